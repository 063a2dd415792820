"""How the state of a run is written down: plain values and tensors, masks as bits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nmsparse.functional import pack_bits, unpack_bits
from nmsparse.recipes import Recipe


def describe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, for checkpoints."""
    options = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    return {"name": recipe.name, **options, "pattern": str(recipe.pattern)}


def to_saved(tensor: Tensor) -> Tensor:
    """A state tensor as it is saved: masks as bits."""
    return pack_bits(tensor) if tensor.dtype == torch.bool else tensor.detach().clone()


def from_saved(value: Tensor, like: Tensor) -> Tensor:
    """A saved tensor in the form of the state tensor ``like``."""
    value = value.to(like.device)
    value = unpack_bits(value, like.shape) if like.dtype == torch.bool else value
    if value.shape != like.shape:
        raise ValueError(f"a saved state of shape {tuple(value.shape)} does not fit this layer's {tuple(like.shape)}.")
    return value


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A value that further training cannot change, on a device of choice."""
    return value.detach().to(device or value.device, copy=True) if isinstance(value, Tensor) else value
