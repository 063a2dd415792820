"""One optimizer step as recipes see it: layers with their gradients, and the scheduled scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nmsparse.functional import transposable_mask
from nmsparse.kernels import transposable_kernel
from nmsparse.nn import Layer, SparseMixin, SparseModule, fast
from nmsparse.pattern import Pattern
from nmsparse.recipes import Clock, Recipe, State


def _masks(recipe: Recipe, states: list[State], weights: list[Tensor]) -> list[Tensor | None]:
    return [recipe.mask(weight, state) for weight, state in zip(weights, states, strict=True)]


def _add_decay(
    recipe: Recipe, states: list[State], weights: list[Tensor], grads: list[Tensor], decay: float, scale: Tensor | None
) -> None:
    for mask, weight, grad in zip(_masks(recipe, states, weights), weights, grads, strict=True):
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

    @property
    def is_live(self) -> bool:
        """False once the module was densified or converted anew."""
        return isinstance(self.module, SparseMixin) and self.module._nmsparse is self.layer

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
        return self.view(self.module.weight.detach())

    def view(self, tensor: Tensor) -> Tensor:
        return self.module.view_weight(tensor)

    def gradient(self) -> Tensor | None:
        grad = self.module.weight.grad
        if grad is None:
            return None
        wide = self.view(grad)
        wide = wide if wide.dtype == torch.float64 else wide.float()
        return wide if self.grad_scale is None else wide / self.grad_scale.to(wide.device)

    def mask_gradient(self, mask: Tensor) -> None:
        if self.module.weight.grad is not None:
            self.view(self.module.weight.grad).masked_fill_(~mask, 0)


@dataclass(eq=False)
class OptimizerUpdate:
    """What :class:`nmsparse.recipes.Update` promises."""

    clock: Clock
    layers: Sequence[LayerHandle]
    covers_all_layers: bool
    optimizer: torch.optim.Optimizer
    memory: dict[str, Any]

    def decay_pruned(self, decay: float) -> None:
        for layers in _by_device([layer for layer in self.layers if decay and layer.parameter.grad is not None]):
            grads = [layer.view(cast(Tensor, layer.parameter.grad)) for layer in layers]
            scale = None if layers[0].grad_scale is None else layers[0].grad_scale.to(grads[0].device)
            weights, states = [layer.weight for layer in layers], [layer.state for layer in layers]
            fast(_add_decay, grads[0])(layers[0].layer.recipe, states, weights, grads, decay, scale)

    def masks(self) -> dict[str, Tensor]:
        """The recipe's masks now, in memory of their own."""
        found: dict[str, Tensor] = {}
        for layers in _by_device(self.layers):
            weights, states = [layer.weight for layer in layers], [layer.state for layer in layers]
            masks = fast(_masks, weights[0])(layers[0].layer.recipe, states, weights)
            for layer, mask in zip(layers, masks, strict=True):
                if mask is not None:
                    found[layer.name] = mask.clone() if "mask" in layer.state else mask
        return found

    def transposable_mask(self, weight: Tensor, pattern: Pattern) -> Tensor:
        kernel = transposable_kernel(weight, str(pattern))
        return transposable_mask(weight, pattern) if kernel is None else kernel(weight)

    def set_scalar(self, name: str, value: float) -> None:
        fill([layer.state[name] for layer in self.layers], value)


def _by_device(layers: Sequence[LayerHandle]) -> list[list[LayerHandle]]:
    groups: dict[torch.device, list[LayerHandle]] = {}
    for layer in layers:
        groups.setdefault(layer.parameter.device, []).append(layer)
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
        # the max norm cannot overflow, whatever the dtype
        norms = torch._foreach_norm([grad for _, grad in grads], float("inf"))
        bad = ~torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite()
        names = [name for name, _ in grads]
        if wait or not bad.is_cuda:
            return _first(names, bad)
        flags = torch.empty_like(bad, device="cpu", pin_memory=True).copy_(bad, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
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


def _first(names: list[str], flags: Tensor) -> str | None:
    return names[int(flags.int().argmax())] if bool(flags.any()) else None
