"""Run folders without training: plausible curves, layers and masks, for tests of what reads them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nmsparse import functional
from nmsparse.pattern import Pattern
from nmsparse.workbench.records import RunWriter

PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LAYERS = tuple(f"transformer.h.{block}.{part}" for block in range(3) for part in PARTS)[:10]
SIDE = 64


@dataclass(frozen=True)
class Character:
    """How a recipe behaves: final loss, level of flips, noise of gradients, milliseconds per step."""

    recipe: str
    loss: float
    flips: float = 0.0
    noise: float = 0.55
    step_ms: float = 40.0

    @property
    def label(self) -> str:
        return self.recipe if self.recipe == "dense" else f"{self.recipe} 2:4"


CHARACTERS = (
    Character("dense", 1.612, step_ms=38.2),
    Character("sr-ste", 1.668, flips=0.011, noise=0.63, step_ms=47.5),
    Character("s-ste", 1.634, flips=0.004, noise=0.66, step_ms=61.3),
    Character("trio", 1.651, flips=0.005, noise=0.74, step_ms=83.9),
)


def information(character: Character, seed: int, steps: int, **changes: Any) -> dict[str, Any]:
    """run.json of a run; changes replace its fields."""
    is_dense = character.recipe == "dense"
    emulated = dict.fromkeys(("output", "grad_input"), "torch sees no CUDA GPU") | {"grad_weight": "not sparse in this recipe"}
    dense_layers = {"lm_head": "out_features = 65 is not a multiple of 4", "transformer.wte": "not a linear layer"}
    facts = {
        "label": character.label,
        "recipe": character.recipe,
        "pattern": "2:4",
        "seed": seed,
        "task": {"name": "shakespeare", "headline": "loss", "higher_is_better": False, "unit": "tokens"},
        "config": {"task": "shakespeare", "model": "gpt2", "recipe": character.recipe, "seed": seed, "steps": steps}
        | {"batch": 32, "length": 64, "lr": 2e-3, "schedule": "cosine", "optimizer": "adamw", "decay": 0.1 if is_dense else 2e-4},
        "model": {"name": "gpt2", "parameters": 10_788_929, "sparse_parameters": 0 if is_dense else 9_437_184},
        "environment": {"nmsparse": "0.2.0", "torch": "2.13.0", "python": "3.11.9", "device": "cpu", "cpu_threads": 2},
        "skipped": {} if is_dense else dense_layers,
        "products": {} if is_dense else dict.fromkeys(LAYERS, emulated),
    }
    return facts | changes


def masks(flips: float, seed: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """A mask that moves less and less, as training does: the 2:4 mask of a slowly drifting random matrix."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SIDE, SIDE, generator=generator)
    for index in range(count):
        drift = 14 * flips * (0.5 + 0.5 * math.cos(math.pi * index / count)) + 0.002
        weight = weight + drift * torch.randn(SIDE, SIDE, generator=generator)
        yield index, functional.magnitude_mask(weight, Pattern("2:4"))


def hex_bits(mask: torch.Tensor) -> str:
    text = "".join("1" if bit else "0" for bit in mask.flatten().tolist())
    text += "0" * (-len(text) % 8)
    return f"{int(text, 2):0{len(text) // 4}x}"


