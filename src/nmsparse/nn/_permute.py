"""Channel permutation in a model: order the input channels of layers so that N:M keeps more, and change no output.

The model is traced, and tensors whose channels must stay in one order share an axis (``_axes``). Each axis that nothing
freezes is searched once, and every tensor that lies along it is reordered.

Only `forward` is followed: what other methods of the model return may come in the new order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmsparse.functional import channel_permutation, magnitude_mask
from nmsparse.nn._axes import Axis, Channels, Walk, conv_groups, graphs_of, weight_dims
from nmsparse.nn._sharded import is_sharded, ranks, spread, whole
from nmsparse.pattern import Pattern

WORTH_A_SEARCH = 1e-3
"""Channels that lose a smaller share of their magnitude to N:M stay in their order (Pool and Yu)."""


@dataclass
class Permuted:
    """What :func:`permute_channels_` did."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Target layers whose input channels keep their order: name to reason."""
    moves: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """Name of a parameter or buffer, dim, permutation. The weight of a grouped convolution has one permutation per group, as
    rows of a matrix."""
    model: nn.Module | None = None
    """Where the names lead."""

    def undo_(self) -> None:
        """Put everything back in its old order, exactly. A second call does nothing."""
        while self.moves:
            name, dim, permutation = self.moves.pop()
            _reorder_(self._tensor(name), dim, permutation.argsort(-1))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that were reordered."""
        for name in dict.fromkeys(name for name, _, _ in self.moves):
            tensor = self._tensor(name)
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def _tensor(self, name: str) -> Tensor:
        """Looked up now: moving a model to another device or dtype replaces its buffers."""
        path, _, key = name.rpartition(".")
        tensor: Tensor = getattr(cast(nn.Module, self.model).get_submodule(path), key)
        return tensor


def permute_channels_(
    model: nn.Module, layers: Mapping[str, nn.Module], pattern: Pattern, *, escapes: int = 0, time_limit: float = 120.0
) -> Permuted:
    """Reorder the input channels of ``layers`` in place so that N:M keeps more of their magnitude in total.

    The layers before them write their channels in the new order, so the model computes what it did, up to rounding. A
    model that cannot be traced stays as it is. Each search stops after ``time_limit`` seconds. Gradients and optimizer
    state are not reordered: call this before there are any, or apply ``moves`` to them.
    """
    try:
        graphs = graphs_of(model)
    except Exception as error:  # tracing runs the model's own code on stand-ins for tensors, which may raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Permuted(dict.fromkeys(layers, f"torch.fx cannot trace this {type(model).__name__}: {why}"))
    walk = Walk(model)
    for graph in graphs:
        walk.follow(graph)
    walk.freeze_shared()
    unseen = walk.unseen_parameter()
    if unseen is not None:
        return Permuted(dict.fromkeys(layers, f"forward does not use {unseen}, so another method may read any channel"))
    readers, skipped = _readers(walk, layers, pattern.m)
    orders = {axis: _order(axis, places, pattern, escapes, time_limit) for axis, places in readers.items() if not axis.frozen}
    orders = _of_first_rank(model, orders)
    orders = {axis: order for axis, order in orders.items() if not order.equal(_natural(axis.size))}
    skipped |= _unmoved(readers, orders)
    return Permuted(skipped, _apply_(walk, orders), model)


def _of_first_rank(model: nn.Module, orders: dict[Axis, Tensor]) -> dict[Axis, Tensor]:
    """One order on all ranks that hold this model: a search that is out of time ends elsewhere on each of them, and FSDP2 would
    put shards of differently ordered weights together."""
    if ranks() == 1 or not orders:
        return orders
    own = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    found: list[Any] = [None] * ranks()
    torch.distributed.all_gather_object(found, (own, list(orders.values())))
    first = next(theirs for names, theirs in found if names == own)
    return dict(zip(orders, first, strict=True))


_Readers = dict[Axis, list[tuple[str, nn.Module, int]]]
"""Axis: the layers that read it, by name, and the input channel at which it starts in each."""


def _readers(walk: Walk, layers: Mapping[str, nn.Module], m: int) -> tuple[_Readers, dict[str, str]]:
    """Who reads which axis, and the reasons of layers whose input channels have none."""
    readers: _Readers = {}
    skipped: dict[str, str] = {}
    for name, module in layers.items():
        dims = weight_dims(module)
        value = walk.places.get((name, "weight", dims[1])) if dims else None
        if not isinstance(value, Channels):
            kind = f"channels are not followed through {type(module).__name__}, a subclass"
            skipped[name] = _order_is_fixed(value) if value else "forward does not call it by itself" if dims else kind
            continue
        for start, axis in value.spans():
            readers.setdefault(axis, []).append((name, module, start))
            if start % m or axis.size // axis.blocks % m:
                axis.frozen = axis.frozen or f"parts that are not multiples of {m}"
    return readers, skipped


def _unmoved(readers: _Readers, orders: Mapping[Axis, Tensor]) -> dict[str, str]:
    """Reasons of the layers none of whose axes has a new order."""
    moved = {name for axis in orders for name, _, _ in readers[axis]}
    reasons = {
        name: _order_is_fixed(axis.frozen) if axis.frozen else "no other order of its input channels keeps more"
        for axis, places in readers.items()
        for name, _, _ in places
    }
    return {name: why for name, why in reasons.items() if name not in moved}


def _order_is_fixed(why: str) -> str:
    return f"the order of its input channels is fixed by {why}"


def _natural(size: int) -> Tensor:
    """Orders are on the CPU, whatever the user's default device is."""
    return torch.arange(size, device="cpu")


