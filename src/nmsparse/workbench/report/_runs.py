"""Runs as a report sees them: read and checked, in one section per task, in one group per label."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmsparse.workbench.records import RESULT, RUN, RunRecord, find_runs

KINDS = ("train", "valid", "layers", "masks", "mask")
STATUSES = ("finished", "unfinished", "diverged")
HUGE = 1e100
"""Numbers beyond this are overflow, not measurements: they count as missing."""
Points = list[tuple[int, float]]
Model = tuple[str, float | None]
"""A name, and how many parameters it has at the widths and depths of a run."""
Key = tuple[str, str, str, Model]
"""What makes runs one group: label, recipe, pattern and model."""


@dataclass(frozen=True)
class Task:
    """What a run was trained on, and the metric by which runs are compared."""

    name: str
    headline: str
    higher_is_better: bool
    unit: str


@dataclass(frozen=True)
class Run:
    """One run: what run.json says, the rows by kind, and how it ended."""

    name: str
    """Its folder, relative to the folder that was given."""
    label: str
    recipe: str
    pattern: str
    seed: int
    task: Task
    model: str
    parameters: float | None
    info: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    result: dict[str, Any]
    status: str

    def points(self, kind: str, key: str) -> Points:
        """A quantity over time, without the rows that lack it."""
        return [(row["step"], value) for row in self.rows[kind] if (value := number(row.get(key))) is not None]

    def last(self, kind: str, key: str) -> float | None:
        """The last recorded value of a quantity."""
        points = self.points(kind, key)
        return points[-1][1] if points else None

    @property
    def last_step(self) -> int:
        return max((rows[-1]["step"] for rows in self.rows.values() if rows), default=0)

    @property
    def planned_steps(self) -> int | None:
        steps = mapping(self.info.get("config")).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def sized_model(self) -> Model:
        return self.model, self.parameters

    @property
    def is_dense(self) -> bool:
        return self.recipe == "dense"

    @property
    def headline(self) -> float | None:
        """The metric that is compared: of the end, or the last one known."""
        final = number(mapping(self.result.get("valid")).get(self.task.headline))
        return self.last("valid", self.task.headline) if final is None else final


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only; one line in every chart, one row in the table."""

    index: int
    name: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def is_dense(self) -> bool:
        return self.first.is_dense

    def with_status(self, status: str) -> list[Run]:
        return [run for run in self.runs if run.status == status]

    @property
    def finished(self) -> list[Run]:
        return self.with_status("finished")

    @property
    def is_provisional(self) -> bool:
        """No run has finished, so what is known comes from runs under way (or killed)."""
        return not self.finished

    @property
    def measured(self) -> list[Run]:
        """The runs that means are taken over: a half trained or diverged run would spoil the mean of finished ones."""
        return self.finished or self.with_status("unfinished")

    @property
    def most_telling(self) -> list[Run]:
        """Runs in the order in which one of them is picked to show masks and layers."""
        return sorted(self.runs, key=lambda run: STATUSES.index(run.status))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})


@dataclass(frozen=True)
class Section:
    """All groups of one task."""

    task: Task
    groups: list[Group]

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    @property
    def models(self) -> list[str]:
        return unique(run.model for run in self.runs)

    def reference(self, group: Group) -> Group | None:
        """The dense group that a group is compared with: of the same model in the same size."""
        return next((g for g in self.groups if g.is_dense and g.first.sized_model == group.first.sized_model), None)


def number(value: Any) -> float | None:
    """A JSON value as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < HUGE and math.isfinite(value) else None


def mapping(value: Any) -> dict[str, Any]:
    """A JSON value as an object; anything else counts as an empty one."""
    return value if isinstance(value, dict) else {}


def unique(values: Iterable[str]) -> list[str]:
    """Distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs below the given folders, each once."""
    runs: dict[Path, Run] = {}
    for root in map(Path, paths):
        for record in _found(root):
            folder = record.folder.resolve()
            if folder not in runs:
                runs[folder] = _run(record, _name(record.folder, root, len(paths) > 1))
    if not runs:
        where = ", ".join(map(str, paths)) or "no folder"
        raise ValueError(f"no run was found in {where}: give a folder that nmsparse train or nmsparse compare wrote ({RUN}).")
    return list(runs.values())


def sections(runs: Sequence[Run]) -> list[Section]:
    """Runs by task, and within a task by label."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    return [Section(task, _groups([run for run in runs if run.task == task])) for task in tasks]


