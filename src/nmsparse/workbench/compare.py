"""Several recipes and seeds side by side, in as many processes as memory allows; each trains one run after another.

A comparison is a folder of run folders. What is finished in it is not run again, and what was interrupted goes on from its last
checkpoint, so calling it again with the same arguments continues it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nmsparse.workbench._workers import LOG, Worker
from nmsparse.workbench.records import METRICS, RESULT, RUN, RunRecord, write_json
from nmsparse.workbench.training import TrainConfig

CONFIG = "config.json"
POLL_SECONDS = 0.3
GRACE_SECONDS = 15
"""How long a run may go on when time is up: expectations are near, and one that is almost there is not thrown away."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells its processes: a run that inherited it would wait for the others."""
PROCESS_BYTES = 600 << 20
"""What a CUDA process takes beside torch's own memory."""
ERROR = re.compile(r"[\w.]*(Error|Exception)(:.*)?")
"""The line of a traceback that says what happened."""


@dataclass(frozen=True)
class Candidate:
    """A recipe to compare: "s-ste", with options "s-ste:mvue=false,precision=fp8", or with a pattern of its own "sr-ste@1:4"."""

    recipe: str
    pattern: str | None
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Candidate:
        match = re.fullmatch(r"(?P<recipe>[^:@]+)(@(?P<pattern>\d+:\d+))?(:(?P<options>.+))?", text)
        if match is None:
            raise ValueError(f'{text!r} is not a recipe such as s-ste, s-ste@1:4 or "s-ste:mvue=false".')
        words = (match["options"] or "").split(",") if match["options"] else []
        return cls(match["recipe"], match["pattern"], dict(parse_option(word) for word in words))


def parse_option(text: str) -> tuple[str, Any]:
    """``name=value`` with a value in Python or JSON notation; anything else is a word."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"{text!r} is not an option such as mvue=false.")
    constants = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in constants:
        return name.strip(), constants[value.lower()]
    try:
        return name.strip(), ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name.strip(), value


def study(base: TrainConfig, candidates: Sequence[str], patterns: Sequence[str], seeds: int) -> dict[str, TrainConfig]:
    """All runs by folder name. Dense training has no pattern and runs once per seed."""
    runs: dict[str, TrainConfig] = {}
    for candidate in map(Candidate.parse, candidates):
        wanted = [candidate.pattern] if candidate.pattern else list(patterns)
        for pattern in wanted[:1] if candidate.recipe == "dense" else wanted:
            for seed in range(base.seed, base.seed + seeds):
                config = replace(base, recipe=candidate.recipe, pattern=pattern, options=candidate.options, seed=seed)
                runs[f"{slug(config.label)}-seed{seed}"] = config
    return runs


def slug(label: str) -> str:
    """As part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


@dataclass
class Job:
    """One run of a comparison."""

    name: str
    config: TrainConfig
    folder: Path
    worker: Worker | None = None
    """The process that it was given to."""
    failure: str | None = None
    _ended: str | None = None
    """How, once that is known: it does not change any more."""
    _last: dict[str, Any] | None = None
    """The newest log row of a run that has ended."""

    @property
    def is_running(self) -> bool:
        return self._ended is None and self.worker is not None and self.worker.works_on(self.folder)

    @property
    def status(self) -> str:
        """waiting, running, finished, diverged or failed"""
        if self._ended is not None:
            return self._ended
        if self.is_running:
            return "running"
        if (self.folder / RESULT).exists():
            self._ended = str((RunRecord(self.folder).result or {}).get("status"))
            return self._ended
        return "waiting" if self.worker is None else "failed"

    @property
    def unit(self) -> str:
        """What its throughput counts."""
        return str(RunRecord(self.folder).info["task"]["unit"])

    def last_row(self) -> dict[str, Any]:
        """The newest log row; a study asks for all of them again and again."""
        if self._last is not None:
            return self._last
        row = self._newest_row()
        if self._ended is not None:
            self._last = row
        return row

    def _newest_row(self) -> dict[str, Any]:
        """From the end of the file: a long run's is not read as a whole."""
        file = self.folder / METRICS
        if not file.exists():
            return {}
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - (64 << 10)))
            lines = opened.read().splitlines()
        for line in reversed(lines):
            if line.startswith(b'{"kind": "train"'):
                try:
                    row: dict[str, Any] = json.loads(line)
                except ValueError:
                    continue  # still being written
                return row
        return {}


