"""S-STE's continuous projection: every group is shrunk by its largest dropped magnitude."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from nmsparse.functional._groups import UNROLLED, computing_dtype, from_groups, magnitude_rank, to_groups
from nmsparse.pattern import Pattern


def soft_threshold(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """``sign(x) * max(|x| - t, 0)``, where t is the (M-N)-th smallest magnitude of the group.

    At most N entries of a group survive, and the map is continuous: where a hard mask would flip, both contenders are
    already 0. A NaN survives as NaN; a group with more than N non-finite entries has no finite threshold and its
    infinities become NaN or 0.
    """
    pattern = Pattern(pattern)
    groups, axis = to_groups(x, pattern, dim)
    magnitude = groups.abs()
    kept = magnitude_rank(groups, axis) < pattern.n
    dropped = magnitude.masked_fill(kept, 0)
    # a chain over a few slices fuses with the rest; a reduction over an axis of four does not
    threshold = reduce(torch.maximum, dropped.split(1, axis)) if pattern.m <= UNROLLED else dropped.amax(axis, keepdim=True)
    # "not <=" lets NaN through, and a kept entry at the threshold becomes +0.0
    shrunk = groups - torch.copysign(threshold, groups)
    return from_groups(torch.where(kept & ~(magnitude <= threshold), shrunk, 0), axis)


def soft_threshold_scale(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """The least-squares scale ``<x, S(x)> / <S(x), S(x)>`` as a 0-d tensor; 1 where S(x) is all zero."""
    return least_squares_scale(x, soft_threshold(x, pattern, dim))


def least_squares_scale(x: Tensor, projected: Tensor) -> Tensor:
    """The scale b that minimises ``||x - b * projected||``: a 0-d tensor of float32 (float64 for float64 input)."""
    x64, p64 = x.double(), projected.double()  # one pass at conversion; float64 sums make the result independent of their order
    norm = (p64 * p64).sum()
    scale = (x64 * p64).sum() / torch.where(norm == 0, 1, norm)
    return torch.where(norm == 0, 1, scale).to(computing_dtype(x))
