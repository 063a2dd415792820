"""Comparisons and the commands around them, as a user tries them, without a terminal."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from nmsparse.cli import app
from nmsparse.workbench import compare as compare_module
from nmsparse.workbench.compare import Candidate, Job, run_study, study
from nmsparse.workbench.records import RunRecord, find_runs
from nmsparse.workbench.reproduce import CLAIMS
from nmsparse.workbench.training import TrainConfig, train

TINY: dict[str, Any] = {
    "width": 16, "layers": 1, "heads": 2, "length": 16, "limit": 64, "batch": 4, "steps": 4, "eval_batches": 2, "log_every": 1,
}  # fmt: skip
FLAGS = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def nmsparse(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nmsparse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)


# ---- what is compared ----


def test_candidates_are_recipes_with_patterns_and_options() -> None:
    assert Candidate.parse("dense") == Candidate("dense", None, {})
    assert Candidate.parse("sr-ste@1:4") == Candidate("sr-ste", "1:4", {})
    assert Candidate.parse("s-ste@1:8:mvue=false,precision=fp8") == Candidate("s-ste", "1:8", {"mvue": False, "precision": "fp8"})
    assert Candidate.parse("sr-ste:decay=2e-4").options == {"decay": 2e-4}
    for wrong in ("", "s-ste@", "s-ste:mvue", "@2:4"):
        with pytest.raises(ValueError, match="is not"):
            Candidate.parse(wrong)


def test_a_study_crosses_recipes_patterns_and_seeds_and_runs_dense_once() -> None:
    runs = study(TrainConfig(), ["dense", "sr-ste", "s-ste@1:8"], ["2:4", "1:4"], seeds=2)
    assert list(runs) == [
        "dense-seed0", "dense-seed1", "sr-ste-2-4-seed0", "sr-ste-2-4-seed1", "sr-ste-1-4-seed0", "sr-ste-1-4-seed1",
        "s-ste-1-8-seed0", "s-ste-1-8-seed1",
    ]  # fmt: skip
    assert runs["sr-ste-1-4-seed1"].pattern == "1:4"
    assert runs["sr-ste-1-4-seed1"].seed == 1


# ---- running it ----


def test_a_comparison_trains_reports_and_continues(tmp_path: Path) -> None:
    """The whole path of make demo: two recipes, two seeds, table, report; a second call has nothing left to do."""
    arguments = ["compare", "dense", "s-ste", "--seeds", "2", "--output", "out", *FLAGS]
    first = nmsparse(*arguments, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[4 of 4]" in first.stdout
    assert "validation loss" in first.stdout
    assert "report: out/report.html" in first.stdout
    assert "nothing can be said about significance" in first.stdout
    records = find_runs(tmp_path / "out")
    assert [record.info["label"] for record in records] == ["dense", "dense", "s-ste 2:4", "s-ste 2:4"]
    assert all(record.result is not None and record.result["status"] == "finished" for record in records)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "s-ste 2:4" in page
    with (tmp_path / "out" / "report.results.csv").open() as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    expected = [record.result["valid"]["loss"] for record in records[2:] if record.result is not None]
    assert float(rows["s-ste 2:4"]["mean"]) == pytest.approx(sum(expected) / 2)
    before = {record.folder: (record.folder / "metrics.jsonl").stat().st_mtime_ns for record in records}
    again = nmsparse(*arguments, "--json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {folder: (folder / "metrics.jsonl").stat().st_mtime_ns for folder in before} == before
    values = json.loads(again.stdout)
    assert values["failed"] == 0
    assert [row["label"] for row in values["results"][0]["rows"]] == ["dense", "s-ste 2:4"]
    other = nmsparse(*arguments, "--lr", "0.5", folder=tmp_path)
    assert other.returncode == 2
    assert "holds another run (lr 0.5 against None)" in other.stderr


def test_a_run_that_fails_is_named_and_the_others_finish(tmp_path: Path) -> None:
    good = TrainConfig.from_dict(TINY | {"recipe": "dense", "steps": 1})
    bad = TrainConfig.from_dict(TINY | {"recipe": "dense", "steps": 1, "model": "nonsense"})
    jobs = run_study({"bad": bad, "good": good}, tmp_path)
    assert [job.status for job in jobs] == ["failed", "finished"]
    assert jobs[0].failure is not None
    assert "there is no model named 'nonsense'" in jobs[0].failure


def test_a_process_that_has_trained_before_trains_the_same(tmp_path: Path) -> None:
    """One process for two runs, and one for each: bit for bit the same losses, in logs of their own."""
    configs = {name: TrainConfig.from_dict(TINY | {"recipe": name}) for name in ("s-ste", "ste")}
    together = run_study(configs, tmp_path / "together", jobs=1)
    assert together[0].worker is together[1].worker
    for name, config in configs.items():
        run_study({name: config}, tmp_path / "apart", jobs=1)
        rows = [RunRecord(tmp_path / where / name).rows("valid") for where in ("together", "apart")]
        assert rows[0] == rows[1]


def test_a_process_that_failed_is_replaced(tmp_path: Path) -> None:
    configs = {str(n): TrainConfig.from_dict(TINY | {"recipe": "dense", "steps": 1, "seed": n}) for n in range(3)}
    configs["1"] = replace(configs["1"], model="nonsense")
    first, failed, last = run_study(configs, tmp_path, jobs=1)
    assert [job.status for job in (first, failed, last)] == ["finished", "failed", "finished"]
    assert first.worker is failed.worker is not last.worker
    assert (tmp_path / "1" / "log.txt").read_text().count("Traceback") == 1
    assert not any(job.worker.is_alive for job in (first, last) if job.worker is not None)


def test_runs_that_become_possible_meanwhile_join(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(TINY | {"recipe": "dense", "steps": 1})
    later = iter([{}, {"second": replace(config, seed=1)}])
    jobs = run_study({"first": config}, tmp_path, jobs=1, more=lambda: next(later, {}))
    assert {job.name: job.status for job in jobs} == {"first": "finished", "second": "finished"}


@pytest.mark.parametrize("asked", range(1, 9))
def test_a_run_that_ends_at_any_moment_is_followed_by_what_it_makes_possible(
    asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while its process is asked for the n-th time: between any two lines of the loop."""

    class Ending:
        is_alive, is_idle, exit_code = True, False, None

        def __init__(self, environment: Any, folder: Path) -> None:
            self.left = asked

        def works_on(self, folder: Path) -> bool:
            self.left -= 1
            if self.left == 0:
                (folder / "result.json").write_text('{"status": "finished"}')
            return self.left > 0

        def nothing(self) -> None:
            """There is no process."""

        dismiss = terminate = wait = nothing

    monkeypatch.setattr(compare_module, "Worker", Ending)
    monkeypatch.setattr(compare_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(compare_module, "RunRecord", lambda folder: SimpleNamespace(result={"status": "finished"}))
    booked: set[str] = set()
    later = ["second"]
    config = TrainConfig.from_dict(TINY | {"recipe": "dense"})

    def more() -> dict[str, TrainConfig]:
        return {later.pop(): config} if booked and later else {}

    def listen(jobs: list[Job]) -> None:
        booked.update(job.name for job in jobs if job.status == "finished")

    jobs = run_study({"first": config}, tmp_path, jobs=1, listen=listen, more=more)
    assert [(job.name, job.status) for job in jobs] == [("first", "finished"), ("second", "finished")]


def test_what_waits_starts_by_its_order(tmp_path: Path) -> None:
    configs = {str(n): TrainConfig.from_dict(TINY | {"recipe": "dense", "steps": 1, "seed": n}) for n in range(3)}
    ended: dict[str, None] = {}
    run_study(configs, tmp_path, jobs=1, order=lambda name: -int(name), listen=lambda jobs: ended.update(
        dict.fromkeys(job.name for job in jobs if job.status == "finished")))  # fmt: skip
    assert list(ended) == ["2", "1", "0"]


def test_a_process_goes_back_to_its_own_number_of_threads(tmp_path: Path) -> None:
    """A resumed run takes as many as it began with: here one. The next one is another's."""
    config = TrainConfig.from_dict(TINY | {"recipe": "dense", "checkpoint_every": 1})

    def stop(step: int, row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "first", progress=stop)
    jobs = run_study({"first": config, "second": config}, tmp_path, jobs=1)
    assert jobs[0].worker is jobs[1].worker
    records = [RunRecord(tmp_path / job.name) for job in jobs]
    assert [record.info["environment"]["cpu_threads"] for record in records] == [1, compare_module.cores()]


def test_a_killed_process_is_said_to_be_killed(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("a warning of no importance\n")
    killed: Any = SimpleNamespace(exit_code=-int(signal.SIGKILL))
    words = compare_module._last_words(Job("a", TrainConfig(), tmp_path, killed))
    assert words == "killed by SIGKILL, perhaps because memory ran out"


def test_a_diverged_run_counts_as_diverged(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(TINY | {"recipe": "dense", "lr": 1e30, "clip": 0.0, "steps": 6})
    (job,) = run_study({"wild": config}, tmp_path)
    assert job.status == "diverged"
    assert "training stopped" in (RunRecord(tmp_path / "wild").result or {})["message"]


def test_a_killed_comparison_leaves_no_process_behind(tmp_path: Path) -> None:
    arguments = ["compare", "dense", "--seeds", "1", "--output", "out", *FLAGS, "--steps", "1000000", "--jobs", "1"]
    command = [sys.executable, "-m", "nmsparse", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    rows, lock = tmp_path / "out" / "dense-seed0" / "metrics.jsonl", tmp_path / "out" / "dense-seed0" / ".lock"
    while process.poll() is None and not (rows.exists() and rows.stat().st_size):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a run goes on


INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and its children with it
from nmsparse.cli import main
main()
"""


@pytest.mark.parametrize("arguments", [["train", "--recipe", "dense"], ["compare", "dense", "--seeds", "1", "--jobs", "1"]])
def test_an_interrupt_says_how_to_go_on_and_exits_with_130(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, *arguments, "--output", "out", *FLAGS, "--steps", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        while process.poll() is None and not any(file.stat().st_size for file in tmp_path.glob("out/**/metrics.jsonl")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert words.startswith("stopped; ")
    assert len(words.splitlines()) == 1


def test_the_pattern_of_a_configuration_file_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def stop(configs: dict[str, TrainConfig], *rest: Any, **others: Any) -> None:
        seen.extend(config.pattern for config in configs.values())
        raise ValueError("enough")

    monkeypatch.setattr("nmsparse.workbench.compare.run_study", stop)
    (tmp_path / "a.toml").write_text('pattern = "1:4"\n')
    for more, expected in ([], "1:4"), (["--pattern", "1:8"], "1:8"):
        seen.clear()
        CliRunner().invoke(app, ["compare", "ste", "--seeds", "1", "--config", str(tmp_path / "a.toml"), *more])
        assert seen == [expected]


@pytest.mark.parametrize("line", ['recipe = "sr-ste"', "[options]\nmvue = false"])
def test_a_file_that_says_what_candidates_say_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(line)
    result = CliRunner().invoke(app, ["compare", "dense", "--config", str(tmp_path / "a.toml"), "--output", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert "recipe and options of a comparison are given with its candidates" in result.output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_pretrained_folder_is_found_from_other_directories(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def stop(what: Any, *rest: Any, **others: Any) -> None:
        seen.extend(config.pretrained for config in ([what] if command == "train" else what.values()))
        raise ValueError("enough")

    monkeypatch.setattr("nmsparse.workbench.training.train", stop)
    monkeypatch.setattr("nmsparse.workbench.compare.run_study", stop)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    more = ["dense", "--seeds", "1"] if command == "compare" else []
    for given in ("bert", "nowhere"):
        CliRunner().invoke(app, [command, *more, "--pretrained", given])
    assert seen == [str(tmp_path / "bert"), "nowhere"]


def test_the_newest_row_is_read_while_a_line_is_being_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "valid", "step": 1}\n{"kind": "train", "st')
    assert Job("a", TrainConfig(), tmp_path).last_row()["step"] == 1


@pytest.mark.parametrize(("guess", "free_gib", "fits"), [(None, 100, False), (12.0, 100, True), (12.0, 20, False)])
def test_before_the_first_row_a_guess_decides_how_many_start(
    guess: float | None, free_gib: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has started and said nothing yet; the next needs room beside it."""
    monkeypatch.setattr(compare_module, "_free_bytes", lambda: free_gib << 30)
    silent = Job("first", TrainConfig(), tmp_path)
    assert compare_module._fits([silent], [silent], guess) is fits


def test_a_run_finds_few_compile_workers_and_what_a_study_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(compare_module, "Worker", lambda environment, folder: seen.update(environment))
    compare_module._start(Job("a", TrainConfig(), tmp_path), 2, {"NMSPARSE_CACHE": "elsewhere"})
    assert (seen["TORCHINDUCTOR_COMPILE_THREADS"], seen["OMP_NUM_THREADS"], seen["NMSPARSE_CACHE"]) == ("2", "2", "elsewhere")


# ---- commands ----


def test_train_from_a_file_prints_json_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("\n".join(f"{name} = {value}" for name, value in TINY.items()) + '\nrecipe = "dense"\n')
    first = nmsparse("train", "--config", "run.toml", "--recipe", "ste", "--output", "out", "--json", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    values = json.loads(first.stdout)
    assert (values["label"], values["status"], values["non_zero"]) == ("ste 2:4", "finished", 0.5)
    again = nmsparse("train", "--resume", "out", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "validation: loss" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--task", "shakespere"], "shakespere"),
        (["train", "--task", "cifar10"], "NMSPARSE_DATA"),
        (["train", "--recipe", "sste"], "sste"),
        (["train", "--option", "mvue"], "is not an option such as"),
        (["train", "--option", "wrong=1"], "s-ste has no option 'wrong'"),
        (["train", "--recipe", "step", "--optimizer", "adamw"], "choose step-adamw, not adamw"),
        (["train", *FLAGS, "--output", "/dev/null"], "/dev/null: File exists"),
        (["train", "--model", "vit"], "vit is a model for images"),
        (["train", "--config", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["train", "--resume", "nowhere"], "nowhere"),
        (["train", "--tracker", "nonsense"], "tracker 'nonsense' is not installed"),
        (["compare", "dense", "x-ste"], "x-ste"),
        (["compare", "--pattern", "5:4"], "5:4"),
        (["compare", "dense", "--output", "/dev/null"], "/dev/null/dense-seed0: Not a directory"),
        (["report", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_wrong_arguments_exit_with_2_and_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = nmsparse(*arguments, folder=tmp_path)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_tasks_and_models_are_listed(tmp_path: Path) -> None:
    rows = json.loads(nmsparse("tasks", "--json").stdout)
    assert {"shakespeare", "cifar10", "multi30k", "sst2"} <= {row["name"] for row in rows}
    assert all(row["models"] for row in rows)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """torchrun, without other code: the same losses, the same validation."""
    arguments = ["train", "--recipe", "sr-ste", *FLAGS, "--json"]
    assert nmsparse(*arguments, "--output", "one", folder=tmp_path).returncode == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nmsparse"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, *arguments, "--output", "two"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    one, two = RunRecord(tmp_path / "one"), RunRecord(tmp_path / "two")
    assert two.info["environment"]["processes"] == 2
    losses = [row["loss"] for row in one.rows("train")]
    assert [row["loss"] for row in two.rows("train")] == pytest.approx(losses, rel=1e-5)
    assert one.result is not None
    assert two.result is not None
    assert two.result["valid"]["loss"] == pytest.approx(one.result["valid"]["loss"], rel=1e-5)


def test_claims_are_listed_planned_and_refused_by_name(tmp_path: Path) -> None:
    assert [claim["name"] for claim in json.loads(nmsparse("reproduce", "--json").stdout)][:2] == ["s-ste", "step"]
    listed = nmsparse("reproduce")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["s-ste", "step", "bi-mask", "sdgp", "progressive", "trio"]
    planned = nmsparse("reproduce", "s-ste", "--scale", "toy", "--dry-run", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "runs to do" in planned.stdout
    plans = [
        json.loads(nmsparse("reproduce", name, "--scale", "toy", "--dry-run", "--json", folder=tmp_path).stdout)
        for name in ("s-ste", "all")
    ]
    assert plans[0] == plans[1][0]
    assert f"{plans[0]['to_do']} of" in planned.stdout
    contradiction = nmsparse("reproduce", "--report", "--dry-run", folder=tmp_path)
    assert contradiction.returncode == 2
    assert "ask for one or the other" in contradiction.stderr
    assert not list(tmp_path.iterdir())
    everything = nmsparse("reproduce", "all", "--scale", "toy", "--max-minutes", "0", "--json", folder=tmp_path)
    assert [outcome["claim"] for outcome in json.loads(everything.stdout)] == list(CLAIMS)
    assert nmsparse("reproduce", "all", "--only", "vit").returncode == 2
    wrong = nmsparse("reproduce", "s-ste2")
    assert wrong.returncode == 2
    assert "s-ste2" in wrong.stderr
