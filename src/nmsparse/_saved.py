"""How the state of a run is written down, and what it fits: plain values and tensors, masks as bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nmsparse.functional import pack_bits, unpack_bits
from nmsparse.recipes import Recipe

VERSION = 1
"""Of a run's state."""
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


def check_same_model(state: Mapping[str, Any], recipe: Recipe, seed: int, layers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Whether a saved state is one of this recipe, seed and layers; ``layers`` holds the state tensors by layer name."""
    if state.get("version") != VERSION:
        raise ValueError(f"this run state has version {state.get('version')!r}; this nmsparse reads version {VERSION}.")
    if state["recipe"] != describe(recipe):
        raise ValueError(
            f"the saved run used {state['recipe']}, this one uses {describe(recipe)}: build the same recipe to continue it."
        )
    if state["seed"] != seed:
        raise ValueError(f"the saved run used seed {state['seed']}, this one {seed}: pass the same seed to sparsify_.")
    if set(state["layers"]) != set(layers):
        odd = sorted(set(state["layers"]) ^ set(layers))
        raise ValueError(
            f"the saved run and this one differ in their sparse layers ({', '.join(odd[:4])}): use the same targets and exclude."
        )
    for name, saved in state["layers"].items():
        own = layers[name]
        if set(saved) != set(own):
            raise ValueError(f"{name}: the saved run keeps {sorted(saved)}, this one {sorted(own)}; the state does not fit.")
        for key, value in saved.items():
            from_saved(value, own[key])  # raises where shapes differ, before anything is written


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
