"""One optimizer step as recipes see it: layers with their gradients, and the scheduled scalars.

Where parameters are sharded, a rank changes the part that it holds. Masks are made from that part alone where its rows tell them,
and from the gathered weight otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from nmsparse.functional import transposable_mask
from nmsparse.kernels import transposable_kernel
from nmsparse.nn import (
    Layer,
    SparseMixin,
    SparseModule,
    fast,
    held,
    is_sharded,
    splits_rows,
    spread,
    sum_over_shards,
    whole,
)
from nmsparse.pattern import Pattern
from nmsparse.recipes import Clock, Recipe, State


def _masks(recipe: Recipe, states: list[State], weights: list[Tensor]) -> list[Tensor | None]:
    return [recipe.mask(weight, state) for weight, state in zip(weights, states, strict=True)]


def _add_decay(
    recipe: Recipe, states: list[State], weights: list[Tensor], grads: list[Tensor], decay: float, scale: Tensor | None
) -> None:
    _add_decay_where(_masks(recipe, states, weights), weights, grads, decay, scale)


def _add_decay_where(
    masks: list[Tensor | None], weights: list[Tensor], grads: list[Tensor], decay: float, scale: Tensor | None
) -> None:
    for mask, weight, grad in zip(masks, weights, grads, strict=True):
        assert mask is not None, "a recipe that decays pruned weights says which they are"
        wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
        term = torch.where(mask, 0, weight.to(wide)) * decay
        # 16-bit gradients are summed in fp32 and rounded once
        grad.copy_(grad.to(wide) + (term if scale is None else term * scale))


@dataclass(eq=False)
class LayerHandle:
    """A sparse layer by name. The parameter is looked up at every use: FSDP and accelerate replace it."""

    name: str
    module: SparseModule
    layer: Layer
    grad_scale: Tensor | None = None
    """Loss scale that the optimizer has yet to divide out (fused optimizers under GradScaler)."""
    shape: torch.Size = field(init=False)
    """Of the weight at conversion; a DTensor has it still, whatever a rank holds."""

    def __post_init__(self) -> None:
        self.shape = self.module.weight.shape

    @property
    def is_live(self) -> bool:
        """False once the module was densified or converted anew."""
        return isinstance(self.module, SparseMixin) and getattr(self.module, "_nmsparse", None) is self.layer

    @property
    def state(self) -> State:
        return self.layer.state

    @property
    def stream(self) -> int:
        return self.layer.stream

    @property
    def parameter(self) -> Tensor:
        return self.module.weight

    @property
    def weight(self) -> Tensor:
        return self.view(whole(self.module.weight.detach()))

    def view(self, tensor: Tensor) -> Tensor:
        return self.module.view_weight(tensor)

    @property
    def rows_tell(self) -> bool:
        """The part of the weight that this rank holds is enough to find its part of the mask."""
        weight = self.parameter
        if not is_sharded(weight):
            return True
        return self.layer.recipe.masks_rows and splits_rows(weight) and not self.module.is_transposed

    @property
    def held_weight(self) -> Tensor:
        return self.view(held(self.module.weight.detach()))

    @property
    def held_gradient(self) -> Tensor | None:
        grad = self.module.weight.grad
        return None if grad is None else self.view(held(grad))

    @property
    def held_state(self) -> State:
        """The state, with masks cut down to the part of the weight that this rank holds."""
        if not is_sharded(self.parameter):
            return self.state
        shape = self.view(torch.empty(self.parameter.shape, device="meta")).shape
        return {name: self.part(value) if value.shape == shape else value for name, value in self.state.items()}

    def part(self, values: Tensor) -> Tensor:
        """Of (O, ..., I) values for the whole weight, those of the part that this rank holds."""
        if not is_sharded(self.parameter):
            return values
        stored = torch.empty(self.parameter.shape, dtype=values.dtype, device=values.device)
        self.view(stored).copy_(values)
        return self.view(held(spread(stored, self.parameter)))

    def held_mask(self) -> Tensor | None:
        """The recipe's mask of the part that this rank holds; a collective where rows do not tell."""
        recipe = self.layer.recipe
        if self.rows_tell:
            return recipe.mask(self.held_weight, self.held_state)
        mask = recipe.mask(self.weight, self.state)
        return None if mask is None else self.part(mask)

    def density(self) -> Tensor | None:
        """Share of non-zeros that `output` sees, in the rows of this rank; None where they do not tell."""
        if not self.rows_tell:
            return None
        seen = self.layer.recipe.output_weight(self.held_weight, self.held_state)
        return (seen != 0).sum() / seen.numel() if seen.numel() else None

    def gradient(self) -> Tensor | None:
        grad = self.module.weight.grad
        if grad is None:
            return None
        wide = self.view(grad)
        wide = wide if wide.dtype == torch.float64 else wide.float()
        return wide if self.grad_scale is None else wide / self.grad_scale.to(wide.device)

    def mask_gradient(self, mask: Tensor) -> None:
        grad = self.held_gradient
        if grad is not None:
            grad.masked_fill_(~self.part(mask), 0)

    def mask_weight(self, mask: Tensor) -> None:
        self.held_weight.masked_fill_(~self.part(mask), 0)

    def shrink_pruned(self, factor: float) -> None:
        weight, mask = self.held_weight, self.held_mask()
        assert mask is not None, "a recipe that shrinks pruned weights says which they are"
        wide = weight if weight.dtype == torch.float64 else weight.float()  # a factor near 1 is 1 in 16 bit
        weight.copy_(torch.where(mask, wide, wide * factor))


