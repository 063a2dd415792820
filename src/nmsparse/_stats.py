"""Statistics of a whole run from those of its layers."""

from __future__ import annotations

from typing import Any


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
