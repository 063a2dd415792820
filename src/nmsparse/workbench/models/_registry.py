"""Models by name: one record of facts for each, and the checks that come before one is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import nn

from nmsparse.workbench.models import _cifar_resnet as cifar
from nmsparse.workbench.models import _transformers as library
from nmsparse.workbench.tasks import Facts, Kind

SMALL: Mapping[str, float] = {"width": 128, "layers": 2, "heads": 4, "dropout": 0.0}
"""Sizes of a transformer that learns something on one CPU core in seconds."""

NEEDED = {
    "language": {"vocabulary": 1, "length": 2},
    "images": {"classes": 2, "channels": 1, "side": 1},
    "sentences": {"vocabulary": 1, "length": 1, "classes": 1},
    "translation": {"vocabulary": 1, "length": 1},
}
"""What a kind of task must say about its data, and the least value that makes sense."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model that users choose by."""

    name: str
    kinds: tuple[Kind, ...]
    """Kinds of task that it fits."""
    summary: str
    defaults: Mapping[str, float]
    """The sizes that can be chosen, with what they are unless given."""
    build: Callable[..., nn.Module] = field(repr=False)
    targets: str = "all-linear"
    """Which layers to make sparse: what ``nmsparse.sparsify_`` takes."""
    exclude: tuple[str, ...] = ()
    """The output head, where ``targets`` does not leave it out by itself."""


_MODELS = {
    info.name: info
    for info in (
        ModelInfo("gpt2", ("language",), "GPT-2: learned positions, GELU, linear layers stored transposed", SMALL, library.gpt2),
        ModelInfo("llama", ("language",), "LLaMA: rotary positions, RMSNorm, gated MLP, no biases", SMALL, library.llama),
        ModelInfo("vit", ("images",), "Vision Transformer", SMALL, library.vit),
        ModelInfo("deit", ("images",), "DeiT: ViT with a distillation token", SMALL, library.deit),
        ModelInfo(
            "resnet",
            ("images",),
            "ResNet-18 of transformers; its stem reduces images by 4, so it suits those of 64 pixels and more",
            {"width": 32},
            library.resnet,
            targets="all",
            exclude=("classifier.1",),
        ),
        ModelInfo(
            "resnet18",
            ("images",),
            "ResNet-18 for CIFAR: 3x3 stem, no pooling before the first stage",
            {"width": 64},
            cifar.resnet18,
            targets="all",
            exclude=("classifier",),
        ),
        ModelInfo(
            "resnet32",
            ("images",),
            "ResNet-32 for CIFAR: three stages of five blocks, shortcuts without parameters",
            {"width": 16},
            cifar.resnet32,
            targets="all",
            exclude=("classifier",),
        ),
        ModelInfo("bert", ("sentences",), "BERT with a classifier, or a regression for one class", SMALL, library.bert),
        ModelInfo("marian", ("translation",), "Marian: the encoder-decoder of Vaswani et al. 2017", SMALL, library.marian),
        ModelInfo("t5", ("translation",), "T5: encoder-decoder, relative positions, no biases", SMALL, library.t5),
    )
}


def models() -> list[ModelInfo]:
    """All models, those for one kind of task side by side."""
    return list(_MODELS.values())


def model_info(name: str) -> ModelInfo:
    """The record of a model."""
    if name not in _MODELS:
        close = get_close_matches(name, _MODELS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no model named {name!r}.{hint} There are: {', '.join(_MODELS)}.")
    return _MODELS[name]


def build_model(
    name: str,
    facts: Facts,
    *,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """A new model of a named architecture for a task; sizes that are not given are small.

    Weights come from torch's random generator, so ``torch.manual_seed`` before the call makes them reproducible.
    """
    info = model_info(name)
    if facts.kind not in info.kinds:
        fitting = [other.name for other in models() if facts.kind in other.kinds]
        raise ValueError(f"{name} is a model for {' and '.join(info.kinds)}; models for {facts.kind} are: {', '.join(fitting)}.")
    _check_facts(facts)
    return info.build(facts, **_sizes(info, {"width": width, "layers": layers, "heads": heads, "dropout": dropout}))


def _check_facts(facts: Facts) -> None:
    for what, least in NEEDED[facts.kind].items():
        if getattr(facts, what) < least:
            raise ValueError(f"a model for {facts.kind} needs {what} of at least {least}, the task says {getattr(facts, what)}.")
    for what in ("padding", "begin", "end"):
        if facts.kind in ("sentences", "translation") and not 0 <= getattr(facts, what) < facts.vocabulary:
            raise ValueError(f"the {what} token {getattr(facts, what)} is not among the task's {facts.vocabulary} tokens.")


def _sizes(info: ModelInfo, given: Mapping[str, float | None]) -> dict[str, float]:
    """The sizes to build with: defaults, replaced by what was given."""
    chosen = {what: value for what, value in given.items() if value is not None}
    for what, value in chosen.items():
        if what not in info.defaults:
            raise ValueError(f"{info.name} has no {what} to choose; its sizes are: {', '.join(info.defaults)}.")
        if what == "dropout" and not 0 <= value < 1:
            raise ValueError(f"dropout is a share from 0 to below 1, got {value!r}.")
        if what != "dropout" and (type(value) is not int or value < 1):
            raise ValueError(f"{what} counts from 1, got {value!r}.")
    sizes = {**info.defaults, **chosen}
    if "heads" in sizes and sizes["width"] % sizes["heads"]:
        raise ValueError(
            f"{info.name}: width {sizes['width']} is not a multiple of {sizes['heads']} heads; change width or heads."
        )
    return sizes
