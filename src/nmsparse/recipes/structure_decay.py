"""Structure decay (SdGf): the pattern tightens in stages.

Progressive Gradient Flow for Robust N:M Sparsity Training in Transformers. A. Bambhaniya et al. CPAL 2025,
arXiv:2402.04744.

output, grad_input: B_i*W, B_i = magnitude mask of stage i; equal stages between the dense and the fixed share of the run
stepwise:    (M-1):M, then (M/2):M, (M/4):M, ... down to N:M
geometric:   (kN):(kM), (kN/2):(kM/2), ... N:M: the density stays, the freedom shrinks
update:      pruned_grad="ste": dW on all entries; "scaled": B_i * dW
Deviations:  k is the largest power of two up to `widest` that divides the layer (the paper: 16, its code: 8), with groups of
             1,024 at most: 1:128 starts at 8:1024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nmsparse.functional import from_groups, magnitude_mask, magnitude_rank, stage_at, staged_mask, to_groups
from nmsparse.pattern import MAX_GROUP, Pattern
from nmsparse.recipes._base import OUTPUT, Clock, Fit, Packing, Recipe, State, masked, not_a_multiple, scalar
from nmsparse.recipes._phases import Phases
from nmsparse.recipes._registry import register_recipe


def stepwise_stages(pattern: Pattern) -> tuple[Pattern, ...]:
    """(M-1):M, then halves of M down to N."""
    ratio, rest = divmod(pattern.m, pattern.n)
    if rest or ratio & (ratio - 1):
        raise ValueError(
            f'stepwise structure decay halves the kept entries down to N, so M/N must be a power of two; "{pattern}" needs '
            "an explicit stages=(...)."
        )
    kept = [pattern.m - 1] if ratio > 1 else []
    step = pattern.m // 2
    while step >= pattern.n and ratio > 1:
        if step < kept[-1]:
            kept.append(step)
        step //= 2
    return tuple(Pattern(n, pattern.m) for n in kept) or (pattern,)


def geometric_stages(pattern: Pattern, in_features: int, widest: int) -> tuple[Pattern, ...]:
    """(kN):(kM) and its halves, for the largest power of two k that the layer admits."""
    k = 1
    while 2 * k <= widest and 2 * k * pattern.m <= MAX_GROUP and in_features % (2 * k * pattern.m) == 0:
        k *= 2
    stages = []
    while k >= 1:
        stages.append(Pattern(k * pattern.n, k * pattern.m))
        k //= 2
    return tuple(stages)


@register_recipe(
    "structure-decay",
    paper="Bambhaniya et al., CPAL 2025, arXiv:2402.04744",
    patterns="stepwise: M/N a power of two; geometric: any N:M",
)
@dataclass(frozen=True)
class StructureDecay(Recipe):
    """The pattern tightens from nearly dense, or from large groups, to N:M."""

    shape: Literal["stepwise", "geometric"] = "stepwise"
    """How the pattern tightens."""
    pruned_grad: Literal["ste", "scaled"] = "ste"
    """Gradient of pruned weights: in full, or none."""
    dense: float = 0.05
    """Share of the run before the first stage."""
    fixed: float = 0.1
    """Last share of the run, at the final pattern."""
    widest: int = 16
    """Largest factor k of the geometric form."""
    stages: tuple[str, ...] = ()
    """An explicit list of patterns in place of the shape; the last one must be the recipe's pattern."""

    host_state = ("progress",)

    def validate(self) -> None:
        Phases(self.dense, self.fixed).check()
        if self.shape not in ("stepwise", "geometric"):
            raise ValueError(f'shape is "stepwise" or "geometric", got {self.shape!r}.')
        if self.pruned_grad not in ("ste", "scaled"):
            raise ValueError(f'pruned_grad is "ste" or "scaled", got {self.pruned_grad!r}.')
        if self.widest < 1:
            raise ValueError(f"widest must be at least 1, got {self.widest!r}.")
        if self.stages and Pattern(self.stages[-1]) != self.pattern:
            raise ValueError(
                f'the last stage "{self.stages[-1]}" is not the pattern "{self.pattern}" that the run must end with.'
            )
        if not self.stages and self.shape == "stepwise":
            stepwise_stages(self.pattern)

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT,)

    @property
    def needs_total_steps(self) -> bool:
        return True

    def fit(self, out_features: int, in_features: int) -> Fit:
        for stage in self.stages_for(in_features):
            if in_features % stage.m:
                return Fit(refused=not_a_multiple("in_features", in_features, stage))
        return Fit()

    def stages_for(self, in_features: int) -> tuple[Pattern, ...]:
        """The patterns that a layer of this size passes through."""
        if self.stages:
            return tuple(Pattern(stage) for stage in self.stages)
        if self.shape == "stepwise":
            return stepwise_stages(self.pattern)
        return geometric_stages(self.pattern, in_features, self.widest)

    @property
    def has_one_group_size(self) -> bool:
        """Only the number of kept entries moves, so a compiled graph can follow it in a tensor."""
        return len({stage.m for stage in self.stages_for(0)}) == 1

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        if self.has_one_group_size:
            return {"kept": scalar(self.pattern.m, weight.device)}
        # float64: the stage must not depend on rounding; on the CPU, where the op reads it
        return {"progress": torch.tensor(-1.0, dtype=torch.float64, device="cpu")}

    def _mask(self, weight: Tensor, state: State) -> Tensor:
        if "kept" in state:
            groups, axis = to_groups(weight, self.pattern, -1)
            return from_groups(magnitude_rank(groups, axis) < state["kept"], axis)
        stages = self.stages_for(weight.shape[-1])
        mask: Tensor = staged_mask(weight, state["progress"], [s.n for s in stages], [s.m for s in stages])
        return mask

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing()

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, self._mask(weight, state))

    def weight_grad(self, grad_weight: Tensor, weight: Tensor, state: State) -> Tensor:
        return grad_weight if self.pruned_grad == "ste" else masked(grad_weight, self._mask(weight, state))

    def final_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, magnitude_mask(weight, self.pattern))

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return self._mask(weight, state)

    def progress(self, clock: Clock) -> float:
        """Position in the active span: below 0 while dense, 0 to 1 through the stages, then 1."""
        phases = Phases(self.dense, self.fixed)
        if phases.is_dense(clock):
            return -1.0
        if phases.is_final(clock):
            return 1.0
        return max(0.0, clock.step - phases.start(clock)) / (phases.end(clock) - phases.start(clock))

    def active_products(self, clock: Clock, memory: dict[str, Any]) -> tuple[str, ...]:
        count = len(self.stages_for(0))  # the most any layer passes through; with fewer it arrives at the last one no later
        progress = self.progress(clock)
        return self.sparse_products if progress >= 0 and stage_at(progress, count) == count - 1 else ()

    def schedule(self, clock: Clock) -> dict[str, float]:
        progress = self.progress(clock)
        if not self.has_one_group_size:
            return {"progress": progress}
        stages = self.stages_for(0)
        return {"kept": self.pattern.m if progress < 0 else stages[stage_at(progress, len(stages))].n}

    def describe(self, state: State) -> dict[str, Tensor | float]:
        return dict(state)
