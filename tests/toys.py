"""Small models and runs that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.plan import MARGIN, NOT_FASTER, PROJECTION, LayerPlan

STEPS = 12
CASES: list[tuple[str, dict[str, Any]]] = [
    *((info.name, {}) for info in nm.recipes()),
    ("sr-ste", {"decay": 0.1}),
    ("sr-ste", {"decay": 0.1, "decay_on": "weight"}),
    ("asp", {"start": 4}),
    ("asp", {"start": 0.5}),
    ("step", {"switch": 5, "decay": 0.1}),
    ("step", {"switch": 0.5}),
    ("s-ste", {"mvue": False}),
    ("s-ste", {"mvue": "approximate"}),
    ("s-ste", {"precision": "fp8"}),
    ("fst", {"refresh": 3, "decay": 0.1}),
    ("fst", {"dense_tail": 0.0, "refresh": 1}),
    ("bi-mask", {"refresh": 3, "candidates": 4, "decay": 0.1}),
    ("bi-mask", {"permutation": "random", "refresh": 2}),
    ("bi-mask", {"permutation": "identity"}),
    ("sdgp", {"rescale": False}),
    ("sdgp", {"selector": "random"}),
    ("sdgp", {"selector": "mvue", "mvue": True}),
    ("mask-decay", {"shape": "linear", "pruned_grad": "scaled"}),
    ("structure-decay", {"shape": "geometric", "pruned_grad": "scaled"}),
    ("trio", {"forward": "double-soft"}),
    ("trio", {"forward": "hard", "decay": 0.1}),
]
"""Every registered recipe at its defaults, and settings of ours that take other paths. A new recipe is in here at once."""


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    name, options = case
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


class Block(nn.Module):
    """A residual MLP block, the unit that activation checkpointing re-runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A small residual network with an output head."""

    def __init__(self, width: int = 32, blocks: int = 2, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).to(dtype)


def make_data(count: int = 64, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    target = torch.sin(x @ torch.randn(16, 4, generator=generator))
    return x.to(dtype), target.to(dtype)


def make_optimizer(recipe: nm.Recipe, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW, or what the recipe needs."""
    needs = nm.recipe_info(recipe).needs if recipe.name else ()
    kind = nm.StepAdamW if "freeze_variance" in needs else torch.optim.AdamW
    return kind(model.parameters(), **{"lr": 3e-3, "weight_decay": 0.01, **options})


def start(
    name: str,
    options: dict[str, Any],
    pattern: str = "2:4",
    total_steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    **net: Any,
) -> tuple[Net, torch.optim.Optimizer, nm.Run]:
    """A converted network with an attached optimizer."""
    model = make_net(dtype=dtype, **net)
    recipe = nm.recipe(name, pattern, **options)
    run = nm.sparsify_(model, recipe)
    optimizer = make_optimizer(recipe, model)
    run.attach(optimizer, total_steps=total_steps, stats_every=2)
    return model, optimizer, run


def train(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, steps: int, data: tuple[Tensor, Tensor]
) -> list[float]:
    """Plain full-batch steps; returns the losses."""
    losses = []
    for _ in range(steps):
        loss = (model(data[0]) - data[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    """Equal state dicts, bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def assert_identical(left: Any, right: Any) -> None:
    """Equal bit for bit, through dicts and lists."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_identical(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_identical(a, b)
    elif isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


def assert_follows_its_times(layer: LayerPlan) -> None:
    """A plan with one micro-batch, of a recipe that packs the weight for two products: what runs sparse saves time by the plan's
    own numbers, and what could but does not would save no more than the margin."""
    cast = layer.dense_ms - sum(times.dense_ms or 0.0 for times in layer.products.values())
    for product, times in layer.products.items():
        if times.reason not in (None, NOT_FASTER):
            continue
        assert times.dense_ms is not None
        assert times.sparse_ms is not None
        # a sparse product spares the projection of the weight as well
        spared = 0.0 if product == "grad_weight" else PROJECTION * cast
        gain = times.dense_ms + spared - times.sparse_ms - times.pack_ms
        rounding = 1e-4  # times are kept to 1e-5 ms
        if times.reason is None:
            assert gain > -rounding, product
        else:
            assert gain <= MARGIN * layer.planned_ms + rounding, product