def _found(root: Path) -> list[RunRecord]:
    try:
        return find_runs(root)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the runs in {root} cannot be read: {error}.") from error


def _name(folder: Path, root: Path, several_roots: bool) -> str:
    """A run's folder as people know it; the given folder's own name where that alone says which run is meant."""
    inner = folder.relative_to(root).as_posix()
    if inner == ".":
        return folder.resolve().name
    return f"{root.resolve().name}/{inner}" if several_roots else inner


def _run(record: RunRecord, name: str) -> Run:
    info, file = record.info, record.folder / RUN
    task = _field(file, info, "task", dict)
    return Run(
        name=name,
        label=_field(file, info, "label", str),
        recipe=_field(file, info, "recipe", str),
        pattern=_field(file, info, "pattern", str, default=""),
        seed=_field(file, info, "seed", int),
        task=Task(
            _field(file, task, "name", str),
            _field(file, task, "headline", str),
            _field(file, task, "higher_is_better", bool),
            _field(file, task, "unit", str, default="units"),
        ),
        model=_field(file, _field(file, info, "model", dict), "name", str),
        parameters=number(info["model"].get("parameters")),
        info=info,
        rows={kind: _rows(record, kind) for kind in KINDS},
        result=record.result or {},
        status=_status(record),
    )


def _field(file: Path, values: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {value!r}"
        raise ValueError(f"{file}: {key!r} {found}, and a report needs it as {kind.__name__}.")
    return value


def _rows(record: RunRecord, kind: str) -> list[dict[str, Any]]:
    try:
        return sorted(record.rows(kind), key=lambda row: row["step"])
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the metrics of {record.folder} cannot be read: {error}.") from error


def _status(record: RunRecord) -> str:
    if record.result is None:
        return "unfinished"
    status = record.result.get("status")
    if status not in ("finished", "diverged"):
        raise ValueError(f"{record.folder / RESULT} has the status {status!r}; a run that ended is 'finished' or 'diverged'.")
    return status


def _groups(runs: Sequence[Run]) -> list[Group]:
    members: dict[Key, list[Run]] = {}
    for run in runs:
        members.setdefault((run.label, run.recipe, run.pattern, run.sized_model), []).append(run)
    names = _names(list(members))
    ordered = sorted(members, key=lambda key: key[1] != "dense")  # the reference comes first; sorting keeps the rest in order
    return [
        Group(index, names[key], sorted(members[key], key=lambda run: (run.seed, run.name))) for index, key in enumerate(ordered)
    ]


def _names(keys: list[Key]) -> dict[Key, str]:
    """A label, and what else it takes to tell groups apart."""
    shared = Counter(label for label, *_ in keys)
    models = {key[3] for key in keys}

    def differs(label: str, part: Callable[[Key], str]) -> bool:
        return shared[label] > 1 and len({part(key) for key in keys if key[0] == label}) > 1

    names: dict[Key, str] = {}
    for key in keys:
        label, recipe, pattern, model = key
        extra = [recipe] if differs(label, lambda k: k[1]) else []
        extra += [pattern] if differs(label, lambda k: k[2]) else []
        extra += [_model_words(model, models)] if len(models) > 1 else []
        names[key] = " · ".join([label, *extra])
    return names


def _model_words(model: Model, models: set[Model]) -> str:
    name, parameters = model
    has_sizes = sum(other == name for other, _ in models) > 1
    return f"{name}, {parameters:,.0f} parameters" if has_sizes and parameters is not None else name
