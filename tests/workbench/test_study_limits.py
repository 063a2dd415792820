"""What limits a study: its time, its hardware, the life of the process that leads it, and what it can read."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process_worker import InProcessWorker

from nmsparse.workbench import compare as compare_module
from nmsparse.workbench._workers import PARENT
from nmsparse.workbench.compare import Job, run_study
from nmsparse.workbench.records import RunRecord
from nmsparse.workbench.reproduce import SCALES, Claim, Ledger, Study, reproduce
from nmsparse.workbench.reproduce import _runner as runner
from nmsparse.workbench.reproduce._claim import Contender, Experiment, Setup
from nmsparse.workbench.reproduce._ledger import device_name, settings_hash, settings_of
from nmsparse.workbench.reproduce._runner import Progress
from nmsparse.workbench.training import TrainConfig

TINY: dict[str, Any] = {
    "task": "shakespeare", "model": "gpt2", "width": 16, "layers": 1, "heads": 2, "length": 16, "limit": 32, "batch": 4,
    "steps": 4, "eval_batches": 1, "log_every": 1, "emulate": True, "save": False,
}  # fmt: skip
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


def experiment(name: str, **changes: Any) -> Experiment:
    setup = Setup(TINY | changes, (1e-3,))
    return Experiment(name, name, dict.fromkeys(SCALES, setup), (Contender("dense"), Contender("ste@2:4")))


def claim(*experiments: Experiment, name: str = "tiny") -> Claim:
    return Claim(name, "Tiny", "Nobody, 2026.", "Nothing in particular.", experiments, ())


def only_dense(each: Experiment) -> Experiment:
    return replace(each, contenders=each.contenders[:1])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(InProcessWorker, "given", [])
    monkeypatch.setattr(compare_module, "Worker", InProcessWorker)
    monkeypatch.setattr(compare_module, "POLL_SECONDS", 0.0)
    return monkeypatch


# ---- time ----


class LateClock:
    """A clock that says it is much later as soon as a run has begun to train."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_late = False
        monkeypatch.setattr(compare_module, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(compare_module, "time", SimpleNamespace(monotonic=self.monotonic, sleep=time.sleep))

    def monotonic(self) -> float:
        return time.monotonic() + 1e6 * self.is_late

    def listen(self, jobs: list[Job]) -> None:
        self.is_late = self.is_late or any(job.last_row() for job in jobs)


def test_a_run_that_overruns_is_ended_and_left_and_made_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = claim(only_dense(experiment("gpt", steps=300)))
    arguments: dict[str, Any] = {"scale": "toy", "seeds": 1, "folder": tmp_path / "runs"}
    with monkeypatch.context() as patched:
        clock = LateClock(patched)
        ((study, progress),) = reproduce([long], tmp_path / "book", **arguments, minutes=10, listen=clock.listen)
    (planned,) = study.finals(1)
    assert progress == Progress([planned.name], {})
    (folder,) = (tmp_path / "runs" / "tiny" / "toy").iterdir()
    assert RunRecord(folder).result is None, "it was in the middle of it"
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a run goes on
    ((study, progress),) = reproduce([long], tmp_path / "book", **arguments)
    assert progress == Progress([], {})
    assert study.find(planned) is not None


def test_what_runs_a_little_longer_than_expected_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "GRACE_SECONDS", 1e9)
    clock = LateClock(monkeypatch)
    configs = {str(seed): TrainConfig.from_dict(TINY | {"recipe": "dense", "seed": seed}) for seed in (0, 1)}
    jobs = run_study(configs, tmp_path, jobs=1, until=time.monotonic() + 1000, listen=clock.listen)
    assert [job.status for job in jobs] == ["finished", "waiting"]


def test_a_run_that_is_found_to_be_shorter_starts_after_all(tmp_path: Path, here: Any) -> None:
    configs = {str(seed): TrainConfig.from_dict(TINY | {"recipe": "dense", "seed": seed}) for seed in (0, 1)}
    ended: set[str] = set()
    jobs = run_study(
        configs, tmp_path, jobs=1, until=time.monotonic() + 1000, lasts=lambda name: 0.0 if name == "0" or ended else 1e6,
        listen=lambda jobs: ended.update(job.name for job in jobs if job.status == "finished"), more=dict,
    )  # fmt: skip
    assert [job.status for job in jobs] == ["finished", "finished"]


@pytest.fixture
def add(tmp_path: Path) -> Callable[..., None]:
    """Enters a row as if a run of a study had been made."""

    def add(study: Study, planned: Any, seconds: float, step_ms: float = 10.0) -> None:
        config = planned.config
        row = {
            "version": 1, "claim": study.claim.name, "scale": study.scale, "experiment": planned.experiment.name,
            "contender": planned.contender.label, "hash": settings_hash(config), "settings": settings_of(config),
            "seed": config.seed, "steps": config.steps, "step_ms": step_ms, "seconds": seconds, "status": "finished",
            "when": "2026-11-16T00:00:00+00:00", "environment": {"device": study.device},
        }  # fmt: skip
        study.ledger.add(study.claim.name, row)

    return add


