"""What a training run leaves behind: run.json, metrics.jsonl and result.json in one folder. Written by training, read by reports.

run.json        what was run: label, recipe, pattern, seed, task, model, all settings, environment
metrics.jsonl   one object a line; its kind is train, valid, layers, masks or mask, its step counts updates from 1
result.json     how it ended; absent while it runs, and after a kill
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = 1
RUN, METRICS, RESULT = "run.json", "metrics.jsonl", "result.json"


def finite(value: Any) -> Any:
    """A value as JSON allows it: NaN and infinities become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(finite(value), indent=1) + "\n")
    os.replace(temporary, path)


class RunWriter:
    """Writes the records of one run; a resumed run drops the rows that its checkpoint had not seen."""

    def __init__(self, folder: Path, after_step: int = 0) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = [row for row in _rows(folder / METRICS) if row["step"] <= after_step]
        temporary = folder / f".{METRICS}.tmp"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, folder / METRICS)
        (folder / RESULT).unlink(missing_ok=True)
        self._metrics = (folder / METRICS).open("a")

    def describe(self, info: dict[str, Any]) -> None:
        write_json(self.folder / RUN, {"version": VERSION, **info})

    def add(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        row = finite({"kind": kind, "step": step, **values})
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        return row

    def close(self) -> None:
        self._metrics.close()

    def finish(self, result: dict[str, Any]) -> None:
        self.close()
        write_json(self.folder / RESULT, result)


class RunRecord:
    """Reads the records of one run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info: dict[str, Any] = _object(self.folder / RUN)
        if self.info.get("version") != VERSION:
            raise ValueError(
                f"{self.folder / RUN} has version {self.info.get('version')!r}; this nmsparse reads version {VERSION}."
            )
        self.result: dict[str, Any] | None = _object(self.folder / RESULT) if (self.folder / RESULT).exists() else None

    @property
    def settings(self) -> dict[str, Any]:
        """What TrainConfig.from_dict takes."""
        config = self.info.get("config")
        if not isinstance(config, dict):
            raise ValueError(f"{self.folder / RUN} does not say with which settings the run was made.")
        return config

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of a kind, in the order of time."""
        return [row for row in _rows(self.folder / METRICS) if row["kind"] == kind]


def find_runs(path: str | Path) -> list[RunRecord]:
    """All runs in a folder and below it, in the order of their names."""
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the folder that nmsparse train or compare wrote.")
    return [RunRecord(file.parent) for file in sorted(root.rglob(RUN))]


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object.")
    return value


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics file. A run that was killed may leave half a line at the end: it is dropped."""
    if not path.exists():
        return
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("kind"), str)):
                raise ValueError("a row has a kind and a step")
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: {error}.") from error
        yield row
