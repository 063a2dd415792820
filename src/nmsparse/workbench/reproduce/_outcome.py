"""The result of a claim in numbers and in words: one table per experiment, one line per statement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmsparse.workbench.report._numbers import MINUS, Estimate, brief, decimals, estimate, fixed, listed, share
from nmsparse.workbench.reproduce._claim import HEADLINE, Advice, Claim, Contender, Experiment
from nmsparse.workbench.reproduce._ledger import Run
from nmsparse.workbench.reproduce._statistics import FEWEST_SEEDS, is_better, paired_difference
from nmsparse.workbench.reproduce._study import Rate, Study
from nmsparse.workbench.reproduce._verdicts import Judged, judge, times_to_common_loss

EDGE, PARTIAL = "*", "†"
EDGE_NOTE = f"{EDGE} the best learning rate is the lowest or the highest of the grid: one beyond it may be better still."
PARTIAL_NOTE = f"{PARTIAL} the grid of learning rates was made longer since, and its new rates are not tried yet."


@dataclass(frozen=True)
class Standing:
    """What a contender reached in an experiment."""

    contender: Contender
    runs: dict[int, Run]
    rate: Rate | None

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs.values() if run.is_finished]

    @property
    def headline(self) -> Estimate | None:
        return estimate(run.headline for run in self.finished)

    def mean(self, key: str) -> float | None:
        values = [run.row[key] for run in self.finished if run.row.get(key) is not None]
        return statistics.fmean(values) if values else None

    @property
    def flops(self) -> float | None:
        """Training FLOPs with sparse products at their density."""
        values = [run.row["flops"]["sparse"] for run in self.finished if run.row.get("flops")]
        return statistics.fmean(values) if values else None

    @property
    def by_seed(self) -> dict[int, float]:
        return {seed: run.headline for seed, run in self.runs.items() if run.headline is not None}


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]


@dataclass(frozen=True)
class Metric:
    """How the compared metric is written: accuracy in percent and points, losses as they are."""

    name: str
    higher_is_better: bool
    is_percent: bool

    @staticmethod
    def of(run: Run) -> Metric:
        return Metric(run.metric, run.higher_is_better, run.metric in ("accuracy", "f1", "matthews"))

    @property
    def factor(self) -> float:
        return 100.0 if self.is_percent else 1.0

    @property
    def title(self) -> str:
        return f"validation {self.name}" + (", %" if self.is_percent else "")

    def write(self, value: float, places: int, signed: bool = False) -> str:
        return fixed(self.factor * value, places, signed)


def standings(study: Study, experiment: Experiment) -> list[Standing]:
    found = []
    for contender in experiment.contenders:
        rate = study.rate(experiment, contender, whole_grid=False)
        found.append(Standing(contender, study.results(experiment, contender), rate))
    return found


def table(study: Study, experiment: Experiment) -> Table | None:
    """One row per contender; None where nothing was run."""
    found = [standing for standing in standings(study, experiment) if standing.runs]
    if not any(standing.finished for standing in found):
        return None
    metric = Metric.of(next(run for standing in found for run in standing.finished))
    scaled = [_scaled(standing.headline, metric.factor) for standing in found]
    places = decimals(scaled)
    reference = next((standing for standing in found if standing.contender.candidate.recipe == "dense"), None)
    rows = [_row(standing, value, places, metric, reference) for standing, value in zip(found, scaled, strict=True)]
    header = ["recipe", "seeds", "learning rate", metric.title, "against dense", "flips at the end", "training FLOPs"]
    rates = [standing.rate for standing in found if standing.rate is not None]
    notes = [EDGE_NOTE] if any(rate.is_at_edge for rate in rates) else []
    notes += [PARTIAL_NOTE] if any(rate.is_partial for rate in rates) else []
    notes += [f"{_diverged(s)} of {len(s.runs)} runs of {s.contender.label} diverged and are not in its mean."
              for s in found if _diverged(s)]  # fmt: skip
    notes += [f"{s.contender.label} switched to masks at update {listed(moments)}."
              for s in found if (moments := _switches(s))]  # fmt: skip
    return Table(experiment.title, [*header, "ms per step"], rows, notes)


def _last_flips(run: Run) -> float | None:
    """The flip rate of the last log row: of the first update of its interval, or of the last search of a mask."""
    points = run.curve("flip_rate")
    return points[-1][1] if points else None


def _switches(standing: Standing) -> list[str]:
    """When STEP switched, seed by seed."""
    return [str(run.row["switched_at"]) for run in standing.finished if run.row.get("switched_at") is not None]


def _row(standing: Standing, value: Estimate | None, places: int, metric: Metric, reference: Standing | None) -> list[str]:
    spread = "" if value is None or value.deviation is None else f" ± {fixed(value.deviation, places)}"
    change = None if reference is None or reference is standing else paired_difference(standing.by_seed, reference.by_seed)
    against = "" if change is None else metric.write(change.mean, places, signed=True)
    flips = [rate for run in standing.finished if (rate := _last_flips(run)) is not None]
    flops = None if reference is None or not reference.flops or not standing.flops else standing.flops / reference.flops
    return [
        standing.contender.label,
        str(len(standing.finished)),
        "" if (rate := standing.rate) is None else f"{rate.value:g}" + EDGE * rate.is_at_edge + PARTIAL * rate.is_partial,
        fixed(None if value is None else value.mean, places) + spread,
        against,
        share(statistics.fmean(flips)) if flips else "",
        "" if flops is None else f"{flops:.2f}",
        brief(standing.mean("step_ms")),
    ]


def _scaled(value: Estimate | None, factor: float) -> Estimate | None:
    if value is None:
        return None
    return Estimate(factor * value.mean, None if value.deviation is None else factor * value.deviation, value.count)


def _diverged(standing: Standing) -> int:
    return len(standing.runs) - len(standing.finished)


# ---- statements ----


def judge_all(study: Study) -> list[Judged]:
    names = {experiment.name for experiment in study.experiments}
    return [judge(study, statement) for statement in study.claim.statements if statement.experiment in names]


def gain_words(judged: Judged) -> str:
    """The gain with its interval and the margin that it was judged by, in the unit of the metric."""
    lost = "; ".join(
        f"{count} runs of {label} diverged" if count > 1 else f"1 run of {label} diverged"
        for count, label in zip(judged.lost, (judged.statement.left, judged.statement.right), strict=True)
        if count
    )
    if judged.gain is None:
        return lost
    return _interval_words(judged) + (f"; {lost}" if lost else "")


def _interval_words(judged: Judged) -> str:
    assert judged.gain is not None
    is_percent = judged.metric in ("accuracy", "f1", "matthews") or judged.metric.startswith("flip_rate")
    factor, unit = (100.0, " points") if is_percent else (1.0, _unit(judged.metric))
    mean, low, high = (factor * value for value in (judged.gain.mean, judged.gain.low, judged.gain.high))
    margin = f", margin {brief(factor * judged.statement.margin)}{unit}" if judged.statement.margin else ""
    if judged.gain.count < 2:
        return f"{_signed(mean)}{unit} (1 seed){margin}"
    return f"{_signed(mean)}{unit} ({_signed(low)} to {_signed(high)}, {judged.gain.count} seeds){margin}"


def _unit(metric: str) -> str:
    return {"step_ms": " ms", "seconds_to_loss": " s", "loss": " nats"}.get(metric, "")


def _signed(value: float) -> str:
    text = brief(abs(value))
    return text if value == 0 else ("+" if value > 0 else MINUS) + text


# ---- which recipe when ----


def advise(study: Study, advice: Advice) -> str | None:
    """One sentence from the runs, on the seeds that all choices have; None where fewer than two of them have enough."""
    experiment = study.claim.experiment(advice.experiment)
    among = [standing for standing in standings(study, experiment) if standing.contender.label in advice.among]
    found = [standing for standing in among if len(standing.by_seed) >= FEWEST_SEEDS]
    if len(found) < 2:
        return None
    metric = Metric.of(found[0].finished[0])
    seeds = set.intersection(*(set(standing.by_seed) for standing in found))
    same = [{seed: value for seed, value in standing.by_seed.items() if seed in seeds} for standing in found]
    values = _seconds(found) if advice.by == "seconds" else same
    if min(map(len, values)) < FEWEST_SEEDS:
        return None
    sign = 1 if metric.higher_is_better and advice.by == HEADLINE else -1
    gains = [{seed: sign * value for seed, value in each.items()} for each in values]
    best = max(range(len(found)), key=lambda index: statistics.fmean(gains[index].values()))
    others = [index for index in range(len(found)) if index != best]
    worse = [found[index].contender.label for index in others if _is_better(gains[best], gains[index])]
    equal = [found[index].contender.label for index in others if not _is_better(gains[best], gains[index])]
    sentence = f"`{found[best].contender.label}` ({_reached(metric, values, best, advice)})"
    if worse:
        sentence += f", better than {_quoted(worse)}"
    if equal:
        sentence += f"; within noise of it: {_quoted(equal)}"
    return sentence + "." + "".join(_left_out(standing) for standing in among if standing not in found)


def _left_out(standing: Standing) -> str:
    """A choice that is not in the comparison, and why."""
    label, runs = standing.contender.label, len(standing.runs)
    if not runs:
        return f" `{label}`: not run yet."
    lost = _diverged(standing)
    return f" `{label}`: " + (f"{lost} of {runs} runs diverged." if lost else f"{runs} seeds only.")


def _reached(metric: Metric, values: Sequence[dict[int, float]], best: int, advice: Advice) -> str:
    mean = statistics.fmean(values[best].values())
    if advice.by == "seconds":
        return f"{brief(mean)} s to a loss that all reach"
    places = decimals([_scaled(estimate(each.values()), metric.factor) for each in values])
    return f"{metric.title.removesuffix(', %')} {metric.write(mean, places)}" + ("\u202f%" if metric.is_percent else "")


def _seconds(found: Sequence[Standing]) -> list[dict[int, float]]:
    """Time to a loss that all reach, by contender and seed, for the seeds that all have."""
    seeds = sorted(set.intersection(*(set(standing.by_seed) for standing in found)))
    times = {seed: times_to_common_loss(*(standing.runs[seed] for standing in found)) for seed in seeds}
    return [{seed: each[index] for seed, each in times.items() if each is not None} for index in range(len(found))]


def _is_better(left: dict[int, float], right: dict[int, float]) -> bool:
    gain = paired_difference(left, right)
    return gain is not None and is_better(gain) == "holds"


def _quoted(labels: Sequence[str]) -> str:
    return listed([f"`{label}`" for label in labels])


# ---- everything ----


def to_dict(study: Study, claim: Claim) -> dict[str, Any]:
    """For ``--json``: every value, with the hash of the run that it comes from."""
    return {
        "claim": claim.name,
        "scale": study.scale,
        "device": study.device,
        "says": claim.says,
        "published": [{"setting": row.setting, "values": dict(row.values)} for row in claim.published],
        "experiments": [_experiment(study, experiment) for experiment in study.experiments],
        "statements": [judged.to_dict() for judged in judge_all(study)],
    }


def _experiment(study: Study, experiment: Experiment) -> dict[str, Any]:
    contenders = [
        {
            "contender": standing.contender.label,
            "lr": None if standing.rate is None else standing.rate.value,
            "lr_at_edge": standing.rate is not None and standing.rate.is_at_edge,
            "grid_is_partial": standing.rate is not None and standing.rate.is_partial,
            "runs": [
                {
                    "seed": seed,
                    "hash": run.hash,
                    "status": run.row["status"],
                    HEADLINE: run.headline,
                    "step_ms": run.row["step_ms"],
                    "flops": run.row.get("flops"),
                    "flip_rate_at_end": _last_flips(run),
                    "switched_at": run.row.get("switched_at"),
                }
                for seed, run in standing.runs.items()
            ],
        }
        for standing in standings(study, experiment)
    ]
    return {"name": experiment.name, "title": experiment.title, "contenders": contenders}
