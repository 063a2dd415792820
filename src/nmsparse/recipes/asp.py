"""ASP: prune a trained model once, then retrain under the fixed mask.

Accelerating Sparse Deep Neural Networks. A. Mishra et al. 2021, arXiv:2104.08378. Channel permutation: J. Pool and
C. Yu, NeurIPS 2021.

output, grad_input: B0*W, with B0 = N largest of M along I, found once, when step `start` begins
update:      gradient <- B0 * gradient (after clipping); after the step W <- B0 * W
Deviations:  the mask belongs to the run and is saved with it. The optimizer keeps its state at the moment of pruning;
             for the published recipe (fresh state, full schedule again) convert a trained model and start at 0. The
             permutation search is the greedy one at every width, without the random restarts, and stops after two minutes
             an axis with the best order so far (very wide layers: before all pairs of groups were scored).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmsparse.functional import LARGEST_PERMUTED_GROUP, magnitude_mask
from nmsparse.recipes._base import OUTPUT, Clock, Packing, Recipe, State, Update, fraction_or_step, masked, scalar
from nmsparse.recipes._registry import register_recipe


@register_recipe("asp", paper="Mishra et al. 2021, arXiv:2104.08378")
@dataclass(frozen=True)
class ASP(Recipe):
    """One-shot magnitude mask after dense training, then fixed."""

    start: int | float = 0
    """Update at which the mask is found: a step, or a fraction of the run. Dense before."""
    permute: bool = False
    """Search for channel permutations that keep more weight, and fold them into the model at conversion (start = 0 only)."""

    def validate(self) -> None:
        if self.start < 0 or (isinstance(self.start, float) and self.start >= 1):
            raise ValueError(f"start is a step (0, 1, ...) or a fraction below 1, got {self.start!r}.")
        if self.permute and self.pattern.m > LARGEST_PERMUTED_GROUP:
            raise ValueError(f'permute searches groups of up to {LARGEST_PERMUTED_GROUP}, not "{self.pattern}".')
        if self.permute and self.start != 0:
            raise ValueError(
                "permute reorders weights at conversion, before an optimizer holds state for them: it needs start = 0."
            )

    @property
    def permutes_channels(self) -> bool:
        return self.permute

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT,)

    def active_products(self, clock: Clock, memory: dict[str, Any]) -> tuple[str, ...]:
        return self.sparse_products if memory.get("found") else ()

    @property
    def needs_total_steps(self) -> bool:
        return isinstance(self.start, float)

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        found = self.start == 0
        mask = magnitude_mask(weight, self.pattern) if found else torch.ones_like(weight, dtype=torch.bool)
        return {"mask": mask, "found": scalar(found, weight.device)}

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing(mask="mask")

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, state["mask"])

    def final_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, torch.where(state["found"] > 0, state["mask"], magnitude_mask(weight, self.pattern)))

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return state["mask"]

    @property
    def starts_from_weights(self) -> bool:
        return self.start == 0

    def on_attach(self, update: Update) -> None:
        if not self._is_due(update.clock):  # a new clock begins with its dense phase; a saved one is loaded afterwards
            for layer in update.layers:
                layer.state["mask"].fill_(True)
            update.set_scalar("found", 0.0)
        elif not update.starts_run:  # found once and for all
            update.memory["found"] = True
        self._find_when_due(update)

    def before_update(self, update: Update) -> None:
        for layer in update.layers:
            layer.mask_gradient(layer.state["mask"])

    def after_update(self, update: Update) -> None:
        if update.memory.get("found"):
            for layer in update.layers:
                # momentum and weight decay of a shared optimizer must not bring a pruned weight back
                layer.mask_weight(layer.state["mask"])
        self._find_when_due(update)

    def _find_when_due(self, update: Update) -> None:
        if update.memory.get("found") or not self._is_due(update.clock):
            return
        update.memory["found"] = True
        for layer in update.layers:
            layer.state["mask"].copy_(magnitude_mask(layer.weight, self.pattern))
        update.set_scalar("found", 1.0)

    def _is_due(self, clock: Clock) -> bool:
        return clock.step >= fraction_or_step(self.start, clock)
