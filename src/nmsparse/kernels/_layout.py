"""The compressed 2:4 layout of Hopper's sparse tensor cores in 16 bit, in plain torch: the reference of every pack kernel.

A packed operand is one 1-d tensor of the value type, ``[values][metadata]`` without a gap, 9/16 of the dense size. The
logical matrix is m x k with groups of four along k; r is its row, g = k // 4 the group, i0 < i1 the two kept positions.

    K-major   stored (m, k):  slot s of group g at  r * (k/2) + 2g + s
    M-major   stored (k, m):  slot s of group g at  (2g + s) * m + r

The metadata is the same for both: a nibble ``i0 | i1 << 2`` per group, in atoms of 64 rows x 32 columns (256 bytes), so m
must be a multiple of 64 and k of 32:

    byte  (r//64)*8*k + (g//8)*256 + ((r%64)//16)*64 + (r%8)*8 + (g%4)*2 + (g//4)%2,   high nibble where (r//8) is odd

NVIDIA calls the format opaque; the engine compares it with the library's own compression before it relies on it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Major = Literal["k", "m"]
ATOM_ROWS, ATOM_COLUMNS = 64, 32


def misfit(m: int, k: int) -> str | None:
    """Why an m x k operand cannot be packed; None if it can."""
    if m % ATOM_ROWS or k % ATOM_COLUMNS or not m or not k:
        return f"the hardware's layout needs multiples of {ATOM_ROWS} x {ATOM_COLUMNS}, and this operand is {m} x {k}"
    return None


def padded(tokens: int, multiple: int = ATOM_ROWS) -> int:
    """Tokens with those that fill the last atom of the layout, whichever side they are on."""
    return -(-tokens // multiple) * multiple


def packed_size(m: int, k: int) -> int:
    """Entries (of 16 bits) of a packed m x k operand."""
    return m * k // 2 + m * k // 16


def _byte_address(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(m, k/4) addresses of the metadata bytes, and which nibble of them is the group's."""
    r = torch.arange(m, device=device)[:, None]
    g = torch.arange(k // 4, device=device)[None, :]
    address = (r // 64) * 8 * k + (g // 8) * 256 + (r % 64 // 16) * 64 + (r % 8) * 8 + (g % 4) * 2 + g // 4 % 2
    return address, (r // 8 % 2).expand_as(address)


def _two_of_four(dense: Tensor) -> Tensor:
    """(m, k/4, 2) ascending positions of the kept entries: the two largest magnitudes, ties to the lower position."""
    groups = dense.unflatten(1, (-1, 4))
    order = groups.abs().float().nan_to_num(nan=torch.inf).sort(dim=2, descending=True, stable=True).indices
    return order[..., :2].sort(dim=2).values


def compress(stored: Tensor, major: Major, positions: Tensor | None = None) -> Tensor:
    """Pack a stored matrix that is 2:4 along k already: (m, k) if K-major, (k, m) if M-major.

    ``positions`` (m, k/4, 2) says which entries to keep; without it the two of largest magnitude.
    """
    dense = stored if major == "k" else stored.t()
    m, k = dense.shape
    why = misfit(m, k)
    if why is not None:
        raise ValueError(f"{why}.")
    kept = _two_of_four(dense) if positions is None else positions
    values = dense.unflatten(1, (-1, 4)).gather(2, kept).flatten(1)
    values = torch.where(values == 0, 0, values)  # no -0.0: a compressor of the library once tripped over it
    nibbles = kept[..., 0] | kept[..., 1] << 2
    address, is_high = _byte_address(m, k, dense.device)
    metadata = torch.zeros(m * k // 8, dtype=torch.int64, device=dense.device)
    metadata.index_add_(0, address.flatten(), (nibbles << 4 * is_high).flatten())
    ordered = (values if major == "k" else values.t()).contiguous().flatten()
    return torch.cat([ordered.view(torch.uint8), metadata.to(torch.uint8)]).view(stored.dtype)


def decompress(packed: Tensor, m: int, k: int, major: Major) -> Tensor:
    """The stored matrix of :func:`compress`, with zeros where nothing was kept."""
    count = m * k // 2
    values = packed[:count].view(m, k // 2) if major == "k" else packed[:count].view(k // 2, m).t()
    metadata = packed[count:].view(torch.uint8).long()
    address, is_high = _byte_address(m, k, packed.device)
    nibbles = metadata[address] >> 4 * is_high & 15
    positions = torch.stack([nibbles & 3, nibbles >> 2], 2)
    dense = packed.new_zeros(m, k // 4, 4).scatter_(2, positions, values.unflatten(1, (-1, 2))).flatten(1)
    return dense if major == "k" else dense.t().contiguous()


def random_packed(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A packed operand of random values in random legal positions, of either major; for measurements."""
    count = m * k
    values = torch.randn(count // 2, device=device).to(dtype)
    legal = torch.tensor([0x4, 0x8, 0x9, 0xC, 0xD, 0xE], device=device)
    nibbles = legal[torch.randint(6, (2, count // 8), device=device)]
    return torch.cat([values.view(torch.uint8), (nibbles[0] | nibbles[1] << 4).to(torch.uint8)]).view(dtype)
