"""Hardware-neutral packing: the N values of every group and their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from nmsparse.functional._groups import to_groups
from nmsparse.functional._masks import violations
from nmsparse.pattern import Pattern


def pack(x: Tensor, pattern: str | Pattern) -> tuple[Tensor, Tensor]:
    """Split an N:M tensor (along its last dim) into ``values`` and uint8 ``indices``, both with N entries per group.

    Indices ascend inside a group. A group with fewer than N non-zeros is filled with its lowest free positions.
    :func:`unpack` returns the same bits, except that a negative zero may come back as +0.0 and a bfloat16 NaN with another
    payload.
    """
    pattern = Pattern(pattern)
    if x.ndim == 0:
        raise ValueError("pack needs at least one dim to group, got a 0-d tensor.")
    broken = int(violations(x, pattern))
    if broken:
        raise ValueError(
            f"{broken} groups of this {tuple(x.shape)} tensor have more than {pattern.n} non-zeros, so packing it as "
            f'"{pattern}" would lose '
            "values; prune it first, for example with magnitude_mask."
        )
    groups, axis = to_groups(x, pattern, -1)
    non_zero_first = (groups == 0).to(torch.uint8).sort(dim=axis, stable=True).indices
    chosen = non_zero_first.narrow(axis, 0, pattern.n).sort(dim=axis).values
    values = groups.gather(axis, chosen)
    # uint8 cannot hold positions of groups above 256; int16 can hold all of ours
    narrow = torch.uint8 if pattern.m <= 256 else torch.int16
    return values.flatten(-2), chosen.to(narrow).flatten(-2)


def unpack(values: Tensor, indices: Tensor, pattern: str | Pattern) -> Tensor:
    """Rebuild the tensor that :func:`pack` took apart."""
    pattern = Pattern(pattern)
    if values.shape != indices.shape:
        raise ValueError(f"values {tuple(values.shape)} and indices {tuple(indices.shape)} must have one shape.")
    if values.ndim == 0 or values.shape[-1] % pattern.n:
        raise ValueError(
            f"the last dim of values {tuple(values.shape)} is not a multiple of {pattern.n}, so it does not hold groups of "
            f'"{pattern}".'
        )
    count = values.shape[-1] // pattern.n
    positions = indices.unflatten(-1, (count, pattern.n)).long()
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= pattern.m):
        raise ValueError(f'an index lies outside its group of {pattern.m}; these indices were not packed as "{pattern}".')
    dense = values.new_zeros(*values.shape[:-1], count, pattern.m)
    return dense.scatter_(-1, positions, values.unflatten(-1, (count, pattern.n))).flatten(-2)
