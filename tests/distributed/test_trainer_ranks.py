"""transformers' Trainer on two ranks, with a sparse model: DistributedDataParallel by accelerate, checkpoints by rank 0."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from toys import assert_identical

import nmsparse as nm

pytest.importorskip("transformers")
INTEGRATIONS = str(Path(__file__).parents[1] / "integrations")
BATCH, STEPS, HALF = 8, 6, 3

RECIPES = {
    "sr-ste": nm.SRSTE("2:4", decay=0.5),  # a term on the gradients, which DDP has averaged by then
    "bi-mask": nm.BiMask("2:4", refresh=2, candidates=4),  # permutations that all ranks must agree on, saved by one of them
}


def train(rank: int, world: int, name: str, folder: str, checkpoint: str | None) -> dict[str, Any]:
    """The same eight examples per update, however many ranks share them out."""
    if INTEGRATIONS not in sys.path:
        sys.path.append(INTEGRATIONS)
    toys = importlib.import_module("hf_toys")
    callback = toys.SparsityCallback(RECIPES[name])
    options = {"save_strategy": "steps", "save_steps": HALF, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    options |= {"max_steps": STEPS, "per_device_train_batch_size": BATCH // world}
    trainer = toys.make_trainer(Path(folder), callback, kind="llama", **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.args.world_size == world
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()}
    return {"weights": weights, "run": callback.run.state_dict(), "losses": losses}


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_train_as_one_process_and_resume_exactly(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    alone = train(0, 1, name, str(tmp_path / "alone"), None)
    found = two_ranks.run(train, name, str(tmp_path / "ranks"), None)
    for result in found:
        assert len(result["losses"]) == STEPS
        for key, expected in alone["weights"].items():
            # a mean over two ranks adds up in another order: float32 rounding, 1e-8 after six updates of up to 1e-3 each
            torch.testing.assert_close(result["weights"][key], expected, rtol=1e-5, atol=1e-6)
    assert_identical(found[0]["weights"], found[1]["weights"])

    half = shutil.move(tmp_path / "ranks" / f"checkpoint-{HALF}", tmp_path / "half")
    for result, whole in zip(two_ranks.run(train, name, str(tmp_path / "resumed"), str(half)), found, strict=True):
        assert_identical(result, whole)