@dataclass(eq=False)
class OptimizerUpdate:
    """What :class:`nmsparse.recipes.Update` promises."""

    clock: Clock
    layers: Sequence[LayerHandle]
    covers_all_layers: bool
    optimizer: torch.optim.Optimizer
    memory: dict[str, Any]
    starts_run: bool = False

    def decay_pruned(self, decay: float) -> None:
        for layers in _by_device([layer for layer in self.layers if decay and layer.parameter.grad is not None]):
            grads = [cast(Tensor, layer.held_gradient) for layer in layers]
            scale = None if layers[0].grad_scale is None else layers[0].grad_scale.to(grads[0].device)
            weights = [layer.held_weight for layer in layers]
            if not layers[0].rows_tell:
                _add_decay_where([layer.held_mask() for layer in layers], weights, grads, decay, scale)
                continue
            states = [layer.held_state for layer in layers]
            fast(_add_decay, grads[0])(layers[0].layer.recipe, states, weights, grads, decay, scale)

    def masks(self) -> dict[str, Tensor]:
        """The recipe's masks now, of the parts that this rank holds, in memory of their own."""
        found: dict[str, Tensor] = {}
        for layers in _by_device(self.layers):
            for layer, mask in zip(layers, _held_masks(layers), strict=True):
                if mask is not None:
                    found[layer.name] = mask.clone() if "mask" in layer.state else mask
        return found

    def flip_rates(self, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """Share of mask bits that differ from earlier ones, over all ranks."""
        after = self.masks()
        layers = [layer for layer in self.layers if layer.name in before and layer.name in after]
        changed = [(before[layer.name] != after[layer.name]).sum(dtype=torch.float32) for layer in layers]
        totals = sum_over_shards(changed, [layer.parameter for layer in layers])
        pairs = zip(layers, totals, strict=True)
        return {layer.name: total / max(layer.parameter.numel(), 1) for layer, total in pairs}

    def transposable_mask(self, weight: Tensor, pattern: Pattern) -> Tensor:
        kernel = transposable_kernel(weight, str(pattern))
        return transposable_mask(weight, pattern) if kernel is None else kernel(weight)

    def set_scalar(self, name: str, value: float) -> None:
        fill([layer.state[name] for layer in self.layers], value)


def _held_masks(layers: Sequence[LayerHandle]) -> list[Tensor | None]:
    """Of layers on one device that rows tell alike."""
    if not layers[0].rows_tell:
        return [layer.held_mask() for layer in layers]
    weights, states = [layer.held_weight for layer in layers], [layer.held_state for layer in layers]
    masks: list[Tensor | None] = fast(_masks, weights[0])(layers[0].layer.recipe, states, weights)
    return masks


def _by_device(layers: Sequence[LayerHandle]) -> list[list[LayerHandle]]:
    """Layers that one call can serve: on one device, and with masks that rows tell, or not."""
    groups: dict[tuple[torch.device, bool], list[LayerHandle]] = {}
    for layer in layers:
        groups.setdefault((layer.parameter.device, layer.rows_tell), []).append(layer)
    return list(groups.values())


def fill(tensors: list[Tensor], value: float) -> None:
    """Set many 0-d tensors in two calls, whatever their number."""
    if tensors:
        torch._foreach_zero_(tensors)
        torch._foreach_add_(tensors, value)


class FiniteCheck:
    """Looks for NaN and Inf in gradients: at once on the CPU; on a GPU without waiting, one update later.

    Reading a flag from the GPU at once would keep it idle until the host has launched the next kernels.
    """

    def __init__(self) -> None:
        self.pending: tuple[list[str], Tensor, Any] | None = None

    def start(self, layers: Sequence[LayerHandle], wait: bool) -> str | None:
        """Check these gradients; return the name of a broken one if that is known by now."""
        found = [(layer.name, layer.parameter.grad) for layer in layers]
        grads = [(name, grad) for name, grad in found if grad is not None]
        if not grads:
            return None
        bad = _not_finite([grad for _, grad in grads])
        names = [name for name, _ in grads]
        if wait or not bad.is_cuda:
            return _first(names, bad)
        flags = torch.empty_like(bad, device="cpu", pin_memory=True).copy_(bad, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(bad.device))  # where the copy runs, whatever the current device
        self.pending = (names, flags, event)
        return None

    def finish(self) -> str | None:
        """The verdict on the gradients of the update before, if it is still open."""
        if self.pending is None:
            return None
        names, flags, event = self.pending
        self.pending = None
        event.synchronize()  # recorded a whole step ago
        return _first(names, flags)


def _not_finite(grads: list[Tensor]) -> Tensor:
    """A flag per gradient; of a sharded one the same on all ranks, so that all of them stop."""
    parts = [held(grad) for grad in grads]
    parts = [part if part.numel() else part.new_zeros(1) for part in parts]  # a rank may hold no row
    # the max norm cannot overflow, whatever the dtype
    norms = torch._foreach_norm(parts, float("inf"))
    bad = ~torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite()
    if not any(map(is_sharded, grads)):
        return bad  # a kernel per layer would take longer to launch than the update of a small model
    return torch.stack([flag.to(norms[0].device) for flag in sum_over_shards(list(bad.float()), grads)]) > 0


def is_rehearsal(optimizer: torch.optim.Optimizer, layers: Sequence[LayerHandle]) -> bool:
    """torch.distributed.checkpoint takes a step at a learning rate of 0 and with gradients of 0, to make the state that it loads
    into; that is no update. A warm-up may start at a learning rate of 0 too, but not with such gradients."""
    if optimizer.state or not all(_is_host_zero(group.get("lr")) for group in optimizer.param_groups):
        return False
    # of all parameters: below an output layer of zeros, the first gradients of all others are zeros too
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(grad.is_sparse for grad in grads):  # a rehearsal's are dense
        return False
    non_zero = [held(grad).count_nonzero().float() for grad in grads]
    return not any(float(count) for count in sum_over_shards(non_zero, grads))


def _is_host_zero(rate: Any) -> bool:
    """Whether a learning rate is 0, without waiting for a GPU: a rehearsal's is on the CPU, whatever the optimizer's own.
    transformers' Adafactor finds its own, and has None."""
    return rate is not None and not (isinstance(rate, Tensor) and not rate.is_cpu) and float(rate) == 0


def _first(names: list[str], flags: Tensor) -> str | None:
    return names[int(flags.int().argmax())] if bool(flags.any()) else None
