"""One run: what it records, that it resumes bit for bit, and how it refuses."""

from __future__ import annotations

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
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from typer.testing import CliRunner

import nmsparse as nm
from nmsparse.cli import app
from nmsparse.workbench.records import RunRecord
from nmsparse.workbench.training import CheckpointError, Checkpoints, DivergenceError, TrainConfig, make_model, open_task, train
from nmsparse.workbench.training import _checkpoints as checkpoint_module
from nmsparse.workbench.training import _loop as loop_module
from nmsparse.workbench.training.__main__ import shapes_of
from nmsparse.workbench.training._build import compile_, locked
from nmsparse.workbench.training._order import Order, learning_rate
from nmsparse.workbench.training._telemetry import moments_of

TINY: dict[str, Any] = {
    "width": 16, "layers": 1, "heads": 2, "length": 16, "limit": 64, "batch": 4, "steps": 8, "eval_batches": 2,
    "log_every": 1, "eval_every": 4, "checkpoint_every": 2,
}  # fmt: skip


def tiny(**changes: Any) -> TrainConfig:
    return TrainConfig.from_dict(TINY | changes)


class KillError(Exception):
    """Stands for the end of a process."""


def kill_at(step: int) -> Any:
    def listen(now: int, row: dict[str, Any] | None) -> None:
        if now == step:
            raise KillError

    return listen


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


TIMES = ("step_ms", "units_per_second", "seconds", "memory_gib")


def rows(folder: Path) -> list[dict[str, Any]]:
    """All records without what a clock said."""
    record = RunRecord(folder)
    found = [row for kind in ("train", "valid", "layers", "masks", "mask") for row in record.rows(kind)]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def assert_same_run(one: Path, other: Path) -> None:
    expected, got = weights(one), weights(other)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert rows(one) == rows(other)


# ---- records ----


def test_a_row_has_the_flips_of_the_first_update_of_its_interval(tmp_path: Path) -> None:
    """docs/run-folder.md says so, and so does RESULTS.md."""
    settings = {"recipe": "sr-ste", "steps": 6, "eval_every": 1}
    every, third = (train(tiny(**settings, log_every=n), tmp_path / str(n)).rows("train") for n in (1, 3))
    assert [row["flip_rate"] for row in third] == [every[0]["flip_rate"], every[3]["flip_rate"]]
    assert every[0]["flip_rate"] != every[2]["flip_rate"]


def test_a_run_leaves_records_a_model_and_the_newest_checkpoints(tmp_path: Path) -> None:
    record = train(tiny(recipe="sr-ste", keep=2), tmp_path / "run")
    assert record.info["label"] == "sr-ste 2:4"
    assert [row["step"] for row in record.rows("train")] == list(range(1, 9))
    assert [row["step"] for row in record.rows("valid")] == [4, 8]
    assert [row["step"] for row in record.rows("masks")] == [0, 4, 8]
    assert record.rows("masks")[0]["churn"] is None
    assert 0 < record.rows("masks")[-1]["from_start"] < 1
    picture = record.rows("mask")[-1]
    bits = bin(int("1" + picture["bits"], 16))[3:]
    assert bits.count("1") == picture["rows"] * picture["columns"] // 2  # 2:4 along columns
    assert all(bits[i : i + 4].count("1") == 2 for i in range(0, len(bits), 4))
    assert record.result is not None
    assert record.result["status"] == "finished"
    assert (record.result["non_zero"], record.result["violations"]) == (0.5, 0)
    assert Checkpoints(tmp_path / "run" / "checkpoints", 2).steps() == [6, 8]
    assert nm.verify(tmp_path / "run" / "model").ok


