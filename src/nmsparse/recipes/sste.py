"""S-STE: continuous N:M pre-training by soft thresholding.

S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training. Y. Hu, J. Zhu, J. Chen. NeurIPS 2024,
arXiv:2409.09099.

output:      beta * S(W), S(w) = sign(w) max(|w| - t, 0), t = largest dropped magnitude of the group along I
grad_input:  the same tensor, dense product
grad_weight: MVUE(G) in groups of M tokens;  bias gradient from the full G
update:      straight through the whole map: no factor beta, no mask
beta:        <W, S(W)> / <S(W), S(W)> over the whole tensor, at conversion and when the run's optimizer is attached, never
             again; saved with the run
Deviations:  the exact estimator by default (the paper trains with an approximate one: mvue="approximate"); patterns
             other than 1:2 and 2:4 follow from the formula; beta of a pre-trained model comes from its loaded weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nmsparse.functional import magnitude_mask, soft_threshold, soft_threshold_scale
from nmsparse.recipes._base import GRAD_WEIGHT, OUTPUT, Packing, Recipe, State, Update, fill_states_anew
from nmsparse.recipes._registry import register_recipe
from nmsparse.recipes._tokens import Estimator, check_estimator, mvue_along_tokens


@register_recipe("s-ste", paper="Hu et al., NeurIPS 2024, arXiv:2409.09099")
@dataclass(frozen=True)
class SSTE(Recipe):
    """Continuous soft-threshold projection with a fixed scale, MVUE weight gradients."""

    mvue: Estimator = True
    """Prune G for `grad_weight`: True (exact estimator), "approximate" (the paper's), False (dense G)."""
    precision: Literal["fp8"] | None = None
    """"fp8": e4m3 in `output`, e5m2 in the two gradient products, per-tensor current scaling."""

    def validate(self) -> None:
        check_estimator(self.mvue, self.pattern)
        if self.precision not in (None, "fp8"):
            raise ValueError(f'precision is None or "fp8", got {self.precision!r}.')

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT, GRAD_WEIGHT) if self.mvue else (OUTPUT,)

    @property
    def samples_tokens(self) -> bool:
        return self.mvue is True

    @property
    def is_random(self) -> bool:
        return bool(self.mvue)

    @property
    def runs_in_fp8(self) -> bool:
        return self.precision == "fp8"

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        return {"scale": soft_threshold_scale(weight, self.pattern).float()}

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing(scale="scale")

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return soft_threshold(weight, self.pattern) * state["scale"]

    def grad_weight_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        return mvue_along_tokens(grad, self.pattern, state, counter, self.mvue)

    @property
    def starts_from_weights(self) -> bool:
        return True

    def on_attach(self, update: Update) -> None:
        fill_states_anew(self, update)

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return magnitude_mask(weight, self.pattern)
