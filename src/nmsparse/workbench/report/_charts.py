"""Charts over time: one line with a band per group, as SVG paths and as places for ticks and labels.

The drawing surface is WIDTH x HEIGHT and is stretched to whatever room the page has, with strokes that do not stretch. Text is
not part of it: the page places ticks and labels beside it in percent, so that they keep their size on a phone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nmsparse.workbench.report._axes import Axis, linear_axis, log_axis, step_axis
from nmsparse.workbench.report._curves import Curve, average, thin
from nmsparse.workbench.report._numbers import brief, share
from nmsparse.workbench.report._runs import Group, Run, Section

WIDTH, HEIGHT = 2000, 1000
LABEL_SPACING = 15 / 240
"""Least distance of two labels at the ends of lines: 15 pixels of a plot that is 240 high."""
MOST_DOTS = 40
"""Curves of at most so many points show them as dots."""


@dataclass(frozen=True)
class Spec:
    """What a chart shows."""

    key: str
    kind: str
    column: str
    title: str
    axis: str
    caption: str
    is_percent: bool = False
    variants: tuple[str, ...] = ("linear",)
    cuts_start: bool = False
    """A loss falls so steeply in the first steps that the rest would be one flat line: they may lie above the frame."""
    is_about_masks: bool = False
    """Then dense runs have no part in it, whatever they recorded."""


@dataclass(frozen=True)
class Line:
    """The mean of a group, its band, its points, and where its label stands at the right."""

    group: Group
    path: str
    band: str
    dots: str
    label_place: float | None


@dataclass(frozen=True)
class Lone:
    """A run by itself, because it did not finish; x and y say where it ends."""

    group: Group
    run: Run
    path: str
    x: float
    y: float


@dataclass(frozen=True)
class Variant:
    """One way to look at a chart: linear, logarithmic, or the second half only."""

    name: str
    x: Axis
    y: Axis
    lines: list[Line]
    lone: list[Lone]
    cut: str = ""
    """What lies above the frame, in words."""


@dataclass(frozen=True)
class Chart:
    spec: Spec
    variants: list[Variant]
    summary: str
    """The chart in words, for those who cannot see it."""
    thinned_from: int
    """Points of the longest curve before it was thinned; 0 when none was."""
    data: dict[str, Any]
    """What the read-out under the pointer needs."""


@dataclass(frozen=True)
class Traced:
    """The curves of a chart: means of finished runs, and other runs one by one."""

    groups: list[tuple[Group, Curve]]
    lone: list[tuple[Group, Run, Curve]]
    thinned_from: int

    @property
    def curves(self) -> list[Curve]:
        return [curve for _, curve in self.groups] + [curve for _, _, curve in self.lone]


def line_chart(section: Section, spec: Spec) -> Chart | None:
    """A chart of one recorded quantity; None where no run has recorded it."""
    traced = _trace(section, spec)
    if not traced.curves:
        return None
    last = max(run.last_step for run in section.runs)
    variants = [variant for name in spec.variants if (variant := _variant(traced, spec, name, last)) is not None]
    return Chart(spec, variants, _summary(traced, spec), traced.thinned_from, _data(traced, spec, variants))


def _trace(section: Section, spec: Spec) -> Traced:
    groups: list[tuple[Group, Curve]] = []
    lone: list[tuple[Group, Run, Curve]] = []
    longest = 0

    def short(curve: Curve) -> Curve:
        nonlocal longest
        thinned = thin(curve)
        longest = max(longest, len(curve) if len(thinned) < len(curve) else 0)
        return thinned

    for group in (group for group in section.groups if not (spec.is_about_masks and group.is_dense)):
        mean = average([run.points(spec.kind, spec.column) for run in group.finished])
        groups += [] if mean is None else [(group, short(mean))]
        others = [run for run in group.runs if run.status != "finished"]
        single = [(run, average([run.points(spec.kind, spec.column)])) for run in others]
        lone += [(group, run, short(curve)) for run, curve in single if curve is not None]
    return Traced(groups, lone, longest)


def _variant(traced: Traced, spec: Spec, name: str, last: int) -> Variant | None:
    """One view of a chart. All charts share their horizontal axis, so that the eye can go from one to the next."""
    first = last // 2 if name == "close-up" else 0
    if name == "close-up" and min((len(curve.after(first)) for _, curve in traced.groups), default=0) < 3:
        return None
    top = _peak_after(traced, last / 10) if spec.cuts_start and name == "linear" else None
    y = _vertical_axis(traced, spec, first, is_log=name == "log", top=top)
    if y is None:
        return None
    peak = max((high for curve in traced.curves for high in curve.after(first).highs), default=y.high)
    cut = f"↑ cut, up to {share(peak) if spec.is_percent else brief(peak)}" if peak > y.high else ""
    x = step_axis(first, last)
    ends = {group.index: y.place(curve.means[-1]) for group, curve in traced.groups if curve.means[-1] > 0 or not y.is_log}
    labels = spread_out(ends)
    lines = [_line(group, curve.after(_entry(curve, first)), x, y, labels.get(group.index)) for group, curve in traced.groups]
    lone = [_lone(group, run, curve, x, y) for group, run, curve in traced.lone if curve.steps[-1] >= first]
    return Variant(name, x, y, lines, lone, cut)


def _entry(curve: Curve, first: int) -> int:
    """The last recorded step before a frame begins, so that lines enter it from outside."""
    return max((step for step in curve.steps if step < first), default=curve.steps[0])


def _peak_after(traced: Traced, step: float) -> float | None:
    """The highest value from a step on, if most of the chart's height lies above it."""
    whole, rest = _range(traced.curves, False), _range([curve.after(step) for curve in traced.curves], False)
    if whole is None or rest is None or rest[1] - rest[0] > 0.6 * (whole[1] - whole[0]) or rest[1] <= rest[0]:
        return None
    return rest[1]


