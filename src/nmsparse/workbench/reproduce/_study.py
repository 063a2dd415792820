"""A claim as runs: which configurations it trains, which learning rate each contender takes, and what is known already.

tuning     every rate of the grid, on a seed of its own, for a part of the length  ->  the best rate by the headline
final      seeds 0, 1, 2, ... at that rate
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nmsparse.workbench.reproduce._claim import Claim, Contender, Experiment, Scale
from nmsparse.workbench.reproduce._flops import equal_flops_steps
from nmsparse.workbench.reproduce._ledger import Ledger, Run, settings_hash
from nmsparse.workbench.training import TrainConfig

TUNING_SEED = 100
MOST_SEEDS = 10
"""Further ones are not looked for."""


@dataclass(frozen=True)
class Planned:
    """One run of a study. Its configuration has no path of this machine in it."""

    experiment: Experiment
    contender: Contender
    config: TrainConfig
    is_tuning: bool

    @property
    def name(self) -> str:
        """Of its folder: readable, and never that of another configuration."""
        words = f"{self.experiment.name} {self.contender.label} lr {self.config.peak_lr:g} seed {self.config.seed}"
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', words).strip('-')}-{settings_hash(self.config)[:6]}"


@dataclass(frozen=True)
class Rate:
    """The learning rate that a contender found."""

    value: float
    is_at_edge: bool
    """The best of the grid is its lowest or highest: a rate beyond it may be better still."""
    is_partial: bool = False
    """The grid has rates that nobody has tried yet: it was made longer since."""


class Study:
    """The runs of a claim at one scale on one kind of hardware."""

    def __init__(self, claim: Claim, scale: Scale, ledger: Ledger, device: str, only: Sequence[str] = ()) -> None:
        self.claim = claim
        self.scale: Scale = scale
        self.ledger = ledger
        self.device = device
        self.experiments = _experiments_at(claim, scale, only)
        self._results: dict[tuple[str, str, int], dict[int, Run]] = {}
        """What was looked up, while the book had so many rows."""

    def config(self, experiment: Experiment, contender: Contender, rate: float, seed: int) -> TrainConfig:
        """A full run."""
        settings = dict(experiment.setups[self.scale].settings)
        candidate = contender.candidate
        made = TrainConfig.from_dict(
            {
                **settings,
                "recipe": candidate.recipe,
                "pattern": candidate.pattern or "2:4",
                "options": candidate.options,
                "lr": rate,
                "seed": seed,
            },
            f"{self.claim.name}, {experiment.name}, {contender.label}",
        )
        if contender.spends_as:
            reference = self.config(experiment, experiment.contender(contender.spends_as), rate, seed)
            made = replace(made, steps=equal_flops_steps(made, reference))
        return made

    # ---- learning rates ----

    def tuning(self) -> list[Planned]:
        """Tuning runs of all contenders that search for themselves."""
        return [
            self._trial(experiment, contender, rate)
            for experiment in self.experiments
            for contender in experiment.contenders
            for rate in self._grid(experiment)
            if not contender.tuned_as
        ]

    def _grid(self, experiment: Experiment) -> tuple[float, ...]:
        """Rates to try: none where there is no choice."""
        rates = experiment.setups[self.scale].rates
        return rates if len(rates) > 1 else ()

    def _trial(self, experiment: Experiment, contender: Contender, rate: float) -> Planned:
        config = self.config(experiment, contender, rate, TUNING_SEED)
        steps = max(1, round(config.steps * experiment.setups[self.scale].tuning_share))
        shorter = replace(config, steps=steps, eval_every=steps)
        return Planned(experiment, contender, shorter, is_tuning=True)

    def rate(self, experiment: Experiment, contender: Contender, whole_grid: bool = True) -> Rate | None:
        """The best rate of the grid by validation; None while a trial is missing. A diverged trial is the worst.

        With ``whole_grid=False`` it is the best of those that were tried and trained with: what was published before a grid was
        made longer stays until its new rates are tried.
        """
        if contender.tuned_as:
            return self.rate(experiment, experiment.contender(contender.tuned_as), whole_grid)
        grid = self._grid(experiment)
        if not grid:
            return Rate(experiment.setups[self.scale].rates[0], is_at_edge=False)
        known = {rate: run for rate in grid if (run := self.find(self._trial(experiment, contender, rate))) is not None}
        is_partial = len(known) < len(grid)
        if is_partial and not whole_grid:
            known = {rate: run for rate, run in known.items() if self._runs(experiment, contender, rate)}
        if not known or (is_partial and whole_grid):
            return None
        best = max(known, key=lambda rate: _score(known[rate]))
        return Rate(best, best in (grid[0], grid[-1]), is_partial)

    # ---- runs ----

    def finals(self, seeds: int) -> list[Planned]:
        """The runs that statements are tested on, of all contenders whose rate is known. Those that statements name come first,
        experiment by experiment and then seed by seed, so that an interrupted study has verdicts and whole seeds."""
        found = [
            Planned(experiment, contender, self.config(experiment, contender, rate.value, seed), is_tuning=False)
            for experiment in self.experiments
            for seed in range(seeds)
            for contender in experiment.contenders
            if (rate := self.rate(experiment, contender)) is not None
        ]
        return sorted(found, key=lambda planned: not self.is_judged(planned))

    def is_judged(self, planned: Planned) -> bool:
        """Whether a statement of the claim is about it."""
        sides = (side for s in self.claim.statements if s.experiment == planned.experiment.name for side in (s.left, s.right))
        return planned.contender.label in sides

    def unknown(self, seeds: int) -> list[str]:
        """Final runs whose rate no trial has found yet, in words."""
        return [
            f"{experiment.name} {contender.label} seed {seed}"
            for experiment in self.experiments
            for contender in experiment.contenders
            if self.rate(experiment, contender) is None
            for seed in range(seeds)
        ]

    def find(self, planned: Planned) -> Run | None:
        return self.ledger.find(planned.config, self.device)

    def missing(self, runs: Sequence[Planned]) -> list[Planned]:
        """Runs that are in no book yet, each once."""
        seen: dict[str, Planned] = {}
        for planned in runs:
            if self.find(planned) is None:
                seen.setdefault(settings_hash(planned.config), planned)
        return list(seen.values())

    def results(self, experiment: Experiment, contender: Contender) -> dict[int, Run]:
        """Runs of a contender by seed, finished and diverged, as far as they were made."""
        key = (experiment.name, contender.label, len(self.ledger.runs))
        if key not in self._results:
            self._results[key] = self._look_up(experiment, contender)
        return self._results[key]

    def _look_up(self, experiment: Experiment, contender: Contender) -> dict[int, Run]:
        rate = self.rate(experiment, contender, whole_grid=False)
        return {} if rate is None else self._runs(experiment, contender, rate.value)

    def _runs(self, experiment: Experiment, contender: Contender, rate: float) -> dict[int, Run]:
        """Final runs at a rate, by seed."""
        first = self.config(experiment, contender, rate, 0)
        found = {seed: self.ledger.find(replace(first, seed=seed), self.device) for seed in range(MOST_SEEDS)}
        return {seed: run for seed, run in found.items() if run is not None}


def _experiments_at(claim: Claim, scale: Scale, only: Sequence[str]) -> list[Experiment]:
    """The experiments that have a setup of this scale; an error where one that was asked for has none."""
    wanted = [claim.experiment(name) for name in only] or list(claim.experiments)
    found = [experiment for experiment in wanted if scale in experiment.setups]
    if not found or (only and len(found) < len(wanted)):
        lacking = next(experiment for experiment in wanted if scale not in experiment.setups)
        raise ValueError(
            f"{claim.name}, {lacking.name}: not at scale {scale}, only at {', '.join(lacking.setups)}. It is about tensor cores, "
            "or too large."
        )
    return found


def _score(run: Run) -> float:
    """More is better."""
    value = run.headline
    if value is None:
        return float("-inf")
    return value if run.higher_is_better else -value
