"""Mask decay (MdGf): pruned weights fade out of the forward pass.

Progressive Gradient Flow for Robust N:M Sparsity Training in Transformers. A. Bambhaniya et al. CPAL 2025,
arXiv:2402.04744.

output, grad_input: W * (B + D (1-B)), B = N largest of M along I, D falls from 1 to 0
schedule:    D = 1 during the dense share; linear: 1 - b j, exponential: exp(-b j), j = updates since; 0 in the fixed share
update:      pruned_grad="ste": dW on all entries (figure and PyTorch code); "scaled": dW * (B + D (1-B)) (the prose)
Deviations:  the rate b is calibrated so that D reaches 0 (or eps) at share `reach` of the run, as the authors advise,
             unless `rate` sets it; below eps, D is exactly 0. While D > 0 the forward weight is dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nmsparse.functional import magnitude_mask
from nmsparse.recipes._base import OUTPUT, Clock, Packing, Recipe, State, masked, scalar
from nmsparse.recipes._phases import Phases
from nmsparse.recipes._registry import register_recipe


@register_recipe("mask-decay", paper="Bambhaniya et al., CPAL 2025, arXiv:2402.04744")
@dataclass(frozen=True)
class MaskDecay(Recipe):
    """Pruned weights keep a factor that decays to zero; for high sparsity."""

    shape: Literal["linear", "exponential"] = "exponential"
    """How the factor falls."""
    pruned_grad: Literal["ste", "scaled"] = "ste"
    """Gradient of pruned weights: in full, or times the factor."""
    dense: float = 0.05
    """Share of the run before the decay starts."""
    fixed: float = 0.1
    """Last share of the run, with the hard mask."""
    reach: float = 0.7
    """Share of the run at which the factor arrives at 0."""
    eps: float = 1e-3
    """Below this the factor is 0; the exponential form arrives here at `reach`."""
    rate: float | None = None
    """Decay per update, in place of the calibrated one."""

    def validate(self) -> None:
        Phases(self.dense, self.fixed).check()
        if self.shape not in ("linear", "exponential"):
            raise ValueError(f'shape is "linear" or "exponential", got {self.shape!r}.')
        if self.pruned_grad not in ("ste", "scaled"):
            raise ValueError(f'pruned_grad is "ste" or "scaled", got {self.pruned_grad!r}.')
        if not self.dense < self.reach <= 1 - self.fixed + 1e-12:
            raise ValueError(
                f"reach = {self.reach} must lie after dense = {self.dense} and not after 1 - fixed = {1 - self.fixed}."
            )
        if not 0 < self.eps < 1:
            raise ValueError(f"eps must lie between 0 and 1, got {self.eps!r}.")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"rate must be positive, got {self.rate!r}.")

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT,)

    @property
    def needs_total_steps(self) -> bool:
        return True

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        return {"keep": scalar(1, weight.device)}

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing()

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return torch.where(magnitude_mask(weight, self.pattern), weight, weight * state["keep"])

    def weight_grad(self, grad_weight: Tensor, weight: Tensor, state: State) -> Tensor:
        if self.pruned_grad == "ste":
            return grad_weight
        return torch.where(magnitude_mask(weight, self.pattern), grad_weight, grad_weight * state["keep"])

    def final_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, magnitude_mask(weight, self.pattern))

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return magnitude_mask(weight, self.pattern)

    def factor(self, clock: Clock) -> float:
        """D at an update: a pure function of time."""
        phases = Phases(self.dense, self.fixed)
        if phases.is_dense(clock):
            return 1.0
        if phases.is_final(clock):
            return 0.0
        elapsed = max(0.0, clock.step - phases.start(clock))
        span = self.reach * clock.total - phases.start(clock)
        if self.shape == "linear":
            factor = 1 - (self.rate or 1 / span) * elapsed
        else:
            factor = math.exp(-(self.rate or math.log(1 / self.eps) / span) * elapsed)
        return factor if factor >= self.eps * (1 - 1e-9) else 0.0

    def active_products(self, clock: Clock, memory: dict[str, Any]) -> tuple[str, ...]:
        return self.sparse_products if self.factor(clock) == 0 else ()

    def schedule(self, clock: Clock) -> dict[str, float]:
        return {"keep": self.factor(clock)}

    def describe(self, state: State) -> dict[str, Tensor | float]:
        return {"keep": state["keep"]}
