"""Views and orders that every function here shares: groups of M along a dim, and the order of magnitudes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmsparse.pattern import Pattern

UNROLLED = 8
"""Up to this group size, comparing all pairs entry by entry beats sorting."""
PAIRED = 64
"""Up to this group size a GPU compares all pairs at once: its sort gives a whole block of threads to a group of any size."""
PAIRS_AT_ONCE = 1 << 30
"""Bytes that the comparisons of all pairs may take outside a compiled graph, three for each."""


def check_divisible(shape: torch.Size, pattern: Pattern, dim: int) -> int:
    """Return ``dim`` counted from the front, or raise the error that names size, dim and pattern."""
    ndim = len(shape)
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(shape)}.")
    dim %= ndim
    if shape[dim] % pattern.m:
        raise ValueError(
            f"size {shape[dim]} of dim {dim} (shape {tuple(shape)}) is not a multiple of {pattern.m}, so pattern "
            f'"{pattern}" does not fit; '
            f"pad that dim to {-(-shape[dim] // pattern.m) * pattern.m} or choose another pattern."
        )
    return dim


def to_groups(x: Tensor, pattern: Pattern, dim: int) -> tuple[Tensor, int]:
    """View ``dim`` as (groups, M); return the view and the axis of the M entries of a group."""
    dim = check_divisible(x.shape, pattern, dim)
    return x.unflatten(dim, (x.shape[dim] // pattern.m, pattern.m)), dim + 1


def from_groups(x: Tensor, axis: int) -> Tensor:
    """Undo :func:`to_groups`."""
    return x.flatten(axis - 1, axis)


def computing_dtype(x: Tensor) -> torch.dtype:
    """float64 stays, everything else is computed in float32: sums of 16-bit magnitudes lose too much."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def magnitude_key(x: Tensor) -> Tensor:
    """Integers ordered like ``|x|``, with every NaN equal and above infinity.

    Comparing bits in place of floats gives a total order, so CPU, GPU and every dtype agree on ties and on NaN.
    """
    x = x.abs().to(computing_dtype(x))
    if x.dtype == torch.float64:
        return x.view(torch.int64).clamp(max=0x7FF0000000000001)
    return x.view(torch.int32).clamp(max=0x7F800001)


def entry_ranks(keys: Sequence[Tensor]) -> list[Tensor]:
    """Rank of each entry among the others of its group, where ``keys[i]`` holds the i-th entry of all groups.

    Small groups are worked on as such lists: pure element-wise code, which a compiler fuses into one pass and a CPU
    vectorises, where reductions over an axis of four would do neither.
    """
    ranks = [torch.zeros_like(keys[0], dtype=torch.int8) for _ in keys]
    for low in range(len(keys)):
        for high in range(low + 1, len(keys)):
            high_wins = keys[high] > keys[low]
            ranks[low] = ranks[low] + high_wins
            ranks[high] = ranks[high] + ~high_wins
    return ranks


def pair_ranks(key: Tensor, axis: int) -> Tensor:
    """Rank of each entry inside its group, from all pairs in one comparison; the lower index wins a tie.

    A handful of launches in eager mode, where entry by entry would be dozens; one reduction in a compiled graph.
    """
    size, key = key.shape[axis], key.movedim(axis, -1)
    place = torch.arange(size, device=key.device)
    other, own = key.unsqueeze(-2), key.unsqueeze(-1)
    beats = torch.where(place[None, :] < place[:, None], other >= own, other > own)
    return beats.sum(-1, dtype=torch.int16).movedim(-1, axis)


def _compares_pairs(key: Tensor, size: int) -> bool:
    """Whether comparing all pairs at once beats the other ways: on GPUs, unless a compiler fuses what is done entry by entry."""
    if not key.is_cuda or size > PAIRED:
        return False
    return size > UNROLLED if torch.compiler.is_compiling() else 3 * key.numel() * size <= PAIRS_AT_ONCE


def magnitude_rank(x: Tensor, axis: int) -> Tensor:
    """Rank of each entry's magnitude inside its group (0 = largest); on a tie the lower index ranks first."""
    key = magnitude_key(x)
    size = x.shape[axis]
    if _compares_pairs(key, size):
        return pair_ranks(key, axis)
    if size <= UNROLLED:
        return torch.stack(entry_ranks(key.unbind(axis)), axis)
    order = key.sort(dim=axis, descending=True, stable=True).indices
    shape = [1] * x.ndim
    shape[axis] = size
    places = torch.arange(size, dtype=torch.int16, device=x.device).view(shape).expand_as(order)
    return torch.empty_like(places, memory_format=torch.contiguous_format).scatter_(axis, order, places)
