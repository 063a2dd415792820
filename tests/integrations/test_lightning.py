"""The Lightning callback, with the real package: conversion, clock, metrics and resumption."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import assert_identical, make_data, make_net, same

import nmsparse as nm
from nmsparse.integrations.lightning import SparsityCallback, check_version

# one worker-less loader on a CPU is what a small test wants, and two versions of torch and Lightning disagree on names
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(pl.LightningModule):
    """The toy network, trained through training_step alone."""

    def __init__(self, recipe: nm.Recipe | None = None) -> None:
        super().__init__()
        self.net = make_net()
        self.recipe = recipe

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        needs = nm.recipe_info(self.recipe).needs if self.recipe is not None else ()
        kind = nm.StepAdamW if needs else torch.optim.AdamW
        return kind(self.parameters(), lr=3e-3)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data(32)), batch_size=8)


def trainer(callback: SparsityCallback | None, folder: Path, epochs: int, **options: Any) -> pl.Trainer:
    callbacks = [] if callback is None else [callback]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, default_root_dir=folder, **(quiet | options))


def fit(recipe: nm.Recipe, folder: Path, epochs: int = 2, **options: Any) -> tuple[Task, SparsityCallback]:
    task, callback = Task(recipe), SparsityCallback(recipe)
    trainer(callback, folder, epochs, **options).fit(task, loader())
    return task, callback


def by_hand(recipe: nm.Recipe, epochs: int = 2, clip: float | None = None) -> nn.Module:
    """The loop that the trainer is expected to run."""
    task = Task(recipe)
    run = nm.sparsify_(task, recipe)
    optimizer = task.configure_optimizers()
    run.attach(optimizer, total_steps=4 * epochs)
    for _ in range(epochs):
        for index, batch in enumerate(loader()):
            optimizer.zero_grad()
            run.begin_micro_batch()
            task.training_step(batch, index).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(task.parameters(), clip)
            optimizer.step()
    return task


@pytest.mark.parametrize(
    ("name", "options"),
    [("sr-ste", {"decay": 0.1}), ("s-ste", {}), ("asp", {"start": 0.5}), ("step", {"switch": 0.5}), ("mask-decay", {})],
)
def test_training_equals_the_plain_loop(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Gradients come from a closure inside step(): decay, masks and schedules must act after it."""
    recipe = nm.recipe(name, "2:4", **options)
    task, callback = fit(recipe, tmp_path)
    assert callback.run is not None
    assert callback.run.step == 8
    assert same(task, by_hand(recipe))


def test_decay_comes_after_clipping(tmp_path: Path) -> None:
    recipe = nm.SRSTE("2:4", decay=0.5)
    task, _ = fit(recipe, tmp_path, gradient_clip_val=0.01)
    assert same(task, by_hand(recipe, clip=0.01))


def test_accumulated_batches_are_one_update(tmp_path: Path) -> None:
    _, callback = fit(nm.SSTE("2:4"), tmp_path, accumulate_grad_batches=2)
    assert callback.run is not None
    assert callback.run.step == 4


