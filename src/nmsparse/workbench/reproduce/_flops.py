"""Training FLOPs, counted with torch.utils.flop_counter on a model without memory.

Convention: 1 multiply-add = 2 FLOPs; what the counter counts (matrix products, convolutions, attention) in forward and backward
of one update. "dense" is that number. "sparse" takes away what N:M tensor cores would skip: each of the three products of a
sparse layer costs as much as its forward product, times the density of its N:M operand at that update (N/M, or 1 while a
schedule keeps it dense). Hardware of today skips 2:4 only; the count says what a recipe asks for, not what a GPU delivers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nmsparse.functional import stage_at
from nmsparse.nn import select_layers
from nmsparse.recipes import ASP, PRODUCTS, STEP, Clock, Recipe, StructureDecay
from nmsparse.workbench.models import build_model, model_info, models
from nmsparse.workbench.tasks import Facts, load_task, tasks
from nmsparse.workbench.training import TrainConfig

SAMPLES = 1000
"""Moments of a schedule that are looked at."""
PRETRAINED = {
    "minilm": {"width": 384, "layers": 6, "heads": 12},
    "bert-base-uncased": {"width": 768, "layers": 12, "heads": 12},
}
"""Sizes of the encoders that claims fine-tune, by the name of their folder: they are counted without being read."""
FACTS = {
    "cifar10": Facts("images", classes=10, channels=3, side=32),
    "enwik8": Facts("language", vocabulary=256, length=512),
    "enwik8-bpe": Facts("language", vocabulary=50257, length=256),
    "wikitext2": Facts("language", vocabulary=33278, length=128),
    "sst2": Facts("sentences", vocabulary=30522, length=64, classes=2, begin=101, end=102),
    "mrpc": Facts("sentences", vocabulary=30522, length=128, classes=2, begin=101, end=102),
}
"""What models must know of data sets that need not be read for counting."""


@dataclass(frozen=True)
class Flops:
    """Of a whole run."""

    dense: float
    sparse: float

    @property
    def share(self) -> float:
        return self.sparse / self.dense


@dataclass(frozen=True)
class Cost:
    """Of one update, densely: all of it, and the forward products of the layers that may be sparse, with their sizes."""

    total: int
    layers: dict[str, tuple[int, int, int]]
    """Name: FLOPs of its forward product, out features, in features."""


def training_flops(config: TrainConfig, switched_at: int | None = None) -> Flops:
    """FLOPs of a run; ``switched_at`` is when STEP's automatic switch came (its latest moment by default)."""
    cost, recipe = update_cost(config), config.make_recipe()
    densities = {product: _mean_density(recipe, product, config.steps, switched_at) for product in PRODUCTS}
    skipped = 0.0
    for forward, out_features, in_features in cost.layers.values():
        fit = recipe.fit(out_features, in_features)
        if fit.refused is None:
            skipped += forward * sum(1 - densities[product] for product in PRODUCTS if product not in fit.dense)
    return Flops(float(cost.total) * config.steps, (cost.total - skipped) * config.steps)


def equal_flops_steps(config: TrainConfig, reference: TrainConfig) -> int:
    """Updates after which ``config`` has spent as many sparse FLOPs as ``reference``; its density must not depend on time."""
    return round(training_flops(reference).sparse / training_flops(config).sparse * config.steps)


