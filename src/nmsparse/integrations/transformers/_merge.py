"""Merge a LoRA adapter into a frozen sparse model without losing its zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def merge_keeping_zeros(model: Any) -> nn.Module:
    """``model.merge_and_unload()`` of a PEFT model, after which every weight that was exactly zero is zero again.

    The result is sparse as the base was, but not the same function as base plus adapter: what the adapter adds to zeros is
    lost. Measure it before you rely on it.
    """
    if not callable(getattr(model, "merge_and_unload", None)):
        raise TypeError(f"merge_keeping_zeros takes a PEFT model with a mergeable adapter, got {type(model).__name__}.")
    modules = model.get_base_model().named_modules()
    zeros = {name: module.base_layer.weight == 0 for name, module in modules if hasattr(module, "base_layer")}
    merged: nn.Module = model.merge_and_unload()
    for name, mask in zeros.items():
        merged.get_parameter(f"{name}.weight").masked_fill_(mask, 0)
    return merged