def test_the_finished_model_loads_with_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    train(tiny(steps=2), tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert int(nm.functional.violations(weight, "2:4", dim=0)) == 0


def test_every_embedded_task_trains(tmp_path: Path) -> None:
    for task in ("fashion-mini", "questions", "pig-latin"):
        changes: dict[str, Any] = {"task": task, "steps": 2, "length": None}
        record = train(tiny(**changes), tmp_path / task)
        assert record.result is not None
        assert record.result["valid"][record.info["task"]["headline"]] is not None


def test_resnets_train_with_sgd(tmp_path: Path) -> None:
    changes = {"task": "fashion-mini", "model": "resnet32", "layers": None, "heads": None, "length": None, "optimizer": "sgd"}
    record = train(tiny(**changes, steps=2, recipe="bi-mask"), tmp_path / "run")
    assert record.result is not None
    assert record.result["violations"] == 0
    assert record.rows("train")[0]["gradient_noise"] is None  # SGD keeps no second moment


def test_accumulated_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    one = train(tiny(recipe="sr-ste", steps=4), tmp_path / "one")
    four = train(tiny(recipe="sr-ste", steps=4, accumulate=4), tmp_path / "four")
    expected = [row["loss"] for row in one.rows("train")]
    assert [row["loss"] for row in four.rows("train")] == pytest.approx(expected, rel=1e-4)


def test_micro_batches_of_translations_count_by_their_tokens(tmp_path: Path) -> None:
    """Targets differ in length, so a mean of means would not be the mean."""
    changes: dict[str, Any] = {"task": "pig-latin", "length": None, "recipe": "sr-ste", "steps": 3, "batch": 8}
    losses = [[row["loss"] for row in train(tiny(**changes, accumulate=k), tmp_path / str(k)).rows("train")] for k in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_same_seed_starts_all_recipes_from_the_same_weights(tmp_path: Path) -> None:
    losses = [train(tiny(recipe=name, steps=1, lr=0.0), tmp_path / name).rows("train")[0]["loss"] for name in ("dense", "sdgp")]
    assert losses[0] == losses[1]


# ---- resuming ----


@pytest.mark.parametrize("info", nm.recipes(), ids=lambda info: info.name)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(info: nm.RecipeInfo, tmp_path: Path) -> None:
    """Dropout is on, so random numbers count too; the kill falls between two checkpoints."""
    config = tiny(recipe=info.name, dropout=0.1, log_every=3)  # a log row that spans the checkpoint at 4
    train(config, tmp_path / "whole")
    with pytest.raises(KillError):
        train(config, tmp_path / "broken", progress=kill_at(5))
    train(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_interrupted_run_in_mixed_precision_ends_as_an_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    config = tiny(precision=precision, steps=6)
    train(config, tmp_path / "whole")
    with pytest.raises(KillError):
        train(config, tmp_path / "broken", progress=kill_at(3))
    train(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("moment", ["save_file", "_fingerprint", "_flush"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=6)
    train(config, tmp_path / "whole")
    original, half = getattr(checkpoint_module, moment), tmp_path / "broken" / "checkpoints"

    def dies(*args: Any) -> Any:
        if list(half.glob(".writing-4*")):
            raise KillError
        return original(*args)

    monkeypatch.setattr(checkpoint_module, moment, dies)
    with pytest.raises(KillError):
        train(config, tmp_path / "broken")
    monkeypatch.undo()
    assert list(half.glob(".writing-4*"))
    assert Checkpoints(tmp_path / "broken" / "checkpoints", 2).steps() == [2]
    train(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert not list((tmp_path / "broken" / "checkpoints").glob(".*"))


def test_a_full_disk_ends_a_run_in_one_sentence_and_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        if file.name == checkpoint_module.TRAINING:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint_module, "save_file", write)
    (tmp_path / "run.json").write_text(json.dumps(TINY))
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "run.json"), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "step-00000002 cannot be written (I/O error: No space left on device" in result.output
    assert isinstance(result.exception, SystemExit)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_model_that_a_full_disk_does_not_hold_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*arguments: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(nm, "save", save)
    (tmp_path / "run.json").write_text(json.dumps(TINY))
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "run.json"), "--output", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "No space left on device" in result.output


def test_a_killed_process_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A real SIGKILL at whatever moment it falls, twice."""
    config = tiny(steps=40)
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nmsparse.workbench.training"]

    def begin(folder: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        assert process.stdin is not None
        process.stdin.write(f"{folder}\n".encode())
        process.stdin.close()
        return process

    for enough in (6, 20):
        process = begin(folder)
        while process.poll() is None and max(Checkpoints(folder / "checkpoints", 2).steps(), default=0) < enough:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert begin(folder).wait() == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config.to_dict()))
    assert begin(whole).wait() == 0
    assert_same_run(whole, folder)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    train(tiny(steps=2), tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns
    assert train(tiny(steps=2), tmp_path / "run", resume=True).result is not None
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    train(tiny(steps=1), tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny(steps=1), tmp_path / "run")


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    with pytest.raises(KillError):
        train(tiny(), tmp_path / "run", progress=kill_at(3))
    with pytest.raises(CheckpointError, match=r"other settings: lr None against 0\.5|lr 0\.5 against None"):
        train(tiny(lr=0.5), tmp_path / "run", resume=True)


def test_other_settings_are_refused_before_the_first_checkpoint_too(tmp_path: Path) -> None:
    with pytest.raises(KillError):
        train(tiny(checkpoint_every=8), tmp_path / "run", progress=kill_at(3))
    with pytest.raises(ValueError, match=r"holds another run \(lr 0\.5 against None\)"):
        train(tiny(lr=0.5), tmp_path / "run", resume=True)


def test_a_resumed_run_sums_over_as_many_threads_as_before(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        with pytest.raises(KillError):
            train(tiny(), tmp_path / "run", progress=kill_at(3))
        torch.set_num_threads(before)
        train(tiny(), tmp_path / "run", resume=True)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="another process is training in"):
        train(tiny(steps=1), tmp_path / "run")
    train(tiny(steps=1), tmp_path / "run")


def test_all_processes_go_through_as_many_validation_batches() -> None:
    """Sharded weights are gathered at every forward, so one that has less to do would leave the others waiting."""
    config = tiny(eval_batches=0, batch=4)
    parts: list[list[tuple[list[int], int]]] = []
    for rank in range(4):
        accelerator = SimpleNamespace(num_processes=4, process_index=rank)
        session: Any = SimpleNamespace(config=config, accelerator=accelerator, task=SimpleNamespace(valid=range(6)), parts=4)
        parts.append(loop_module.Session._validation_batches(session))
    assert [len(part) for part in parts] == [2] * 4
    assert sorted(index for part in parts for batch, counts in part for index in batch * counts) == list(range(6))


# ---- damaged checkpoints ----


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A run that was interrupted, with checkpoints at 2 and 4."""
    with pytest.raises(KillError):
        train(tiny(), tmp_path / "run", progress=kill_at(5))
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_checkpoint_is_named_and_refused(name: str, damage: str, broken: Path) -> None:
    file = broken / "checkpoints" / "step-00000004" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes(content[:-9] + b"#" + content[-8:])
    with pytest.raises(CheckpointError, match=r"step-00000004 is damaged.*resume from step-00000002"):
        train(tiny(), broken, resume=True)


def test_a_changed_number_in_a_checkpoint_is_noticed(broken: Path) -> None:
    file = broken / "checkpoints" / "step-00000004" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 3}))
    with pytest.raises(CheckpointError, match=r"step-00000004 is damaged: checkpoint\.json is not what was written"):
        train(tiny(), broken, resume=True)