def test_the_next_of_kin_say_how_long_a_run_takes(tmp_path: Path, add: Callable[..., None]) -> None:
    """All of that scale (half the session at most), then its experiment, then its contender in whichever claim."""
    ledger = Ledger(tmp_path)
    ours = Study(claim(experiment("gpt", steps=100)), "toy", ledger, "a GPU")
    far = Study(claim(experiment("far", batch=8), name="far"), "toy", ledger, "a GPU")
    theirs = Study(claim(experiment("their gpt", steps=100), name="other"), "toy", ledger, "a GPU")
    session = runner._Session([ours], tmp_path, None, None, 20.0, lambda jobs: None)
    dense, ste = ours.finals(1)
    (name,) = session._begin(ours, [ste], is_timed=False)
    assert session._seconds(name) == runner.UNKNOWN_SECONDS
    add(Study(far.claim, "toy", ledger, "another GPU"), far.finals(1)[0], 900.0)
    assert session._seconds(name) == runner.UNKNOWN_SECONDS
    add(far, far.finals(1)[0], 300.0)
    assert session._seconds(name) == runner.STARTING_SECONDS + 300
    session._expected.clear()
    session.minutes = 2.0
    assert session._seconds(name) == 60
    add(ours, dense, 200.0, step_ms=1000.0)
    assert session._seconds(name) == runner.STARTING_SECONDS + 100 + 100
    add(theirs, theirs.finals(2)[-1], 50.0, step_ms=400.0)
    assert session._seconds(name) == pytest.approx(runner.STARTING_SECONDS + 10 + 40)


# ---- hardware ----


def test_a_run_of_other_hardware_is_not_booked_and_said_once(tmp_path: Path, here: pytest.MonkeyPatch) -> None:
    here.setattr(runner, "device_name", lambda: "Some GPU 9")
    small = claim(experiment("gpt"))
    ((study, progress),) = reproduce([small], tmp_path / "book", scale="toy", seeds=2, folder=tmp_path / "runs")
    names = sorted(planned.name for planned in study.finals(2))
    assert sorted(progress.failed) == sorted(progress.left) == names
    assert all(f"it trained on {device_name()}, not on Some GPU 9: " in why for why in progress.failed.values())
    assert not list((tmp_path / "book").glob("*.jsonl"))


def test_a_run_does_not_go_on_on_other_hardware(tmp_path: Path, here: pytest.MonkeyPatch) -> None:
    small = claim(only_dense(experiment("gpt")))
    reproduce([small], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs")
    here.setattr(runner, "device_name", lambda: "Some GPU 9")
    reproduce([small], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs")
    cpu, gpu = sorted((tmp_path / "runs" / "tiny" / "toy").iterdir(), key=lambda folder: "some-gpu-9" in folder.name)
    assert cpu.name.endswith("-cpu")
    assert gpu.name.endswith("-some-gpu-9")
    assert len(Ledger(tmp_path / "book").runs) == 1


def test_cores_are_those_that_this_process_may_use() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cores cannot be taken away here")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert compare_module.cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert compare_module.cores() == len(before)


# ---- processes ----

LEADER = """
import subprocess, sys, os
from nmsparse.workbench._workers import PARENT
environment = {**os.environ, PARENT: str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, env=environment)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
child.wait()
"""
FOLLOWER = """
import time
from nmsparse.workbench._workers import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    """A process that nobody waits for stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@on_linux
def test_a_worker_dies_with_its_parent() -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER, FOLLOWER], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pid, said = leader.stdout.readline().split()
    assert said == "ready"
    assert not is_gone(int(pid))
    leader.kill()
    leader.wait()
    leader.stdout.close()
    wait_for(lambda: is_gone(int(pid)))


@on_linux
def test_a_worker_whose_parent_is_gone_already_does_not_begin() -> None:
    environment = {**os.environ, PARENT: str(2**22 + 1)}  # above the highest process number
    done = subprocess.run([sys.executable, "-c", FOLLOWER], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "is gone" in done.stderr
    assert "ready" not in done.stdout


# ---- words ----

CUDA = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    raise ValueError: not this line
torch.AcceleratorError: CUDA error: device-side assert triggered
Search for `cudaErrorAssert' in https://docs.nvidia.com for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (CUDA, "torch.AcceleratorError: CUDA error: device-side assert triggered"),
        ("ValueError: the cause\n\nThe above exception ...\n\nRuntimeError: the end\n", "RuntimeError: the end"),
        ("AssertionError\nsome advice\n", "AssertionError"),
        ("no error\nbut a last line\n", "but a last line"),
        ("", "exit code 1"),
    ],
)
def test_the_last_error_of_a_log_is_its_last_word(log: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    failed: Any = SimpleNamespace(exit_code=1)
    assert compare_module._last_words(Job("a", TrainConfig(), tmp_path, failed)) == words


# ---- data ----


def test_tasks_are_opened_side_by_side_and_each_once(tmp_path: Path, here: pytest.MonkeyPatch) -> None:
    """Each waits until the other has begun; a task that cannot be read stops its own experiment."""
    both = threading.Barrier(2, timeout=60)
    opened: list[tuple[str, int | None]] = []

    def open_task(config: TrainConfig) -> None:
        opened.append((config.task, config.length))
        if config.length == 16:
            both.wait()
        if config.task == "questions":
            raise ValueError("no questions")

    here.setattr(runner, "open_task", open_task)
    parts = [experiment("gpt"), experiment("longer", length=32), experiment("bert", task="questions", model="bert")]
    ((study, progress),) = reproduce([claim(*parts)], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs")
    assert sorted(opened) == [("questions", 16), ("shakespeare", 16), ("shakespeare", 32)]
    assert progress.failed == {"bert": "no questions"}
    assert {run.row["experiment"] for run in study.ledger.runs.values()} == {"gpt", "longer"}
