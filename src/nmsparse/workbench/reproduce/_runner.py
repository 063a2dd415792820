"""Trains what claims still lack, in as many processes as memory and cores allow, and enters every run that ends in the book."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nmsparse.workbench._workers import LOG
from nmsparse.workbench.compare import Job, Listener, run_study, slug
from nmsparse.workbench.records import RunRecord
from nmsparse.workbench.reproduce._claim import Claim, Scale
from nmsparse.workbench.reproduce._flops import training_flops
from nmsparse.workbench.reproduce._ledger import Ledger, device_name, make_row, settings_hash, settings_of
from nmsparse.workbench.reproduce._study import MOST_SEEDS, Planned, Study
from nmsparse.workbench.training import TrainConfig, open_task

DATA = "{data}"
"""Stands for the data folder in the settings of a claim: hashes and books know no path of any machine."""
GUESS_GIB: dict[str, float] = {"toy": 2, "cpu": 2, "small": 6}
"""What a run is taken to need until the first has said, so that a study need not wait for it. A guess with room to spare."""
TIMED_GUESS_GIB = 12.0
"""The same for timed experiments, whose models are wide."""
STARTING_SECONDS = 15
"""What a run takes beside training, in a process that has just begun."""
UNKNOWN_SECONDS = 60.0
"""How long the first run of all is expected to take, where time is limited."""
VARIED = ("lr", "seed", "steps", "eval_every")
"""Settings in which the runs of a contender differ: an update takes as long with any of them."""


@dataclass(frozen=True)
class Progress:
    """How far a study is."""

    left: list[str]
    """Runs that have not been made, because time was up."""
    failed: dict[str, str]
    """Runs that broke off, with their last words."""


def reproduce(
    claims: Sequence[Claim],
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
) -> list[tuple[Study, Progress]]:
    """Train what is missing and return the studies, which know all runs, old and new, each with how far it is.

    ``results`` is the folder of the books, ``folder`` takes the runs themselves. Claims train together, so that no process waits
    while one tunes; what belongs to an earlier claim starts first, and a final run as soon as its learning rate is known. It ends
    within ``minutes``, or seconds later: no run starts that would take longer, going by those before, and one that takes longer
    after all is ended and left. Calling again goes on. Timed experiments come last: they tune side by side, and then run one at a
    time.
    """
    if seeds > MOST_SEEDS:
        raise ValueError(f"{seeds} seeds are more than the {MOST_SEEDS} that results are looked for.")
    ledger, device = Ledger(results), device_name()
    studies = [Study(claim, scale, ledger, device, only) for claim in claims]
    named = os.environ.get("NMSPARSE_DATA")
    session = _Session(studies, folder, data_dir or (Path(named) if named else None), jobs, minutes, listen)
    session.check(seeds)
    session.train(lambda study: [*study.tuning(), *study.finals(seeds)], is_timed=False)
    # algorithms that are searched while others use the GPU are no choice for runs that have it to themselves
    crowded = {"NMSPARSE_CACHE": str(folder.absolute() / "tuning-cache")}
    session.train(lambda study: study.tuning(), is_timed=True, environment=crowded)
    session.train(lambda study: study.finals(seeds), is_timed=True, alone=True)
    return [(study, session.progress(study, seeds)) for study in studies]


class _Session:
    """One call: the time that is left, what was begun, and what failed."""

    def __init__(
        self,
        studies: Sequence[Study],
        folder: Path,
        data_dir: Path | None,
        jobs: int | None,
        minutes: float | None,
        listen: Listener,
    ) -> None:
        self.studies = studies
        self.folder = folder
        self.data_dir = data_dir
        self.jobs = jobs
        self.minutes = minutes
        self.until = None if minutes is None else time.monotonic() + 60 * minutes
        self.listen = listen
        self.failed: dict[str, dict[str, str]] = {study.claim.name: {} for study in studies}
        """By claim, and then by run or by experiment."""
        self.begun: dict[str, tuple[Study, Planned]] = {}
        """By the folder of the run. Claims share runs, so each is begun by the first that wants it."""
        self._hashes: set[str] = set()
        self._lacks: dict[tuple[str, int | None, str | None], str | None] = {}
        """What was opened, by task, length and pretrained model, and why it could not be."""
        self._expected: dict[tuple[str, int], float] = {}
        """Seconds of a run, while the book had so many rows."""

    def train(
        self,
        wanted: Callable[[Study], Sequence[Planned]],
        *,
        is_timed: bool,
        alone: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Train what the studies want, now and as their books grow."""
        if self.until is not None and time.monotonic() > self.until:
            return
        looked_at = -1

        def new() -> dict[str, TrainConfig]:
            nonlocal looked_at
            rows = len(self.studies[0].ledger.runs)
            if rows == looked_at:
                return {}
            looked_at = rows
            begun: dict[str, TrainConfig] = {}
            for study in self.studies:
                begun |= self._begin(study, wanted(study), is_timed)
            return begun

        configs = new()
        if not configs:
            return
        guess = TIMED_GUESS_GIB if is_timed and self.studies[0].scale == "small" else GUESS_GIB.get(self.studies[0].scale)
        done = run_study(
            configs, self.folder, jobs=1 if alone else self.jobs, until=self.until, listen=self._record_and_listen,
            guess_gib=guess, environment=environment, lasts=self._seconds, more=new, order=self._order,
        )  # fmt: skip
        for job in done:
            study, planned = self.begun[job.name]
            if job.status == "failed":
                self.failed[study.claim.name][planned.name] = job.failure or f"see {LOG} in {job.folder}"

    def _begin(self, study: Study, runs: Sequence[Planned], is_timed: bool) -> dict[str, TrainConfig]:
        """Of these runs, those that nobody has made or begun, by folder."""
        configs: dict[str, TrainConfig] = {}
        for planned in study.missing(runs):
            digest = settings_hash(planned.config)
            if planned.experiment.is_timed != is_timed or digest in self._hashes or not self._has_what_it_reads(study, planned):
                continue
            self._hashes.add(digest)
            # a CPU's run does not go on on a GPU, nor is it taken for one of the GPU's
            name = f"{study.claim.name}/{study.scale}/{planned.name}-{slug(study.device).lower()}"
            self.begun[name] = study, planned
            configs[name] = self._here(planned.config)
        return configs

    def _record_and_listen(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.status in ("finished", "diverged"):
                self._record_once(*self.begun[job.name], job.folder)
        self.listen(jobs)

    def _order(self, name: str) -> tuple[int, bool, bool, int, int]:
        """Time that is up leaves verdicts of the first claims: claim by claim, final runs before trials, those that statements
        name before others, seed by seed."""
        study, planned = self.begun[name]
        places = self.studies.index(study), study.experiments.index(planned.experiment)
        return places[0], planned.is_tuning, not study.is_judged(planned), places[1], planned.config.seed

    def check(self, seeds: int) -> None:
        """Where nothing of what is to be trained can be read, that is an error of the caller's."""
        runs = [(study, p) for study in self.studies for p in study.missing([*study.tuning(), *study.finals(seeds)])]
        self._open(planned.config for _, planned in runs)
        readable = [self._has_what_it_reads(study, planned) for study, planned in runs]
        if runs and not any(readable):
            raise ValueError(next(why for failed in self.failed.values() for why in failed.values()))

    def _open(self, configs: Iterable[TrainConfig]) -> None:
        """Read every task, all side by side, while no run needs the GPU yet; one of several lengths is one after another, because
        its files in the cache are the same.

        What takes long (tokens, for instance) is then in the cache, and not done by all processes at the same time.
        """
        by_task: dict[str, list[TrainConfig]] = {}
        for config in configs:
            by_task.setdefault(config.task, []).append(config)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._open_in_turn, by_task.values()))

    def _open_in_turn(self, configs: Sequence[TrainConfig]) -> None:
        for config in configs:
            self._lack(config)

    def _lack(self, config: TrainConfig) -> str | None:
        """Why the data or the pretrained model of a run cannot be read; None where they are there. Asked once for each."""
        reads = config.task, config.length, config.pretrained
        if reads not in self._lacks:
            try:
                open_task(self._here(config))
                self._lacks[reads] = None
            except (FileNotFoundError, ValueError) as error:
                self._lacks[reads] = str(error)
        return self._lacks[reads]

    def _has_what_it_reads(self, study: Study, planned: Planned) -> bool:
        """Whether data and a pretrained model are there. What is not stops its experiment, and not the rest of the claim."""
        lack = self._lack(planned.config)
        if lack is not None:
            self.failed[study.claim.name][planned.experiment.name] = lack
        return lack is None

    def _seconds(self, name: str) -> float:
        """How long a run should take. Asked again and again, and known until the book grows."""
        study, planned = self.begun[name]
        key = name, len(study.ledger.runs)
        if key not in self._expected:
            self._expected[key] = self._expect(study, planned)
        return self._expected[key]

    def _expect(self, study: Study, planned: Planned) -> float:
        """By the slowest run of its contender so far, in any claim; of its experiment; or of all. Where nobody knows, 0 without a
        limit of time, and with one enough not to start at the last second."""
        rows = [run.row for run in study.ledger.runs.values() if run.device == study.device]
        rows = [row for row in rows if row["seconds"] and row["step_ms"]]
        settings = {name: value for name, value in settings_of(planned.config).items() if name not in VARIED}
        experiment = {"claim": study.claim.name, "scale": study.scale, "experiment": planned.experiment.name}
        alike = [row for row in rows if settings.items() <= row["settings"].items()]
        alike = alike or [row for row in rows if experiment.items() <= row.items()]
        if alike:
            return _expected_seconds(alike, planned.config.steps)
        if self.minutes is None:
            return 0.0
        slowest = max((row["seconds"] for row in rows if row["scale"] == study.scale), default=None)
        guess = UNKNOWN_SECONDS if slowest is None else STARTING_SECONDS + slowest
        return min(guess, 60 * self.minutes / 2)  # a short session makes something too

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

    def _record_once(self, study: Study, planned: Planned, folder: Path) -> None:
        """Enter a run that has ended. One that cannot be entered must not end the others."""
        failed = self.failed[study.claim.name]
        if planned.name in failed or study.find(planned) is not None:
            return
        try:
            device = RunRecord(folder).info["environment"]["device"]
            if device == study.device:
                self._record(study, planned, folder)
            else:  # in the book it would not be found, and entered again at every look
                failed[planned.name] = (
                    f"it trained on {device}, not on {study.device}: its process saw other hardware than this one does (is "
                    f"ACCELERATE_USE_CPU set?); remove {folder} to train it again"
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            failed[planned.name] = f"it ended, but could not be recorded ({type(error).__name__}: {error}); see {folder}"

    def _record(self, study: Study, planned: Planned, folder: Path) -> None:
        record = RunRecord(folder)
        facts = {
            "claim": study.claim.name,
            "scale": study.scale,
            "experiment": planned.experiment.name,
            "contender": planned.contender.label,
            "role": "tuning" if planned.is_tuning else "final",
        }
        row = make_row(record, planned.config, facts)
        flops = training_flops(planned.config, row["switched_at"])
        study.ledger.add(study.claim.name, {**row, "flops": {"dense": flops.dense, "sparse": flops.sparse}})

    def progress(self, study: Study, seeds: int) -> Progress:
        """What is missing: trials, and final runs; those whose rate is not known yet by contender and seed."""
        trials = [planned.name for planned in study.missing(study.tuning())]
        finals = [planned.name for planned in study.missing(study.finals(seeds))]
        return Progress([*trials, *finals, *study.unknown(seeds)], self.failed[study.claim.name])


def _expected_seconds(rows: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Of a run of so many updates at the slowest pace of these."""
    pace = max(row["step_ms"] for row in rows) / 1e3
    compiling = max(row["seconds"] - row["steps"] * row["step_ms"] / 1e3 for row in rows)  # once, however long the run
    return STARTING_SECONDS + max(0.0, compiling) + pace * steps
