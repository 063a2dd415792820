"""The book of finished runs: JSON lines that hold settings, seed, versions, hardware, results and thinned curves of every run.

A run is found again by the hash of its settings on the same hardware, whichever claim trained it. So a study goes on where it
stopped, on a fresh machine too, and every number can be traced to the runs that it comes from.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nmsparse.workbench.provenance import commit
from nmsparse.workbench.records import RunRecord, finite
from nmsparse.workbench.training import TrainConfig

VERSION = 1
COLUMNS = ("loss", "step_ms", "flip_rate", "gradient_noise", "variance", "variance_change", "density")
"""Columns of the log rows that are kept as curves."""
DIGITS = 5


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """All settings that make a run what it is, also those at their default: a default may change."""
    return {entry.name: getattr(config, entry.name) for entry in fields(TrainConfig) if not entry.metadata["free"]}


def settings_hash(config: TrainConfig) -> str:
    return hashlib.sha256(json.dumps(settings_of(config), sort_keys=True).encode()).hexdigest()[:12]


def _present_hash(row: Mapping[str, Any]) -> str:
    """The hash that a recorded run would have today: settings that came since have their default."""
    try:
        return settings_hash(TrainConfig.from_dict(row["settings"]))
    except ValueError:  # a setting that is gone: nothing today is that run
        return str(row["hash"])


def device_name() -> str:
    """The hardware that runs train on, as a run's own records call it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


@dataclass(frozen=True)
class Run:
    """One finished (or diverged) run."""

    row: Mapping[str, Any]

    @property
    def hash(self) -> str:
        return str(self.row["hash"])

    @property
    def device(self) -> str:
        return str(self.row["environment"]["device"])

    @property
    def seed(self) -> int:
        return int(self.row["seed"])

    @property
    def is_finished(self) -> bool:
        return self.row["status"] == "finished"

    @property
    def metric(self) -> str:
        return str(self.row["metric"]["name"])

    @property
    def higher_is_better(self) -> bool:
        return bool(self.row["metric"]["higher_is_better"])

    @property
    def headline(self) -> float | None:
        value = self.row["valid"].get(self.metric)
        return None if value is None or not self.is_finished else float(value)

    def curve(self, column: str) -> list[tuple[int, float]]:
        """(update, value) of a column of the log rows, or of the validations' headline."""
        part = self.row["curves"]["valid" if column in (self.metric, "headline") else "train"]
        values = part.get(self.metric if column == "headline" else column, [])
        return [(step, value) for step, value in zip(part["step"], values, strict=False) if value is not None]


class Ledger:
    """All rows of a folder's files; new ones are appended to the file of a claim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[tuple[str, str], Run] = {}
        """By hash and hardware; of two, the later."""
        for file in sorted(folder.glob("*.jsonl")):
            for row in _rows(file):
                self._remember(Run(row))

    def _remember(self, run: Run) -> None:
        key = (_present_hash(run.row), run.device)
        known = self.runs.get(key)
        if known is None or known.row["when"] <= run.row["when"]:
            self.runs[key] = run

    def find(self, config: TrainConfig, device: str) -> Run | None:
        return self.runs.get((settings_hash(config), device))

    def devices(self) -> list[str]:
        """Hardware that rows were measured on, that of the newest row first."""
        newest: dict[str, str] = {}
        for run in self.runs.values():
            newest[run.device] = max(newest.get(run.device, ""), str(run.row["when"]))
        return sorted(newest, key=newest.__getitem__, reverse=True)

    def add(self, claim: str, row: dict[str, Any]) -> Run:
        """Append a row, in one write: a kill leaves a whole line or half of one at the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{claim}.jsonl"
        line = json.dumps(finite(row)) + "\n"
        if file.exists() and not file.read_bytes().endswith(b"\n"):
            line = "\n" + line  # what a killed process wrote ends here
        with file.open("a") as opened:
            opened.write(line)
            opened.flush()
            os.fsync(opened.fileno())
        run = Run(json.loads(line))
        self._remember(run)
        return run


def make_row(record: RunRecord, config: TrainConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a run that has ended. ``config`` is as planned, without this machine's paths; ``facts`` go in front."""
    info, result = record.info, record.result or {}
    task = info["task"]
    return {
        "version": VERSION,
        **facts,
        "seed": config.seed,
        "lr": config.peak_lr,
        "steps": config.steps,
        "hash": settings_hash(config),
        "settings": settings_of(config),
        "status": result.get("status"),
        "message": str(result["message"]).partition(";")[0] if "message" in result else None,
        "metric": {"name": task["headline"], "higher_is_better": task["higher_is_better"], "unit": task["unit"]},
        "valid": result.get("valid", {}),
        "step_ms": result.get("step_ms"),
        "seconds": result.get("seconds"),
        "non_zero": result.get("non_zero"),
        "violations": result.get("violations"),
        "model": {**info["model"], "name": config.pretrained or info["model"]["name"]},
        "sparse_products": _sparse_products(info["products"]),
        "curves": {"train": _columns(record.rows("train"), COLUMNS), "valid": _columns(record.rows("valid"), None)},
        "switched_at": next((row["switched_at"] for row in reversed(record.rows("train")) if "switched_at" in row), None),
        "environment": {"cuda": torch.version.cuda, "commit": commit(), **info["environment"]},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _sparse_products(products: Mapping[str, Mapping[str, str]]) -> str:
    """How many products ran on sparse tensor cores, of how many."""
    how = [reason for layer in products.values() for reason in layer.values()]
    return f"{how.count('sparse')} of {len(how)}"


def _columns(rows: list[dict[str, Any]], names: tuple[str, ...] | None) -> dict[str, list[Any]]:
    """Rows as columns of numbers of few digits; columns that are empty everywhere are left out."""
    wanted = names or tuple(name for name in (rows[-1] if rows else {}) if name not in ("kind", "step"))
    columns = {name: [_rounded(row.get(name)) for row in rows] for name in wanted}
    filled = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return {"step": [row["step"] for row in rows], **filled}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file; half a line, left by a kill, is passed over."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or row.get("version") != VERSION:
            raise ValueError(f"{file}, line {number}: not a row of version {VERSION}, which this nmsparse reads.")
        yield row
