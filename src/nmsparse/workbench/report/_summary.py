"""The table of results as words, for a terminal, and as plain values, for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmsparse.workbench.report._csv import RESULTS_HEADER, result_line
from nmsparse.workbench.report._results import Result, emulation_note, finding, measure_of, results
from nmsparse.workbench.report._runs import Section, read_runs, sections
from nmsparse.workbench.report._table import Column, columns


@dataclass(frozen=True)
class SummaryTable:
    """Results of all runs of one task."""

    title: str
    header: list[str]
    rows: list[list[str]]
    finding: str
    caveat: str
    note: str
    values: list[dict[str, Any]]
    """The rows with all digits; None where something is not known."""

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.title, "finding": self.finding, "caveat": self.caveat, "note": self.note, "rows": self.values}


def summarize(paths: Sequence[Path]) -> list[SummaryTable]:
    """One table per task from all runs in and below the given folders."""
    return [_table(section) for section in sections(read_runs(paths))]


def _table(section: Section) -> SummaryTable:
    rows = results(section)
    measure = measure_of(section, rows)
    shown = [column for column in columns(section, rows, measure) if not _is_dull(column)]
    cells = [
        [row.group.name, *(f"{column.cells[i].text} {column.cells[i].spread}".strip() for column in shown)]
        for i, row in enumerate(rows)
    ]
    header = ["recipe", *(column.title for column in shown)]
    if any(len(row.group.finished) < len(row.group.runs) for row in rows):
        header.append("status")
        cells = [[*line, row.status] for line, row in zip(cells, rows, strict=True)]
    found = finding(section, rows, measure)
    values = [_values(section, row) for row in rows]
    return SummaryTable(section.task.name, header, cells, found.sentence, found.caveat, emulation_note(rows), values)


def _is_dull(column: Column) -> bool:
    """A terminal is narrow: what the page has beside it, and columns without news, are left out."""
    return column.title == "training loss" or (column.title == "violations" and not any(c.is_warning for c in column.cells))


def _values(section: Section, row: Result) -> dict[str, Any]:
    line = result_line(section, row)
    return {name: None if value == "" else value for name, value in zip(RESULTS_HEADER, line, strict=True)}