def test_spoiled_weights_are_not_written(tmp_path: Path) -> None:
    """An update may spoil weights after a loss that was fine; the checkpoint before stays the last good one."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    run = nm.sparsify_(model, nm.SSTE("2:4"), targets="all")
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(optimizer, total_steps=8)
    state = checkpoint_module.Restorable(model, optimizer, run, checkpoint_module.MaskWatch(model, run))
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, state, {})
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"0\.weight holds NaN or Inf after update 2"):
        checkpoints.save(2, state, {})
    assert checkpoints.steps() == [1]


def test_a_checkpoint_of_another_version_is_refused(broken: Path) -> None:
    file = broken / "checkpoints" / "step-00000004" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    with pytest.raises(CheckpointError, match="version 99; this nmsparse reads version 1"):
        train(tiny(), broken, resume=True)


def test_a_checkpoint_of_another_model_changes_nothing(broken: Path) -> None:
    """All is compared before anything is loaded."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    run = nm.sparsify_(model, nm.SSTE("2:4"), targets="all")
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(optimizer, total_steps=8)
    before = model[0].weight.detach().clone()
    watch = checkpoint_module.MaskWatch(model, run)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoint_module.restore(
            broken / "checkpoints" / "step-00000004", checkpoint_module.Restorable(model, optimizer, run, watch)
        )
    assert torch.equal(model[0].weight, before)


def test_a_half_written_last_row_is_dropped(broken: Path) -> None:
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert RunRecord(broken).rows("train")[-1]["step"] == 5


# ---- divergence ----


