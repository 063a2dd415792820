"""The decay on pruned weights, shared by SR-STE, FST, Bi-Mask, STEP and Trio."""

from __future__ import annotations

import torch
from torch import Tensor

from nmsparse.recipes._base import LayerUpdate


def check_decay(decay: float) -> None:
    if not 0 <= decay < float("inf"):
        raise ValueError(f"decay on pruned weights must be a finite number of at least 0, got {decay!r}.")


def add_decay(layer: LayerUpdate, mask: Tensor, decay: float) -> None:
    """gradient += decay * (1 - mask) * W, in fp32 (fp64 for fp64 weights)."""
    if decay:
        weight = layer.weight
        wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
        layer.add_to_gradient(torch.where(mask, 0, weight.to(wide)) * decay)
