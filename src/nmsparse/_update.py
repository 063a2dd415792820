"""One optimizer step as recipes see it: layers with their gradients, and the scheduled scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmsparse.nn import Layer, SparseMixin, SparseModule
from nmsparse.recipes import Clock, State


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

    def add_to_gradient(self, term: Tensor) -> None:
        grad = self.module.weight.grad
        if grad is None:
            return
        view = self.view(grad)
        if self.grad_scale is not None:
            term = term * self.grad_scale.to(term.device)
        # 16-bit gradients are summed in fp32 and rounded once
        view.copy_(view.to(term.dtype) + term) if view.dtype != term.dtype else view.add_(term)

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
