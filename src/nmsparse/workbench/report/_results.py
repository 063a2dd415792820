"""The table of results and what it says: differences from dense with their spread, in words that claim no more than the data."""

from __future__ import annotations

from dataclasses import dataclass

from nmsparse.workbench.report._numbers import (
    THIN,
    Estimate,
    counted,
    decimals,
    difference,
    estimate,
    fixed,
    interval,
)
from nmsparse.workbench.report._runs import STATUSES, Group, Run, Section, Task, mapping, number

ENOUGH_SEEDS = 3


@dataclass(frozen=True)
class Measure:
    """How the compared metric is written: loss as it is, accuracy in percent."""

    name: str
    is_percent: bool
    places: int

    @property
    def factor(self) -> float:
        return 100.0 if self.is_percent else 1.0

    def write(self, value: float | None, signed: bool = False) -> str:
        return fixed(None if value is None else self.factor * value, self.places, signed)

    @property
    def unit(self) -> str:
        return THIN + "%" if self.is_percent else ""

    @property
    def difference_unit(self) -> str:
        return "\N{NO-BREAK SPACE}points" if self.is_percent else ""

    def spread(self, value: Estimate | None, signed: bool = False) -> str:
        """mean ± deviation"""
        if value is None:
            return self.write(None)
        return self.write(value.mean, signed) + ("" if value.deviation is None else f" ± {self.write(value.deviation)}")


@dataclass(frozen=True)
class Result:
    """One row of the table: a group's means over its measured runs."""

    group: Group
    headline: Estimate | None
    difference: Estimate | None
    """From dense, in the metric's own direction; None for dense itself and without it."""
    train_loss: Estimate | None
    non_zero: Estimate | None
    violations: int | None
    """The most in one run."""
    flip_rate: Estimate | None
    step_ms: Estimate | None
    speedup: float | None
    """Dense step time over this group's."""
    sparse_products: tuple[int, int]
    """How many of the layers' products ran on sparse tensor cores, and of how many."""

    @property
    def status(self) -> str:
        """All runs by how they ended."""
        counts = [(len(self.group.with_status(status)), status) for status in STATUSES]
        return ", ".join(f"{count} {status}" for count, status in counts if count)


@dataclass(frozen=True)
class Finding:
    """The key sentence, and what it does not say."""

    sentence: str
    caveat: str


def results(section: Section) -> list[Result]:
    return [_result(section, group) for group in section.groups]


def measure_of(section: Section, rows: list[Result]) -> Measure:
    headlines = [row.headline for row in rows]
    known = [value.mean for value in headlines if value is not None]
    is_percent = section.task.headline.endswith("accuracy") and all(0 <= value <= 1 for value in known)
    places = decimals(headlines)
    return Measure(section.task.headline, is_percent, max(0, places - 2) if is_percent else places)


def finding(section: Section, rows: list[Result], measure: Measure) -> Finding:
    """What the runs show about the compared metric."""
    task = section.task
    ended = [row for row in rows if row.headline is not None and not row.group.is_provisional]
    if not ended:
        return Finding(
            f"No run has finished with a {metric_words(task)} yet.", "Values so far are shown, and nothing follows from them."
        )
    compared = [row for row in ended if row.difference is not None]
    if not compared:
        return _without_reference(section, ended, measure)
    best = max(compared, key=lambda row: _gain(task, row))
    reference = next(row for row in ended if row.group is section.reference(best.group))
    return _against_dense(section, best, reference, measure, len(compared))


def metric_words(task: Task) -> str:
    """validation loss, validation accuracy"""
    return "validation " + task.headline.replace("_", " ")


def emulation_note(rows: list[Result]) -> str:
    """What step times mean where no product ran on sparse tensor cores."""
    sparse_rows = [row for row in rows if not row.group.is_dense]
    plain = [row.group.name for row in sparse_rows if row.sparse_products[0] == 0]
    if not plain:
        return ""
    who = "None of these runs" if len(plain) == len(sparse_rows) else f"No run of {', '.join(plain)}"
    return (
        f"{who} computed a product on sparse tensor cores: the masks were emulated with dense products, which costs time. "
        "Such step times say nothing about the speed of sparse training on hardware that has them."
    )


def _result(section: Section, group: Group) -> Result:
    runs, reference = group.measured, section.reference(group)
    headline = estimate(run.headline for run in runs)
    of_dense = None if reference is None or reference.is_provisional else estimate(run.headline for run in reference.measured)
    is_compared = not group.is_dense and not group.is_provisional and headline is not None and of_dense is not None
    step_ms = estimate(map(step_time, runs))
    dense_ms = None if reference is None else estimate(map(step_time, reference.measured))
    violations = [value for run in runs if (value := number(run.result.get("violations"))) is not None]
    return Result(
        group=group,
        headline=headline,
        difference=difference(headline, of_dense) if is_compared and headline and of_dense else None,
        train_loss=estimate(run.last("train", "loss") for run in runs),
        non_zero=estimate(map(_non_zero, runs)),
        violations=int(max(violations)) if violations else None,
        flip_rate=estimate(run.last("train", "flip_rate") for run in runs),
        step_ms=step_ms,
        speedup=dense_ms.mean / step_ms.mean if dense_ms and step_ms and step_ms.mean > 0 else None,
        sparse_products=_sparse_products(group),
    )


