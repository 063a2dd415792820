"""FST: fully sparse training with transposable masks.

Accelerating Transformer Pre-training with 2:4 Sparsity. Y. Hu, K. Zhao, W. Huang, J. Chen, J. Zhu. ICML 2024,
arXiv:2404.01847.

output, grad_input: A*W, A = transposable mask, searched every `refresh` updates
grad_weight: MVUE(G) in groups of M tokens
update:      gradient + decay * (1-A)*W, after clipping
schedule:    the last `dense_tail` of the run is dense: A = 1, no MVUE, no decay
Deviations:  the exact estimator by default (mvue="approximate" is the paper's); above M = 4 the mask is near optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmsparse.functional import transposable_mask
from nmsparse.recipes._base import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Clock,
    Fit,
    Packing,
    Recipe,
    State,
    Update,
    check_decay,
    masked,
    not_a_multiple,
    scalar,
    share_of,
)
from nmsparse.recipes._registry import register_recipe
from nmsparse.recipes._tokens import Estimator, check_estimator, mvue_along_tokens


@register_recipe("fst", paper="Hu et al., ICML 2024, arXiv:2404.01847", ends_dense=True)
@dataclass(frozen=True)
class FST(Recipe):
    """Transposable masks for two products, MVUE for the third, a dense tail."""

    decay: float = 6e-5
    """Strength of the decay on pruned weights (6e-5 for GPT-2 124M, 2e-4 for 350M, 6e-6 for BERT)."""
    refresh: int = 40
    """Updates between two mask searches."""
    dense_tail: float = 1 / 6
    """Last share of the run, trained densely; with 0 the model stays sparse to the end."""
    mvue: Estimator = True
    """Prune G for `grad_weight`: True (exact estimator), "approximate" (the paper's), False (dense G)."""

    def validate(self) -> None:
        check_decay(self.decay)
        check_estimator(self.mvue, self.pattern)
        if self.refresh < 1:
            raise ValueError(f"refresh counts updates between mask searches: at least 1, got {self.refresh!r}.")
        if not 0 <= self.dense_tail < 1:
            raise ValueError(f"dense_tail is a share of the run, at least 0 and below 1, got {self.dense_tail!r}.")

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT, GRAD_INPUT, GRAD_WEIGHT) if self.mvue else (OUTPUT, GRAD_INPUT)

    @property
    def samples_tokens(self) -> bool:
        return self.mvue is True

    @property
    def is_random(self) -> bool:
        return bool(self.mvue)

    @property
    def needs_total_steps(self) -> bool:
        return self.dense_tail > 0

    def fit(self, out_features: int, in_features: int) -> Fit:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % self.pattern.m:
                return Fit(refused=not_a_multiple(name, size, self.pattern))
        return Fit()

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        return {"mask": transposable_mask(weight, self.pattern), "tail": scalar(0, weight.device)}

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing(mask="mask")

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, state["mask"] | (state["tail"] > 0))

    def grad_weight_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        sample = mvue_along_tokens(grad, self.pattern, state, counter, self.mvue)
        return grad if sample is grad else torch.where(state["tail"] > 0, grad, sample)

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return state["mask"]

    def mask_changes_at(self, step: int) -> bool | None:
        return step % self.refresh == 0

    def in_tail(self, clock: Clock) -> bool:
        return self.dense_tail > 0 and clock.step >= share_of(1 - self.dense_tail, clock)

    def active_products(self, clock: Clock, memory: dict[str, Any]) -> tuple[str, ...]:
        return () if self.in_tail(clock) else self.sparse_products

    def schedule(self, clock: Clock) -> dict[str, float]:
        return {"tail": float(self.in_tail(clock))}

    @property
    def starts_from_weights(self) -> bool:
        return True

    def on_attach(self, update: Update) -> None:
        self._search(update)

    def before_update(self, update: Update) -> None:
        if not self.in_tail(update.clock):
            update.decay_pruned(self.decay)

    def after_update(self, update: Update) -> None:
        if update.clock.step % self.refresh == 0 and not self.in_tail(update.clock):
            self._search(update)

    def _search(self, update: Update) -> None:
        for layer in update.layers:
            layer.state["mask"].copy_(update.transposable_mask(layer.weight, self.pattern))
