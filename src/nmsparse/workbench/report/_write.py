"""Write a report: the page, and its numbers as CSV beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nmsparse.workbench.report._csv import metrics_csv, results_csv
from nmsparse.workbench.report._page import render
from nmsparse.workbench.report._results import results
from nmsparse.workbench.report._runs import read_runs, sections


@dataclass(frozen=True)
class ReportFiles:
    """What was written."""

    html: Path
    metrics: Path
    """Every recorded number: run, label, seed, kind, step, name, value."""
    results: Path
    """The table of results with all digits."""

    @property
    def csv(self) -> tuple[Path, Path]:
        return self.metrics, self.results


def write_report(paths: Sequence[Path], output: Path, title: str | None = None) -> ReportFiles:
    """One self-contained HTML file from all runs in and below the given folders, with two CSV files beside it.

    Runs are grouped by label; seeds within a group give mean and standard deviation. Runs that diverged or have not finished are
    shown as such. Runs of several tasks get a section each. Nothing is written when the runs cannot be read.
    """
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"{output} is a folder; give the name of the HTML file to write, such as {output / 'report.html'}.")
    parts = sections(read_runs([Path(path) for path in paths]))
    names = ReportFiles(output, output.with_name(f"{output.stem}.metrics.csv"), output.with_name(f"{output.stem}.results.csv"))
    tables = [(section, results(section)) for section in parts]
    csv = {names.results.name: results_csv(tables), names.metrics.name: metrics_csv(parts)}
    page = render(parts, title, csv)
    output.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((names.results, csv[names.results.name]), (names.metrics, csv[names.metrics.name]), (output, page)):
        _replace(path, text)
    return names


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(text.encode(errors="replace"))  # JSON can hold half a character (a lone surrogate), UTF-8 cannot
    os.replace(temporary, path)
