"""SDGP: structured pruning of the data gradient.

Accelerating DNN Training with Structured Data Gradient Pruning. B. McDanel, H. Dinh, J. Magallanes. ICPR 2022,
arXiv:2202.00774.

output, grad_weight, bias: dense
grad_input:  Gd W, Gd = N largest of M output channels of each token, rescaled to keep the L1 norm of G
Deviations:  the published rescaling is per sample and channel over the pixels of a convolution; a linear layer has no
             pixels, so there it is per token over the channels. A relative guard replaces an absolute 1e-4, which loss
             scaling would defeat. mvue=True also prunes G for `grad_weight` (ours): two sparse products, dense weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nmsparse.functional import counter_uniform, from_groups, magnitude_rank, mvue, sdgp, to_groups
from nmsparse.recipes._base import GRAD_INPUT, GRAD_WEIGHT, Recipe, State, masked
from nmsparse.recipes._registry import register_recipe
from nmsparse.recipes._tokens import Estimator, check_estimator, mvue_along_tokens


@register_recipe("sdgp", paper="McDanel et al., ICPR 2022, arXiv:2202.00774", ends_dense=True)
@dataclass(frozen=True)
class SDGP(Recipe):
    """Dense weights; the input gradient sees a pruned output gradient."""

    rescale: bool = True
    """Restore the L1 norm of G (magnitude), or multiply by M/N (random), after pruning."""
    selector: Literal["magnitude", "random", "mvue"] = "magnitude"
    """Which entries of G survive: the largest, random ones (a baseline), or an unbiased sample."""
    mvue: Estimator = False
    """Prune G along tokens for `grad_weight` as well."""

    def validate(self) -> None:
        check_estimator(self.mvue, self.pattern)
        if self.selector not in ("magnitude", "random", "mvue"):
            raise ValueError(f'selector is "magnitude", "random" or "mvue", got {self.selector!r}.')

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (GRAD_INPUT, GRAD_WEIGHT) if self.mvue else (GRAD_INPUT,)

    @property
    def samples_tokens(self) -> bool:
        return self.mvue is True

    @property
    def is_random(self) -> bool:
        return bool(self.mvue) or self.selector != "magnitude"

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def prunes_channels(self) -> bool:
        return True

    @property
    def prunes_channels_by_magnitude(self) -> bool:
        return self.selector == "magnitude"

    @property
    def rescales_channels(self) -> bool:
        return self.rescale

    def grad_input_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        if self.pattern.n == self.pattern.m:
            return grad
        if self.selector == "magnitude":
            pixels = (1, 2) if grad.ndim == 4 else None
            return sdgp(grad, self.pattern, rescale=self.rescale, over=pixels)
        assert counter is not None, "random recipes get a counter"
        if self.selector == "mvue":
            shape = (*grad.shape[:-1], grad.shape[-1] // self.pattern.m, 1)
            # the complement of the counter keeps these draws apart from those along tokens
            return mvue(grad, self.pattern, uniform=counter_uniform(shape, state["stream"], ~counter, grad.device))
        draws, axis = to_groups(counter_uniform(tuple(grad.shape), state["stream"], ~counter, grad.device), self.pattern, -1)
        kept = masked(grad, from_groups(magnitude_rank(draws, axis) < self.pattern.n, axis))
        return kept * (self.pattern.m / self.pattern.n) if self.rescale else kept

    def grad_weight_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        return mvue_along_tokens(grad, self.pattern, state, counter, self.mvue)
