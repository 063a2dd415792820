"""Merge adapters into a frozen sparse model without losing its zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nmsparse.nn import sparse_modules

WRAPPED = {"base_layer", "original_module"}
"""What PEFT calls a module of the base inside the one that took its place; names in the merged model lack this step."""
TRAINED = {"modules_to_save", "token_adapter"}
"""What it calls trained copies of whole modules, and single tokens trained in an embedding. The base has no zeros there."""


@torch.no_grad()
def merge_keeping_zeros(model: Any) -> nn.Module:
    """``model.merge_and_unload()`` of a PEFT model, after which every weight that was exactly zero is zero again.

    The result is sparse as the base was, but not the same function as base plus adapter: what training adds to zeros is lost.
    Measure it before you rely on it.

    This holds for matrices under adapters, for parameters in ``target_parameters``, and for modules trained whole
    (``modules_to_save``). Biases, embeddings trained whole or by the token, and modules trained whole that were zero
    throughout, as a new head may be, have no pattern and stay as trained.

    Zeros are read from the base's weights as they are now: freeze it first, and call this in place of ``merge_adapter``.
    ``unmerge_adapter`` brings exact zeros back for one LoRA adapter, not for several, nor for DoRA.
    """
    if not all(callable(getattr(model, name, None)) for name in ("merge_and_unload", "get_base_model")):
        raise TypeError(f"merge_keeping_zeros takes a PEFT model with a mergeable adapter, got {type(model).__name__}.")
    base = model.get_base_model()
    _check(base)
    zeros = dict(_zeros(base))
    merged: nn.Module = model.merge_and_unload()
    for name, parameter in merged.named_parameters(remove_duplicate=False):
        if name in zeros:
            parameter.masked_fill_(zeros[name], 0)
    return merged


def _check(base: nn.Module) -> None:
    """Zeros can be read only from weights that are baked, and hold nothing of an adapter yet."""
    for name, _ in sparse_modules(base):
        raise ValueError(
            f"{_plain(name)}: is still being trained sparse, so its zeros are those of a mask and not in its weight, and merging "
            "would lose them. Call nm.freeze_(model) first; it takes the PEFT model too."
        )
    for name, module in base.named_modules():
        adapters: Any = getattr(module, "merged_adapters", None)
        if adapters:
            raise ValueError(
                f"{_plain(name)}: adapter {', '.join(adapters)} is merged into its weight already, so which weights were zero "
                "is not known any more. Load the base and the adapter anew, and call merge_keeping_zeros in place of "
                "merge_adapter."
            )


def _zeros(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Where weights that merging changes are zero, by their names in the merged model."""
    for path, module in base.named_modules(remove_duplicate=False):
        steps = set(path.split("."))
        if steps & WRAPPED and not steps & TRAINED:
            yield from _zeros_of(_plain(path), module, is_whole="original_module" in steps)


def _zeros_of(name: str, module: nn.Module, is_whole: bool) -> Iterator[tuple[str, Tensor]]:
    """Zeros of a module's own matrices. ``is_whole``: a trained copy takes its place, not a sum with an adapter."""
    if is_whole and isinstance(module, nn.Embedding):
        return
    for own, parameter in module.named_parameters(recurse=False):
        if parameter.dim() < 2:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name}.{own}: is quantized ({parameter.dtype}), so its zeros cannot be read. Load the base in 16 or 32 bit."
            )
        mask = parameter == 0
        if not (is_whole and mask.all()):
            yield f"{name}.{own}", mask


def _plain(name: str) -> str:
    """A name without the steps that go with the adapters."""
    return ".".join(step for step in name.split(".") if step not in WRAPPED)
