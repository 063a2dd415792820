"""What is written: the packed form of a tensor, and sparsity.json beside the weights.

A tensor ``k`` of shape S that is N:M along one dim is stored as two:

    k.nm_values    its N kept entries of every group, in the dtype of the tensor, groups in the order of the tensor with that
                   dim moved to the end
    k.nm_indices   their positions inside the group, ceil(log2 M) bits each (1 for M = 1), the first in the lowest bits of the
                   first byte

At 2:4 that is 9/16 of the bytes in bf16 or fp16. ``sparsity.json`` names, for every such tensor, pattern, dim, shape and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from nmsparse.functional import pack, unpack
from nmsparse.pattern import Pattern

VERSION = 1
METHOD = "nmsparse"
"""What config.json calls the packed format."""
VALUES, INDICES = ".nm_values", ".nm_indices"
SPARSITY, WEIGHTS, INDEX = "sparsity.json", "model.safetensors", "model.safetensors.index.json"
LARGEST = 1 << 60
"""Entries. No file can back more; an empty tensor could claim them in its other dims, and overflow what torch counts."""
AT_ONCE = 1 << 16
"""Kept entries that are unpacked together: on the way each takes some 50 bytes, and blocks of a few MB return to the system."""


@dataclass(frozen=True)
class Layout:
    """How a tensor is sparse: N of every M entries along a dim."""

    pattern: str
    dim: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor, pattern: Pattern, dim: int) -> Layout:
        return cls(str(pattern), dim, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @classmethod
    def read(cls, name: str, saved: Any) -> Layout:
        """From sparsity.json, which anybody may have written."""
        try:
            shape = tuple(saved["shape"])
            dim, dtype = saved["dim"], saved["dtype"]
            if not all(type(size) is int and size >= 0 for size in shape) or type(dim) is not int:
                raise ValueError("shape and dim are integers")
            if prod(size or 1 for size in shape) > LARGEST:
                raise ValueError("no tensor has that shape")
            if not -len(shape) <= dim < len(shape) or not isinstance(getattr(torch, str(dtype), None), torch.dtype):
                raise ValueError("its dim or dtype does not exist")
            pattern = Pattern(saved["pattern"])
            if shape[dim] % pattern.m:
                raise ValueError(f"size {shape[dim]} is not a multiple of {pattern.m}")
            return cls(str(pattern), dim, shape, dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{SPARSITY}: the entry of {name!r} makes no sense ({error}).") from error


def packed_config(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """The ``quantization_config`` of a packed folder's config.json, by which transformers knows what to unpack."""
    return {"quant_method": METHOD, "version": VERSION, "tensors": {name: asdict(layout) for name, layout in layouts.items()}}


def index_bits(pattern: Pattern) -> int:
    """Bits of a position inside a group."""
    return max(1, (pattern.m - 1).bit_length())


def pack_tensor(tensor: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Values and index bytes of an N:M tensor."""
    pattern = Pattern(layout.pattern)
    values, positions = pack(tensor.movedim(layout.dim, -1).contiguous(), pattern)
    bits = index_bits(pattern)
    device = positions.device
    planes = (positions.flatten().to(torch.int32)[:, None] >> torch.arange(bits, device=device)) & 1
    flat = torch.nn.functional.pad(planes.flatten(), (0, -planes.numel() % 8)).view(-1, 8)
    return values.flatten(), (flat << torch.arange(8, device=device)).sum(1).to(torch.uint8)


def packed_sizes(layout: Layout) -> tuple[int, int]:
    """Entries of values and bytes of indices."""
    pattern = Pattern(layout.pattern)
    kept = prod(layout.shape) // pattern.m * pattern.n
    return kept, -(-kept * index_bits(pattern) // 8)


def check_packed(values: int, indices: Tensor, layout: Layout, name: str) -> None:
    """Raise where :func:`unpack_tensor` would; ``values`` counts the kept entries."""
    _check_sizes(values, indices, layout, name)
    pattern, bits = Pattern(layout.pattern), index_bits(Pattern(layout.pattern))
    if pattern.m == 1 << bits:
        return  # every position that the bits can say exists
    step = max(8, AT_ONCE // 8 * 8)  # a multiple of 8 begins at a whole byte of indices
    for start in range(0, values, step):
        count = min(step, values - start)
        taken = indices[start * bits // 8 : -(-(start + count) * bits // 8)]
        if int(_positions(taken, count, bits).max()) >= pattern.m:
            raise ValueError(
                f'{name}: an index lies outside its group of {pattern.m}; these indices were not packed as "{pattern}".'
            )


def _check_sizes(values: int, indices: Tensor, layout: Layout, name: str) -> None:
    kept, index_bytes = packed_sizes(layout)
    if values != kept or indices.numel() != index_bytes or indices.dtype != torch.uint8:
        raise ValueError(
            f"{name}: a {layout.pattern} tensor of shape {layout.shape} takes {kept} values and {index_bytes} index bytes, the "
            f"file has {values} and {indices.numel()}."
        )


def unpack_tensor(values: Tensor, indices: Tensor, layout: Layout, name: str) -> Tensor:
    """Undo :func:`pack_tensor`, bit for bit; sizes and positions are checked."""
    _check_sizes(values.numel(), indices, layout, name)
    pattern, kept = Pattern(layout.pattern), values.numel()
    shape = list(layout.shape)
    size = shape.pop(layout.dim)
    per_row, bits = size // pattern.m * pattern.n, index_bits(pattern)
    dense = values.new_empty(prod(shape), size)
    rows = max(8, AT_ONCE // max(per_row, 1) // 8 * 8)  # a multiple of 8 begins at a whole byte of indices
    try:
        for start in range(0, len(dense) if kept else 0, rows):
            part = dense[start : start + rows]
            first, count = start * per_row, len(part) * per_row
            taken = indices[first * bits // 8 : -(-(first + count) * bits // 8)]
            positions = _positions(taken, count, bits).view(len(part), per_row)
            part.copy_(unpack(values[first : first + count].view(len(part), per_row), positions, pattern))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return dense.view(*shape, size).movedim(-1, layout.dim).contiguous()


def _positions(indices: Tensor, count: int, bits: int) -> Tensor:
    """Positions inside their groups, from their bits."""
    byte, bit = torch.arange(8, device=indices.device), torch.arange(bits, device=indices.device)
    planes = ((indices[:, None].to(torch.int32) >> byte) & 1).flatten()[: count * bits].view(count, bits)
    return (planes << bit).sum(1).to(torch.int16)
