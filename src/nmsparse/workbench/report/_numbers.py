"""Numbers: mean and spread over seeds, and how they are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIMES = "\N{MULTIPLICATION SIGN}"
MINUS, THIN, NOTHING = "\N{MINUS SIGN}", "\N{NARROW NO-BREAK SPACE}", "\N{EN DASH}"
# Student's t, 97.5% point, for 1 .. 30 degrees of freedom; between 1 and 2, where it falls steeply, at quarters too
WHOLE = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
STUDENT = {1 / freedom: t for freedom, t in (*enumerate(WHOLE, 1), (1.25, 8.028), (1.5, 6.017), (1.75, 4.949))} | {0.0: 1.960}
"""By the inverse of the degrees of freedom; that of infinitely many is 0."""


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, and the standard deviation between them (None for a single run)."""

    mean: float
    deviation: float | None
    count: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and sample standard deviation of the values that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Estimate(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b; its deviation is that between two single runs, one of each."""
    known = a.deviation is not None and b.deviation is not None
    deviation = math.hypot(a.deviation or 0.0, b.deviation or 0.0) if known else None
    return Estimate(a.mean - b.mean, deviation, min(a.count, b.count))


def student(freedom: float) -> float:
    """Student's t, 97.5% point, for one degree of freedom and more: to 0.5 %, by the line through the logarithms beside it."""
    place = min(1.0, 1 / freedom)
    low, high = max(x for x in STUDENT if x <= place), min(x for x in STUDENT if x >= place)
    weight = 0.0 if low == high else (place - low) / (high - low)
    return STUDENT[low] ** (1 - weight) * STUDENT[high] ** weight


def interval(a: Estimate, b: Estimate) -> tuple[float, float]:
    """95% confidence interval of the difference of two means (Welch: the spreads may differ)."""
    if a.deviation is None or b.deviation is None:
        raise ValueError("a confidence interval needs at least two runs on each side.")
    middle, va, vb = a.mean - b.mean, a.deviation**2 / a.count, b.deviation**2 / b.count
    if va + vb == 0:
        return middle, middle
    freedom = (va + vb) ** 2 / (va**2 / (a.count - 1) + vb**2 / (b.count - 1))
    half = student(freedom) * math.sqrt(va + vb)
    return middle - half, middle + half


def decimals(estimates: Sequence[Estimate | None], most: int = 6) -> int:
    """Places after the point for a column: two digits of the typical spread, or four of the largest value."""
    spreads = [e.deviation for e in estimates if e is not None and e.deviation]
    if spreads:
        return _clamp(1 - _exponent(statistics.median(spreads)), 0, most)
    largest = max((abs(e.mean) for e in estimates if e is not None), default=0.0)
    return _clamp(3 - _exponent(largest), 0, most) if largest else 3


def fixed(value: float | None, places: int, signed: bool = False) -> str:
    """A number with a fixed number of places and a true minus sign; very large ones in powers of ten."""
    if value is None:
        return NOTHING
    if abs(value) >= 1e7:
        return f"{value:.3g}".replace("-", MINUS)
    text = f"{value:+.{places}f}" if signed else f"{value:.{places}f}"
    if not any(digit in "123456789" for digit in text):
        text = text.lstrip("+-")  # nothing is left of the sign of a rounded zero
    return text.replace("-", MINUS)


def brief(value: float | None, digits: int = 3) -> str:
    """A number in few digits, for read-outs and small tables."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    exponent = _exponent(value)
    if exponent < -4 or exponent > 6:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e").replace("-", MINUS)
    return fixed(value, max(0, digits - 1 - exponent))


def share(value: float | None, places: int | None = None) -> str:
    """A share in percent: one place, more where it is small."""
    if value is None:
        return NOTHING
    if places is None:
        percent = abs(100 * value)
        places = 1 if percent >= 10 or percent == 0 else 2 if percent >= 0.095 else 3
    return fixed(100 * value, places) + THIN + "%"


def counted(count: int, noun: str) -> str:
    """1 seed, 2 seeds."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def magnitude(value: float | None) -> str:
    """A count with a letter for thousands, millions, billions."""
    if value is None:
        return NOTHING
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))