Listener = Callable[[list[Job]], None]


def run_study(
    configs: Mapping[str, TrainConfig],
    folder: Path,
    *,
    jobs: int | None = None,
    until: float | None = None,
    listen: Listener = lambda jobs: None,
    guess_gib: float | None = None,
    environment: Mapping[str, str] | None = None,
    lasts: Callable[[str], float] = lambda name: 0.0,
    more: Callable[[], Mapping[str, TrainConfig]] | None = None,
    order: Callable[[str], Any] | None = None,
) -> list[Job]:
    """Train everything; return the jobs, finished, diverged or failed. ``jobs`` caps how many run at a time.

    No run starts that would end after ``until`` (of time.monotonic), going by the seconds that it ``lasts``, and one that still
    trains some seconds later is ended; both are returned as waiting. ``more`` is asked now and then for runs that have become
    possible meanwhile; what waits starts by its ``order``.
    ``guess_gib`` is what a run may take until the first has said what it does take; without it that one is waited for.
    """
    study = _Study(folder, jobs, until, listen, guess_gib, environment or {}, lasts, more, order)
    study.add(configs)
    try:
        with _ends_on_signals():
            study.run()
    finally:
        study.stop()
    listen(study.jobs)
    return study.jobs


class _Study:
    """Runs, and the processes that train them."""

    def __init__(
        self,
        folder: Path,
        at_a_time: int | None,
        until: float | None,
        listen: Listener,
        guess_gib: float | None,
        environment: Mapping[str, str],
        lasts: Callable[[str], float],
        more: Callable[[], Mapping[str, TrainConfig]] | None,
        order: Callable[[str], Any] | None,
    ) -> None:
        self.folder, self.at_a_time, self.until, self.listen = folder, at_a_time, until, listen
        self.guess_gib, self.environment, self.lasts, self.more, self.order = guess_gib, environment, lasts, more, order
        self.jobs: list[Job] = []
        self.waiting: list[Job] = []
        self.workers: list[Worker] = []

    def add(self, configs: Mapping[str, TrainConfig]) -> None:
        new = [Job(name, config, self.folder / name) for name, config in configs.items()]
        for job in new:
            _prepare(job)
        self.jobs += new
        self.waiting += [job for job in new if job.status not in ("finished", "diverged")]
        if self.order is not None:
            order = self.order
            self.waiting.sort(key=lambda job: order(job.name))

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.is_running]

    @property
    def most(self) -> int:
        """Runs at a time. Of all jobs, not of those that are left: threads decide about rounding, and a comparison that goes on
        must go on exactly."""
        wanted = self.at_a_time or (8 if torch.cuda.is_available() else cores())
        return wanted if self.more is not None else max(1, min(len(self.jobs), wanted))

    def run(self) -> None:
        while True:
            self._start_what_fits()
            is_busy = bool(
                self.running
            )  # asked first: all that ended before it is told below, and followed by what it makes possible
            self._tell()
            if self.until is not None and time.monotonic() > self.until + GRACE_SECONDS:
                self._leave()
                return
            if self.more is not None:
                self.add(self.more())
            if not (is_busy or self._in_time()):
                return
            time.sleep(POLL_SECONDS)

    def _in_time(self) -> list[Job]:
        """What waits and would end before time is up. The others stay: a run that ends sooner than expected may let them in."""
        if self.until is None:
            return list(self.waiting)
        left = self.until - time.monotonic()
        return [job for job in self.waiting if self.lasts(job.name) <= left]

    def _leave(self) -> None:
        """Runs that still train are ended by stop(): they did not fail, but wait for the next call."""
        for job in self.running:
            job.worker = None

    def _start_what_fits(self) -> None:
        for worker in [worker for worker in self.workers if not worker.is_alive]:
            worker.wait()
            self.workers.remove(worker)
        running = self.running
        for job in self._in_time():
            if len(running) >= self.most or not _fits(running, self.jobs, self.guess_gib):
                return
            self.waiting.remove(job)
            worker = next((worker for worker in self.workers if worker.is_idle and worker.give(job.folder)), None)
            if worker is None:
                worker = _start(job, max(1, cores() // self.most), self.environment)
                self.workers.append(worker)
            job.worker = worker
            running.append(job)

    def _tell(self) -> None:
        for job in self.jobs:
            if job.worker is not None and job.failure is None and job.status == "failed":
                job.failure = _last_words(job)
        self.listen(self.jobs)

    def stop(self) -> None:
        """End what still runs, and wait for it: the next call finds the folders free."""
        for worker in self.workers:
            if worker.is_idle:
                worker.dismiss()
            else:
                worker.terminate()
        for worker in self.workers:
            worker.wait()


def cores() -> int:
    """Those that this process may use: a container or a batch system may have given it some of many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare(job: Job) -> None:
    """Write what the process is to do; refuse a folder in which another run was made."""
    file = job.folder / CONFIG
    if file.exists():
        differences = job.config.differences(TrainConfig.from_dict(TrainConfig.read(file), str(file)))
        if differences:
            raise ValueError(f"{job.folder} holds another run ({'; '.join(differences[:4])}): choose another folder.")
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(file, job.config.to_dict())


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """A closed terminal or a kill ends a comparison as Ctrl-C does: its processes must not go on without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    # nohup ignores SIGHUP, and whoever handles a signal already knows better
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _start(job: Job, threads: int, environment: Mapping[str, str]) -> Worker:
    alone = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    own = {
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),  # by default each run would start a worker for every core
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Worker({**alone, **own, **environment}, job.folder)


def _fits(running: list[Job], all_jobs: list[Job], guess_gib: float | None) -> bool:
    """Whether memory holds one more run, going by the largest that any run of this study has taken so far.

    Runs that have not logged yet will take as much as that. Before the first has logged, the guess counts; without one nobody
    knows, and it is waited for.
    """
    if not running:
        return True
    known = [row["memory_gib"] for job in all_jobs if (row := job.last_row())]
    if not known and guess_gib is not None:
        known = [guess_gib]
    if not known:
        return False
    free = _free_bytes()
    most = 1.2 * max(known) * 2**30 + (PROCESS_BYTES if torch.cuda.is_available() else 0)
    unseen = sum(not job.last_row() for job in running)
    return free is None or free > (1 + unseen) * most


def _free_bytes() -> int | None:
    """Memory that nobody uses, on the device that runs train on; None where it cannot be told."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable")), None)
    return None if available is None else int(available) << 10


def _last_words(job: Job) -> str:
    """Why a process failed: the last error in its log, or else its last line; nothing of that, where it was killed."""
    code = job.worker.exit_code if job.worker else None
    if code is not None and code < 0:
        why = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{why}"
    lines = (job.folder / LOG).read_text(errors="replace").strip().splitlines()
    # CUDA's errors, for one, end in advice that is the same for all of them
    error = next((line for line in reversed(lines) if ERROR.fullmatch(line.rstrip())), None)
    return error or (lines[-1] if lines else f"exit code {code}")


def is_study(folder: Path) -> bool:
    """Whether a folder holds runs."""
    return folder.is_dir() and any(folder.glob(f"*/{RUN}"))