def test_a_loss_that_is_not_finite_stops_the_run_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"at update \d.*last good checkpoint is .*step-0000000\d"):
        train(tiny(lr=1e30, warmup=0.5, clip=0.0, recipe="dense", steps=8, checkpoint_every=1), tmp_path / "run")
    record = RunRecord(tmp_path / "run")
    assert record.result is not None
    assert record.result["status"] == "diverged"
    newest = Checkpoints(tmp_path / "run" / "checkpoints", 2).newest()
    assert newest is not None
    saved = load_file(newest / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.values())


def test_a_run_that_its_last_update_spoils_has_diverged(tmp_path: Path) -> None:
    """No loss comes after it; the validation is what tells."""
    with pytest.raises(DivergenceError, match="after update 1"):
        train(tiny(lr=1e30, warmup=0.0, clip=0.0, recipe="dense", steps=1, save=False), tmp_path / "run")
    record = RunRecord(tmp_path / "run")
    assert record.result is not None
    assert record.result["status"] == "diverged"


def test_runs_of_one_shape_share_compiled_code_but_not_on_sparse_tensor_cores() -> None:
    first = tiny(recipe="s-ste", emulate=True)
    assert shapes_of(first) == shapes_of(replace(first, recipe="dense", seed=3, lr=1.0))
    assert shapes_of(first) != shapes_of(replace(first, batch=2 * first.batch))
    alone = replace(first, emulate=False)
    assert shapes_of(alone) != shapes_of(alone)


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stpes": 3}, "'stpes' is not a setting. Did you mean steps?"),
        ({"steps": 0}, "steps is at least 1, got 0"),
        ({"steps": "many"}, "steps is of type int, got 'many'"),
        ({"lr": float("nan")}, "lr is a finite number"),
        ({"batch": 6, "accumulate": 4}, "do not divide"),
        ({"schedule": "step"}, "schedule is one of cosine, linear, constant"),
        ({"recipe": "ssste"}, "ssste"),
        ({"pattern": "2:x"}, "2:x"),
        ({"options": {"mvue": "perhaps", "wrong": 1}}, "wrong"),
        ({"recipe": "sr-ste", "options": {"decay": "abc"}}, "option decay of sr-ste is a number, got 'abc'"),
        ({"recipe": "sr-ste", "options": {"decay": float("nan")}}, "option decay of sr-ste is a number, got nan"),
        ({"recipe": "sr-ste", "options": {"decay": True}}, "option decay of sr-ste is a number, got True"),
        ({"recipe": "fst", "options": {"refresh": 1.5}}, "option refresh of fst is a whole number, got 1.5"),
        ({"recipe": "mask-decay", "options": {"rate": "x"}}, "option rate of mask-decay is a number or None, got 'x'"),
        ({"options": {"pattern": "1:4"}}, "pattern is a setting of its own"),
        ({"recipe": "step", "optimizer": "sgd"}, "choose step-adamw, not sgd"),
        ({"seed": 1 << 63}, "seed is below 2**63"),
        ({"compile": 1}, "compile is of type bool"),
        ({"warmup": 1.5}, "at most 1"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        TrainConfig.from_dict(settings)
    assert words in str(error.value)


def test_settings_come_from_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"steps": 3, "options": {"mvue": false}}')
    (tmp_path / "a.toml").write_text("steps = 3\n[options]\nmvue = false\n")
    read = [TrainConfig.from_dict(TrainConfig.read(tmp_path / name)) for name in ("a.json", "a.toml")]
    assert read[0] == read[1] == TrainConfig(steps=3, options={"mvue": False})
    assert read[0].label == "s-ste 2:4 mvue=False"
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold an object"):
        TrainConfig.read(tmp_path / "b.json")
    (tmp_path / "c.toml").write_text("steps =")
    with pytest.raises(ValueError, match=r"c\.toml cannot be read as TOML"):
        TrainConfig.read(tmp_path / "c.toml")


def test_a_pretrained_folder_may_move_but_not_become_another() -> None:
    here = tiny(pretrained="/here/minilm")
    assert here.differences(tiny(pretrained="/there/minilm")) == []
    assert here.differences(tiny(pretrained="/here/bert")) == ["pretrained 'minilm' against 'bert'"]
    assert here.differences(tiny()) == ["pretrained 'minilm' against None"]


def test_sizes_of_a_pretrained_model_are_not_silently_ignored() -> None:
    config = tiny(pretrained="somewhere")
    with pytest.raises(ValueError, match="leave out width and layers and heads"):
        make_model(config, open_task(config))


