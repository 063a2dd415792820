"""One optimizer step as recipes see it: layers with their gradients, and the scheduled scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nmsparse.nn import Layer, SparseMixin, SparseModule
from nmsparse.recipes import Clock, Recipe, State


def _mask(recipe: Recipe, state: State, weight: Tensor) -> Tensor | None:
    return recipe.mask(weight, state)


def _add_decay(recipe: Recipe, state: State, weight: Tensor, grad: Tensor, decay: float, scale: Tensor | None) -> None:
    mask = recipe.mask(weight, state)
    assert mask is not None, "a recipe that decays pruned weights says which they are"
    wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
    term = torch.where(mask, 0, weight.to(wide)) * decay
    # 16-bit gradients are summed in fp32 and rounded once
    grad.copy_(grad.to(wide) + (term if scale is None else term * scale))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def fast(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """On a GPU the compiled function: outside the model's own graph, dozens of small kernels per layer add up.

    Without Triton there is no compiler for the GPU, and the same function runs as it is.
    """
    return _compiled(function) if tensor.is_cuda and find_spec("triton") is not None else function


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

    def decay_pruned(self, decay: float) -> None:
        grad = self.module.weight.grad
        if grad is not None and decay:
            scale = None if self.grad_scale is None else self.grad_scale.to(grad.device)
            fast(_add_decay, grad)(self.layer.recipe, self.state, self.weight, self.view(grad), decay, scale)

    def mask(self) -> Tensor | None:
        """The recipe's mask now, in memory of its own."""
        mask: Tensor | None = fast(_mask, self.parameter)(self.layer.recipe, self.state, self.weight)
        is_stored = mask is not None and mask is self.state.get("mask")
        return self.state["mask"].clone() if is_stored else mask

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

    def set_scalar(self, name: str, value: float) -> None:
        fill([layer.state[name] for layer in self.layers], value)


def fill(tensors: list[Tensor], value: float) -> None:
    """Set many 0-d tensors in two calls, whatever their number."""
    if tensors:
        torch._foreach_zero_(tensors)
        torch._foreach_add_(tensors, value)


def find_non_finite(layers: Sequence[LayerHandle]) -> LayerHandle | None:
    """The first layer whose gradient holds NaN or Inf; one wait for the device in all."""
    grads = [(layer, layer.parameter.grad) for layer in layers]
    found = [(layer, grad) for layer, grad in grads if grad is not None]
    if not found:
        return None
    # the max norm cannot overflow, whatever the dtype
    norms = torch._foreach_norm([grad for _, grad in found], float("inf"))
    bad = ~torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite()
    return found[int(bad.int().argmax())][0] if bool(bad.any()) else None