def step_time(run: Run) -> float | None:
    final = number(run.result.get("step_ms"))
    if final is not None:
        return final
    middle = sorted(value for _, value in run.points("train", "step_ms"))
    return middle[len(middle) // 2] if middle else None


def _non_zero(run: Run) -> float | None:
    final = number(run.result.get("non_zero"))
    return run.last("train", "density") if final is None else final


def _sparse_products(group: Group) -> tuple[int, int]:
    products = mapping(group.first.info.get("products"))
    how = [reason for layer in products.values() for reason in mapping(layer).values()]
    return how.count("sparse"), len(how)


def _gain(task: Task, row: Result) -> float:
    """How much better than dense a group is, in the metric's good direction."""
    change = row.difference.mean if row.difference else 0.0
    return change if task.higher_is_better else -change


def _without_reference(section: Section, ended: list[Result], measure: Measure) -> Finding:
    task = section.task
    best = max(ended, key=lambda row: (row.headline.mean if row.headline else 0.0) * (1 if task.higher_is_better else -1))
    value = f"a {metric_words(task)} of {measure.spread(best.headline)}{measure.unit}"
    over = counted(best.headline.count if best.headline else 0, "seed")
    has_dense = any(row.group.is_dense for row in ended)
    if len(ended) == 1:
        missing = "no sparse run has finished" if has_dense else "no dense run has finished"
        return Finding(f"{best.group.name} reaches {value} over {over}.", f"It cannot be compared: {missing}.")
    lost = _lost(best.group)
    lead = "highest" if task.higher_is_better else "lowest"
    caveat = "No dense run of the same model has finished, so what sparsity costs cannot be said."
    return Finding(f"{best.group.name} has the {lead} mean: {value} over {over}.", " ".join([caveat, *lost]))


def _against_dense(section: Section, best: Result, reference: Result, measure: Measure, compared: int) -> Finding:
    if best.headline is None or reference.headline is None or best.difference is None:
        raise ValueError("a comparison needs the metric of both sides.")
    gain = _gain(section.task, best)
    size = measure.write(abs(best.difference.mean)) + measure.difference_unit
    if gain == 0:
        how = "equals dense"
    else:
        closest = "comes closest to" if compared > 1 else "stays behind"
        how = f"does better than {reference.group.name}" if gain > 0 else f"{closest} {reference.group.name}"
    values = f"{measure.spread(best.headline)}{measure.unit} against {measure.spread(reference.headline)}{measure.unit}"
    change = "" if gain == 0 else f", {size} {'better' if gain > 0 else 'worse'}"
    sentence = f"{best.group.name} {how}: {metric_words(section.task)} {values}{change}."
    known = [{run.seed for run in row.group.finished if run.headline is not None} for row in (best, reference)]
    caveat = _caveat(section.task, best.headline, reference.headline, measure, compared, min(map(len, known)))
    return Finding(sentence, " ".join([caveat, *_lost(best.group), *_lost(reference.group)]))


def _lost(group: Group) -> list[str]:
    """A mean over the runs that survived must say that others did not."""
    diverged, total = len(group.with_status("diverged")), len(group.runs)
    verb = "is" if diverged == 1 else "are"
    return [f"{diverged} of {total} runs of {group.name} diverged and {verb} not in its mean."] if diverged else []


def _caveat(task: Task, best: Estimate, reference: Estimate, measure: Measure, compared: int, seeds: int) -> str:
    """What the seeds allow to say; a seed that ran twice counts once."""
    if seeds < ENOUGH_SEEDS:
        return f"With {counted(seeds, 'seed')} nothing can be said about significance: compare at least {ENOUGH_SEEDS} seeds."
    low, high = interval(best, reference)
    span = f"{measure.write(low, signed=True)} to {measure.write(high, signed=True)}{measure.difference_unit}"
    if low <= 0 <= high:
        verdict = "which contains 0, so these seeds do not establish a difference"
    else:
        verdict = f"so these seeds show {'a gain' if (low > 0) == task.higher_is_better else 'a loss'}"
    chosen = f" It is the best of {compared}, and the interval is not corrected for that choice." if compared > 1 else ""
    over = f"{seeds} seeds each" if best.count == reference.count else f"{best.count} and {reference.count} seeds"
    return f"Over {over}, the 95{THIN}% interval of the difference is {span}, {verdict}.{chosen}"
