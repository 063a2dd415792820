"""Masks as bits: how a mask that is not a function of the weights travels in a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor as a flat uint8 tensor, eight entries to the byte, the first in the lowest bit."""
    flat = mask.flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """Undo :func:`pack_bits`."""
    if bits.numel() != -(-shape.numel() // 8):
        raise ValueError(f"{bits.numel()} bytes do not hold a mask of shape {tuple(shape)}.")
    entries = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return entries.flatten()[: shape.numel()].view(shape).bool()
