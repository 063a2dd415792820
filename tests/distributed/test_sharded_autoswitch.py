"""STEP's automatic switch is decided once for all ranks: a sharded run switches when an unsharded one does."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import nmsparse as nm

STEPS = 30


def run_small_net(rank: int, world: int) -> tuple[int, float, list[Tensor]]:
    """A STEP run on one process, or sharded over several; returns T0, the last sample and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    run = nm.sparsify_(model, nm.STEP("2:4", switch_eps=3e-6, latest=1.0), exclude=["4"])
    if world > 1:
        fully_shard(model)
    optimizer = nm.StepAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.8), floor_quantile=0.1)
    run.attach(optimizer, total_steps=STEPS)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(16, 8, generator=generator)
        target = torch.randn(16, 4, generator=generator)
        x, target = (t.chunk(world)[rank] for t in (x, target))
        loss = (model(x) - target).square().mean() * 0.85**step  # gradients fade, so that the variance settles
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = run.stats()["total"]
    weights = [p.detach().full_tensor() if world > 1 else p.detach() for p in model.parameters()]
    return total.get("switched_at"), total["variance_change"], weights


def test_sharded_and_unsharded_runs_switch_at_the_same_step(two_ranks: Ranks) -> None:
    switched_at, sample, weights = run_small_net(0, 1)
    assert 5 < switched_at < STEPS, "the window decides, not a limit"
    for other in two_ranks.run(run_small_net):
        assert other[0] == switched_at
        assert other[1] == pytest.approx(sample, rel=1e-4)
        torch.testing.assert_close(other[2], weights, rtol=1e-3, atol=1e-4)
