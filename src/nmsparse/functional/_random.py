"""Counter-based uniforms: a pure function of (stream, counter, element).

The same integers give the same numbers on every device and in every process, so a resumed, recomputed or replicated
step draws what the first one drew. The hash is a 32-bit finaliser (two multiplications, three xor-shifts), applied
twice; a Triton kernel reproduces it bit for bit in uint32.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND = 0x7FEB352D, 0x846CA68B
STREAM, COUNTER, SECOND_STREAM = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


def _signed(value: int) -> int:
    """The int32 with the bits of a uint32."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(h: Tensor) -> Tensor:
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * FIRST
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * _signed(SECOND)
    return h ^ ((h >> 16) & 0xFFFF)


def _mix_pair(h: Tensor) -> Tensor:
    """Half a finaliser, for the xor of two words that are random already; only its upper bits are good."""
    h = h * FIRST
    return (h ^ ((h >> 15) & 0x1FFFF)) * _signed(SECOND)


def wrap_int32(value: int) -> int:
    """The int32 that is congruent to an integer."""
    return _signed(value & 0xFFFFFFFF)


def hash_integers(*values: int) -> int:
    """Mix Python integers into one int32, on the host: keys for streams and counters."""
    h = 0
    for value in values:
        h = (h ^ (value & 0xFFFFFFFF)) * STREAM & 0xFFFFFFFF
        h ^= h >> 16
        h = h * FIRST & 0xFFFFFFFF
        h ^= h >> 15
        h = h * SECOND & 0xFFFFFFFF
        h ^= h >> 16
    return _signed(h)


def _times(value: Tensor | int, odd: int) -> Tensor | int:
    """``value * odd`` modulo 2**32, as int32."""
    return _signed(value * odd & 0xFFFFFFFF) if isinstance(value, int) else value * _signed(odd)


def counter_bits(count: int, stream: Tensor | int, counter: Tensor | int, device: torch.device | str = "cpu") -> Tensor:
    """``count`` int32 words with 32 random bits each, keyed by int32 ``stream`` and ``counter``."""
    element = torch.arange(count, dtype=torch.int32, device=device)
    # the stream enters twice: once alone, two streams that differ in low bits would share their numbers in another order
    return _mix(_mix(element ^ _times(stream, STREAM)) ^ _times(counter, COUNTER) ^ _times(stream, SECOND_STREAM))


def _to_uniform(bits: Tensor) -> Tensor:
    """The upper 23 bits as float32 in [0, 1): 1 + u is then exact in float32 as well."""
    return ((bits >> 9) & 0x7FFFFF).to(torch.float32) * 2.0**-23


def counter_uniform(
    shape: tuple[int, ...], stream: Tensor | int, counter: Tensor | int, device: torch.device | str = "cpu"
) -> Tensor:
    """float32 uniforms in [0, 1) with 23 random bits, keyed by int32 ``stream`` and ``counter``."""
    count = 1
    for size in shape:
        count *= size
    return _to_uniform(counter_bits(count, stream, counter, device)).view(shape)


def counter_uniform_grid(rows: int, columns: int, stream: Tensor, counter: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """(rows, columns) uniforms from one hash per row, one per column, and half a hash per entry: cheap enough to draw
    beside every memory access of a kernel."""
    of_row = counter_bits(rows, stream, counter, device)
    of_column = counter_bits(columns, ~stream, counter, device)
    return _to_uniform(_mix_pair(of_row[:, None] ^ of_column[None, :]))


def counter_permutation(count: int, stream: int, counter: int, device: torch.device | str = "cpu") -> Tensor:
    """A permutation of ``count`` indices, the same on every device (ties of the hash keep their order)."""
    return counter_bits(count, stream, counter, device).sort(stable=True).indices
