"""Wrappers that replace, flatten or gather parameters: what works goes on, what cannot is told."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_registry_sharded import Layers, batches, whole
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from toys import make_optimizer

import nmsparse as nm
from nmsparse.integrations import fsdp
from nmsparse.integrations.fsdp import compressed_all_gather


def converted(recipe: nm.Recipe) -> tuple[Layers, nm.Run]:
    torch.manual_seed(0)
    model = Layers()
    return model, nm.sparsify_(model, recipe)


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, world: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batches(world, step, torch.float32)[rank]
        (model(x) - y).square().mean().backward()
        optimizer.step()


# ---- FSDP1 ----


def flatten(rank: int, world: int, attaches_first: bool) -> str:
    model, run = converted(nm.SRSTE("2:4", decay=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attaches_first:
        run.attach(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so
        wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="at conversion") as caught:
            train(wrapped, optimizer, rank, world, 1) if attaches_first else run.attach(optimizer)
    return str(caught.value)


@pytest.mark.parametrize("attaches_first", [True, False])
def test_fsdp1_is_refused_with_what_to_use(attaches_first: bool, two_ranks: Ranks) -> None:
    for message in two_ranks.run(flatten, attaches_first):
        assert "FSDP1 (FullyShardedDataParallel) or DeepSpeed ZeRO-3 flattened it" in message
        assert "fully_shard (FSDP2)" in message


# ---- attach after a forward pass ----


def evaluate_then_train(rank: int, world: int, evaluates: bool) -> tuple[list[str], dict[str, Tensor]]:
    model, run = converted(nm.SRSTE("2:4", decay=0.1))
    fully_shard(model.embed)
    fully_shard(model)
    optimizer = make_optimizer(run.recipe, model)
    if evaluates:  # the root stays whole after it, embed does not
        with torch.no_grad():
            model.eval()(batches(1, 0, torch.float32)[0][0])
        model.train()
    run.attach(optimizer)
    train(model, optimizer, rank, world, 3)
    return [layer.name for layer in run._clocks[0].layers], {name: whole(p) for name, p in model.named_parameters()}


def test_attach_after_an_evaluation_finds_all_layers(two_ranks: Ranks) -> None:
    late, early = two_ranks.run(evaluate_then_train, True)[0], two_ranks.run(evaluate_then_train, False)[0]
    assert late[0] == early[0] == converted(nm.STE("2:4"))[1].layers
    for name, expected in early[1].items():
        assert torch.equal(late[1][name], expected)


def attach_inside(rank: int, world: int) -> str:
    """The root of the sharding is outside of the model that was converted, so attach cannot know it."""
    model, run = converted(nm.STE("2:4"))
    outer = torch.nn.Sequential(model)
    fully_shard(model.embed)
    fully_shard(outer)
    optimizer = make_optimizer(run.recipe, outer)
    with torch.no_grad():
        outer(batches(1, 0, torch.float32)[0][0])
    run.attach(optimizer)
    with pytest.raises(RuntimeError, match="without a clock") as caught:
        train(outer, optimizer, rank, world, 1)
    return str(caught.value)


def test_layers_that_attach_could_not_find_are_told_at_the_first_update(two_ranks: Ranks) -> None:
    for message in two_ranks.run(attach_inside):
        assert "call reshard() on the outermost sharded module" in message


# ---- densify_ and freeze_ of weights that travel packed ----


def undo(rank: int, world: int, is_packed: bool, end: str, trains: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model, run = converted(nm.SSTE("2:4", mvue=False))
    if is_packed:
        compressed_all_gather(model)
    fully_shard(model.embed)
    fully_shard(model)
    optimizer = make_optimizer(run.recipe, model)
    run.attach(optimizer, total_steps=3)
    if trains:
        train(model, optimizer, rank, world, 3)
    {"densify": nm.densify_, "freeze": nm.freeze_}[end](model)
    with torch.no_grad():
        output = model(batches(1, 0, torch.float32)[0][0])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, world, 2)  # dense from here on
    return output, {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("end", ["densify", "freeze"])
def test_plain_layers_get_whole_weights_again(end: str, trains: bool, two_ranks: Ranks) -> None:
    plain, packed = two_ranks.run(undo, False, end, trains)[0], two_ranks.run(undo, True, end, trains)[0]
    assert torch.equal(packed[0], plain[0])
    for name, expected in plain[1].items():
        assert torch.equal(packed[1][name], expected), name


def undo_inside(rank: int, world: int) -> str:
    model, _ = converted(nm.STE("2:4"))
    compressed_all_gather(model)
    outer = torch.nn.Sequential(model)
    fully_shard(outer)
    with pytest.raises(ValueError, match="outermost") as caught:
        nm.densify_(model)
    outer(batches(1, 0, torch.float32)[0][0])
    nm.densify_(outer)
    outer(batches(1, 0, torch.float32)[0][0])
    return str(caught.value)


def test_records_of_sharded_parameters_are_found_in_older_and_newer_torch() -> None:
    """torch 2.11 keeps one group or none in a state, 2.13 a list; only the installed one can be run."""
    assert fsdp._param_groups(SimpleNamespace(_fsdp_param_group=None)) == []
    assert fsdp._param_groups(SimpleNamespace(_fsdp_param_group="a group")) == ["a group"]
    assert fsdp._param_groups(SimpleNamespace(_fsdp_param_groups=["a", "b"], _fsdp_param_group="no longer")) == ["a", "b"]


def test_densify_wants_the_module_that_was_sharded(two_ranks: Ranks) -> None:
    for message in two_ranks.run(undo_inside):
        assert message.startswith("embed.weight travels packed and was sharded with a module outside of this")
