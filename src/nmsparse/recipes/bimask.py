"""Bi-Mask: separate masks for the forward and the backward product.

Bi-directional Masks for Efficient N:M Sparse Training. Y. Zhang et al. ICML 2023, arXiv:2302.06058.

output:      B*W, B = N largest of M along I, at every forward
grad_input:  Bb*B*W, Bb = N largest of M along O among the kept weights, rows grouped in the order of a permutation P
update:      gradient + decay * (1-B)*W
P:           every `refresh` updates the best of `candidates` random row orders: most groups that lose nothing; natural order
             in grouped convolutions, whose groups reduce over their own rows only
Deviations:  the natural and the present order are candidates too, so a search never makes it worse; P comes from counter
             based random numbers, so that every rank and a resumed run draw the same; the decay is added once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nmsparse.functional import backward_mask, counter_permutation, hash_integers, magnitude_mask, to_groups
from nmsparse.pattern import Pattern
from nmsparse.recipes._base import GRAD_INPUT, OUTPUT, LayerUpdate, State, Update, check_decay, masked
from nmsparse.recipes._registry import register_recipe
from nmsparse.recipes.ste import STE


@register_recipe("bi-mask", paper="Zhang et al., ICML 2023, arXiv:2302.06058")
@dataclass(frozen=True)
class BiMask(STE):
    """SR-STE whose input gradient sees a second mask along the output channels."""

    decay: float = 2e-4
    """Strength of the decay on pruned weights."""
    candidates: int = 100
    """Random row orders tried at a search."""
    refresh: int = 100
    """Updates between two searches."""
    permutation: Literal["search", "random", "identity"] = "search"
    """How rows are grouped: best of the candidates, redrawn blindly at every refresh, or always in natural order."""

    def validate(self) -> None:
        check_decay(self.decay)
        for name in ("candidates", "refresh"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}.")
        if self.permutation not in ("search", "random", "identity"):
            raise ValueError(f'permutation is "search", "random" or "identity", got {self.permutation!r}.')

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT, GRAD_INPUT)

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        # a grouped convolution reduces inside each of its groups: rows of different groups must not meet
        if self.permutation == "identity" or groups > 1 or weight.shape[0] % self.pattern.m:
            return {}
        natural = torch.arange(weight.shape[0], device=weight.device)
        return {"permutation": natural, "inverse": natural.clone()}

    def row_order(self, state: State) -> Tensor | None:
        return state.get("permutation")

    def grad_input_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, backward_mask(weight, self.pattern, state.get("permutation"), inverse=state.get("inverse")))

    @property
    def starts_from_weights(self) -> bool:
        return self.permutation != "identity"

    def on_attach(self, update: Update) -> None:
        self._regroup(update)

    def before_update(self, update: Update) -> None:
        update.decay_pruned(self.decay)

    def after_update(self, update: Update) -> None:
        if update.clock.step % self.refresh == 0:
            self._regroup(update)

    def _regroup(self, update: Update) -> None:
        for layer in update.layers:
            if "permutation" in layer.state:
                layer.state["permutation"].copy_(self._choose(layer, update.clock.step))
                layer.state["inverse"].copy_(layer.state["permutation"].argsort())

    def _choose(self, layer: LayerUpdate, step: int) -> Tensor:
        mask = magnitude_mask(layer.weight, self.pattern).flatten(1)
        present = layer.state["permutation"]

        def draw(candidate: int) -> Tensor:
            return counter_permutation(len(mask), layer.stream, hash_integers(step, candidate), mask.device)

        if self.permutation == "random":
            return draw(0)
        orders = [present, torch.arange(len(mask), device=mask.device), *(draw(i) for i in range(self.candidates))]
        scores = torch.stack([eligible_blocks(mask[order], self.pattern) for order in orders])
        return orders[int(scores.argmax())]  # the first maximum: equal counts keep the present order


def eligible_blocks(mask: Tensor, pattern: Pattern) -> Tensor:
    """Number of groups along dim 0 with at most N kept entries: the backward mask takes nothing from them."""
    groups, axis = to_groups(mask, pattern, 0)
    return (groups.sum(axis) <= pattern.n).sum()