def _mean_density(recipe: Recipe, product: str, steps: int, switched_at: int | None) -> float:
    every = max(1, steps // SAMPLES)
    moments = range(0, steps, every)
    return sum(density(recipe, product, Clock(step, steps), switched_at) for step in moments) / len(moments)


def density(recipe: Recipe, product: str, clock: Clock, switched_at: int | None = None) -> float:
    """Share of the product that is computed at an update: N/M of the operand's pattern at that time, 1 where it is dense."""
    if product not in recipe.sparse_products:
        return 1.0
    if isinstance(recipe, StructureDecay):
        stages, progress = recipe.stages_for(0), recipe.progress(clock)
        pattern = stages[stage_at(progress, len(stages))]
        return 1.0 if progress < 0 else pattern.n / pattern.m
    if isinstance(recipe, STEP | ASP):
        is_sparse = clock.step >= _start(recipe, clock, switched_at)
    else:
        is_sparse = product in recipe.active_products(clock, {})
    return recipe.pattern.n / recipe.pattern.m if is_sparse else 1.0


def _start(recipe: STEP | ASP, clock: Clock, switched_at: int | None) -> float:
    """The update from which a recipe with a dense first phase is sparse."""
    if isinstance(recipe, ASP):
        return recipe.start * clock.total if isinstance(recipe.start, float) else recipe.start
    if isinstance(recipe.switch, str):
        return recipe.latest * clock.total if switched_at is None else switched_at
    return recipe.switch * clock.total if isinstance(recipe.switch, float) else recipe.switch


# ---- counting ----


def update_cost(config: TrainConfig) -> Cost:
    """What one update costs, from one example: products are linear in the number of examples."""
    sizes = tuple((name, value) for name in ("width", "layers", "heads") if (value := getattr(config, name)) is not None)
    if config.pretrained is not None:
        sizes = tuple(PRETRAINED[PurePosixPath(config.pretrained).name].items())
    one = _count(config.task, config.model, config.length, sizes, tuple(config.targets), tuple(config.exclude))
    layers = {name: (config.batch * forward, rows, columns) for name, (forward, rows, columns) in one.layers.items()}
    return Cost(config.batch * one.total, layers)


@cache
def _count(
    task: str, model: str | None, length: int | None, sizes: Any, targets: tuple[str, ...], exclude: tuple[str, ...]
) -> Cost:
    facts = task_facts(task, length)
    info = model_info(model or next(info.name for info in models() if facts.kind in info.kinds))
    with torch.device("meta"):
        made = build_model(info.name, facts, **dict(sizes))
    chosen = select_layers(made, list(targets) or info.targets, list(exclude or info.exclude) or None).layers
    shapes = {name: _sizes(module) for name, module in chosen.items() if isinstance(module, nn.Module)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        made.to_empty(device="cpu")
        batch = _example(facts)
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # of attention's kernels the counter knows some, and which one runs is the device's choice
            with FlopCounterMode(display=False) as forward:
                loss = made(**batch).loss
            with FlopCounterMode(display=False) as backward:
                loss.backward()
    by_module = {name.partition(".")[2]: sum(counts.values()) for name, counts in forward.get_flop_counts().items()}
    layers = {name: (int(by_module[name]), rows, columns) for name, (rows, columns) in shapes.items()}
    return Cost(int(forward.get_total_flops() + backward.get_total_flops()), layers)


def task_facts(task: str, length: int | None = None) -> Facts:
    """Sizes of a task's data, without reading what is not embedded."""
    if task in FACTS:
        known = FACTS[task]
        return known if length is None or not known.length else replace(known, length=length)
    if any(info.name == task and info.is_embedded for info in tasks()):
        return load_task(task, length=length, limit=1).facts
    raise ValueError(f"the sizes of task {task!r} are not known here; add them to FACTS of reproduce/_flops.py.")


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Out and in features that groups run along."""
    if isinstance(module, nn.Conv2d):
        return module.out_channels // module.groups, module.in_channels // module.groups
    weight: Tensor = module.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)  # transformers' Conv1D is stored transposed


def _example(facts: Facts) -> dict[str, Tensor]:
    if facts.kind == "images":
        side = facts.side
        return {"pixel_values": torch.zeros(1, facts.channels, side, side), "labels": torch.zeros(1, dtype=torch.int64)}
    ids = torch.zeros(1, facts.length, dtype=torch.int64)
    if facts.kind == "sentences":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(1, dtype=torch.int64)}
    return {"input_ids": ids, "labels": ids}
