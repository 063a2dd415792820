"""What a user of the command line sees of a claim: the paper's numbers, ours, the verdicts, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmsparse.workbench.reproduce._claim import Claim
from nmsparse.workbench.reproduce._flops import training_flops
from nmsparse.workbench.reproduce._outcome import gain_words, judge_all, table
from nmsparse.workbench.reproduce._runner import Progress
from nmsparse.workbench.reproduce._study import Planned, Study
from nmsparse.workbench.terminal import print_table

SHOWN = 8
"""Runs that are named where many are left."""


def print_outcome(study: Study, progress: Progress) -> None:
    claim = study.claim
    print(f"{claim.title}\n{claim.paper}\n{claim.says}\n")
    _print_published(claim)
    for experiment in study.experiments:
        made = table(study, experiment)
        if made is None:
            print(f"{experiment.title}: not run yet\n")
            continue
        print_table(made.header, made.rows, made.title)
        print("\n".join([*made.notes, ""]))
    judged = judge_all(study)
    rows = [[each.statement.text, gain_words(each), each.verdict] for each in judged]
    print_table(["statement", "gain (95 % interval), margin", "verdict"], rows)
    _print_rest(progress)


def _print_published(claim: Claim) -> None:
    names = list(dict.fromkeys(name for row in claim.published for name in row.values))
    if names:
        rows = [
            [row.setting, *(f"{row.values[name]:g}" if name in row.values else "" for name in names)] for row in claim.published
        ]
        print_table(["published", *names], rows)
    if claim.published_note:
        print(claim.published_note)
    print()


def _print_rest(progress: Progress) -> None:
    for name, why in progress.failed.items():
        print(f"{name} failed: {why}")
    if progress.left:
        named = ", ".join(progress.left[:SHOWN]) + (", ..." if len(progress.left) > SHOWN else "")
        print(f"{len(progress.left)} runs are left ({named}); the same command goes on with them.")


def plan(study: Study, seeds: int) -> dict[str, Any]:
    """For ``--dry-run``: what would be trained, and what is in the books already."""
    runs: Sequence[Planned] = [*study.tuning(), *study.finals(seeds)]
    missing = {planned.name for planned in study.missing(runs)}
    described = [
        {
            "run": planned.name,
            "role": "tuning" if planned.is_tuning else "final",
            "steps": planned.config.steps,
            "dense_flops": training_flops(planned.config).dense,
            "is_done": planned.name not in missing,
        }
        for planned in runs
    ]
    later = study.unknown(seeds)
    to_do = len(missing) + len(later)
    return {"claim": study.claim.name, "scale": study.scale, "runs": described, "later": later, "to_do": to_do}


def print_plan(planned: dict[str, Any]) -> None:
    rows = [
        [run["run"], run["role"], str(run["steps"]), f"{run['dense_flops']:.2e}", "done" if run["is_done"] else "to do"]
        for run in planned["runs"]
    ]
    print_table(["run", "role", "steps", "dense FLOPs", "state"], rows)
    if planned["later"]:
        print(f"{len(planned['later'])} final runs follow at the learning rates that these find.")
    print(f"{planned['to_do']} of {len(planned['runs']) + len(planned['later'])} runs to do.")
