"""Checkpoints of sharded runs: saved on four ranks, loaded on two, under the keys of the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_registry_sharded import Case, Layers, backward, batches, start, train_alone, whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from toys import STEPS, case_id

import nmsparse as nm
from nmsparse.integrations.fsdp import compressed_all_gather

CUT = 7
"""Updates before the checkpoint: past the switch of step, the start of asp and a refresh of fst."""
PARTS = 4
"""Micro-batches of an update, on any number of ranks."""


def train(model: Any, optimizer: Any, rank: int, world: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        mine = batches(PARTS, step)[rank::world]
        for batch in mine:
            backward(model, batch, len(mine))
        optimizer.step()


def save(rank: int, world: int, case: Case, folder: str) -> None:
    model, optimizer, run = start(case, "fsdp")
    assert isinstance(run, Stateful)
    train(model, optimizer, rank, world, range(CUT))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "run": run}, checkpoint_id=folder)


def load_and_go_on(rank: int, world: int, case: Case, folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    model, optimizer, run = start(case, "fsdp")
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "run": run}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert run.step == CUT
    train(model, optimizer, rank, world, range(CUT, STEPS))
    return run.step, {name: whole(p) for name, p in model.named_parameters()}


RESUMED: list[Case] = [
    ("sr-ste", {"decay": 0.1}),
    ("asp", {"start": 4}),
    ("step", {"switch": 5, "decay": 0.1}),
    ("s-ste", {}),
    ("fst", {"refresh": 3, "decay": 0.1}),
    ("bi-mask", {"refresh": 3, "candidates": 4, "decay": 0.1}),
]


@pytest.mark.parametrize("case", RESUMED, ids=case_id)
def test_run_saved_on_four_ranks_goes_on_on_two(case: Case, four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(save, case, str(tmp_path))
    alone = train_alone(case, PARTS)["weights"]
    for step, weights in two_ranks.run(load_and_go_on, case, str(tmp_path)):
        assert step == STEPS
        for name, expected in alone.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-12, atol=1e-12)


def prepare_to_load(rank: int, world: int) -> tuple[int, bool]:
    """A new optimizer has no state to load into, so torch makes one by a step without gradients."""
    model, optimizer, run = start(("sr-ste", {"decay": 0.1}), "fsdp")
    get_state_dict(model, optimizer)
    moved = any(bool(whole(state["exp_avg"]).any()) for state in optimizer.state.values())
    return run.step, moved


def test_making_room_for_loading_is_no_update(two_ranks: Ranks) -> None:
    assert two_ranks.run(prepare_to_load) == [(0, False), (0, False)]


def full_weights(rank: int, world: int, is_packed: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Layers()
    nm.sparsify_(model, nm.STE("2:4"))
    if is_packed:
        compressed_all_gather(model)
    torch.distributed.fsdp.fully_shard(model)
    model(batches(world, 0, torch.float32)[rank][0]).sum().backward()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


@pytest.mark.parametrize("is_packed", [False, True])
def test_gathered_state_dict_is_that_of_the_dense_model(is_packed: bool, two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    dense = Layers()
    expected = dense.state_dict()
    gathered = two_ranks.run(full_weights, is_packed)[0]
    assert list(gathered) == list(expected)
    for name, tensor in gathered.items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, expected[name])
