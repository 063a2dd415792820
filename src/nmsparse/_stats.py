"""Statistics of a whole run from those of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def numbers(rows: Mapping[str, Mapping[str, Tensor | float | None]]) -> dict[str, dict[str, float | None]]:
    """The values of 0-d tensors, in the same places. A GPU is waited for once, not once for each of them."""
    tensors = [_as_tensor(value) for row in rows.values() for value in row.values() if value is not None]
    values = iter(read(tensors))
    return {name: {key: None if tensor is None else next(values) for key, tensor in row.items()} for name, row in rows.items()}


def read(tensors: list[Tensor]) -> list[float]:
    """Numbers of 0-d tensors, of which those on one device come in one transfer."""
    found: dict[int, float] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no doubles
        found |= dict(zip(here, torch.stack([tensors[place].to(wide) for place in here]).tolist(), strict=True))
    return [found[place] for place in range(len(tensors))]


def _as_tensor(value: Tensor | float) -> Tensor:
    """A recipe of the user's may describe itself in plain numbers."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def totals(layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means weighted by size; sums of counts."""
    entries = sum(layer["entries"] for layer in layers.values())
    changes = [layer["mask_changes"] for layer in layers.values() if layer["mask_changes"] is not None]
    return {
        "entries": entries,
        "density": _mean(layers, "density"),
        "flip_rate": _mean(layers, "flip_rate"),
        "mask_changes": sum(changes) if changes else None,
    }


def _mean(layers: dict[str, dict[str, Any]], key: str) -> float | None:
    """Over the layers where it is known."""
    known = [(layer["entries"], layer[key]) for layer in layers.values() if layer[key] is not None]
    entries = sum(size for size, _ in known)
    return sum(size * value for size, value in known) / entries if entries else None