def write_run(
    folder: Path,
    character: Character = CHARACTERS[0],
    seed: int = 0,
    *,
    steps: int = 400,
    log_every: int = 5,
    stop: int | None = None,
    ending: str | None = "finished",
    kinds: Sequence[str] = ("train", "valid", "layers", "masks", "mask"),
    accuracy: bool = False,
    **changes: Any,
) -> Path:
    """One run folder. stop ends it early; ending=None leaves it without a result, as a kill does."""
    draw = random.Random(f"{character.recipe} {seed}")
    shift = draw.gauss(0, 0.006)
    if accuracy:
        changes = {"task": {"name": "fashion-mini", "headline": "accuracy", "higher_is_better": True, "unit": "images"}} | changes
    writer = RunWriter(folder)
    writer.describe(information(character, seed, steps, **changes))
    last, valid = stop or steps, {"loss": 0.0}
    for step in range(log_every, last + 1, log_every):
        loss = (character.loss - 0.11 + shift) + 2.5 * math.exp(-step / 28) + 0.55 * math.exp(-step / 130) + draw.gauss(0, 0.016)
        valid = {"loss": loss + 0.10 + 0.06 * step / steps + draw.gauss(0, 0.003)}
        valid |= {"accuracy": min(1.0, 1.45 - 0.36 * valid["loss"])} if accuracy else {}
        add_train(writer, character, step, steps, loss, draw) if "train" in kinds else None
        if "valid" in kinds and step % (8 * log_every) == 0:
            writer.add("valid", step, **valid)
        if "layers" in kinds and character.flips and step % (2 * log_every) == 0:
            writer.add("layers", step, layers={name: layer(character, i, step, steps, draw) for i, name in enumerate(LAYERS)})
    if character.flips:
        add_masks(writer, character, seed, range(log_every, last + 1, 4 * log_every), kinds)
    if ending is not None:
        writer.finish(result(character, ending, last, valid, draw))
    else:
        writer._metrics.close()
    return folder


def add_train(writer: RunWriter, character: Character, step: int, steps: int, loss: float, draw: random.Random) -> None:
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    flips = character.flips * (0.03 + cosine) * (1 + 3 * math.exp(-step / 40)) * draw.uniform(0.9, 1.1)
    noise = character.noise + 0.3 * (1 - math.exp(-step / 60)) * (1 - character.noise) + draw.gauss(0, 0.008)
    step_ms = character.step_ms * draw.uniform(0.97, 1.06)
    writer.add(
        "train",
        step,
        loss=loss,
        lr=2e-3 * min(1, step / 40) * cosine,
        grad_norm=0.4 + 1.2 * math.exp(-step / 50) + abs(draw.gauss(0, 0.04)),
        step_ms=step_ms,
        units_per_second=2048 / step_ms * 1e3,
        seconds=step * character.step_ms / 1e3,
        flip_rate=flips if character.flips else None,
        density=0.5 if character.flips else 1.0,
        gradient_noise=noise,
    )


def layer(character: Character, index: int, step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    depth = 0.6 + 0.35 * (index % 4) + 0.12 * (index // 4)
    density = 0.5 - (0.012 * draw.random() if character.recipe == "trio" else 0)
    flips = character.flips * depth * (0.03 + cosine) * (1 + 3 * math.exp(-step / 40)) * draw.uniform(0.85, 1.15)
    return {"density": density, "flip_rate": flips, "entries": 384 * 384 * (1 + index % 4)}


def add_masks(writer: RunWriter, character: Character, seed: int, steps: Sequence[int], kinds: Sequence[str]) -> None:
    first = before = torch.empty(0)
    for (index, mask), step in zip(masks(character.flips, seed, len(steps)), steps, strict=True):
        first = mask if index == 0 else first
        before = mask if index == 0 else before
        if "masks" in kinds:
            churn, from_start = [(mask != other).float().mean().item() if index else None for other in (before, first)]
            writer.add("masks", step, churn=churn, from_start=from_start)
        if "mask" in kinds:
            writer.add("mask", step, layer=LAYERS[2], rows=SIDE, columns=SIDE, bits=hex_bits(mask))
        before = mask


def result(character: Character, ending: str, last: int, valid: dict[str, float], draw: random.Random) -> dict[str, Any]:
    facts: dict[str, Any] = {"status": ending, "steps": last, "valid": valid, "non_zero": 0.5 if character.flips else 1.0}
    facts |= {"violations": 0, "step_ms": character.step_ms * draw.uniform(0.99, 1.02), "seconds": last * character.step_ms / 1e3}
    if ending == "diverged":
        facts |= {"message": f"the loss became NaN at step {last}; the last good checkpoint is of step {last - 11}", "valid": {}}
    return facts


def write_comparison(folder: Path, seeds: int = 3, **options: Any) -> Path:
    """dense, sr-ste, s-ste and trio side by side."""
    for character in CHARACTERS:
        for seed in range(seeds):
            write_run(folder / character.label.replace(" ", "-").replace(":", "x") / f"seed-{seed}", character, seed, **options)
    return folder
