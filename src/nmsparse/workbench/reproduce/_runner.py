"""Trains what a claim still lacks, in as many processes as memory and cores allow, and enters every run that ends in the book."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nmsparse.workbench.compare import Job, Listener, run_study
from nmsparse.workbench.records import RunRecord
from nmsparse.workbench.reproduce._claim import Claim, Scale
from nmsparse.workbench.reproduce._flops import training_flops
from nmsparse.workbench.reproduce._ledger import Ledger, device_name, make_row
from nmsparse.workbench.reproduce._study import MOST_SEEDS, Planned, Study
from nmsparse.workbench.training import TrainConfig, open_task

DATA = "{data}"
"""Stands for the data folder in the settings of a claim: hashes and books know no path of any machine."""
GUESS_GIB: dict[str, float] = {"toy": 2, "cpu": 2, "small": 6}
"""What a run is taken to need until the first has said, so that a study need not wait for it. A guess with room to spare."""
TIMED_GUESS_GIB = 12.0
"""The same for timed experiments, whose models are wide."""
STARTING_SECONDS = 15
"""What a process takes beside training."""


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

    ``results`` is the folder of the books, ``folder`` takes the runs themselves. It ends within ``minutes``: no run starts that
    would take longer, going by those before; calling again goes on. Timed experiments tune side by side like the others, and then
    run one at a time.
    """
    if seeds > MOST_SEEDS:
        raise ValueError(f"{seeds} seeds are more than the {MOST_SEEDS} that results are looked for.")
    study = Study(claim, scale, Ledger(results), device_name(), only)
    named = os.environ.get("NMSPARSE_DATA")
    data = data_dir or (Path(named) if named else None)
    session = _Session(study, folder / claim.name / scale, data, jobs, minutes, listen)
    trials = study.tuning()
    session.check(study.missing([*trials, *study.finals(seeds)]))
    session.train([planned for planned in trials if not planned.experiment.is_timed])
    # algorithms that are searched while others use the GPU are no choice for runs that have it to themselves
    crowded = {"NMSPARSE_CACHE": str(session.folder.absolute() / "tuning-cache")}
    session.train([planned for planned in trials if planned.experiment.is_timed], environment=crowded)
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

    def train(self, runs: Sequence[Planned], alone: bool = False, environment: Mapping[str, str] | None = None) -> None:
        if self.until is not None and time.monotonic() > self.until:
            return
        missing = {planned.name: planned for planned in self.study.missing(runs) if self._has_what_it_reads(planned)}
        if not missing:
            return
        configs = {name: self._here(planned.config) for name, planned in missing.items()}

        def record_and_listen(jobs: list[Job]) -> None:
            for job in jobs:
                if job.status in ("finished", "diverged") and job.name not in self.failed:
                    self._record_once(missing[job.name], job.folder)
            self.listen(jobs)

        done = run_study(
            configs,
            self.folder,
            jobs=1 if alone else self.jobs,
            until=self.until,
            listen=record_and_listen,
            guess_gib=self._guess_gib(list(missing.values())),
            environment=environment,
            lasts=lambda name: self._seconds(missing[name]),
        )
        self.failed |= {job.name: job.failure or "see its log.txt" for job in done if job.status == "failed"}

    def check(self, runs: Sequence[Planned]) -> None:
        """Where nothing of what is to be trained can be read, that is an error of the caller's."""
        if runs and not any(map(self._has_what_it_reads, runs)):
            raise ValueError(next(iter(self.failed.values())))

    def _has_what_it_reads(self, planned: Planned) -> bool:
        """Whether data and a pretrained model are there. What is not stops its experiment, and not the rest of the claim.

        Every task is read once here: what takes long (tokens, for instance) is then in the cache, and not done by all processes
        at the same time.
        """
        kind = planned.config.task, planned.config.length
        try:
            config = self._here(planned.config)
            if kind not in self._prepared:
                open_task(config)
                self._prepared.add(kind)
        except (FileNotFoundError, ValueError) as error:
            self.failed[planned.experiment.name] = str(error)
            return False
        return True

    def _guess_gib(self, runs: Sequence[Planned]) -> float | None:
        is_wide = self.study.scale == "small" and any(planned.experiment.is_timed for planned in runs)
        return TIMED_GUESS_GIB if is_wide else GUESS_GIB.get(self.study.scale)

    def _seconds(self, planned: Planned) -> float:
        """How long a run should take, by the slowest of its experiment so far; 0 where nobody knows."""
        mine = (run.row for run in self.study.ledger.runs.values() if run.device == self.study.device)
        paces = [row["seconds"] / row["steps"] for row in mine if row["experiment"] == planned.experiment.name and row["seconds"]
                 and row["claim"] == self.study.claim.name and row["scale"] == self.study.scale]  # fmt: skip
        return STARTING_SECONDS + max(paces) * planned.config.steps if paces else 0.0

    def _here(self, config: TrainConfig) -> TrainConfig:
        """The configuration with the paths of this machine."""
        pretrained = config.pretrained
        if pretrained is not None and DATA in pretrained:
            if self.data_dir is None:
                raise FileNotFoundError(f"{pretrained} is looked for in the data folder: pass --data-dir, or set NMSPARSE_DATA.")
            pretrained = pretrained.replace(DATA, str(self.data_dir))
            if not Path(pretrained).is_dir():
                raise FileNotFoundError(
                    f"{pretrained} does not exist: put the pretrained model there (config.json, model.safetensors)."
                )
        return replace(config, pretrained=pretrained, data_dir=None if self.data_dir is None else str(self.data_dir))

    def _record_once(self, planned: Planned, folder: Path) -> None:
        """Enter a run that has ended. One that cannot be entered must not end the others."""
        if self.study.find(planned) is not None:
            return
        try:
            self._record(planned, folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.failed[planned.name] = f"it ended, but could not be recorded ({type(error).__name__}: {error}); see {folder}"

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
        """What is missing: trials, and final runs; those whose rate is not known yet by contender and seed."""
        study = self.study
        trials = [planned.name for planned in study.missing(study.tuning())]
        finals = [planned.name for planned in study.missing(study.finals(seeds))]
        return Progress([*trials, *finals, *study.unknown(seeds)], self.failed)