def _vertical_axis(traced: Traced, spec: Spec, first: int, is_log: bool, top: float | None) -> Axis | None:
    """A range for the finished runs; others widen it by half at most, because a diverged run would squeeze the rest flat."""
    main = _range([curve.after(first) for _, curve in traced.groups], is_log)
    single = _range([curve.after(first) for _, _, curve in traced.lone], is_log)
    if main is None or single is None:
        chosen = main or single
    else:
        room = 0.5 * (main[1] - main[0])
        chosen = (max(min(main[0], single[0]), main[0] - room), min(max(main[1], single[1]), main[1] + room))
    if chosen is None:
        return None
    if top is not None:
        chosen = (chosen[0], min(chosen[1], top))
    if is_log:
        low = chosen[0] if chosen[0] > 0 else (main or chosen)[0]
        return log_axis(low, chosen[1], spec.is_percent)
    return linear_axis(*chosen, percent=spec.is_percent)


def _range(curves: Sequence[Curve], is_log: bool) -> tuple[float, float] | None:
    values = [value for curve in curves for value in (curve.means if is_log else curve.lows + curve.highs)]
    if is_log:  # a band may reach below zero, where a logarithm cannot follow; the lowest mean above zero ends the axis
        values = [value for value in values + [high for curve in curves for high in curve.highs] if value > 0]
    elif values and all(value >= 0 for curve in curves for value in curve.means):
        values = [max(0.0, value) for value in values]
    return (min(values), max(values)) if values else None


def _line(group: Group, curve: Curve, x: Axis, y: Axis, label: float | None) -> Line:
    places = [_pixel(x, y, step, mean) for step, mean in zip(curve.steps, curve.means, strict=True)]
    visible = [None if y.is_log and mean <= 0 else place for place, mean in zip(places, curve.means, strict=True)]
    dots = dot_path(place for place in visible if place) if len(curve) <= MOST_DOTS else ""
    return Line(group, line_path(visible), _band(curve, x, y) if curve.runs > 1 else "", dots, label)


