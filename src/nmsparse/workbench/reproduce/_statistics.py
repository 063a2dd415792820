"""Paired statistics: contenders with one seed start from the same weights and see the same examples in the same order.

The difference within a seed is therefore taken first, and its mean and Student's interval over the seeds afterwards: what a seed
does to both sides drops out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nmsparse.workbench.report._numbers import student

Verdict = Literal["holds", "within noise", "fails", "too few seeds", "not run yet"]
FEWEST_SEEDS = 3
"""Below this the spread is too uncertain to judge by."""


@dataclass(frozen=True)
class Difference:
    """Mean of the differences left - right over seeds, with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int


def paired_difference(left: Mapping[int, float], right: Mapping[int, float]) -> Difference | None:
    """Over the seeds that both sides have; None without any. A single seed has an interval without end."""
    differences = [left[seed] - right[seed] for seed in sorted(set(left) & set(right))]
    if not differences:
        return None
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, -math.inf, math.inf, count)
    half = student(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


def is_better(gain: Difference) -> Verdict:
    """Whether a gain is positive: its whole interval lies on one side of 0, or nothing can be said."""
    if gain.count < FEWEST_SEEDS:
        return "too few seeds"
    return "holds" if gain.low > 0 else "fails" if gain.high < 0 else "within noise"


def is_not_worse(gain: Difference, margin: float) -> Verdict:
    """Whether a loss of more than the margin can be excluded."""
    return is_better(Difference(gain.mean + margin, gain.low + margin, gain.high + margin, gain.count))


def is_equal(gain: Difference, margin: float) -> Verdict:
    """Whether a difference of more than the margin, to either side, can be excluded."""
    if gain.count < FEWEST_SEEDS:
        return "too few seeds"
    if -margin < gain.low and gain.high < margin:
        return "holds"
    return "fails" if gain.high < -margin or gain.low > margin else "within noise"
