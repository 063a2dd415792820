"""Curves: several seeds become a mean with a band, long curves become short ones that keep their extremes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nmsparse.workbench.report._runs import Points

SPANS = 120
"""A long curve is cut into so many equal spans of steps; what each keeps is its first point and its extremes."""
LONGEST = 2 * SPANS
"""Shorter curves are drawn as they are."""


@dataclass(frozen=True)
class Curve:
    """Mean over runs at each step, and the standard deviation between them (0 for a single run)."""

    steps: list[int]
    means: list[float]
    deviations: list[float]
    runs: int

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def lows(self) -> list[float]:
        return [mean - deviation for mean, deviation in zip(self.means, self.deviations, strict=True)]

    @property
    def highs(self) -> list[float]:
        return [mean + deviation for mean, deviation in zip(self.means, self.deviations, strict=True)]

    def after(self, step: float) -> Curve:
        """The part from a step on."""
        return self.pick([index for index, at in enumerate(self.steps) if at >= step])

    def pick(self, indices: Sequence[int]) -> Curve:
        return Curve(
            [self.steps[i] for i in indices],
            [self.means[i] for i in indices],
            [self.deviations[i] for i in indices],
            self.runs,
        )


def average(series: Sequence[Points]) -> Curve | None:
    """Mean and spread of several runs over the steps that all of them cover.

    Runs of one group record at the same steps, and then these are the steps. Where they do not, a run's value between two of
    its steps is interpolated. The mean ends with the shortest run: a mean over a changing set of runs would jump.
    """
    known = [points for points in series if points]
    if not known:
        return None
    first, last = max(points[0][0] for points in known), min(points[-1][0] for points in known)
    steps = sorted({step for points in known for step, _ in points if first <= step <= last})
    if not steps:
        return None
    columns = [_at(points, steps) for points in known]
    values = list(zip(*columns, strict=True))
    deviations = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    return Curve(steps, [statistics.fmean(v) for v in values], deviations, len(known))


def thin(curve: Curve, spans: int = SPANS, longest: int = LONGEST) -> Curve:
    """A shorter curve with the same look: of each span of steps, the first point and the extremes of mean and band."""
    if len(curve) <= longest:
        return curve
    lows, highs, means = curve.lows, curve.highs, curve.means
    kept = {0, len(curve) - 1}
    for members in _spans(curve.steps, spans):
        kept |= {members[0], min(members, key=means.__getitem__), max(members, key=means.__getitem__)}
        kept |= {min(members, key=lows.__getitem__), max(members, key=highs.__getitem__)}
    return curve.pick(sorted(kept))


def _spans(steps: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the points, by equal spans of steps; empty spans are left out."""
    width = (steps[-1] - steps[0] + 1) / count
    members: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        members.setdefault(int((step - steps[0]) / width), []).append(index)
    return list(members.values())


def _at(points: Points, steps: Sequence[int]) -> list[float]:
    """The values of a curve at ascending steps within its range, interpolated where it has no point."""
    values: list[float] = []
    right = 0
    for step in steps:
        while points[right][0] < step:
            right += 1
        (x1, y1), (x0, y0) = points[right], points[max(0, right - 1)]
        values.append(y1 if x1 == step else y0 + (y1 - y0) * (step - x0) / (x1 - x0))
    return values
