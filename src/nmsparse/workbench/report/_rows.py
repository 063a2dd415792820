"""Charts with one row per group: the compared metric seed by seed, and the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nmsparse.workbench.report._axes import Axis, linear_axis
from nmsparse.workbench.report._numbers import NOTHING, THIN, TIMES, Estimate, fixed
from nmsparse.workbench.report._results import Measure, Result
from nmsparse.workbench.report._runs import Group, Run


@dataclass(frozen=True)
class Dot:
    """One run; place is in percent of the row's width."""

    place: float
    title: str


@dataclass(frozen=True)
class Row:
    group: Group
    dots: list[Dot]
    mean: float | None
    low: float | None
    high: float | None
    texts: list[str]
    """The value in words, in parts that a line break should not split."""
    note: str = ""


@dataclass(frozen=True)
class RowChart:
    axis: Axis
    rows: list[Row]
    reference: float | None = None
    """Where dense lies, in percent."""


def headline_chart(rows: Sequence[Result], measure: Measure) -> RowChart | None:
    """Every run's metric as a dot, the mean as a mark, one standard deviation as a bar."""
    values = {row.group.index: _values(row.group.finished, lambda run: run.headline) for row in rows}
    known = [value for pairs in values.values() for _, value in pairs]
    if not known:
        return None
    edges = [edge for row in rows if not row.group.is_provisional for edge in _edges(row.headline)]
    axis = linear_axis(min(known + edges), max(known + edges), percent=measure.is_percent)
    made = [_headline_row(row, axis, values[row.group.index], measure) for row in rows]
    dense = [row.headline for row in rows if row.group.is_dense and row.headline is not None and values[row.group.index]]
    # of two models each has a dense run of its own, and one line for both would mislead
    return RowChart(axis, made, _percent(axis, dense[0].mean) if len(dense) == 1 else None)


def time_chart(rows: Sequence[Result], step_ms: Callable[[Run], float | None]) -> RowChart | None:
    """The time of a step as a bar from zero, with each run as a dot, and the ratio to dense."""
    values = {row.group.index: _values(row.group.measured, step_ms) for row in rows}
    known = [value for pairs in values.values() for _, value in pairs]
    if not known:
        return None
    axis = linear_axis(0.0, max(known), from_zero=True)
    return RowChart(axis, [_time_row(row, axis, values[row.group.index]) for row in rows])


def _headline_row(row: Result, axis: Axis, values: list[tuple[Run, float]], measure: Measure) -> Row:
    """A group without finished runs has no marks: a half trained run would stretch the axis, and say nothing."""
    if row.headline is None:
        return _row(row.group, axis, [], None, [NOTHING], measure.write)
    mean = measure.write(row.headline.mean) + measure.unit
    if row.group.is_provisional:
        return _row(row.group, axis, [], None, [mean, "so far"], measure.write)
    spread = [] if row.headline.deviation is None else [f"± {measure.write(row.headline.deviation)}"]
    return _row(row.group, axis, values, row.headline, [mean, *spread], measure.write)


def _time_row(row: Result, axis: Axis, values: list[tuple[Run, float]]) -> Row:
    if row.step_ms is None:
        return _row(row.group, axis, values, None, [NOTHING], lambda value: NOTHING)
    places = 0 if row.step_ms.mean >= 100 else 1 if row.step_ms.mean >= 10 else 2
    text = f"{fixed(row.step_ms.mean, places)}{THIN}ms"
    made = _row(row.group, axis, values, row.step_ms, [text], lambda value: f"{fixed(value, places)}{THIN}ms")
    is_compared = not row.group.is_dense and row.speedup is not None
    note = f"{fixed(row.speedup, 2)}{TIMES}" if is_compared else ""
    return Row(made.group, made.dots, made.mean, made.low, made.high, made.texts, note)


def _row(
    group: Group,
    axis: Axis,
    values: list[tuple[Run, float]],
    mean: Estimate | None,
    texts: list[str],
    write: Callable[[float | None], str],
) -> Row:
    dots = [Dot(_percent(axis, value), f"{group.name}, seed {run.seed}: {write(value)}") for run, value in values]
    low, high = [_percent(axis, edge) for edge in _edges(mean)] or (None, None)
    return Row(group, dots, None if mean is None else _percent(axis, mean.mean), low, high, texts)


def _values(runs: Sequence[Run], value_of: Callable[[Run], float | None]) -> list[tuple[Run, float]]:
    return [(run, value) for run in runs if (value := value_of(run)) is not None]


def _edges(value: Estimate | None) -> list[float]:
    if value is None or value.deviation is None:
        return []
    return [value.mean - value.deviation, value.mean + value.deviation]


def _percent(axis: Axis, value: float) -> float:
    return round(100 * min(1.0, max(0.0, axis.place(value))), 2)
