"""Small SVG pictures: one line with a band (mean and standard deviation over seeds) per contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nmsparse.workbench.report._axes import Axis, linear_axis, step_axis
from nmsparse.workbench.report._charts import line_path, spread_out
from nmsparse.workbench.report._curves import Curve, average, thin
from nmsparse.workbench.reproduce._claim import HEADLINE, Chart
from nmsparse.workbench.reproduce._ledger import Run
from nmsparse.workbench.reproduce._outcome import Standing, standings
from nmsparse.workbench.reproduce._study import Study
from nmsparse.workbench.reproduce._verdicts import seconds_to

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 210, 30, 40
COLOURS = ("#3b4148", "#0072b2", "#d55e00", "#009e73", "#b85c92", "#c98500", "#3d9fd6", "#a89a00")
"""Told apart by colour-blind eyes, and dark enough for white paper; the first is for dense."""
POINTS = 40
TIME_SCALE = 1000
"""Steps of a common axis are integers: seconds are drawn in thousandths."""
CUT = 0.1
"""First share of a loss curve that is not shown: everything after it would be one flat line."""


@dataclass(frozen=True)
class Line:
    label: str
    colour: str
    curve: Curve


def draw(study: Study, chart: Chart) -> str | None:
    """The picture, or None where nothing was recorded."""
    experiment = study.claim.experiment(chart.experiment)
    wanted = [s for s in standings(study, experiment) if not chart.contenders or s.contender.label in chart.contenders]
    lines = [line for index, standing in enumerate(wanted) if (line := _line(standing, chart, index)) is not None]
    if not lines:
        return None
    is_percent = chart.column in ("flip_rate", "gradient_noise") or _headline(wanted, chart) == "accuracy"
    return _svg(chart, lines, is_percent)


def _headline(found: Sequence[Standing], chart: Chart) -> str:
    run = next((run for standing in found for run in standing.finished), None)
    return run.metric if run is not None and chart.column == HEADLINE else ""


def _line(standing: Standing, chart: Chart, index: int) -> Line | None:
    curve = average([_points(run, chart) for run in standing.finished])
    if curve is None:
        return None
    if chart.column == HEADLINE and len(curve) > 5:
        curve = curve.after(curve.steps[0] + CUT * (curve.steps[-1] - curve.steps[0]))
    return Line(standing.contender.label, COLOURS[index % len(COLOURS)], thin(curve, POINTS // 2, POINTS))


def _points(run: Run, chart: Chart) -> list[tuple[int, float]]:
    points = run.curve(chart.column)
    if chart.over == "steps":
        return points
    return [(round(seconds_to(run, step) * TIME_SCALE), value) for step, value in points]


def _svg(chart: Chart, lines: Sequence[Line], is_percent: bool) -> str:
    x = _time_axis(chart, lines)
    values = [value for line in lines for value in (*line.curve.lows, *line.curve.highs)]
    y = linear_axis(min(values), max(values), percent=is_percent)
    body = [*_grid(x, y), *(part for line in lines for part in _marks(line, x, y)), *_labels(lines, y)]
    unit = "seconds of training" if chart.over == "seconds" else "updates"
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(chart.title, quote=True)}">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{LEFT}" y="18" font-size="13" fill="#1b1f24">{escape(chart.title)}</text>\n'
        + "\n".join(body)
        + f'\n<text x="{middle:g}" y="{HEIGHT - 8}" text-anchor="middle" fill="#5c636b">{unit}</text>\n</svg>\n'
    )


def _time_axis(chart: Chart, lines: Sequence[Line]) -> Axis:
    first = min(line.curve.steps[0] for line in lines)
    last = max(line.curve.steps[-1] for line in lines)
    if chart.over == "steps":
        return step_axis(first, last)
    seconds = linear_axis(0, last / TIME_SCALE, from_zero=True)
    return Axis(seconds.low * TIME_SCALE, seconds.high * TIME_SCALE, ticks=seconds.ticks)


def _place(x: Axis, y: Axis, step: float, value: float) -> tuple[int, int]:
    across = LEFT + (WIDTH - LEFT - RIGHT) * x.place(step)
    return round(across), round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - y.place(value)))


def _grid(x: Axis, y: Axis) -> list[str]:
    low, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks:
        at = round(TOP + (low - TOP) * (1 - tick.place))
        parts.append(f'<path d="M{LEFT} {at}H{right}" stroke="#e4e4df"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end" fill="#5c636b">{escape(tick.text)}</text>')
    for tick in x.ticks:
        at = round(LEFT + (right - LEFT) * tick.place)
        parts.append(f'<text x="{at}" y="{low + 16}" text-anchor="middle" fill="#5c636b">{escape(tick.text)}</text>')
    return parts


def _marks(line: Line, x: Axis, y: Axis) -> list[str]:
    curve = line.curve
    middle = [_place(x, y, step, value) for step, value in zip(curve.steps, curve.means, strict=True)]
    parts = []
    if curve.runs > 1:
        upper = [_place(x, y, step, value) for step, value in zip(curve.steps, curve.highs, strict=True)]
        lower = [_place(x, y, step, value) for step, value in zip(curve.steps, curve.lows, strict=True)]
        parts.append(f'<path d="{line_path([*upper, *reversed(lower)])}z" fill="{line.colour}" opacity=".15"/>')
    parts.append(f'<path d="{line_path(middle)}" fill="none" stroke="{line.colour}" stroke-width="1.6"/>')
    return parts


def _labels(lines: Sequence[Line], y: Axis) -> list[str]:
    """Names beside the ends of the lines, moved apart."""
    places = spread_out({index: y.place(line.curve.means[-1]) for index, line in enumerate(lines)}, 13 / (HEIGHT - TOP - BOTTOM))
    return [
        f'<text x="{WIDTH - RIGHT + 8}" y="{round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - places[index])) + 4}" '
        f'fill="{line.colour}">{escape(line.label)}</text>'
        for index, line in enumerate(lines)
    ]
