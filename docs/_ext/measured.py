"""Parts of the pages that say what was measured. Everything comes from benchmarks/; where there is nothing, that is said."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown_directive import Generated, table
from sphinx.application import Sphinx

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REPRODUCTION = BENCHMARKS / "reproduction"
NOT_MEASURED = "not measured yet"


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of a results file, the oldest first."""
    file = BENCHMARKS / "results" / name
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return sorted(rows, key=lambda row: row["when"])


@cache
def reproduction() -> ModuleType | None:
    """The room that judges training runs; None where its extra packages are missing."""
    try:
        return importlib.import_module("nmsparse.workbench.reproduce")
    except ImportError:
        return None


@cache
def verdicts() -> list[dict[str, Any]]:
    """Every statement of every claim that runs have decided, with the recipes that it compares."""
    room = reproduction()
    if room is None or not REPRODUCTION.is_dir():
        return []
    found = []
    for place in room.places(REPRODUCTION):
        for judged in room.judge_all(place.study):
            if judged.gain is None:
                continue
            sides = (place.experiment.contender(side) for side in (judged.statement.left, judged.statement.right))
            recipes = {side.candidate.recipe for side in sides}
            found.append({"claim": place.claim.name, "where": place.where, "recipes": recipes, **judged.to_dict()})
    return found


class DecisionTable(Generated):
    """Situation, what the runs say, and where they are."""

    optional_arguments = 0

    def markdown(self) -> str:
        room = reproduction()
        return "Not run yet." if room is None else room.decision_table(REPRODUCTION)


class Results(Generated):
    """What was measured of one recipe: training, speed on tensor cores, cost of emulation."""

    required_arguments = 1
    optional_arguments = 0

    def markdown(self) -> str:
        name = self.arguments[0]
        parts = {
            "Training": _training(name),
            "Speed of a whole training step": _steps(name),
            "Cost of emulation": _overhead(name),
        }
        return "\n\n".join(f"**{title}:** {text}" for title, text in parts.items())


def _training(name: str) -> str:
    rows = [
        [f"`{row['claim']}`, {row['experiment']}", row["statement"], _gain(row), f"**{row['verdict']}**", row["where"]]
        for row in verdicts()
        if name in row["recipes"]
    ]
    if not rows:
        return f"{NOT_MEASURED}."
    return "\n\n" + table(["claim", "statement", "gain (95 % interval)", "verdict", "where"], rows)


def _gain(row: dict[str, Any]) -> str:
    gain = row["gain"]
    interval = f" ({gain['low']:.3g} to {gain['high']:.3g})" if gain.get("low") is not None else ""
    return f"{gain['mean']:.3g}{interval} {row['quantity']}"


def newest_steps(recipe: str | None = None) -> list[dict[str, Any]]:
    """The newest row of every model and recipe whose whole training step was measured."""
    rows = [row for row in rows_of("bench.jsonl") if row["suite"] == "steps" and recipe in (None, row["recipe"])]
    return list({(row["model"], row["recipe"]): row for row in rows}.values())


def steps_table(rows: list[dict[str, Any]]) -> str:
    header = ["model", "recipe", "dense, ms", "sparse, ms", "speed-up", "where"]
    return table(header, [_step_cells(row) for row in rows])


def _step_cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row[side]:.1f}" for side in ("dense_ms", "sparse_ms")]
    return [f"{row['model']}, {row['blocks']} blocks", f"`{row['recipe']}`", *times, f"{row['speedup']:.2f}", _where(row)]


def _steps(name: str) -> str:
    rows = newest_steps(name)
    if not rows:
        return f"{NOT_MEASURED}."
    return "2:4, bf16, `torch.compile` on both sides, everything included.\n\n" + steps_table(rows)


def _where(row: dict[str, Any]) -> str:
    return f"{row['gpu']}, torch {row['torch']}, commit {row['commit']}"


def _overhead(name: str) -> str:
    mine = [row for row in rows_of("overhead.jsonl") if row["recipe"] == name]
    if not mine:
        return f"{NOT_MEASURED}."
    newest = {(json.dumps(row["options"]), row["device"]): row for row in mine}
    rows = [_overhead_cells(row) for row in newest.values()]
    words = "a step with pruned operands and ordinary products, relative to a dense step."
    return f"{words}\n\n" + table(["options", "device", "width", "ratio", "where"], rows)


def _overhead_cells(row: dict[str, Any]) -> list[str]:
    where = f"torch {row['torch']}, commit {row['commit']}" + (f"; {row['note']}" if row.get("note") else "")
    return [_options(row["options"]), row["device"], f"{row['width']}", f"{row['ratio']:.2f}", where]


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in options.items()) or "defaults"


class StepTable(Generated):
    """All whole steps that were measured."""

    optional_arguments = 0

    def markdown(self) -> str:
        rows = newest_steps()
        return steps_table(rows) if rows else f"{NOT_MEASURED.capitalize()}."


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("decision-table", DecisionTable)
    app.add_directive("recipe-results", Results)
    app.add_directive("step-table", StepTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