def test_model_is_converted_before_the_strategy_sees_it_and_keeps_its_keys(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watching(Task):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            seen.append([name for name, _ in nm.nn.sparse_modules(self)])
            return super().configure_optimizers()

    task, callback = Watching(), SparsityCallback(nm.STE("2:4"), exclude=["embed"])
    trainer(callback, tmp_path, 1).fit(task, loader())
    assert seen == [["net.blocks.0.up", "net.blocks.0.down", "net.blocks.1.up", "net.blocks.1.down"]]
    assert list(task.state_dict()) == list(Task().state_dict())


@pytest.mark.parametrize(("name", "options"), [("s-ste", {}), ("asp", {"start": 3}), ("bi-mask", {"refresh": 3, "decay": 0.1})])
def test_resumed_run_equals_uninterrupted_run(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    recipe = nm.recipe(name, "2:4", **options)
    whole, first = fit(recipe, tmp_path, epochs=4)

    half, callback = Task(recipe), SparsityCallback(recipe, total_steps=16)
    stopped = trainer(callback, tmp_path, 2)
    stopped.fit(half, loader())
    stopped.save_checkpoint(tmp_path / "half.ckpt")

    resumed, callback = Task(recipe), SparsityCallback(recipe)
    trainer(callback, tmp_path, 4).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert same(resumed, whole)
    assert callback.run is not None
    assert first.run is not None
    assert_identical(callback.run.state_dict(), first.run.state_dict())


def test_checkpoint_holds_tensors_and_plain_values_only(tmp_path: Path) -> None:
    recipe = nm.SSTE("2:4")
    task, callback = Task(recipe), SparsityCallback(recipe)
    done = trainer(callback, tmp_path, 1)
    done.fit(task, loader())
    done.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["callbacks"][callback.state_key]["optimizers"][0]["step"] == 4
    dense = Task()
    dense.load_state_dict(saved["state_dict"])  # stock keys
    assert same(dense, task)


def test_metrics_reach_the_logger(tmp_path: Path) -> None:
    recipe = nm.SRSTE("2:4", decay=0.1)
    task, callback = Task(recipe), SparsityCallback(recipe, stats_every=1)
    trained = trainer(callback, tmp_path, 1, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trained.fit(task, loader())
    header, *rows = (Path(trained.logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"sparsity/flip_rate", "sparsity/density", "sparsity/decay"} <= set(header.split(","))
    assert len(rows) == 4
    assert rows[0].split(",")[header.split(",").index("sparsity/density")] == "0.5"
    assert trained.callback_metrics["sparsity/decay"] == pytest.approx(0.1)


def check_whole_schedule(callback: SparsityCallback, planned: int) -> None:
    """The clock went through all that it planned, to the hard mask."""
    assert callback.run is not None
    assert callback.run.step == planned
    (saved,) = callback.state_dict()["optimizers"]
    assert saved["total_steps"] == planned
    assert callback.run.stats()["total"]["density"] == 0.5
    assert all(layer["keep"] == 0 for layer in callback.run.stats()["layers"].values())


def dense_checkpoint(folder: Path, epochs: int) -> Path:
    trained = trainer(None, folder, epochs)
    trained.fit(Task(), loader())
    trained.save_checkpoint(folder / "dense.ckpt")
    return folder / "dense.ckpt"


def test_checkpoint_written_without_the_callback_is_a_dense_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The schedule is that of the updates which are left, not one that the end of training cuts off."""
    dense = dense_checkpoint(tmp_path, 4)
    whole, callback = Task(), SparsityCallback(nm.MaskDecay("2:4"))
    with caplog.at_level(logging.WARNING, "nmsparse"):
        trainer(callback, tmp_path, 6).fit(whole, loader(), ckpt_path=dense, weights_only=True)
    assert "goes on at update 16 without a saved state of SparsityCallback" in caplog.text
    assert "for 8 updates" in caplog.text
    check_whole_schedule(callback, 8)

    half = SparsityCallback(nm.MaskDecay("2:4"), total_steps=8)
    stopped = trainer(half, tmp_path, 5)
    stopped.fit(Task(), loader(), ckpt_path=dense, weights_only=True)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    caplog.clear()
    resumed, callback = Task(), SparsityCallback(nm.MaskDecay("2:4"))
    trainer(callback, tmp_path, 6).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    check_whole_schedule(callback, 8)
    assert same(resumed, whole)
    assert "without a saved state" not in caplog.text


@pytest.mark.parametrize("epochs", [1, 3])
def test_second_fit_starts_the_clock_anew(epochs: int, tmp_path: Path) -> None:
    task, callback = Task(), SparsityCallback(nm.MaskDecay("2:4"))
    trainer(callback, tmp_path, 2).fit(task, loader())
    trainer(callback, tmp_path, epochs).fit(task, loader())
    check_whole_schedule(callback, 4 * epochs)
    assert callback.run is not None
    assert len(callback.run.optimizers) == 1


def test_prolonged_trainer_starts_the_clock_for_the_updates_that_are_left(tmp_path: Path) -> None:
    task, callback = Task(), SparsityCallback(nm.MaskDecay("2:4"))
    prolonged = trainer(callback, tmp_path, 1)
    prolonged.fit(task, loader())
    prolonged.fit_loop.max_epochs = 3
    prolonged.fit(task, loader())
    assert prolonged.global_step == 12
    check_whole_schedule(callback, 8)


def test_fit_after_the_evaluation_of_a_checkpoint_starts_the_clock_anew(tmp_path: Path) -> None:
    recipe = nm.MaskDecay("2:4")
    trained = trainer(SparsityCallback(recipe), tmp_path, 2)
    trained.fit(Evaluated(recipe), loader())
    trained.save_checkpoint(tmp_path / "last.ckpt")
    task, callback = Evaluated(recipe), SparsityCallback(recipe)
    again = trainer(callback, tmp_path, 1)
    again.validate(task, loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False, weights_only=True)
    again.fit(task, loader())
    check_whole_schedule(callback, 4)


class Endless(IterableDataset[Any]):
    """Examples without a number, as they are streamed."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


@pytest.mark.parametrize(("epochs", "data"), [(-1, loader), (1, lambda: DataLoader(Endless(), batch_size=None))])
def test_run_of_unknown_length_names_the_argument_of_the_callback(epochs: int, data: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mask-decay plans over the whole run.*SparsityCallback\(\.\.\., total_steps=\.\.\.\)"):
        trainer(SparsityCallback(nm.MaskDecay("2:4")), tmp_path, epochs).fit(Task(), data())
    told = SparsityCallback(nm.MaskDecay("2:4"), total_steps=3)
    trainer(told, tmp_path, epochs, max_steps=3).fit(Task(), data())
    check_whole_schedule(told, 3)


def test_number_of_updates_is_checked_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        trainer(SparsityCallback(nm.STE("2:4"), total_steps=0), tmp_path, 1).fit(Task(), loader())


def test_only_the_optimizer_of_sparse_layers_is_attached(tmp_path: Path) -> None:
    class Two(Task):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            body = [p for name, p in self.named_parameters() if "head" not in name]
            return torch.optim.SGD(self.net.head.parameters(), lr=0.1), torch.optim.AdamW(body, lr=1e-3)

        def training_step(self, batch: list[Tensor], index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
                optimizer.step()

    task, callback = Two(), SparsityCallback(nm.SRSTE("2:4", decay=0.1))
    task.automatic_optimization = False
    trainer(callback, tmp_path, 1).fit(task, loader())
    assert callback.run is not None
    assert callback.run.step == 4
    assert [type(optimizer).__name__ for optimizer in callback.run.optimizers] == ["AdamW"]


def test_layers_made_in_configure_model_are_converted_there(tmp_path: Path) -> None:
    class Late(Task):
        def __init__(self, callback: SparsityCallback, converts: bool) -> None:
            pl.LightningModule.__init__(self)
            self.recipe, self.callback, self.converts = None, callback, converts

        def configure_model(self) -> None:
            self.net = make_net()
            if self.converts:
                self.callback.convert(self)

    callback = SparsityCallback(nm.STE("2:4"))
    trainer(callback, tmp_path, 1).fit(Late(callback, True), loader())
    assert callback.run is not None
    assert callback.run.step == 4
    callback = SparsityCallback(nm.STE("2:4"))
    with pytest.raises(RuntimeError, match="configure_model"):
        trainer(callback, tmp_path, 1).fit(Late(callback, False), loader())


def test_a_submodule_can_be_named(tmp_path: Path) -> None:
    callback = SparsityCallback(nm.STE("2:4"), module="net")
    trainer(callback, tmp_path, 1).fit(Task(), loader())
    assert callback.run is not None
    assert "blocks.0.up" in callback.run.layers


class Evaluated(Task):
    """Logs its loss in evaluation."""

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.training_step(batch, index))

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.test_step(batch, index)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader()


@pytest.mark.parametrize("stage", ["test", "validate"])
@pytest.mark.parametrize(
    ("name", "options"), [("sr-ste", {}), ("s-ste", {}), ("fst", {"refresh": 100, "dense_tail": 0.0}), ("asp", {"start": 2})]
)
def test_a_fresh_process_evaluates_what_was_trained(name: str, options: dict[str, Any], stage: str, tmp_path: Path) -> None:
    """A checkpoint holds the dense weights; masks that are older than these, and scales, come with the callback."""
    recipe = nm.recipe(name, "2:4", **options)
    task, callback = Evaluated(recipe), SparsityCallback(recipe)
    trained = trainer(callback, tmp_path, 2)
    trained.fit(task, loader())
    trained.save_checkpoint(tmp_path / "last.ckpt")
    expected = getattr(trained, stage)(task, loader(), verbose=False)

    fresh, callback = Evaluated(recipe), SparsityCallback(recipe)
    evaluated = trainer(callback, tmp_path, 2)
    found = getattr(evaluated, stage)(fresh, loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False, weights_only=True)
    assert found == expected
    assert callback.run is not None
    assert callback.run.step == 0
    with torch.no_grad():
        dense = sum(float(nm.densify_(fresh).training_step(batch, 0)) for batch in loader()) / len(loader())
    if name != "asp":  # which prunes the weights themselves
        assert found[0]["loss"] != pytest.approx(dense, rel=1e-4)


def test_evaluation_leaves_a_frozen_model_as_it_is(tmp_path: Path) -> None:
    recipe = nm.SRSTE("2:4")
    task, callback = Evaluated(recipe), SparsityCallback(recipe)
    trained = trainer(callback, tmp_path, 1)
    trained.fit(task, loader())
    expected = trained.test(task, loader(), verbose=False)
    nm.freeze_(task)
    assert trained.test(task, loader(), verbose=False) == expected
    assert type(task.net.embed) is nn.Linear


class Half(Task):
    """Rank r sees every second example, so two batches of 4 are one of 8."""

    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.trainer.global_rank
        return DataLoader(TensorDataset(*(part[rank::2] for part in make_data(32))), batch_size=4)


def fit_on_two(recipe: nm.Recipe, folder: Path) -> Half:
    task, callback = Half(recipe), SparsityCallback(recipe)
    trainer(callback, folder, 2, strategy="ddp_spawn", devices=2, use_distributed_sampler=False).fit(task)
    return task


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    recipe = nm.SRSTE("2:4", decay=0.1)
    single, _ = fit(recipe, tmp_path)
    try:
        task = fit_on_two(recipe, tmp_path)
    except ProcessExitedException as error:  # gloo's thread aborts now and then while a process ends, see distributed/ranks.py
        if error.signal_name != "SIGABRT":
            raise
        task = fit_on_two(recipe, tmp_path)
    for ours, theirs in zip(task.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bad", ["2.6.2", "2.6.3"])
def test_malicious_versions_are_refused_by_name(bad: str) -> None:
    with pytest.raises(ImportError, match=f"lightning {bad} is one of two published versions with malicious code"):
        check_version(bad)


@pytest.mark.parametrize(("found", "words"), [("2.5.0", "older than 2.6.4"), (None, r"pip install .nmsparse\[lightning\]")])
def test_other_versions_get_a_reason(found: str | None, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        check_version(found)
    check_version("2.6.4")
    check_version("3.0.0rc1")
