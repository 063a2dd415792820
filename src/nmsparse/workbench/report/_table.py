"""The table of results as the page shows it: columns of equal places, each with a word on what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nmsparse.workbench.report._numbers import NOTHING, THIN, TIMES, Estimate, decimals, fixed, share
from nmsparse.workbench.report._results import Measure, Result, metric_words
from nmsparse.workbench.report._runs import Section

Write = Callable[[float | None], str]


@dataclass(frozen=True)
class Cell:
    """A number, and its spread beside it in a lighter tone."""

    text: str
    spread: str = ""
    is_warning: bool = False


@dataclass(frozen=True)
class Column:
    title: str
    hint: str
    cells: list[Cell]

    @property
    def spread_width(self) -> int:
        """Characters of the longest spread: all cells leave that room, so that the numbers before it align."""
        return max(len(cell.spread) for cell in self.cells)

    @property
    def has_spread(self) -> bool:
        return self.spread_width > 0


def columns(section: Section, rows: Sequence[Result], measure: Measure) -> list[Column]:
    """All columns between a group's name and its status."""
    direction = "Higher is better." if section.task.higher_is_better else "Lower is better."
    unit = " (%)" if measure.is_percent else ""
    return [
        Column("seeds", "Runs that the means are taken over, of all runs.", [_seeds(row) for row in rows]),
        _spread(
            metric_words(section.task) + unit,
            f"Mean ± standard deviation over seeds. {direction}",
            [row.headline for row in rows],
            measure.write,
            [row.group.is_provisional for row in rows],
        ),
        _spread(
            "difference from dense" + (" (points)" if measure.is_percent else ""),
            "Difference of the means ± the spread between two single runs, one of each. " + direction,
            [row.difference for row in rows],
            measure.write,
            signed=lambda value: measure.write(value, signed=True),
        ),
        _plain("training loss", "Of the last recorded interval.", [row.train_loss for row in rows]),
        Column("non-zero", "Share of non-zero weights in the layers made sparse.", [_share(row.non_zero) for row in rows]),
        Column("violations", "Groups of M with more than N non-zeros; the most in one run.", [_violations(row) for row in rows]),
        Column("flip rate", "Share of mask bits that the last measured update changed.", [_share(row.flip_rate) for row in rows]),
        _plain("step (ms)", "Time of one update.", [row.step_ms for row in rows], most=time_places(rows)),
        Column("speed-up", "Step time of dense over step time.", [_speedup(row) for row in rows]),
    ]


def _seeds(row: Result) -> Cell:
    used, total = len(row.group.measured), len(row.group.runs)
    return Cell(str(used) if used == total else f"{used} of {total}", is_warning=used != total)


def _spread(
    title: str,
    hint: str,
    values: Sequence[Estimate | None],
    write: Write,
    provisional: Sequence[bool] = (),
    signed: Write | None = None,
) -> Column:
    marks = provisional or [False] * len(values)
    cells = [_cell(value, signed or write, write, mark) for value, mark in zip(values, marks, strict=True)]
    return Column(title, hint, cells)


def _cell(value: Estimate | None, mean: Write, write: Write, is_so_far: bool) -> Cell:
    if value is None:
        return Cell(NOTHING)
    if is_so_far:
        return Cell(mean(value.mean), "so far", is_warning=True)
    return Cell(mean(value.mean), "" if value.deviation is None else f"± {write(value.deviation)}")


def time_places(rows: Sequence[Result]) -> int:
    """Places of milliseconds: three digits of the shortest step."""
    shortest = min((row.step_ms.mean for row in rows if row.step_ms is not None), default=0.0)
    return 0 if shortest >= 100 else 1 if shortest >= 10 else 2


def _plain(title: str, hint: str, values: Sequence[Estimate | None], most: int = 3) -> Column:
    places = min(most, decimals(values))
    return Column(title, hint, [Cell(fixed(None if value is None else value.mean, places)) for value in values])


def _share(value: Estimate | None) -> Cell:
    return Cell(share(None if value is None else value.mean))


def _violations(row: Result) -> Cell:
    if row.violations is None or row.group.is_dense:
        return Cell(NOTHING)
    return Cell(f"{row.violations:,}".replace(",", THIN), is_warning=row.violations > 0)


def _speedup(row: Result) -> Cell:
    return Cell(NOTHING if row.speedup is None or row.group.is_dense else f"{fixed(row.speedup, 2)}{TIMES}")