def _band(curve: Curve, x: Axis, y: Axis) -> str:
    upper = [_pixel(x, y, step, value) for step, value in zip(curve.steps, curve.highs, strict=True)]
    lower = [_pixel(x, y, step, value) for step, value in zip(curve.steps, curve.lows, strict=True)]
    return line_path([*upper, *reversed(lower)]) + "z"


def _lone(group: Group, run: Run, curve: Curve, x: Axis, y: Axis) -> Lone:
    points = [
        None if y.is_log and value <= 0 else _pixel(x, y, step, value)
        for step, value in zip(curve.steps, curve.means, strict=True)
    ]
    end_x, end_y = _pixel(x, y, curve.steps[-1], curve.means[-1])
    return Lone(group, run, line_path(points), end_x / WIDTH, min(1.0, max(0.0, end_y / HEIGHT)))


def _pixel(x: Axis, y: Axis, step: float, value: float) -> tuple[int, int]:
    """Where a value lies on the surface; far outside is as good as a frame's height outside."""
    height = min(2.0, max(-1.0, y.place(value)))
    return round(WIDTH * x.place(step)), round(HEIGHT * (1 - height))


def line_path(points: Iterable[tuple[int, int] | None]) -> str:
    """An SVG path in relative moves, which are short to write; None interrupts it."""
    parts: list[str] = []
    at: tuple[int, int] | None = None
    for point in points:
        if point is None:
            at = None
        elif at is None:
            parts.append(f"M{point[0]} {point[1]}")
            at = point
        elif point != at:
            parts.append(f"l{point[0] - at[0]} {point[1] - at[1]}")
            at = point
    return "".join(parts).replace(" -", "-")


def dot_path(points: Iterable[tuple[int, int]]) -> str:
    """Round dots as lines without length: round line ends keep their shape when the surface is stretched."""
    return "".join(f"M{x} {y}h0" for x, y in points)


def spread_out(places: dict[int, float], spacing: float = LABEL_SPACING) -> dict[int, float]:
    """Labels moved apart until none overlaps, each as near to its place as the others allow; all stay within 0 .. 1."""
    order = sorted(places, key=places.__getitem__)
    spacing = min(spacing, 1 / max(1, len(order) - 1))
    # with the spacing taken out, labels may touch but must not pass each other: those that would share the mean of their places
    shared: list[list[float]] = []
    for index, key in enumerate(order):
        shared.append([min(1.0, max(0.0, places[key])) - index * spacing])
        while len(shared) > 1 and statistics.fmean(shared[-2]) > statistics.fmean(shared[-1]):
            shared[-2:] = [shared[-2] + shared[-1]]
    bare = [statistics.fmean(group) for group in shared for _ in group]
    highest = 1 - (len(order) - 1) * spacing
    return {key: min(highest, max(0.0, bare[i])) + i * spacing for i, key in enumerate(order)}


def _summary(traced: Traced, spec: Spec) -> str:
    factor, unit = (100, "%") if spec.is_percent else (1, "")
    ends = [f"{group.name} {factor * curve.means[-1]:.4g}{unit}" for group, curve in traced.groups]
    ends += [
        f"{group.name} seed {run.seed} ({run.status}) {factor * curve.means[-1]:.4g}{unit}" for group, run, curve in traced.lone
    ]
    last = max(curve.steps[-1] for curve in traced.curves)
    return f"{spec.title} over {last} steps. Last values: {'; '.join(ends)}."


def _data(traced: Traced, spec: Spec, variants: Sequence[Variant]) -> dict[str, Any]:
    def entry(group: Group, curve: Curve, note: str) -> dict[str, Any]:
        deviations = [_rounded(value) for value in curve.deviations] if curve.runs > 1 else None
        means = [_rounded(value) for value in curve.means]
        return {"group": group.index, "note": note, "steps": curve.steps, "means": means, "deviations": deviations}

    return {
        "percent": spec.is_percent,
        "series": [entry(group, curve, "") for group, curve in traced.groups]
        + [entry(group, curve, f"seed {run.seed}, {run.status}") for group, run, curve in traced.lone],
        "variants": {variant.name: {"x": variant.x.for_script(), "y": variant.y.for_script()} for variant in variants},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
