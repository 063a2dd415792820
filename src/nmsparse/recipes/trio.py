"""Trio: all three products sparse (ours).

forward="soft" (default): S-STE forward, Bi-Mask backward, MVUE weight gradient
    output:      Wf = beta * S(W) along I, beta fixed at conversion
    grad_input:  Wb = N largest of M along O of Wf: the soft threshold has already shrunk what is dropped (3.5 % of the
                 squared norm on Gaussian weights, against 7.4 % with hard masks)
    grad_weight: MVUE(G) in groups of M tokens;   update: straight through
forward="double-soft":    Wf = Wb = beta * S_O(S_I(W)): continuous and N:M both ways, so the input gradient is exact
forward="hard":           Bi-Mask's masks in natural row order; set `decay` for SR-STE's pull on pruned weights
Deviations: nothing is published; see the measured comparisons before choosing it over its parents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nmsparse.functional import backward_mask, least_squares_scale, magnitude_mask, soft_threshold
from nmsparse.recipes._base import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Fit,
    Packing,
    Recipe,
    State,
    Update,
    check_decay,
    fill_states_anew,
    fit_sizes,
    masked,
    not_a_multiple,
)
from nmsparse.recipes._registry import register_recipe
from nmsparse.recipes._tokens import Estimator, check_estimator, mvue_along_tokens


@register_recipe("trio", paper="ours; parts from arXiv:2409.09099, arXiv:2302.06058, arXiv:2203.10991")
@dataclass(frozen=True)
class Trio(Recipe):
    """Soft threshold forward, second mask backward, MVUE weight gradient: three sparse products."""

    forward: Literal["soft", "double-soft", "hard"] = "soft"
    """What `output` sees of the weight."""
    mvue: Estimator = True
    """Prune G for `grad_weight`: True (exact estimator), "approximate" (the papers'), False (dense G)."""
    decay: float = 0.0
    """Strength of a decay on pruned weights."""

    def validate(self) -> None:
        check_decay(self.decay)
        check_estimator(self.mvue, self.pattern)
        if self.forward not in ("soft", "double-soft", "hard"):
            raise ValueError(f'forward is "soft", "double-soft" or "hard", got {self.forward!r}.')

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT, GRAD_INPUT, GRAD_WEIGHT) if self.mvue else (OUTPUT, GRAD_INPUT)

    @property
    def samples_tokens(self) -> bool:
        return self.mvue is True

    @property
    def is_random(self) -> bool:
        return bool(self.mvue)

    def fit(self, out_features: int, in_features: int) -> Fit:
        if self.forward == "double-soft" and out_features % self.pattern.m:
            return Fit(refused=not_a_multiple("out_features", out_features, self.pattern))
        return fit_sizes(self, out_features, in_features)

    def _project(self, weight: Tensor) -> Tensor:
        if self.forward == "hard":
            return masked(weight, magnitude_mask(weight, self.pattern))
        along_inputs = soft_threshold(weight, self.pattern)
        return along_inputs if self.forward == "soft" else soft_threshold(along_inputs, self.pattern, dim=0)

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        return {} if self.forward == "hard" else {"scale": least_squares_scale(weight, self._project(weight)).float()}

    @property
    def masks_rows(self) -> bool:
        return self.forward != "double-soft"

    @property
    def packing(self) -> Packing | None:
        return None if self.forward == "double-soft" else Packing(scale=None if self.forward == "hard" else "scale")

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        projected = self._project(weight)
        return projected * state["scale"] if "scale" in state else projected

    def grad_input_weight(self, weight: Tensor, state: State) -> Tensor:
        forward = self.output_weight(weight, state)
        if self.forward == "double-soft":
            return forward  # N:M along O already
        return masked(forward, backward_mask(forward, self.pattern))

    def grad_weight_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        return mvue_along_tokens(grad, self.pattern, state, counter, self.mvue)

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return self._project(weight) != 0 if self.forward == "double-soft" else magnitude_mask(weight, self.pattern)

    @property
    def starts_from_weights(self) -> bool:
        return self.forward != "hard"

    def on_attach(self, update: Update) -> None:
        fill_states_anew(self, update)

    def before_update(self, update: Update) -> None:
        update.decay_pruned(self.decay)
