"""torch.compile together with DDP and with FSDP2: a compiled sparse model trains as the eager one does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_registry_sharded import Layers, backward, batches, check_equal, results, train_alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import STEPS, make_optimizer

import nmsparse as nm

CASE: tuple[str, dict[str, Any]] = ("sr-ste", {"decay": 0.1})
BACKEND = "aot_eager"  # all of the tracing, autograd's graphs too, and no C++ compiler


def wrap(model: Layers, order: str) -> nn.Module:
    """The orders that people use."""
    if order == "compile of ddp":
        return torch.compile(DistributedDataParallel(model), backend=BACKEND)
    if order == "ddp of compile":
        return DistributedDataParallel(torch.compile(model, backend=BACKEND))
    if order == "compile, then fsdp":
        model.compile(backend=BACKEND)
    for layer in (model.up, model.down):
        if order == "compile blocks, then fsdp":
            layer.compile(backend=BACKEND)
        fully_shard(layer)
    fully_shard(model)
    return model


def train(rank: int, world: int, order: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        # what dynamo itself does while tracing; on the ranks warnings are errors, without the exceptions of pyproject.toml
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*torch.autograd.function.Function.* should not be instantiated")
        return train_compiled(rank, world, order)


def train_compiled(rank: int, world: int, order: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    bare = Layers().double()
    recipe = nm.recipe(CASE[0], "2:4", **CASE[1])
    run = nm.sparsify_(bare, recipe)
    model = wrap(bare, order)
    optimizer = make_optimizer(recipe, bare)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, batches(world, step)[rank], 1)
        optimizer.step()
    found = results(bare, run)
    return {**found, "frames": torch._dynamo.utils.counters["frames"]["ok"]}


@pytest.mark.parametrize("order", ["compile of ddp", "ddp of compile", "compile, then fsdp", "compile blocks, then fsdp"])
def test_compiled_ranks_train_as_one_eager_process(order: str, two_ranks: Ranks) -> None:
    found = two_ranks.run(train, order)
    assert all(result["frames"] > 0 for result in found), "something was compiled"
    check_equal(found, train_alone(CASE, 2))
