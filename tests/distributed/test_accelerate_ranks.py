"""accelerate wraps the model and replaces its parameters: everything keyed by name goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from test_registry_sharded import Layers, batches, whole
from toys import STEPS, make_optimizer

import nmsparse as nm

accelerate = pytest.importorskip("accelerate")


def accelerator(kind: str) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    found = accelerate.Accelerator(cpu=True)
    if kind != "ddp":
        # accelerate chooses FSDP on accelerators only; from here on it runs on a CPU like anywhere else
        plugin = accelerate.utils.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=kind == "fsdp from meta"
        )
        found.state.distributed_type = accelerate.DistributedType.FSDP
        found.state.fsdp_plugin = plugin
    return found


def make(name: str) -> tuple[Layers, nm.Run, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Layers()
    run = nm.sparsify_(model, nm.recipe(name, "2:4"))
    return model, run, make_optimizer(run.recipe, model)


def train(rank: int, world: int, kind: str, name: str, attaches_first: bool) -> dict[str, torch.Tensor]:
    own = accelerator(kind)
    bare, run, optimizer = make(name)
    if attaches_first:
        run.attach(optimizer, total_steps=STEPS, stats_every=2)
    model, optimizer = own.prepare(bare, optimizer)
    if not attaches_first:
        run.attach(optimizer, total_steps=STEPS, stats_every=2)
    assert ("DTensor" in {type(p.data).__name__ for p in run.parameters()}) is (kind != "ddp")
    for step in range(STEPS):
        x, y = batches(world, step, torch.float32)[rank]
        own.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert run.step == STEPS
    return {key: whole(p) for key, p in own.unwrap_model(model).named_parameters()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp from meta"])
@pytest.mark.parametrize(("name", "attaches_first"), [("sr-ste", True), ("s-ste", False), ("fst", True)])
def test_run_survives_prepare(kind: str, name: str, attaches_first: bool, two_ranks: Ranks) -> None:
    model, run, optimizer = make(name)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    for step in range(STEPS):
        for x, y in batches(2, step, torch.float32):
            ((model(x) - y).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in two_ranks.run(train, kind, name, attaches_first):
        for key, expected in model.named_parameters():
            torch.testing.assert_close(found[key], expected.detach(), rtol=1e-4, atol=1e-5)
