"""Setups that several claims share. Where settings are the same, runs are the same: a claim takes what another has trained.

Accuracy is measured with ordinary products (``emulate``), exact to the papers on any device; only timed experiments use kernels.
"""

from __future__ import annotations

from typing import Any

from nmsparse.workbench.reproduce._claim import Scale, Setup

Settings = dict[str, Any]

ATTENTION = [
    "attn.c_attn",
    "attn.c_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "query",
    "key",
    "value",
    "attention.output.dense",
]
"""Attention's layers under all names that transformers has given them; papers that make the feed-forward layers sparse leave
them dense."""

SMALL: Settings = {"emulate": True, "precision": "bf16", "save": False}
"""Short runs: when one is interrupted it starts again, so checkpoints would only fill the disk."""
FULL: Settings = {"emulate": True, "precision": "bf16", "eval_batches": 0}

MARGIN = 0.03
"""Nats per token that count as near: three percent in perplexity."""
BYTES_PER_TOKEN = 3.45
"""Of enwik8 in the vocabulary of GPT-2 (3.45 to 3.48 at three places), for margins where losses are per byte."""
FST = "fst@2:4:refresh=2"
"""The 40 updates that the authors leave between two searches are for long runs: in runs as short as these a mask would be out of
date for most of the time, and that would be what is compared."""

# ---- toys: embedded data, seconds on a CPU ----

TOY: Settings = {
    "emulate": True, "save": False, "steps": 4, "batch": 4, "limit": 32, "eval_batches": 2, "log_every": 1, "eval_every": 2,
}  # fmt: skip
TOY_VIT: Settings = {**TOY, "task": "fashion-mini", "model": "vit", "width": 32, "layers": 1, "heads": 2, "exclude": ATTENTION}
TOY_GPT: Settings = {**TOY, "task": "shakespeare", "model": "gpt2", "width": 32, "layers": 1, "heads": 2, "length": 16}
TOY_BERT: Settings = {**TOY, "task": "questions", "model": "bert", "width": 32, "layers": 1, "heads": 2, "length": 16}
TOY_RESNET18: Settings = {**TOY, "task": "fashion-mini", "model": "resnet18", "width": 16}
TOY_RESNET32: Settings = {**TOY, "task": "fashion-mini", "model": "resnet32", "width": 16, "optimizer": "sgd", "clip": 0.0}


def toy(settings: Settings, rates: tuple[float, ...] = (1e-3, 3e-3)) -> Setup:
    return Setup(settings, rates)


# ---- CIFAR-10 ----

CIFAR: Settings = {**SMALL, "task": "cifar10", "batch": 128, "eval_batches": 0}
"""Validation is the whole test part."""
IMAGES = 50_000
CIFAR_CPU: Settings = {"batch": 64}
"""Smaller batches than on a GPU: what a core can do in a minute is a fraction of an epoch, and masks move once per update."""

VIT: Settings = {
    **CIFAR, "model": "vit", "width": 256, "layers": 4, "heads": 4, "steps": 500, "eval_every": 250,
    "weight_decay": 0.05, "beta2": 0.99, "clip": 0.0,
}  # fmt: skip
"""3.2 M parameters, 1.3 epochs. Gradients are not clipped: clipping to 1 would fix the size of Adam's second moment,
by which STEP decides when to switch, and which is compared here. beta2 = 0.99: Adam's usual 0.999 remembers 1,000 updates; the
papers' runs are a hundred times that."""
VIT_CPU: Settings = {**VIT, **CIFAR_CPU, "width": 128, "layers": 3, "steps": 480, "eval_every": 240}
TUNING_SHARE = 0.3
"""Of a run, on a GPU: what two rates do to it shows early."""
STEP_TUNING_SHARE = 0.5
"""Where STEP takes part: in a shorter trial its switch would be forced before the window of its statistic is full."""
ADAM_RATES = (5e-4, 1e-3, 2e-3)
ADAM_RATES_CPU = (2.5e-4, *ADAM_RATES)
"""Smaller batches want smaller rates: of those above, 5e-4 was the best for dense and sdgp."""

RESNET18: Settings = {**CIFAR, "model": "resnet18", "width": 32, "steps": 400, "eval_every": 200}
"""2.8 M parameters, one epoch: half the usual width, so that a GPU shares its time among many."""
RESNET18_CPU: Settings = {**RESNET18, **CIFAR_CPU, "width": 16, "steps": 480, "eval_every": 240}


def epochs(count: float, batch: int, images: int = IMAGES) -> int:
    """Updates in so many passes over the images."""
    return round(count * images / batch)


def vit_setups(exclude: list[str]) -> dict[Scale, Setup]:
    """A small ViT on CIFAR-10 under AdamW; at full scale ViT-B for 350 epochs, as the progressive paper trains it."""
    full = {
        **FULL, "task": "cifar10", "model": "vit", "width": 768, "layers": 12, "heads": 12, "dropout": 0.1, "batch": 256,
        "steps": epochs(350, 256), "weight_decay": 0.01, "warmup": 15 / 350, "clip": 1.0, "exclude": exclude,
    }  # fmt: skip
    return {
        "toy": toy({**TOY_VIT, "exclude": exclude}),
        "cpu": Setup({**VIT_CPU, "exclude": exclude}, ADAM_RATES_CPU, size="0.6 M parameters, 30,720 images"),
        "small": Setup({**VIT, "exclude": exclude}, ADAM_RATES, STEP_TUNING_SHARE, size="3.2 M parameters, 64,000 images"),
        "full": Setup(full, (5e-4, 1e-3, 2e-3), tuning_share=0.1),
    }


# ---- GPT wide enough for the kernels to pay ----

WIDE_GPT: Settings = {
    "task": "enwik8", "model": "gpt2", "width": 2048, "layers": 4, "heads": 16, "length": 512, "batch": 32, "steps": 200,
    "precision": "bf16", "compile": True, "save": False, "weight_decay": 0.1, "beta2": 0.95, "eval_every": 20, "eval_batches": 4,
}  # fmt: skip
"""201 M parameters, 16,384 bytes an update. Bytes, because a head of 50,257 tokens would take a third of the time."""
WIDE_RATE = 3e-4


def wide_gpt_setups() -> dict[Scale, Setup]:
    full = {
        **WIDE_GPT, "width": 4096, "layers": 16, "heads": 32, "length": 1024, "batch": 512, "accumulate": 8, "steps": 20_000,
        "eval_batches": 8,
    }  # fmt: skip
    return {
        "toy": toy({**TOY_GPT, "emulate": False}),
        "small": Setup(WIDE_GPT, (WIDE_RATE,), size="201 M parameters, 3.3 M bytes"),
        "full": Setup({**full, "save": True, "eval_every": 500}, (1e-4, 2e-4, 4e-4), tuning_share=0.1),
    }
