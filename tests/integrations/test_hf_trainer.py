"""SparsityCallback in transformers' Trainer: conversion, clock, metrics, resume."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_toys import make_arguments, make_examples, make_model, make_trainer
from toys import assert_identical, same
from transformers import Trainer, TrainerCallback

import nmsparse as nm
from nmsparse.functional import violations
from nmsparse.integrations.transformers import SparsityCallback, step_optimizer
from nmsparse.integrations.transformers._json import from_json, to_json
from nmsparse.nn import sparse_modules
from nmsparse.run import run_of

METRICS = {"sparsity/density", "sparsity/flip_rate", "sparsity/decay"}


class Listener(TrainerCallback):
    """A logger: remembers what it was told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs or {}))


def test_model_is_sparse_as_soon_as_the_trainer_exists(tmp_path: Path) -> None:
    callback = SparsityCallback(nm.SRSTE("2:4"), exclude=["pooler.dense"])
    trainer = make_trainer(tmp_path, callback)
    assert len(list(sparse_modules(trainer.model))) == len(callback.run.layers) == 6
    assert "output head" in callback.run.skipped["classifier"]
    trainer.train()
    assert callback.run.step == 6
    assert callback.run.stats()["total"]["density"] == 0.5


def test_callback_without_a_trainer_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="give it to a Trainer"):
        SparsityCallback(nm.SRSTE("2:4")).run.stats()


