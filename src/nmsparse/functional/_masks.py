"""Magnitude masks along one dim, Bi-Mask's backward mask, and the two measures of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from nmsparse.functional._groups import from_groups, magnitude_rank, to_groups
from nmsparse.pattern import Pattern


def magnitude_mask(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """Bool mask with exactly N true entries in every group of M along ``dim``: the largest magnitudes.

    Ties keep the lower index. NaN counts as the largest magnitude, so a NaN is kept and stays visible.
    """
    pattern = Pattern(pattern)
    groups, axis = to_groups(x, pattern, dim)
    return from_groups(magnitude_rank(groups, axis) < pattern.n, axis)


def backward_mask(
    weight: Tensor, pattern: str | Pattern, permutation: Tensor | None = None, *, inverse: Tensor | None = None
) -> Tensor:
    """Bi-Mask's mask for ``grad_input``: the N largest of M along dim 0 among the weights that the forward mask keeps.

    ``weight`` is (O, ..., I); its forward mask runs along the last dim. Groups along dim 0 are M consecutive rows in the
    order of ``permutation`` (row indices; ``None`` is the natural order). The mask comes back in natural order. Zeros are
    never kept, so a group with fewer than N surviving weights keeps fewer. ``inverse`` (the argsort of the permutation)
    saves computing it again.
    """
    pattern = Pattern(pattern)
    kept = torch.where(magnitude_mask(weight, pattern), weight, 0)
    rows = kept if permutation is None else kept.index_select(0, permutation)
    mask = magnitude_mask(rows, pattern, dim=0)
    if permutation is not None:
        mask = mask.index_select(0, permutation.argsort() if inverse is None else inverse)
    return mask & (kept != 0)


def violations(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """Number of groups (a 0-d tensor) with more than N non-zero entries; NaN counts as non-zero."""
    pattern = Pattern(pattern)
    groups, axis = to_groups(x, pattern, dim)
    return ((groups != 0).sum(axis) > pattern.n).sum()


def flip_rate(a: Tensor, b: Tensor) -> Tensor:
    """Share of entries (a 0-d tensor) in which two masks differ; 0 for empty masks."""
    if a.shape != b.shape:
        raise ValueError(f"flip_rate compares masks of one shape, got {tuple(a.shape)} and {tuple(b.shape)}.")
    return (a != b).sum(dtype=torch.float32) / max(a.numel(), 1)
