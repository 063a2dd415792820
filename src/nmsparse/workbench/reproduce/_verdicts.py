"""What runs say about the statements of a claim."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nmsparse.workbench.reproduce._claim import HEADLINE, Statement
from nmsparse.workbench.reproduce._ledger import Run
from nmsparse.workbench.reproduce._statistics import (
    FEWEST_SEEDS,
    Difference,
    Verdict,
    is_better,
    is_equal,
    is_not_worse,
    paired_difference,
)
from nmsparse.workbench.reproduce._study import Study

WARM_SHARE = 0.1
"""Of a curve: its beginning, while the learning rate rises."""
COMPILING = 2.0
"""Log rows that took so many times the median of the run hold compilations: phases of a recipe differ by less."""
SECONDS = "seconds_to_loss"


def _mean(run: Run, column: str) -> float | None:
    values = [value for _, value in run.curve(column)]
    return statistics.fmean(values) if values else None


def _third(run: Run, column: str, first: bool) -> float | None:
    """Mean over the first third of a curve, past the warm-up, or over the last."""
    values = [value for _, value in run.curve(column)]
    values = values[round(WARM_SHARE * len(values)) :]
    count = len(values) // 3
    return statistics.fmean(values[:count] if first else values[-count:]) if count else None


def _step_ms(run: Run) -> float | None:
    value = run.row["step_ms"]
    return None if value is None else float(value)


QUANTITIES: dict[str, Callable[[Run], float | None]] = {
    HEADLINE: lambda run: run.headline,
    "step_ms": _step_ms,
    "flip_rate_mean": lambda run: _mean(run, "flip_rate"),
    "flip_rate_first_third": lambda run: _third(run, "flip_rate", first=True),
    "flip_rate_last_third": lambda run: _third(run, "flip_rate", first=False),
    "gradient_noise_mean": lambda run: _mean(run, "gradient_noise"),
    "variance_mean": lambda run: _mean(run, "variance"),
}
"""What statements compare, beside the time to a loss, which takes two runs to say."""


@dataclass(frozen=True)
class Judged:
    """A statement, the values of both sides by seed, and what follows."""

    statement: Statement
    left: Mapping[int, float]
    right: Mapping[int, float]
    gain: Difference | None
    """Of left over right: positive is what the statement hopes for."""
    verdict: Verdict
    metric: str
    lost: tuple[int, int]
    """Runs of either side that diverged, and so are not in the means."""

    def to_dict(self) -> dict[str, Any]:
        gain = None if self.gain is None else vars(self.gain)
        return {
            "statement": self.statement.text,
            "experiment": self.statement.experiment,
            "left": self.statement.left,
            "relation": self.statement.relation,
            "right": self.statement.right,
            "margin": self.statement.margin,
            "claimed": self.statement.is_claimed,
            "quantity": self.metric,
            "left_values": dict(self.left),
            "right_values": dict(self.right),
            "gain": gain,
            "verdict": self.verdict,
            "diverged": {"left": self.lost[0], "right": self.lost[1]},
        }


def judge(study: Study, statement: Statement) -> Judged:
    """Test a statement on the runs that a study has."""
    experiment = study.claim.experiment(statement.experiment)
    lefts, rights = (study.results(experiment, experiment.contender(label)) for label in (statement.left, statement.right))
    left, right = _values(statement, lefts, rights)
    statement = replace(statement, margin=statement.margin * experiment.setups[study.scale].margins_in)
    runs = [*lefts.values(), *rights.values()]
    metric = statement.quantity if statement.quantity != HEADLINE else runs[0].metric if runs else HEADLINE
    rises = statement.relation != "below" and bool(runs) and runs[0].higher_is_better
    gain = paired_difference(left, right) if rises else paired_difference(right, left)
    # of the seeds that both sides have run: a run that is still to come is no loss
    both = sorted(set(lefts) & set(rights))
    lost = sum(lefts[seed].headline is None for seed in both), sum(rights[seed].headline is None for seed in both)
    return Judged(statement, left, right, gain, _verdict(statement, gain, lost, len(both)), metric, lost)


def _verdict(statement: Statement, gain: Difference | None, lost: tuple[int, int], seeds: int) -> Verdict:
    """A run that diverged is worse than any that did not: the side that lost more runs has lost, unless the others contradict.
    That is so of a loss, and of the time to one; how long a step takes has nothing to do with it."""
    if seeds == 0:
        return "not run yet"
    left, right = lost if statement.quantity in (HEADLINE, SECONDS) else (0, 0)
    if left == right and gain is not None:
        return _verdict_of(statement, gain)
    if seeds < FEWEST_SEEDS:
        return "too few seeds"
    if left == right:  # and no seed in which both finished
        return "within noise"
    if left > right or statement.relation == "equal":
        return "fails"
    return "within noise" if gain is not None and gain.high < 0 else "holds"


def _verdict_of(statement: Statement, gain: Difference) -> Verdict:
    if statement.relation == "equal":
        return is_equal(gain, statement.margin)
    if statement.relation == "not worse":
        return is_not_worse(gain, statement.margin)
    return is_better(gain)


def _values(
    statement: Statement, lefts: Mapping[int, Run], rights: Mapping[int, Run]
) -> tuple[dict[int, float], dict[int, float]]:
    if statement.quantity == SECONDS:
        pairs = {seed: times_to_common_loss(lefts[seed], rights[seed]) for seed in sorted(set(lefts) & set(rights))}
        known = {seed: pair for seed, pair in pairs.items() if pair is not None}
        return {seed: pair[0] for seed, pair in known.items()}, {seed: pair[1] for seed, pair in known.items()}
    read = QUANTITIES[statement.quantity], QUANTITIES[statement.right_quantity or statement.quantity]
    left, right = (
        {seed: value for seed, run in runs.items() if run.is_finished and (value := reader(run)) is not None}
        for reader, runs in zip(read, (lefts, rights), strict=True)
    )
    return left, right


def times_to_common_loss(*runs: Run) -> tuple[float, ...] | None:
    """Seconds of training after which each reaches the highest of their final validation losses: a loss that all reach."""
    curves = [run.curve(HEADLINE) for run in runs]
    if not all(run.is_finished for run in runs) or not all(curves):
        return None
    target = max(curve[-1][1] for curve in curves)
    return tuple(seconds_to(run, steps_to(curve, target)) for curve, run in zip(curves, runs, strict=True))


def seconds_to(run: Run, step: float) -> float:
    """Time of training until an update, from the times of the log rows: a recipe's phases differ in speed.

    Rows in which something was compiled count with the run's median; validation is in none.
    """
    median = _step_ms(run) or 0.0
    spent, before = 0.0, 0
    for last, step_ms in run.curve("step_ms"):
        each = median if step_ms > COMPILING * median else step_ms
        spent += each * max(0.0, min(step, last) - before)
        before = last
    return (spent + median * max(0.0, step - before)) / 1e3


def steps_to(curve: list[tuple[int, float]], target: float) -> float:
    """The update at which a falling curve first reaches a value, interpolated between validations; the last one if never."""
    before: tuple[int, float] | None = None
    for step, value in curve:
        if value <= target:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - value)
        before = step, value
    return float(curve[-1][0])
