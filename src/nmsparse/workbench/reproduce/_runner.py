"""Trains what a claim still lacks, in as many processes as memory and cores allow, and enters every run that ends in the book."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nmsparse.workbench.compare import Job, Listener, run_study
from nmsparse.workbench.records import RunRecord
from nmsparse.workbench.reproduce._claim import Claim, Scale
from nmsparse.workbench.reproduce._flops import training_flops
from nmsparse.workbench.reproduce._ledger import Ledger, device_name, make_row
from nmsparse.workbench.reproduce._study import MOST_SEEDS, Planned, Study
from nmsparse.workbench.tasks import load_task
from nmsparse.workbench.training import TrainConfig

DATA = "{data}"
"""Stands for the data folder in the settings of a claim: hashes and books know no path of any machine."""


@dataclass(frozen=True)
class Progress:
    """How far a study is."""

    left: list[str]
    """Runs that have not been made, because time was up."""
    failed: dict[str, str]
    """Runs that broke off, with their last words."""


def reproduce(
    claim: Claim,
    results: Path,
    *,
    scale: Scale = "small",
    seeds: int = 3,
    only: Sequence[str] = (),
    data_dir: Path | None = None,
    folder: Path = Path("runs/reproduce"),
    jobs: int | None = None,
    minutes: float | None = None,
    listen: Listener = lambda jobs: None,
) -> tuple[Study, Progress]:
    """Train what is missing and return the study, which knows all runs, old and new.

    ``results`` is the folder of the books, ``folder`` takes the runs themselves. After ``minutes`` no further run starts; calling
    again goes on. Timed experiments tune side by side like the others, and then run one at a time.
    """
    if seeds > MOST_SEEDS:
        raise ValueError(f"{seeds} seeds are more than the {MOST_SEEDS} that results are looked for.")
    study = Study(claim, scale, Ledger(results), device_name(), only)
    named = os.environ.get("NMSPARSE_DATA")
    data = data_dir or (Path(named) if named else None)
    session = _Session(study, folder / claim.name / scale, data, jobs, minutes, listen)
    session.train(study.tuning())
    finals = study.finals(seeds)
    session.train([planned for planned in finals if not planned.experiment.is_timed])
    session.train([planned for planned in finals if planned.experiment.is_timed], alone=True)
    return study, session.progress(seeds)


class _Session:
    """One call: the time that is left, and what failed."""

    def __init__(
        self,
        study: Study,
        folder: Path,
        data_dir: Path | None,
        jobs: int | None,
        minutes: float | None,
        listen: Listener,
    ) -> None:
        self.study = study
        self.folder = folder
        self.data_dir = data_dir
        self.jobs = jobs
        self.until = None if minutes is None else time.monotonic() + 60 * minutes
        self.listen = listen
        self.failed: dict[str, str] = {}
        self._prepared: set[tuple[str, int | None]] = set()

    def train(self, runs: Sequence[Planned], alone: bool = False) -> None:
        missing = {planned.name: planned for planned in self.study.missing(runs)}
        if not missing or (self.until is not None and time.monotonic() > self.until):
            return
        self._prepare_data(list(missing.values()))
        configs = {name: self._here(planned.config) for name, planned in missing.items()}

        def record_and_listen(jobs: list[Job]) -> None:
            for job in jobs:
                if job.status in ("finished", "diverged") and self.study.find(missing[job.name]) is None:
                    self._record(missing[job.name], job.folder)
            self.listen(jobs)

        done = run_study(configs, self.folder, jobs=1 if alone else self.jobs, until=self.until, listen=record_and_listen)
        self.failed |= {job.name: job.failure or "see its log.txt" for job in done if job.status == "failed"}

    def _prepare_data(self, runs: Sequence[Planned]) -> None:
        """Read every task once: what takes long (tokens, for instance) is then in the cache, and not done by all processes at
        the same time; and a folder without the data is noticed before anything starts."""
        for planned in runs:
            config = planned.config
            if (config.task, config.length) not in self._prepared:
                load_task(config.task, self.data_dir, length=config.length, limit=config.limit)
                self._prepared.add((config.task, config.length))

    def _here(self, config: TrainConfig) -> TrainConfig:
        """The configuration with the paths of this machine."""
        pretrained = config.pretrained
        if pretrained is not None and DATA in pretrained:
            if self.data_dir is None:
                raise ValueError(f"{pretrained} is looked for in the data folder: pass --data-dir, or set NMSPARSE_DATA.")
            pretrained = pretrained.replace(DATA, str(self.data_dir))
            if not Path(pretrained).is_dir():
                raise ValueError(f"{pretrained} does not exist: put the pretrained model there (config.json, model.safetensors).")
        return replace(config, pretrained=pretrained, data_dir=None if self.data_dir is None else str(self.data_dir))

    def _record(self, planned: Planned, folder: Path) -> None:
        record = RunRecord(folder)
        facts = {
            "claim": self.study.claim.name,
            "scale": self.study.scale,
            "experiment": planned.experiment.name,
            "contender": planned.contender.label,
            "role": "tuning" if planned.is_tuning else "final",
        }
        row = make_row(record, planned.config, facts)
        flops = training_flops(planned.config, row["switched_at"])
        self.study.ledger.add(self.study.claim.name, {**row, "flops": {"dense": flops.dense, "sparse": flops.sparse}})

    def progress(self, seeds: int) -> Progress:
        """What is missing: trials, and final runs; those whose rate is not known yet are counted by name and seed."""
        study = self.study
        trials = [planned.name for planned in study.missing(study.tuning())]
        finals = [planned.name for planned in study.missing(study.finals(seeds))]
        unknown = [
            f"{experiment.name} {contender.label} seed {seed}"
            for experiment in study.experiments
            for contender in experiment.contenders
            if study.rate(experiment, contender) is None
            for seed in range(seeds)
        ]
        return Progress([*trials, *finals, *unknown], self.failed)
