"""What people see while something runs: bars and tables on a terminal, plain lines elsewhere, nothing where JSON is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nmsparse.workbench.compare import Job, Listener
from nmsparse.workbench.report import SummaryTable
from nmsparse.workbench.training import Progress, silent


def is_terminal() -> bool:
    """CI services pretend to be terminals; their logs are read as text."""
    return sys.stdout.isatty() and not os.environ.get("CI")


@contextmanager
def training_progress(label: str, steps: int, quiet: bool = False) -> Iterator[Progress]:
    """A bar with loss, throughput, flip rate and time left; or some ten lines."""
    if quiet:
        yield silent
    elif is_terminal():
        with _bars() as bars:
            task = bars.add_task(label, total=steps, text="")

            def advance(step: int, row: dict[str, Any] | None) -> None:
                bars.update(task, completed=step, **({} if row is None else {"text": _facts(row)}))

            yield advance
    else:

        def line(step: int, row: dict[str, Any] | None) -> None:
            if row is not None and (step == steps or step * 10 // steps > getattr(line, "tenth", 0)):
                line.tenth = step * 10 // steps  # type: ignore[attr-defined]
                print(f"{label}  step {step} of {steps}  {_facts(row)}", flush=True)

        yield line


MOST_BARS = 16
"""Of a comparison with more runs, bars of those that have ended make room."""


@contextmanager
def study_progress(quiet: bool = False) -> Iterator[Listener]:
    """A bar for every run that has begun; or a line when a run begins and ends."""
    if quiet:
        yield lambda jobs: None
    elif is_terminal():
        with _bars() as bars:
            tasks: dict[str, Any] = {}

            def show(jobs: list[Job]) -> None:
                for job in jobs:
                    if job.status != "waiting":
                        task = tasks.setdefault(job.name, None)
                        if task is None:
                            task = tasks[job.name] = bars.add_task(job.name, total=job.config.steps, text="starts")
                        is_shown = job.status == "running" or len(jobs) <= MOST_BARS
                        bars.update(task, visible=is_shown, **_state(job))

            yield show
    else:
        seen: dict[str, str] = {}

        def tell(jobs: list[Job]) -> None:
            done = sum(job.status not in ("waiting", "running") for job in jobs)
            for job in jobs:
                if seen.get(job.name, "waiting") != job.status:
                    seen[job.name] = job.status
                    print(f"[{done} of {len(jobs)}] {job.name}: {_words(job)}", flush=True)

        yield tell


def _bars() -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),  # messages may hold brackets
        TimeRemainingColumn(),
    )
    return Progress(*columns)


def _facts(row: dict[str, Any]) -> str:
    flips = "" if row.get("flip_rate") is None else f"  flips {row['flip_rate']:.2%}"
    return f"loss {row['loss']:.3f}  {row['units_per_second']:,.0f} {row['unit']}/s{flips}"


def _state(job: Job) -> dict[str, Any]:
    row = job.last_row()
    if job.status == "running":
        return {"completed": row["step"], "text": _facts({**row, "unit": job.unit})} if row else {}
    return {"completed": row.get("step", 0), "text": _words(job)}


def _words(job: Job) -> str:
    if job.status == "failed":
        return f"failed: {job.failure or 'see its log.txt'}"
    row = job.last_row()
    return f"{job.status}, loss {row['loss']:.3f}" if job.status == "finished" and row else job.status


def print_summary(table: SummaryTable) -> None:
    """Results of one task, and the sentence that follows from them."""
    print_table(table.header, table.rows, table.title)
    for sentence in (table.finding, table.caveat, table.note):
        if sentence:
            print(sentence)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table with its first column to the left and the others to the right."""
    if is_terminal():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=None if title is None else escape(title))
        for number, name in enumerate(header):
            # a narrow terminal must not cut names
            table.add_column(escape(name), justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    if title:
        print(title)
    for row in [header, *rows]:
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())