# ---- order, learning rate, noise ----


def test_every_epoch_sees_every_example_once_in_another_order() -> None:
    order = Order(10, 5, seed=1)
    epochs = [[*order.indices(step), *order.indices(step + 1)] for step in (0, 2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert Order(10, 5, seed=1).indices(3) == order.indices(3)


def test_parts_of_an_update_make_up_the_whole() -> None:
    order = Order(7, 6, seed=0)
    whole = order.indices(1)
    assert [index for part in range(3) for index in order.indices(1, part, 3)] == whole


def test_learning_rates_rise_and_fall() -> None:
    rates = [learning_rate(step, 100, 1.0, "cosine", 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] < 0.001
    assert learning_rate(55, 100, 1.0, "linear", 0.1) == pytest.approx(0.5)
    assert learning_rate(99, 100, 1.0, "constant", 0.0) == 1.0


def test_gradient_noise_is_none_of_a_constant_gradient_and_all_of_a_random_one() -> None:
    def noise(gradients: list[torch.Tensor]) -> float | None:
        parameter = torch.nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.AdamW([parameter])
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
        return moments_of(optimizer, [parameter]).noise

    generator = torch.Generator().manual_seed(0)
    assert noise([torch.ones(1000)] * 5) == pytest.approx(0, abs=1e-5)
    # the mean over about (1 + beta1) / (1 - beta1) = 19 gradients keeps 1/19 of their variance
    assert noise([torch.randn(1000, generator=generator) for _ in range(200)]) == pytest.approx(1 - 1 / 19, abs=0.02)
    assert noise([]) is None


# ---- trackers ----


def test_rows_reach_a_tracker(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = train(tiny(recipe="sr-ste", steps=2, tracker=["tensorboard"]), tmp_path / "run")
    (events,) = (tmp_path / "run" / "trackers").rglob("events.out.*.0")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    assert [event.value for event in found.Scalars("train/loss")] == pytest.approx([row["loss"] for row in record.rows("train")])
    assert {"train/flip_rate", "valid/loss", "masks/from_start"} <= set(found.Tags()["scalars"])


# ---- compilation, and layouts that only GPUs use ----


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layers": 3}, ["GPT2Block"] * 3),
        ({"layers": 1}, ["GPT2LMHeadModel"]),
        ({"task": "fashion-mini", "model": "resnet32", "heads": None, "layers": None, "length": None}, ["CifarResNet"]),
        ({"task": "pig-latin", "model": "t5", "layers": 2}, ["T5Block"] * 4),
    ],
)
def test_blocks_of_a_stack_are_compiled_or_the_whole_model(
    changes: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(**changes)
    model, _, _ = make_model(config, open_task(config))
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    compile_(model)
    assert compiled == parts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at the input of a block, and users do not see it
def test_a_compiled_run_is_an_eager_one_and_its_blocks_share_a_graph(tmp_path: Path) -> None:
    config = tiny(layers=2, recipe="sr-ste", emulate=True, save=False)
    eager = train(config, tmp_path / "eager")
    counters.clear()
    compiled = train(replace(config, compile=True), tmp_path / "compiled")
    assert counters["stats"]["unique_graphs"] == 1  # for training; validation is eager
    for kind in ("train", "valid"):
        losses = [row["loss"] for row in eager.rows(kind)]
        assert [row["loss"] for row in compiled.rows(kind)] == pytest.approx(losses, rel=1e-5)


def test_moments_lie_in_memory_as_their_parameter_does() -> None:
    """Images are trained channels-last on a GPU, whose fused optimizers refuse moments in another order; checkpoints have one
    order for all."""

    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # pyrefly: ignore
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(steps):
            layer(torch.ones(2, 3, 8, 8)).square().sum().backward()
            optimizer.step()
        return layer, optimizer

    (layer, optimizer), (other, target) = trained(2), trained(0)
    saved = checkpoint_module._optimizer_state(optimizer, {id(p): n for n, p in layer.named_parameters()})
    saved["state"] = {name: {key: value.contiguous() for key, value in values.items()} for name, values in saved["state"].items()}
    checkpoint_module._load_optimizer(target, {id(p): n for n, p in other.named_parameters()}, saved)
    for parameter, original in zip(other.parameters(), layer.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert target.state[parameter][key].stride() == parameter.stride()
            assert torch.equal(target.state[parameter][key], optimizer.state[original][key])
