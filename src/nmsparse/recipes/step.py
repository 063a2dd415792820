"""STEP: learn masks under Adam with a preconditioner that was estimated densely.

STEP: Learning N:M Structured Sparsity Masks from Scratch with Precondition. Y. Lu et al. ICML 2023, arXiv:2302.01172.

phase 1:     dense AdamW, until the variance v has settled (update T0)
phase 2:     output B*W, straight-through gradients; the sparse weights' v is frozen at its bias-corrected value v*:
             W <- W - lr * mhat / sqrt(v* + eps);  optional decay * (1-B)*W in the gradient
switch:      AutoSwitch: mean of Z_t = mean |v_t - v_{t-1}| over 1/(1-beta2) updates below eps, between 10 % and 50 %
             of the run; or a fixed step or fraction
Deviations:  the frozen v is bias-corrected (raw, its small early values would multiply the step); phase 1 is plain AdamW.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nmsparse.functional import magnitude_mask
from nmsparse.recipes._autoswitch import STATISTICS, AutoSwitch, Statistic, newest_sample, window_length
from nmsparse.recipes._base import (
    OUTPUT,
    Clock,
    Packing,
    Recipe,
    State,
    Update,
    check_decay,
    fraction_or_step,
    is_past,
    masked,
    scalar,
)
from nmsparse.recipes._registry import register_recipe

logger = logging.getLogger(__name__)


@register_recipe("step", paper="Lu et al., ICML 2023, arXiv:2302.01172", needs=("freeze_variance", "is_frozen"))
@dataclass(frozen=True)
class STEP(Recipe):
    """Dense Adam first, then masks under its frozen variance; needs nmsparse.StepAdamW."""

    switch: Literal["auto"] | int | float = "auto"
    """When phase 2 starts: found automatically, after a number of updates, or after a fraction of the run."""
    decay: float = 0.0
    """Strength of an SR-STE decay on pruned weights in phase 2."""
    statistic: Statistic = "arithmetic"
    """What AutoSwitch watches: the paper's options "arithmetic" and "geometric", or the rules "relative" and "staleness"."""
    switch_eps: float | None = None
    """Threshold of AutoSwitch; None takes Adam's eps, as the paper does."""
    earliest: float = 0.1
    """Share of the run before which AutoSwitch never switches."""
    latest: float = 0.5
    """Share of the run after which it always does."""

    def validate(self) -> None:
        check_decay(self.decay)
        if self.statistic not in STATISTICS:
            raise ValueError(f"statistic is one of {', '.join(STATISTICS)}; got {self.statistic!r}.")
        if not 0 <= self.earliest <= self.latest <= 1:
            raise ValueError(f"earliest = {self.earliest} and latest = {self.latest} must be shares of the run, in this order.")
        if isinstance(self.switch, str):
            if self.switch != "auto":
                raise ValueError(f'switch is "auto", a number of updates or a fraction of the run, got {self.switch!r}.')
        elif not self.switch > 0 or (isinstance(self.switch, float) and self.switch > 1):
            raise ValueError(
                f"switch = {self.switch!r} leaves no dense phase to estimate Adam's variance in; use at least 1 update or a "
                "fraction up to 1."
            )

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return (OUTPUT,)

    @property
    def needs_total_steps(self) -> bool:
        return isinstance(self.switch, str | float)

    def active_products(self, clock: Clock, memory: dict[str, Any]) -> tuple[str, ...]:
        return self.sparse_products if memory.get("switched_at") is not None else ()

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        return {"sparse": scalar(0, weight.device)}

    @property
    def masks_rows(self) -> bool:
        return True

    @property
    def packing(self) -> Packing | None:
        return Packing()

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, magnitude_mask(weight, self.pattern) | (state["sparse"] == 0))

    def final_weight(self, weight: Tensor, state: State) -> Tensor:
        return masked(weight, magnitude_mask(weight, self.pattern))

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        return magnitude_mask(weight, self.pattern)

    def describe(self, state: State) -> dict[str, Tensor | float]:
        return {"sparse": state["sparse"]}

    def on_attach(self, update: Update) -> None:
        if not update.covers_all_layers:
            raise ValueError(
                "step decides one switch for all sparse layers: put them into one StepAdamW (in as many parameter groups as "
                "you like)."
            )
        update.set_scalar("sparse", 0.0)  # a new clock begins with its dense phase; a saved one is loaded afterwards

    def before_update(self, update: Update) -> None:
        if update.memory.get("switched_at") is not None:
            update.decay_pruned(self.decay)
            return
        _check_not_frozen(update)
        if self.switch == "auto" and any(layer.parameter.grad is not None for layer in update.layers):
            rule = self._rule(update)
            rule.record(update.memory, rule.sample(_moments(update)))

    def after_update(self, update: Update) -> None:
        if update.memory.get("switched_at") is None:
            if not self._is_due(update):
                return
            update.memory["switched_at"] = update.clock.step
            update.set_scalar("sparse", 1.0)
        # a layer without a gradient so far has no variance to freeze; it follows as soon as it has one
        optimizer: Any = update.optimizer
        parameters = [layer.parameter for layer in update.layers]
        ready = [p for p in parameters if not optimizer.is_frozen(p) and "exp_avg_sq" in optimizer.state.get(p, {})]
        if ready:
            optimizer.freeze_variance(ready)

    def summarize(self, memory: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        if memory.get("count"):
            # the rival rules sample something else than the change of v
            name = "variance_change" if self.statistic in ("arithmetic", "geometric") else "switch_statistic"
            found[name] = float(memory["samples"][newest_sample(memory)])
        if memory.get("switched_at") is not None:
            found["switched_at"] = memory["switched_at"]
        return found

    def _is_due(self, update: Update) -> bool:
        clock: Clock = update.clock
        if self.switch != "auto":
            return clock.step >= fraction_or_step(self.switch, clock)
        if is_past(self.latest, clock):
            logger.warning(
                "step: AutoSwitch did not settle by update %d (latest = %g) and switches now; consider a fixed switch.",
                clock.step,
                self.latest,
            )
            return True
        return is_past(self.earliest, clock) and self._rule(update).has_settled(update.memory)

    def _rule(self, update: Update) -> AutoSwitch:
        group = _group_of(update.optimizer, update.layers[0].parameter)
        threshold = group["eps"] if self.switch_eps is None else self.switch_eps
        return AutoSwitch(self.statistic, threshold, window_length(group["betas"][1]))


def _group_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))


def _check_not_frozen(update: Update) -> None:
    """A second clock on the optimizer of an earlier one: phase 1 is Adam, whose variance moves."""
    optimizer: Any = update.optimizer
    frozen = next((layer.name for layer in update.layers if optimizer.is_frozen(layer.parameter)), None)
    if frozen is not None:
        raise RuntimeError(
            f"{frozen}: step begins with a dense phase that estimates Adam's variance, and this {type(optimizer).__name__} holds "
            "one that an earlier run has frozen. Make a new optimizer; to go on with the earlier run, call run.load_state_dict."
        )


def _moments(update: Update) -> list[tuple[Tensor, Tensor, float]]:
    """Gradient, v and beta2 of all sparse weights; beta2 = 1 where there is no gradient, because v then stays as it is."""
    moments = []
    for layer in update.layers:
        grad, parameter = layer.gradient(), layer.parameter
        variance = update.optimizer.state.get(parameter, {}).get("exp_avg_sq")
        before = layer.view(torch.zeros_like(parameter) if variance is None else variance).float()
        beta2 = 1.0 if grad is None else _group_of(update.optimizer, parameter)["betas"][1]
        moments.append((before if grad is None else grad, before, beta2))
    return moments
