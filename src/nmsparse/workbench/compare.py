"""Several recipes and seeds side by side, each run in a process of its own, as many at a time as memory allows.

A comparison is a folder of run folders. What is finished in it is not run again, and what was interrupted goes on from its last
checkpoint, so calling it again with the same arguments continues it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nmsparse.workbench.records import METRICS, RESULT, RUN, RunRecord, write_json
from nmsparse.workbench.training import TrainConfig

CONFIG, LOG = "config.json", "log.txt"
POLL_SECONDS = 0.3
STOP_SECONDS = 10
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells its processes: a run that inherited it would wait for the others."""
PROCESS_BYTES = 600 << 20
"""What a CUDA process takes beside torch's own memory."""


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
                runs[f"{_slug(config.label)}-seed{seed}"] = config
    return runs


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


@dataclass
class Job:
    """One run of a comparison."""

    name: str
    config: TrainConfig
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    failure: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process beside ours."""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> str:
        """waiting, running, finished, diverged or failed"""
        if self.is_running:
            return "running"
        if (self.folder / RESULT).exists():
            return str((RunRecord(self.folder).result or {}).get("status"))
        return "waiting" if self.process is None else "failed"

    @property
    def unit(self) -> str:
        """What its throughput counts."""
        return str(RunRecord(self.folder).info["task"]["unit"])

    def last_row(self) -> dict[str, Any]:
        """The newest log row, from the end of the file: a long run's is not read as a whole."""
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
    configs: dict[str, TrainConfig],
    folder: Path,
    *,
    jobs: int | None = None,
    until: float | None = None,
    listen: Listener = lambda jobs: None,
    guess_gib: float | None = None,
    environment: Mapping[str, str] | None = None,
    lasts: Callable[[str], float] = lambda name: 0.0,
) -> list[Job]:
    """Train everything; return the jobs, finished, diverged or failed. ``jobs`` caps how many run at a time.

    No run starts that would end after ``until`` (of time.monotonic), going by the seconds that it ``lasts``; it is returned as
    waiting.
    ``guess_gib`` is what a run may take until the first has said what it does take; without it that one is waited for.
    """
    all_jobs = [Job(name, config, folder / name, environment=environment or {}) for name, config in configs.items()]
    for job in all_jobs:
        _prepare(job)
    waiting = [job for job in all_jobs if job.status not in ("finished", "diverged")]
    try:
        with _ends_on_signals():
            _run(all_jobs, waiting, jobs, until, listen, guess_gib, lasts)
    finally:
        _stop(all_jobs)
    listen(all_jobs)
    return all_jobs


def _prepare(job: Job) -> None:
    """Write what the process is to do; refuse a folder in which another run was made."""
    file = job.folder / CONFIG
    if file.exists():
        differences = job.config.differences(TrainConfig.from_dict(TrainConfig.read(file), str(file)))
        if differences:
            raise ValueError(f"{job.folder} holds another run ({'; '.join(differences[:4])}): choose another folder.")
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(file, job.config.to_dict())


def _run(
    all_jobs: list[Job],
    waiting: list[Job],
    jobs: int | None,
    until: float | None,
    listen: Listener,
    guess_gib: float | None,
    lasts: Callable[[str], float],
) -> None:
    # of all jobs, not of those that are left: threads decide about rounding, and a comparison that goes on must go on exactly
    most = min(len(all_jobs), jobs or (8 if torch.cuda.is_available() else os.cpu_count() or 1)) or 1
    threads = max(1, (os.cpu_count() or 1) // most)
    while waiting or any(job.is_running for job in all_jobs):
        running = [job for job in all_jobs if job.is_running]
        if until is not None:
            waiting[:] = [job for job in waiting if time.monotonic() + lasts(job.name) <= until]
        if waiting and len(running) < most and _fits(running, all_jobs, guess_gib):
            _start(waiting.pop(0), threads)
        _note_failures(all_jobs)
        listen(all_jobs)
        time.sleep(POLL_SECONDS)
    _note_failures(all_jobs)  # of those that ended since


def _stop(all_jobs: list[Job]) -> None:
    """End what still runs, and wait for it: the next call finds the folders free."""
    running = [job.process for job in all_jobs if job.process is not None and job.is_running]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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


def _note_failures(all_jobs: list[Job]) -> None:
    for job in all_jobs:
        if job.process is not None and job.failure is None and job.status == "failed":
            job.failure = _last_words(job)


def _start(job: Job, threads: int) -> None:
    alone = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    environment = {
        **alone,
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),  # by default each run would start a worker for every core
        "TOKENIZERS_PARALLELISM": "false",
        **job.environment,
    }
    with (job.folder / LOG).open("wb") as log:
        command = [sys.executable, "-m", "nmsparse.workbench.training", str(job.folder)]
        job.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


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
    """The last line that a process wrote before it failed."""
    lines = (job.folder / LOG).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {job.process.returncode if job.process else '?'}"


def is_study(folder: Path) -> bool:
    """Whether a folder holds runs."""
    return folder.is_dir() and any(folder.glob(f"*/{RUN}"))
