"""The report's numbers as CSV: every recorded value in long form, and the table of results."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nmsparse.workbench.report._numbers import Estimate
from nmsparse.workbench.report._results import Result
from nmsparse.workbench.report._runs import Group, Run, Section, mapping

METRICS_HEADER = ("run", "label", "seed", "kind", "step", "name", "value")
RESULTS_HEADER = (
    *("task", "label", "recipe", "pattern", "model", "status", "runs", "finished", "seeds", "metric", "mean", "std"),
    *("difference_from_dense", "difference_std", "train_loss", "train_loss_std", "non_zero", "violations", "flip_rate"),
    *("step_ms", "step_ms_std", "speedup", "sparse_products", "products"),
)


def metrics_csv(sections: Sequence[Section]) -> str:
    """One line per recorded number. Mask pictures are left out: they are no numbers. A null is an empty value."""
    lines = (line for section in sections for group in section.groups for run in group.runs for line in _lines(group, run))
    return _csv(METRICS_HEADER, lines)


def results_csv(tables: Sequence[tuple[Section, list[Result]]]) -> str:
    """One line per group: the table of results with all digits."""
    return _csv(RESULTS_HEADER, (result_line(section, row) for section, rows in tables for row in rows))


def _csv(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return buffer.getvalue()


def _lines(group: Group, run: Run) -> Iterator[Sequence[Any]]:
    for kind in ("train", "valid", "masks", "layers"):
        for row in run.rows[kind]:
            for name, value in _values(kind, row):
                yield run.name, group.name, run.seed, kind, row["step"], name, "" if value is None else value


def _values(kind: str, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if kind != "layers":
        yield from ((name, value) for name, value in row.items() if name not in ("kind", "step"))
        return
    for layer, values in mapping(row.get("layers")).items():
        yield from ((f"{layer}.{name}", value) for name, value in mapping(values).items())


def result_line(section: Section, row: Result) -> Sequence[Any]:
    group, run = row.group, row.group.first
    sparse, products = row.sparse_products
    return (
        *(section.task.name, group.name, run.recipe, run.pattern, run.model, row.status),
        *(len(group.runs), len(group.finished), " ".join(map(str, group.seeds)), section.task.headline),
        *(*_pair(row.headline), *_pair(row.difference), *_pair(row.train_loss), _pair(row.non_zero)[0]),
        *("" if row.violations is None else row.violations, _pair(row.flip_rate)[0], *_pair(row.step_ms)),
        *("" if row.speedup is None else row.speedup, sparse, products),
    )


def _pair(value: Estimate | None) -> tuple[float | str, float | str]:
    if value is None:
        return "", ""
    return value.mean, "" if value.deviation is None else value.deviation
