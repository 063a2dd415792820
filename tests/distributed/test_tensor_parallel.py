"""parallelize_module, alone and with fully_shard: recipes that work on a part of a weight train as one process does, the others
say why they cannot."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_registry_sharded import Case, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import CASES, case_id, make_optimizer

import nmsparse as nm

STEPS = 6
EXACT: list[Case] = [
    ("dense", {}),
    ("ste", {}),
    ("sr-ste", {"decay": 0.1}),
    ("sr-ste", {"decay": 0.1, "decay_on": "weight"}),
    ("step", {"switch": 3, "decay": 0.1}),
    ("s-ste", {"mvue": False}),
    ("bi-mask", {"permutation": "identity"}),
    ("sdgp", {}),
    ("mask-decay", {}),
    ("structure-decay", {}),
    ("trio", {"mvue": False}),
]
REFUSED = [
    ("asp", {}, "its state (mask) is of the whole weight"),
    ("fst", {}, "its state (mask) is of the whole weight"),
    ("bi-mask", {}, "its state (permutation, inverse) is of the whole weight"),
    ("s-ste", {}, "its random numbers are drawn for the whole gradient"),
    ("trio", {}, "its random numbers are drawn for the whole gradient"),
    ("sdgp", {"selector": "random"}, "its random numbers are drawn for the whole gradient"),
    ("structure-decay", {"shape": "geometric"}, "the operation that makes its mask wants the whole weight"),
]


class Net(nn.Module):
    """An MLP block; its hidden width is what the ranks share out."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, hidden), nn.Linear(hidden, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.relu(self.up(x))))


def make_mesh(world: int, data_ranks: int = 1) -> DeviceMesh | None:
    """ "tp" splits layers, "dp" splits batches; None for one process."""
    return init_device_mesh("cpu", (data_ranks, world // data_ranks), mesh_dim_names=("dp", "tp")) if world > 1 else None


def make(case: Case, mesh: DeviceMesh | None, hidden: int = 32) -> tuple[Net, nm.Run]:
    """Split over the ranks where there are several."""
    torch.manual_seed(0)
    model = Net(hidden).double()
    run = nm.sparsify_(model, nm.recipe(case[0], "2:4", **case[1]), ["up", "down"])
    if mesh is not None:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if mesh["dp"].size() > 1:
            for module in (model.up, model.down, model):
                fully_shard(module, mesh=mesh["dp"])
    return model, run


def train(rank: int, world: int, case: Case, data_ranks: int = 1) -> dict[str, Any]:
    mesh = make_mesh(world, data_ranks)
    model, run = make(case, mesh)
    part = 0 if mesh is None else mesh["dp"].get_local_rank()
    optimizer = make_optimizer(run.recipe, model)
    run.attach(optimizer, total_steps=STEPS, stats_every=1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = (torch.randn(16, width, generator=generator, dtype=torch.float64) for width in (16, 4))
        optimizer.zero_grad()
        (model(x.chunk(data_ranks)[part]) - y.chunk(data_ranks)[part]).square().mean().backward()
        optimizer.step()
    found = {"flip_rate": run.stats()["total"]["flip_rate"]}
    trained = {f"trained {name}": whole(p) for name, p in model.named_parameters()}
    gradients = {f"gradient of {name}": whole(p.grad) for name, p in model.named_parameters()}
    nm.freeze_(model)
    return found | trained | gradients | {f"frozen {name}": whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", EXACT, ids=case_id)
def test_split_layers_train_as_whole_ones(case: Case, two_ranks: Ranks) -> None:
    check_equal(two_ranks.run(train, case), train(0, 1, case))


def train_two_by_two(rank: int, world: int, case: Case) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # as ColwiseParallel makes any layer do
        return train(rank, world, case, 2)


@pytest.mark.parametrize("case", EXACT, ids=case_id)
def test_split_layers_that_are_sharded_as_well_train_as_whole_ones(case: Case, four_ranks: Ranks) -> None:
    """A rank holds a part of the rows of its part of a layer, and sees half of the batch."""
    check_equal(four_ranks.run(train_two_by_two, case), train(0, 1, case))


def check_equal(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def refusal(rank: int, world: int, case: Case, hidden: int) -> str:
    model, run = make(case, make_mesh(world), hidden)
    run.attach(make_optimizer(run.recipe, model), total_steps=STEPS)
    with pytest.raises(NotImplementedError) as caught:
        model(torch.ones(4, 16, dtype=torch.float64))
    return str(caught.value)


@pytest.mark.parametrize(("name", "options", "words"), REFUSED)
def test_recipes_that_need_the_whole_weight_say_so(name: str, options: dict[str, Any], words: str, two_ranks: Ranks) -> None:
    for message in two_ranks.run(refusal, (name, options), 32):
        assert message.startswith(f"up: {name} 2:4 cannot run on its (32, 16) weight, which tensor parallelism splits: {words}.")
        assert "fully_shard" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ste", "down: ste 2:4 cannot run on its (16, 12) weight, which tensor parallelism splits: a rank holds 6 of its 12 in"),
        ("sdgp", "up: sdgp 2:4 cannot run on its (12, 16) weight, which tensor parallelism splits: a rank holds 6 of its 12 out"),
    ],
)
def test_groups_that_a_border_cuts_through_are_told_with_the_size(name: str, words: str, two_ranks: Ranks) -> None:
    assert all(message.startswith(words) for message in two_ranks.run(refusal, (name, {}), 12))


def test_every_registered_recipe_is_in_one_of_the_lists() -> None:
    assert {name for name, _ in CASES} == {name for name, _ in EXACT} | {name for name, _, _ in REFUSED}
