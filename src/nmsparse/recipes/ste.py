"""STE: straight-through estimator on a magnitude mask (the baseline of every N:M paper).

output:      B*W, B = N largest of M along I, recomputed at every forward
grad_input:  the same tensor, dense product
grad_weight: G^T X; every weight receives it, pruned ones too
Deviations:  none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nmsparse.functional import magnitude_mask
from nmsparse.recipes._base import OUTPUT, Packing, Recipe, State, masked
from nmsparse.recipes._registry import register_recipe


@register_recipe("ste", paper="Bengio et al. 2013, arXiv:1308.3432; N:M form in arXiv:2102.04010")
@dataclass(frozen=True)
class STE(Recipe):
    """Magnitude mask in the forward pass, straight-through gradients."""

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT,)

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing()

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, magnitude_mask(weight, self.pattern))

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return magnitude_mask(weight, self.pattern)