@torch.no_grad()
def _order(axis: Axis, places: list[tuple[str, nn.Module, int]], pattern: Pattern, escapes: int, time_limit: float) -> Tensor:
    """A new order of an axis, searched within each of its blocks."""
    size = axis.size // axis.blocks
    orders: list[Tensor] = []
    for first in range(0, axis.size, size):
        parts = [_columns(module, start + first, size) for _, module, start in places]
        weight = torch.cat([part.to(parts[0].device) for part in parts])
        total = float(weight.abs().sum())
        kept = float(weight.abs()[magnitude_mask(weight, pattern)].sum())
        if kept >= (1 - WORTH_A_SEARCH) * total:
            orders.append(first + _natural(size))
        else:
            limit = time_limit / axis.blocks
            orders.append(first + channel_permutation(weight, pattern, escapes=escapes, time_limit=limit).cpu())
    return torch.cat(orders)


def _columns(module: nn.Module, start: int, size: int) -> Tensor:
    """The part of a layer's weight that reads ``size`` input channels from ``start`` on, as a matrix with a column for each."""
    _, in_dim = cast(tuple[int, int], weight_dims(module))
    weight = cast(Tensor, module.weight).detach().float()
    group, first = divmod(start, weight.shape[in_dim])
    rows = weight.chunk(conv_groups(module))[group].movedim(in_dim, -1)
    return rows.flatten(0, -2)[:, first : first + size]


def _apply_(walk: Walk, orders: Mapping[Axis, Tensor]) -> list[tuple[str, int, Tensor]]:
    """Reorder every tensor along the axes that have a new order."""
    moves: list[tuple[str, int, Tensor]] = []
    for (name, key, dim), value in walk.places.items():
        spans = list(value.spans()) if isinstance(value, Channels) else []
        if not any(axis in orders for _, axis in spans):
            continue
        tensor = cast(Tensor, getattr(walk.modules[name], key))
        permutation = torch.cat([start + orders.get(axis, _natural(axis.size)) for start, axis in spans])
        if len(permutation) != tensor.shape[dim]:  # the input of a grouped convolution: each group counts from 0
            permutation = permutation.view(-1, tensor.shape[dim]) % tensor.shape[dim]
        _reorder_(tensor, dim, permutation)
        moves.append((f"{name}.{key}" if name else key, dim, permutation))
    return moves


@torch.no_grad()
def _reorder_(tensor: Tensor, dim: int, permutation: Tensor) -> None:
    if is_sharded(tensor):  # channels change places between ranks
        full = whole(tensor.detach())
        _reorder_(full, dim, permutation)
        tensor.copy_(spread(full, tensor))
        return
    orders = torch.atleast_2d(permutation).to(tensor.device)
    for part, order in zip(tensor.chunk(len(orders)), orders, strict=True):
        part.copy_(part.index_select(dim, order))
