"""Weights that are spread over processes: FSDP2 and tensor parallelism hold them as DTensors.

A recipe's state is whole on every rank; only parameters, gradients and moments are spread. torch.distributed.tensor is imported
where such a tensor was met, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """A DTensor, told without importing torch.distributed."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. A collective where it is sharded: every rank that holds a part must call it."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor()
    return full


def held(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    local: Tensor = sharded.to_local()
    return local


def spread(values: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank holds whole, sharded as another one is; nothing is sent."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(values, sharded.device_mesh, sharded.placements, src_data_rank=None)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Of this process; 0 where there is only one."""
    return torch.distributed.get_rank() if _is_distributed() else 0


def ranks() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def splits_rows(tensor: Tensor) -> bool:
    """Each rank holds whole rows (entries of dim 0), or all of the tensor."""
    if not is_sharded(tensor):
        return True
    sharded: Any = tensor
    return all(placement.is_replicate() or placement.is_shard(0) for placement in sharded.placements)


def part_size(tensor: Tensor, dim: int) -> int:
    """Entries along a dim of the longest part, which is that of the first rank: the same number on every rank."""
    sharded: Any = tensor
    size = tensor.shape[dim]
    for mesh_dim, placement in enumerate(sharded.placements):
        if placement.is_shard(dim):
            size = -(-size // sharded.device_mesh.size(mesh_dim))
    return size


def sum_over_shards(sums: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums that each rank took over the part of a tensor that it holds, added up; one collective per device mesh.

    ``sums[i]`` is of ``tensors[i]``, all of one shape and dtype. Sums of tensors that are not sharded come back as they are.
    """
    found = list(sums)
    spread_alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_sharded(tensor):
            sharded: Any = tensor
            spread_alike.setdefault((sharded.device_mesh, sharded.placements), []).append(i)
    for (mesh, placements), places in spread_alike.items():
        total = _summed(torch.stack([found[i] for i in places]), mesh, placements)
        for i, value in zip(places, total.unbind(), strict=True):
            found[i] = value
    return found


def _summed(values: Tensor, mesh: Any, placements: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # ranks that hold the same part, as in hybrid sharding, must not count it twice
    kinds = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    return DTensor.from_local(values, mesh, kinds, run_check=False).full_tensor()
