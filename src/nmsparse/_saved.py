"""How the state of a run is written down: plain values and tensors, masks as bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nmsparse.functional import pack_bits, unpack_bits
from nmsparse.recipes import Recipe

TENSOR, TUPLE = "__tensor__", "__tuple__"


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


def taken_apart(value: Any, hosted: Callable[[Tensor], Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Nested dicts, lists and tuples with their tensors taken out: JSON values that refer to the tensors by number.

    ``hosted`` brings a tensor to where it can be written.
    """
    tensors: dict[str, Tensor] = {}

    def plain(entry: Any) -> Any:
        if isinstance(entry, Tensor):
            key = str(len(tensors))
            tensors[key] = hosted(entry)
            return {TENSOR: key}
        if isinstance(entry, dict):
            assert all(isinstance(key, str) for key in entry), "JSON would turn other keys into words"
            return {key: plain(inner) for key, inner in entry.items()}
        if isinstance(entry, tuple):
            return {TUPLE: [plain(inner) for inner in entry]}
        return [plain(inner) for inner in entry] if isinstance(entry, list) else entry

    return plain(value), tensors


def put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo :func:`taken_apart`."""
    if isinstance(value, dict):
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        if set(value) == {TUPLE}:
            return tuple(put_together(entry, tensors) for entry in value[TUPLE])
        return {key: put_together(entry, tensors) for key, entry in value.items()}
    return [put_together(entry, tensors) for entry in value] if isinstance(value, list) else value
