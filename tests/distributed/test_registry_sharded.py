"""Every recipe under FSDP2 and DDP trains as in one process.

One process accumulates over micro-batches what the ranks compute each on its own: the same arithmetic, up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import CASES, STEPS, assert_identical, case_id, make_data, make_optimizer

import nmsparse as nm
from nmsparse.nn import sparse_modules

Case = tuple[str, dict[str, Any]]
TOLERANCE = 1e-12
"""Of float64 numbers near 1: only the order of sums differs."""


class Layers(nn.Module):
    """Rows that are hard to share out. Over four ranks, 20 and 36 rows are 5 and 9 each, so that tiles of four rows lie across
    the borders; 6 rows are 2, 2, 2 and none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 20)
        self.up = nn.Linear(20, 36)
        self.down = nn.Linear(36, 20)
        self.odd = nn.Linear(20, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.odd(x + self.down(torch.nn.functional.gelu(self.up(x)))))


def start(case: Case, wrapper: str | None, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer, nm.Run]:
    torch.manual_seed(0)
    bare = model = Layers().to(dtype)
    recipe = nm.recipe(case[0], "2:4", **case[1])
    run = nm.sparsify_(bare, recipe)
    if wrapper == "fsdp":
        for layer in (bare.embed, bare.up):  # the others belong to the root
            fully_shard(layer)
        fully_shard(bare)
    elif wrapper == "ddp":
        model = DistributedDataParallel(bare)
    optimizer = make_optimizer(recipe, model)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    return model, optimizer, run


def batches(parts: int, step: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    x, y = make_data(32, seed=step, dtype=dtype)
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], parts: int) -> None:
    ((model(batch[0]) - batch[1]).square().mean() / parts).backward()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def results(model: nn.Module, run: nm.Run) -> dict[str, Any]:
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        "weights": {name: whole(p) for name, p in bare.named_parameters()},
        "gradients": {name: whole(p.grad) for name, p in bare.named_parameters()},
        "seen": {name: whole(nm.effective_weight(module)) for name, module in sparse_modules(bare)},
        "stats": run.stats(),
        "saved": run.state_dict(),
    }


def train_on_ranks(rank: int, world: int, wrapper: str, case: Case) -> dict[str, Any]:
    model, optimizer, run = start(case, wrapper)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, batches(world, step)[rank], 1)
        optimizer.step()
    return results(model, run)


def train_alone(case: Case, parts: int) -> dict[str, Any]:
    model, optimizer, run = start(case, None)
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches(parts, step):
            backward(model, batch, parts)
        optimizer.step()
    return results(model, run)


def check_equal(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for key in ("weights", "gradients", "seen"):
        for name, expected in alone[key].items():
            torch.testing.assert_close(found[0][key][name], expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, expected in alone["seen"].items():
        assert torch.equal(found[0]["seen"][name] != 0, expected != 0), f"the mask of {name}"
    for other in found[1:]:  # bit for bit: ranks that drift apart do so slowly
        for key in ("weights", "seen", "saved"):
            assert_identical(other[key], found[0][key])
    expected = alone["stats"]["total"]
    for rank in found:
        total = rank["stats"]["total"]
        assert {key: total[key] for key in total if key not in INEXACT} == {
            key: expected[key] for key in expected if key not in INEXACT
        }
        assert total["density"] is None or total["density"] == pytest.approx(expected["density"], abs=1e-6)


INEXACT = ("density", "variance_change")
"""A rank looks at its own rows; a sum over ranks has another order."""


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sharded_training_equals_one_process(case: Case, two_ranks: Ranks) -> None:
    check_equal(two_ranks.run(train_on_ranks, "fsdp", case), train_alone(case, 2))


BORDERS: list[Case] = [
    ("sr-ste", {"decay": 0.1}),
    ("asp", {"start": 4}),
    ("step", {"switch": 5, "decay": 0.1}),
    ("s-ste", {}),
    ("fst", {"refresh": 3, "decay": 0.1}),
    ("bi-mask", {"refresh": 3, "candidates": 4, "decay": 0.1}),
    ("trio", {"forward": "double-soft"}),
]
"""Recipes with a state per weight, a search, a decay, or a sum over the whole weight."""


@pytest.mark.parametrize("case", BORDERS, ids=case_id)
def test_borders_between_four_ranks_change_nothing(case: Case, four_ranks: Ranks) -> None:
    check_equal(four_ranks.run(train_on_ranks, "fsdp", case), train_alone(case, 4))


@pytest.mark.parametrize("case", [(info.name, {}) for info in nm.recipes()], ids=case_id)
def test_replicated_training_equals_one_process(case: Case, two_ranks: Ranks) -> None:
    check_equal(two_ranks.run(train_on_ranks, "ddp", case), train_alone(case, 2))


def test_replicated_training_on_four_ranks_equals_one_process(four_ranks: Ranks) -> None:
    case: Case = ("fst", {"refresh": 3, "decay": 0.1})
    check_equal(four_ranks.run(train_on_ranks, "ddp", case), train_alone(case, 4))
