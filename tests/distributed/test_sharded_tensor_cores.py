"""Sparse products of weights that FSDP2 shards: packed in the pass that gathered them, by the reference on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import Ranks
from test_registry_sharded import Case, whole
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import CASES, case_id, make_optimizer

import nmsparse as nm
from nmsparse.integrations.fsdp import compressed_all_gather
from nmsparse.kernels import _dispatch

STEPS = 6
TOLERANCE = 2e-2
"""Of losses in bf16 after some updates: products round to it, and sums have another order."""
SPARSE_CASES = [
    case for case in CASES if nm.recipe(case[0], "2:4", **case[1]).sparse_products and case[1].get("precision") is None
]
WAYS = ("autocast", "mixed precision", "replicate", "compiled", "recomputed", "compressed")


@contextmanager
def reference_engine() -> Iterator[None]:
    """Let the reference serve sparse products on the CPU, and let every size pay."""
    with (
        patch.object(_dispatch, "TABLE", [_dispatch.REFERENCE]),
        patch("nmsparse._tensor_cores.Rule.unprofitable", lambda *_: None),
        warnings.catch_warnings(),
    ):
        # what dynamo itself does while tracing
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*torch.autograd.function.Function.* should not be instantiated")
        yield


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrap(model: Net, way: str) -> None:
    if way == "recomputed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    options: dict[str, Any] = {}
    if way in ("mixed precision", "compressed"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if way == "compressed":
        compressed_all_gather(model, dtype=torch.bfloat16)
    for block in model.blocks:
        if way == "compiled":
            block.compile(backend="aot_eager", fullgraph=True)
        replicate(block) if way == "replicate" else fully_shard(block, **options)
    replicate(model) if way == "replicate" else fully_shard(model, **options)


def train(rank: int, world: int, case: Case, way: str | None, emulate: bool) -> dict[str, Any]:
    """The losses, the weights at the end and how products ran; each rank sees its part of the batch."""
    with reference_engine():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, recipe = Net(), nm.recipe(case[0], "2:4", **case[1])
        run = nm.sparsify_(model, recipe, emulate=emulate)
        if way is not None:
            wrap(model, way)
        optimizer = make_optimizer(recipe, model)
        run.attach(optimizer, total_steps=STEPS)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(96, 64, generator=generator), torch.randn(96, 8, generator=generator)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x.chunk(world)[rank]).float() - y.chunk(world)[rank]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        copies = sum(len(h.layer.sparse.copies) for h in run._layers.values() if h.layer.sparse is not None)
        weights = {name: whole(p) for name, p in model.named_parameters()}
        return {"losses": losses, "weights": weights, "products": run.products, "copies": copies}


def projects_between_updates(recipe: nm.Recipe) -> bool:
    """More than one kernel makes what it packs."""
    return (recipe.packing is None and not recipe.prunes_channels) or getattr(recipe, "permutation", "identity") != "identity"


@pytest.mark.parametrize("case", SPARSE_CASES, ids=case_id)
def test_sharded_weights_train_on_sparse_products_as_emulated_ones_do(case: Case, two_ranks: Ranks) -> None:
    sparse, emulated = (two_ranks.run(train, case, "autocast", emulate) for emulate in (False, True))
    for rank, other in zip(sparse, emulated, strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=TOLERANCE)
        assert rank["copies"] == 0
    refused = f"its weight is sharded, and {case[0]} is not packed by one kernel"
    is_refused = projects_between_updates(nm.recipe(case[0], "2:4", **case[1]))
    for product, how in sparse[0]["products"]["blocks.0.up"].items():
        expected = {refused} if is_refused and product != "grad_weight" else {"sparse", f"{case[0]} is in a dense phase"}
        assert how in expected, product


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_shard_use_sparse_products(way: str, two_ranks: Ranks) -> None:
    case: Case = ("trio", {"forward": "hard"} if way == "compressed" else {})
    sparse, emulated = (two_ranks.run(train, case, way, emulate) for emulate in (False, True))
    for rank, other in zip(sparse, emulated, strict=True):
        prefix = "blocks.0._checkpoint_wrapped_module.up" if way == "recomputed" else "blocks.0.up"
        name = next(name for name in rank["products"] if name in (prefix, "blocks.0.up"))
        assert rank["products"][name] == dict.fromkeys(("output", "grad_input", "grad_weight"), "sparse")
        assert rank["losses"] == pytest.approx(other["losses"], rel=TOLERANCE)
    for name, weight in sparse[0]["weights"].items():
        assert torch.equal(weight, sparse[1]["weights"][name]), "ranks drift apart"


def split(rank: int, world: int) -> tuple[dict[str, str], float]:
    with reference_engine():
        torch.manual_seed(0)
        model = Net()
        run = nm.sparsify_(model, nm.STE("2:4"), ["up", "down"])
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(optimizer)
        loss = model(torch.ones(8, 64)).square().mean()
        seen = run.products["blocks.0.up"]
        loss.backward()
        optimizer.step()
        assert run.products["blocks.0.up"] == seen
        return seen, loss.item()


def test_tensor_parallel_layers_are_emulated_and_say_so(two_ranks: Ranks) -> None:
    for products, loss in two_ranks.run(split):
        assert products == {"output": "emulated: tensor parallelism splits its weight"}
        assert loss > 0
