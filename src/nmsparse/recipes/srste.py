"""SR-STE: sparse-refined straight-through estimator.

Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch. A. Zhou et al. ICLR 2021, arXiv:2102.04010.

output, grad_input: as STE, with B = N largest of M along I
update:      gradient + decay * (1-B)*W, once per optimizer step
Deviations:  the decay term is added after unscaling and clipping, in fp32, and not in autograd, where loss scaling,
             accumulation and the number of GPUs would change it. The published runs multiply it by their world size (8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nmsparse.recipes._base import Update, check_decay
from nmsparse.recipes._registry import register_recipe
from nmsparse.recipes.ste import STE


@register_recipe("sr-ste", paper="Zhou et al., ICLR 2021, arXiv:2102.04010")
@dataclass(frozen=True)
class SRSTE(STE):
    """STE plus a decay that pulls pruned weights towards zero."""

    decay: float = 2e-4
    """Strength of the decay on pruned weights."""
    decay_on: Literal["grad", "weight"] = "grad"
    """Add the decay to the gradient, as published, or shrink the weight itself after the step (for Muon and the like)."""

    def validate(self) -> None:
        check_decay(self.decay)
        if self.decay_on not in ("grad", "weight"):
            raise ValueError(f'decay_on is "grad" or "weight", got {self.decay_on!r}.')

    def on_attach(self, update: Update) -> None:
        if self.decay_on == "weight" and any(group.get("lr") is None for group in update.optimizer.param_groups):
            raise ValueError(
                f'{self.name} with decay_on="weight" shrinks weights by lr * decay, but a parameter group of this '
                f'{type(update.optimizer).__name__} has no "lr": give it one, or use decay_on="grad".'
            )
        if self.decay_on == "weight" and any("train_mode" in group for group in update.optimizer.param_groups):
            raise ValueError(
                f'{self.name} with decay_on="weight" shrinks weights after the step, and {type(update.optimizer).__name__} '
                'makes them anew from two other points: use decay_on="grad".'
            )

    def before_update(self, update: Update) -> None:
        if self.decay_on == "grad":
            update.decay_pruned(self.decay)

    def after_update(self, update: Update) -> None:
        if self.decay_on == "grad" or self.decay == 0:
            return
        for group in update.optimizer.param_groups:
            own = {id(p) for p in group["params"]}
            for layer in update.layers:
                if id(layer.parameter) in own and layer.parameter.grad is not None:  # as the optimizer's own decay does
                    layer.shrink_pruned(1 - group["lr"] * self.decay)
