"""AutoSwitch: when has Adam's variance settled? The statistics of the STEP paper and of its rivals.

Samples are taken before an update from v and the gradient, since |v_t - v_{t-1}| = (1 - beta2) |g^2 - v_{t-1}|; no copy
of v is kept. They live on the device; the host reads them only once a switch is possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Statistic = Literal["arithmetic", "geometric", "relative", "staleness"]
STATISTICS = ("arithmetic", "geometric", "relative", "staleness")
RELATIVE_CHANGE = 0.5
"""Agarwal et al. 2021: relative change of the norm of v below which it counts as settled."""
STALENESS = 0.96
"""Tang et al. 2021 (1-bit Adam): ratio of the norms of v one window apart above which it counts as settled."""


def window_length(beta2: float) -> int:
    """round, not int: 1 / (1 - 0.999) is 999.99... in floating point."""
    return max(1, round(1 / (1 - beta2)))


@dataclass(frozen=True)
class AutoSwitch:
    """Decides from the history of one statistic over all sparse weights."""

    statistic: Statistic
    threshold: float
    window: int

    def sample(self, moments: Iterable[tuple[Tensor, Tensor, float]]) -> Tensor:
        """One value of the statistic (fp32, 0-d) from (gradient, v before the update, beta2) of each layer; beta2 = 1 where v
        does not change."""
        parts = [_layer_sums(g, v, beta2) for g, v, beta2 in moments]
        kinds = [[part for part in parts if hasattr(part, "full_tensor") is is_sharded] for is_sharded in (True, False)]
        totals = [torch.stack([part.to(kind[0].device) for part in kind]).sum(0) for kind in kinds if kind]
        # sharded weights: sum over ranks, so that all of them decide alike
        totals = [total.full_tensor() if hasattr(total, "full_tensor") else total for total in totals]
        sums = torch.stack([total.to(totals[0].device) for total in totals]).sum(0)
        change, log_change, moved, count, before_sq, after_sq, after_l1 = sums.unbind()
        if self.statistic == "arithmetic":
            return (change / count).float()
        if self.statistic == "geometric":  # entries without change are left out: one of them would make it zero
            return torch.where(moved > 0, torch.exp(log_change / moved.clamp(min=1)), 0).float()
        if self.statistic == "relative":
            return ((after_sq.sqrt() - before_sq.sqrt()).abs() / before_sq.sqrt()).float()
        return after_l1.float()

    def record(self, memory: dict[str, Any], value: Tensor) -> None:
        """Append a sample to the ring kept in ``memory``."""
        if "samples" not in memory:
            memory["samples"] = torch.zeros(self.window + 1, dtype=torch.float32, device=value.device)
            memory["count"] = 0
        memory["samples"][memory["count"] % (self.window + 1)] = value
        memory["count"] += 1

    def has_settled(self, memory: dict[str, Any]) -> bool:
        """True once the window is full and the statistic says so."""
        samples, count = memory.get("samples"), memory.get("count", 0)
        if samples is None or count < self.window:
            return False
        newest = newest_sample(memory)
        if self.statistic == "relative":
            return bool(samples[newest] < RELATIVE_CHANGE)
        if self.statistic == "staleness":
            oldest = count % (self.window + 1)  # the ring holds one sample more than the window
            return count > self.window and bool(samples[oldest] / samples[newest] > STALENESS)
        last = samples[[(newest - i) % (self.window + 1) for i in range(self.window)]]
        return bool(last.mean() < self.threshold)


def newest_sample(memory: dict[str, Any]) -> int:
    """Where the ring holds its latest sample."""
    place: int = (memory["count"] - 1) % len(memory["samples"])
    return place


def _layer_sums(grad: Tensor, variance: Tensor, beta2: float) -> Tensor:
    """Sums over one layer in fp64: a change of 1e-8 times a million entries must not drown."""
    change = (1 - beta2) * (grad.square() - variance).abs()
    after = beta2 * variance + (1 - beta2) * grad.square()
    moved = change > 0
    logs = torch.where(moved, change, 1).log()
    parts = (change, logs, moved, torch.ones_like(change), variance.square(), after.square(), after)
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])
