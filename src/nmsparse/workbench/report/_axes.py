"""Axes: from values to places between 0 and 1, and the ticks beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from nmsparse.workbench.report._numbers import MINUS, brief, fixed

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Tick:
    place: float
    """0 is the axis's low end, 1 its high end."""
    text: str


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    is_log: bool = False
    ticks: tuple[Tick, ...] = ()

    def place(self, value: float) -> float:
        """Where a value lies; below 0 or above 1 when outside. A logarithmic axis has no place for 0: it returns its low end."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        if value <= 0:
            return 0.0
        return math.log(value / self.low) / math.log(self.high / self.low)

    def for_script(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "log": self.is_log}


def step_axis(first: int, last: int, most: int = 5) -> Axis:
    """The horizontal axis of curves: training steps, from end to end without margins."""
    low, high = (first, last) if last > first else (first - 1, first + 1)
    spacing = max(1.0, nice(high - low, most))
    ticks = [Tick((value - low) / (high - low), _steps(value)) for value in _multiples(low, high, spacing)]
    return Axis(low, high, ticks=tuple(ticks))


def linear_axis(low: float, high: float, percent: bool = False, most: int = 5, from_zero: bool = False) -> Axis:
    """Ticks at round numbers, with a little air above and below the data."""
    if from_zero:
        low = min(0.0, low)
    if high - low <= 1e-7 * max(abs(low), abs(high)):
        margin = 0.1 * abs(high) or 1.0
        low, high = low - (0.0 if from_zero and low == 0 else margin), high + margin
    air = 0.05 * (high - low)
    low, high = low if low == 0 or (from_zero and low >= 0) else low - air, high + air
    return _with_ticks(Axis(low, high), _round_values(low, high, percent, most))


def log_axis(low: float, high: float, percent: bool = False) -> Axis:
    """Ticks at powers of ten; at 1, 2 and 5 of each where the range is short, at any round numbers where it is very short."""
    if high <= low * 1.01:
        low, high = low / 1.5, high * 1.5
    air = (high / low) ** 0.04
    low, high = low / air, high * air
    axis, span = Axis(low, high, is_log=True), math.log10(high / low)
    if span < 0.7:
        return _with_ticks(axis, _round_values(low, high, percent, 5))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1,) if span > 2.5 else (1, 2, 5)
    every = math.ceil(len(decades) / 7) if leads == (1,) else 1
    values = [lead * 10.0**decade for decade in decades if decade % every == 0 for lead in leads]
    return _with_ticks(axis, [(value, _log_text(value, percent)) for value in values if low <= value <= high])


def nice(span: float, most: int) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten that cuts a span into at most so many parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if span / (factor * power) <= most)


def _with_ticks(axis: Axis, values: list[tuple[float, str]]) -> Axis:
    return replace(axis, ticks=tuple(Tick(axis.place(value), text) for value, text in values))


def _round_values(low: float, high: float, percent: bool, most: int) -> list[tuple[float, str]]:
    """Round numbers at equal distances, and how they are written."""
    factor = 100.0 if percent else 1.0
    spacing = nice(factor * (high - low), most) / factor
    places, values = _places(factor * spacing), _multiples(low, high, spacing)
    digits = 2 + math.floor(math.log10(max(1.0, max(map(abs, values), default=0.0) / spacing)))
    return [(value, _linear_text(factor * value, places, digits) + ("%" if percent else "")) for value in values]


def _multiples(low: float, high: float, spacing: float) -> list[float]:
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [k * spacing for k in range(first, last + 1)]


def _places(spacing: float) -> int:
    """Places after the point that ticks need: one more for 0.25 than for 0.2."""
    power = max(0, -math.floor(math.log10(spacing) + 1e-9))
    scaled = spacing * 10.0**power
    return power if abs(scaled - round(scaled)) < 1e-6 else power + 1


def _linear_text(value: float, places: int, digits: int) -> str:
    """Plain digits; powers of ten for the very small and the very large, with the digits that tell ticks apart."""
    return brief(value, digits) if places > 5 or abs(value) >= 1e7 else fixed(value, places)


def _log_text(value: float, percent: bool) -> str:
    shown = 100 * value if percent else value
    if 1e-3 <= shown < 1e5:
        return f"{shown:.10g}" + ("%" if percent else "")
    exponent = math.floor(math.log10(shown) + 1e-9)
    lead = f"{shown / 10.0**exponent:.2g}"
    return ("" if lead == "1" else f"{lead}·") + "10" + str(exponent).translate(SUPERSCRIPTS) + ("%" if percent else "")


def _steps(value: float) -> str:
    """A count of steps: thousands and millions with a letter."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size:
            return f"{value / size:g}{letter}".replace("-", MINUS)
    return f"{value:g}".replace("-", MINUS)