@pytest.mark.parametrize("recipe", [nm.SRSTE("2:4", decay=0.1), nm.STEP("2:4", switch=2, decay=0.1)], ids=["sr-ste", "step"])
def test_trainer_equals_a_plain_loop(tmp_path: Path, recipe: nm.Recipe) -> None:
    options = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "per_device_train_batch_size": 16, "max_steps": 4}
    trainer = make_trainer(tmp_path, SparsityCallback(recipe), kind="llama", weight_decay=0.1, **options)
    plain = copy.deepcopy(make_model("llama"))
    trainer.train()

    run = nm.sparsify_(plain, recipe)
    decayed = set(trainer.get_decay_parameter_names(plain))
    groups = [
        {"params": [p for n, p in plain.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in plain.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    kind = nm.StepAdamW if isinstance(recipe, nm.STEP) else torch.optim.AdamW
    optimizer = kind(groups, lr=1e-2)
    run.attach(optimizer, total_steps=4)
    examples = make_examples("llama")
    batch = {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
    plain.train()
    for _ in range(4):
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(plain.named_parameters(), trainer.model.parameters(), strict=True):
        # the Trainer's batch has another order, and its AdamW is fused
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_accumulated_micro_batches_are_one_update(tmp_path: Path) -> None:
    """A decay term of 4 micro-batches must not count 4 times, and the clock ticks once."""
    models = []
    for size, parts in ((16, 1), (4, 4)):
        callback = SparsityCallback(nm.SRSTE("2:4", decay=1.0))
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "max_steps": 3}
        trainer = make_trainer(tmp_path, callback, kind="llama", **options)
        trainer.train()
        assert callback.run.step == 3
        models.append(trainer.model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_bfloat16_autocast_trains_masters_in_float32(tmp_path: Path) -> None:
    callback = SparsityCallback(nm.SSTE("2:4"))
    trainer = make_trainer(tmp_path, callback, bf16=True)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    after = trainer.model.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in after.values() if tensor.is_floating_point())
    changed = [name for name in callback.run.layers if not torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])]
    assert changed == callback.run.layers


@pytest.mark.parametrize("name", ["sr-ste", "step"])
def test_loss_scale_does_not_change_the_update(tmp_path: Path, name: str) -> None:
    """fp16 needs a GPU in accelerate, its GradScaler does not: the Trainer's fused AdamW gets gradients times the scale."""
    recipe = {"sr-ste": nm.SRSTE("2:4", decay=1.0), "step": nm.STEP("2:4", switch=2, decay=1.0)}[name]
    models = []
    for scale in (None, 1024.0):
        callback = SparsityCallback(recipe)
        trainer = make_trainer(tmp_path, callback, kind="llama", max_grad_norm=0.0)
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        assert callback.run.step == 6
        models.append(trainer.model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_overflowing_update_does_not_move_the_clock(tmp_path: Path) -> None:
    callback = SparsityCallback(nm.SRSTE("2:4"))
    trainer = make_trainer(tmp_path, callback, kind="llama", max_grad_norm=0.0)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    trainer.train()
    assert trainer.state.global_step == 6
    assert callback.run.step == 5


def test_step_without_its_optimizer_names_the_helper(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    callback = SparsityCallback(nm.STEP("2:4"))
    trainer = Trainer(make_model("bert"), args, train_dataset=make_examples("bert"), callbacks=[callback])
    with pytest.raises(TypeError, match=r"step cannot use AdamW.*optimizer_cls_and_kwargs=step_optimizer"):
        trainer.train()


def test_step_optimizer_takes_the_training_arguments(tmp_path: Path) -> None:
    args = make_arguments(tmp_path, learning_rate=0.3, adam_beta2=0.9, adam_epsilon=1e-5)
    kind, options = step_optimizer(args, eps=1e-4, max_update=2.0)
    assert kind is nm.StepAdamW
    assert options == {"lr": 0.3, "betas": (0.9, 0.9), "eps": 1e-4, "fused": None, "max_update": 2.0}


def test_recipe_is_checked_at_once() -> None:
    with pytest.raises(TypeError, match="recipe must be a recipe"):
        SparsityCallback("sr-ste")


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("nmsparse.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"nmsparse\[hf\]"):
        importlib.import_module("nmsparse.integrations.transformers")


# ---- metrics ----


def test_metrics_reach_later_callbacks_and_the_history(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4", decay=0.1)))
    listener = Listener()
    trainer.add_callback(listener)
    trainer.train()
    assert set(listener.logs[0]) >= METRICS
    assert listener.logs[0]["sparsity/density"] == 0.5
    assert listener.logs[0]["sparsity/decay"] == 0.1
    assert set(trainer.state.log_history[0]) >= METRICS


def test_attach_makes_metrics_reach_callbacks_that_come_before(tmp_path: Path) -> None:
    early, late = Listener(), Listener()
    callback = SparsityCallback(nm.SRSTE("2:4"))
    trainer = make_trainer(tmp_path, callback, callbacks=(early,))
    trainer.add_callback(late)
    assert callback.attach(trainer) is callback
    trainer.train()
    assert set(early.logs[0]) >= METRICS
    assert early.logs[:6] == late.logs[:6]


def test_attach_alone_is_enough(tmp_path: Path) -> None:
    early = Listener()
    trainer = make_trainer(tmp_path, None, callbacks=(early,))
    callback = SparsityCallback(nm.SRSTE("2:4")).attach(trainer)
    trainer.train()
    assert callback.run.step == 6
    assert set(early.logs[-1]) >= METRICS


def test_metrics_without_attach_come_too_late_for_callbacks_before(tmp_path: Path) -> None:
    """Why attach exists: the reporting integrations stand before user callbacks."""
    early = Listener()
    make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4")), callbacks=(early,)).train()
    assert not METRICS & set(early.logs[0])


def test_evaluation_logs_stay_as_they_are(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4")), eval_strategy="steps", eval_steps=6)
    trainer.train()
    evaluation = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert not METRICS & set(evaluation)


def test_switch_of_step_is_reported(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.STEP("2:4", switch=3)))
    trainer.train()
    assert trainer.state.log_history[0]["sparsity/density"] == 1.0
    assert trainer.state.log_history[5]["sparsity/switched_at"] == 3
    assert trainer.state.log_history[5]["sparsity/density"] == 0.5


def test_second_sparsity_callback_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4")))
    with pytest.raises(ValueError, match="a model follows one recipe"):
        SparsityCallback(nm.STE("2:4")).attach(trainer)


def test_model_that_is_sparse_already_is_taken_over_if_the_recipe_is_the_same(tmp_path: Path) -> None:
    model = make_model("bert")
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    args, examples = make_arguments(tmp_path), make_examples("bert")
    callback = SparsityCallback(nm.SRSTE("2:4"))
    Trainer(model, args, train_dataset=examples, callbacks=[callback]).train()
    assert callback.run is run
    assert run.step == 6
    with pytest.raises(ValueError, match="sparse already"):
        Trainer(model, args, train_dataset=examples, callbacks=[SparsityCallback(nm.STE("2:4"))])


def test_model_from_model_init_is_converted_in_train(tmp_path: Path) -> None:
    callback = SparsityCallback(nm.SRSTE("2:4"))
    trainer = Trainer(
        model_init=lambda: make_model("bert"),
        args=make_arguments(tmp_path),
        train_dataset=make_examples("bert"),
        callbacks=[callback],
    )
    first = callback.run
    trainer.train()
    assert callback.run is not first
    assert callback.run.step == 6
    assert run_of(trainer.model) is callback.run


def test_second_training_starts_the_clock_anew(tmp_path: Path) -> None:
    callback = SparsityCallback(nm.MaskDecay("2:4"))
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    trainer.train()
    assert callback.run.step == 6
    assert len(callback.run.optimizers) == 1


# ---- resume ----

RESUMED = {
    "ste": nm.STE("2:4"),
    "sr-ste": nm.SRSTE("2:4", decay=0.1),
    "asp": nm.ASP("2:4", start=2),
    "step": nm.STEP("2:4", switch=2, decay=0.1),
    "step-auto": nm.STEP("2:4"),
    "s-ste": nm.SSTE("2:4"),
    "fst": nm.FST("2:4", refresh=2),
    "bi-mask": nm.BiMask("2:4", refresh=2, candidates=4),
    "sdgp": nm.SDGP("2:4", selector="mvue"),
    "mask-decay": nm.MaskDecay("2:4"),
    "structure-decay": nm.StructureDecay("2:4"),
    "trio": nm.Trio("2:4"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, name: str) -> None:
    whole = make_trainer(tmp_path, SparsityCallback(RESUMED[name], seed=5), save_strategy="steps", save_steps=3)
    whole.train()
    callback = SparsityCallback(RESUMED[name], seed=5)
    resumed = make_trainer(tmp_path / "elsewhere", callback, save_strategy="no")
    with torch.no_grad():
        for parameter in resumed.model.parameters():  # a different past that loading must erase
            parameter.add_(0.5)
    moved = shutil.move(tmp_path / "checkpoint-3", tmp_path / "moved")
    resumed.train(resume_from_checkpoint=str(moved))
    assert same(whole.model, resumed.model)
    assert callback.run.step == 6
    other = run_of(whole.model)
    assert other is not None
    assert_identical(other.state_dict(), callback.run.state_dict())


def test_trainer_may_rebuild_the_callback(tmp_path: Path) -> None:
    """restore_callback_states_from_checkpoint replaces callbacks by copies built from JSON, at the end of the list."""
    recipe = nm.FST("2:4", refresh=2)
    whole = make_trainer(tmp_path, SparsityCallback(recipe, targets=["dense", "query"]), save_strategy="steps", save_steps=3)
    whole.train()
    early, callback = Listener(), SparsityCallback(recipe, targets=["dense", "query"])
    options = {"restore_callback_states_from_checkpoint": True}
    resumed = make_trainer(tmp_path / "elsewhere", callback, callbacks=(early,), **options)
    callback.attach(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rebuilt = next(c for c in resumed.callback_handler.callbacks if isinstance(c, SparsityCallback))
    assert rebuilt is not callback
    assert rebuilt.run is callback.run
    assert rebuilt.recipe == recipe
    assert "sparsity/density" in early.logs[0]
    assert same(whole.model, resumed.model)


def test_state_in_trainer_state_json_holds_masks_as_bits(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.ASP("2:4", start=2)), save_strategy="steps", save_steps=3)
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    entry = state["stateful_callbacks"]["SparsityCallback"]
    assert entry["args"]["recipe"] == {"name": "asp", "pattern": "2:4", "start": 2, "permute": entry["args"]["recipe"]["permute"]}
    saved = from_json(entry["attributes"]["saved"]["run"])
    assert saved["optimizers"][0]["step"] == 3
    mask = saved["layers"]["bert.encoder.layer.0.intermediate.dense"]["mask"]
    assert mask.dtype == torch.uint8
    assert mask.numel() == 32 * 16 // 8


def test_checkpoint_written_without_the_callback_is_a_dense_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, None, save_strategy="steps", save_steps=2).train()
    callback = SparsityCallback(nm.MaskDecay("2:4"))
    resumed = make_trainer(tmp_path / "second", callback, save_strategy="steps", save_steps=2)
    with caplog.at_level(logging.WARNING, "nmsparse"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "written without SparsityCallback" in caplog.text
    assert callback.run.step == 4
    again = SparsityCallback(nm.MaskDecay("2:4"))
    third = make_trainer(tmp_path / "third", again)
    third.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-4"))
    assert again.run.step == 4
    assert same(resumed.model, third.model)


def test_dense_checkpoint_of_the_last_update_leaves_none_and_says_so(tmp_path: Path) -> None:
    make_trainer(tmp_path, None, save_strategy="steps", save_steps=6).train()
    resumed = make_trainer(tmp_path, SparsityCallback(nm.MaskDecay("2:4")))
    with pytest.raises(ValueError, match=r"mask-decay starts at update 6, and the Trainer ends at update 6.*larger max_steps"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_resuming_with_another_recipe_is_an_error(tmp_path: Path) -> None:
    make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4")), save_strategy="steps", save_steps=3).train()
    resumed = make_trainer(tmp_path, SparsityCallback(nm.STE("2:4")))
    with pytest.raises(ValueError, match="build the same recipe"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def resume_from_model_init(folder: Path, recipe: nm.Recipe, arguments: dict[str, Any] | None = None, **options: Any) -> None:
    make_trainer(folder, SparsityCallback(recipe, **options), save_strategy="steps", save_steps=3).train()
    trainer = Trainer(
        model_init=lambda: make_model("bert"),
        args=make_arguments(folder, **(arguments or {})),
        train_dataset=make_examples("bert"),
        callbacks=[SparsityCallback(recipe, **options)],
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))


def test_reordered_checkpoint_cannot_be_resumed_in_a_model_from_model_init(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in place of model_init"):
        resume_from_model_init(tmp_path, nm.ASP("2:4", start=0, permute=True))


def test_rebuilt_callback_does_not_lose_its_plan_in_silence(tmp_path: Path) -> None:
    recipe = nm.SRSTE("2:4")
    plan = nm.Plan({"name": "sr-ste", "pattern": "2:4", "decay": recipe.decay, "decay_on": recipe.decay_on}, 8, 1, {}, {})
    with pytest.raises(ValueError, match="does not hold its plan"):
        resume_from_model_init(tmp_path, recipe, plan=plan, arguments={"restore_callback_states_from_checkpoint": True})


def test_best_model_gets_its_own_masks(tmp_path: Path) -> None:
    """The Trainer loads the best weights at the end; masks that are not a function of them must follow."""
    callback = SparsityCallback(nm.BiMask("2:4", refresh=1, candidates=4))
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    trainer = make_trainer(tmp_path, callback, load_best_model_at_end=True, learning_rate=0.3, **options)
    losses = itertools.count(1)  # the first checkpoint is the best one
    trainer.evaluate = lambda *_, **__: {"eval_loss": next(losses)}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    saved = from_json(state["stateful_callbacks"]["SparsityCallback"]["attributes"]["saved"]["run"])
    assert_identical(saved, callback.run.state_dict())


def test_damaged_state_is_refused() -> None:
    saved = to_json({"a": torch.ones(3), "b": (1, [2.5, None])})
    assert_identical(from_json(saved), {"a": torch.ones(3), "b": (1, [2.5, None])})
    for damaged in ({**saved, "tensors": saved["tensors"][:-8]}, {"values": 1}, {**saved, "tensors": "!"}, None):
        with pytest.raises(ValueError, match="damaged"):
            from_json(damaged)


def test_copied_model_belongs_to_no_run() -> None:
    model = make_model("bert")
    run = nm.sparsify_(model, nm.STE("2:4"))
    assert run_of(model) is run
    assert run_of(copy.deepcopy(model)) is None
    nm.densify_(model)
    assert run_of(model) is None


# ---- plain checkpoints ----


def test_frozen_model_loads_with_plain_from_pretrained(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4")))
    trainer.train()
    nm.freeze_(trainer.model)
    trainer.save_model(str(tmp_path / "out"))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert same(loaded, trainer.model)
    weight = loaded.bert.encoder.layer[0].intermediate.dense.weight
    assert int(violations(weight, "2:4")) == 0
    assert (weight == 0).float().mean() == 0.5


def test_checkpoint_in_the_middle_of_training_has_stock_keys(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SparsityCallback(nm.SRSTE("2:4")), save_strategy="steps", save_steps=3)
    trainer.train()
    model, info = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6", output_loading_info=True)
    assert same(model, trainer.model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


class NamedCallback(SparsityCallback):
    """A user's subclass: the Trainer keys its state by this name."""


def test_subclass_of_the_callback_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = nm.ASP("2:4", start=2)
    make_trainer(tmp_path, NamedCallback(recipe), save_strategy="steps", save_steps=3).train()
    callback = NamedCallback(recipe)
    make_trainer(tmp_path, callback).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback.run.step == 6
    assert "was written without" not in caplog.text
