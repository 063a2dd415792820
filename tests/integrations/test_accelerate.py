"""accelerate on one process: it saves and resumes a run that is registered with it, and says which backward ends an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from toys import STEPS, assert_identical, make_data, make_net, make_optimizer, same

import nmsparse as nm

accelerate = pytest.importorskip("accelerate")


def prepared(recipe: nm.Recipe, **options: Any) -> tuple[Any, nn.Module, Any, nm.Run]:
    """In the order of accelerate's users: prepare, attach, register."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    bare = make_net()
    run = nm.sparsify_(bare, recipe)
    model, optimizer = accelerator.prepare(bare, make_optimizer(recipe, bare))
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    accelerator.register_for_checkpointing(run)
    return accelerator, model, optimizer, run


def train(accelerator: Any, model: nn.Module, optimizer: Any, micro_batches: int) -> None:
    x, target = make_data()
    for _ in range(micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - target).square().mean())
            optimizer.step()
            optimizer.zero_grad()


RESUMED: dict[str, dict[str, Any]] = {
    "fst": {"refresh": 3, "decay": 0.1},  # a mask in memory, between two refreshes
    "s-ste": {},  # a scale from the first weights, and random numbers
    "step": {"switch": 2, "decay": 0.1},  # a frozen variance, in the optimizer
    "bi-mask": {"refresh": 3, "candidates": 4, "decay": 0.1},  # permutations that a search found
}


@pytest.mark.parametrize("name", RESUMED)
def test_registered_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    recipe = nm.recipe(name, "2:4", **RESUMED[name])
    accelerator, whole, optimizer, first = prepared(recipe)
    train(accelerator, whole, optimizer, 4)
    accelerator.save_state(tmp_path)
    train(accelerator, whole, optimizer, 4)

    accelerator, resumed, optimizer, second = prepared(recipe)
    train(accelerator, resumed, optimizer, 1)  # a different past that loading must erase
    accelerator.load_state(tmp_path)
    assert second.step == 4
    train(accelerator, resumed, optimizer, 4)
    assert same(whole, resumed)
    assert_identical(second.state_dict(), first.state_dict())


def test_clock_counts_updates_and_not_micro_batches() -> None:
    """accelerate skips the optimizer's step between updates, and the mask decays once per update, not once per micro-batch."""
    recipe = nm.SRSTE("2:4", decay=0.5)
    accelerator, model, optimizer, run = prepared(recipe, gradient_accumulation_steps=4)
    train(accelerator, model, optimizer, 3)
    assert run.step == 0
    train(accelerator, model, optimizer, 5)
    assert run.step == 2

    accelerator, at_once, optimizer, run = prepared(recipe)
    train(accelerator, at_once, optimizer, 2)
    assert run.step == 2
    assert same(model, at_once), "four equal micro-batches have the mean gradient of one"
