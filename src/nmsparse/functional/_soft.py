"""S-STE's continuous projection: every group is shrunk by its largest dropped magnitude."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from nmsparse.functional._groups import (
    UNROLLED,
    computing_dtype,
    entry_ranks,
    from_groups,
    magnitude_key,
    magnitude_rank,
    to_groups,
)
from nmsparse.pattern import Pattern


def soft_threshold(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """``sign(x) * max(|x| - t, 0)``, where t is the (M-N)-th smallest magnitude of the group.

    At most N entries of a group survive, and the map is continuous: where a hard mask would flip, both contenders are
    already 0. A NaN survives as NaN; a group with more than N non-finite entries has no finite threshold and its
    infinities become NaN or 0.
    """
    pattern = Pattern(pattern)
    groups, axis = to_groups(x, pattern, dim)
    if pattern.m > UNROLLED:
        kept = magnitude_rank(groups, axis) < pattern.n
        threshold = groups.abs().masked_fill(kept, 0).amax(axis, keepdim=True)
        return from_groups(_shrink(groups, kept, threshold), axis)
    entries = groups.unbind(axis)
    kept_entries = [rank < pattern.n for rank in entry_ranks(magnitude_key(groups).unbind(axis))]
    dropped = [torch.where(kept, 0, entry.abs()) for kept, entry in zip(kept_entries, entries, strict=True)]
    threshold = reduce(torch.maximum, dropped)
    shrunk = [_shrink(entry, kept, threshold) for entry, kept in zip(entries, kept_entries, strict=True)]
    return from_groups(torch.stack(shrunk, axis), axis)


def _shrink(x: Tensor, kept: Tensor, threshold: Tensor) -> Tensor:
    """Move kept entries towards zero; "not <=" lets NaN through, and a kept entry at the threshold becomes +0.0."""
    return torch.where(kept & ~(x.abs() <= threshold), x - torch.copysign(threshold, x), 0)


def soft_threshold_scale(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """The least-squares scale ``<x, S(x)> / <S(x), S(x)>`` as a 0-d tensor; 1 where S(x) is all zero."""
    return least_squares_scale(x, soft_threshold(x, pattern, dim))


def least_squares_scale(x: Tensor, projected: Tensor) -> Tensor:
    """The scale b that minimises ``||x - b * projected||``: a 0-d tensor of float32 (float64 for float64 input)."""
    x64, p64 = x.double(), projected.double()  # one pass at conversion; float64 sums make the result independent of their order
    norm = (p64 * p64).sum()
    scale = (x64 * p64).sum() / torch.where(norm == 0, 1, norm)
    return torch.where(norm == 0, 1, scale).to(computing_dtype(x))
