"""What the pack kernels share: how a tile lies in memory, how its metadata is stored, and how two of four are drawn.

A program owns 32 rows x COLUMNS columns of the stored matrix and takes four rows at a time; a thread owns four or eight
neighbouring columns in all of them. So both kinds of groups of four lie in one thread, few of them at a time, and threads meet
once, to store metadata. The pass (h, q, j) holds

    rows 16 * h + 8 * q + 4 * j + i (i = 0..3)          group along rows g = 4 * h + 2 * q + j

and each half q has words of metadata of its own, so that where a nibble belongs in them is the same for a whole pass.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 32
SECOND_AXIS = 65535
"""Blocks that a grid can have along its second axis."""
EXACT = {"enable_fp_fusion": False}
"""For kernels that sample: a product and a difference in one rounding would put a point of one group in a million on the other
side of an entry than the reference does."""
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def metadata_of(packed_ptr, rows, columns, KIND: tl.constexpr):
    """Where the metadata of a packed operand begins: behind half as many values as it has entries."""
    return (packed_ptr + rows.to(tl.int64) * columns // 2).to(tl.pointer_type(KIND))


@triton.jit
def with_sign(magnitude, x):
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def store_column_words(words0, words1, meta_ptr, row, column, k, left, COLUMNS: tl.constexpr):
    """M-major metadata of a tile: for each column the half words of q = 0 and 1, with the nibble of pass (h, q, j) in byte
    2j + h. (The bytes of a whole word are the groups 0 4 1 5 2 6 3 7.)

    Logical rows r and r + 8 (columns here) share a word: low and high nibbles.
    """
    pairs = tl.reshape(tl.join(words0, words1), (COLUMNS // 16, 2, 8, 2))
    both = tl.sum(pairs << (4 * tl.arange(0, 2))[None, :, None, None], 1)
    half = tl.arange(0, 2)[None, None, :]
    r = tl.arange(0, COLUMNS // 16)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None]
    logical = column + r
    word = (logical // 64).to(tl.int64) * k + row + logical % 64 // 16 * 8 + logical % 8  # of 8 bytes
    tl.store(meta_ptr + 2 * word + half, both, (r < left) & (half >= 0))


@triton.jit
def store_column_values(first, second, out_ptr, row, column, columns, left, COLUMNS: tl.constexpr):
    """Two values of each group of the four rows from ``row``, M-major: rows 2g and 2g + 1."""
    c = tl.arange(0, COLUMNS)
    address = out_ptr + row // 2 * columns + column + c
    tl.store(address, first.to(out_ptr.dtype.element_ty), c < left)
    tl.store(address + columns, second.to(out_ptr.dtype.element_ty), c < left)


@triton.jit
def _mix(h):
    """The 32-bit finaliser of functional's counter-based numbers."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _mix_pair(h):
    """Half a finaliser, for the xor of two words that are random already; only its upper bits are good."""
    h = h * 0x7FEB352D
    return (h ^ (h >> 15)) * 0x846CA68B


@triton.jit
def _bits(element, stream, counter):
    """functional.counter_bits at flat positions ``element``."""
    return _mix(_mix(element ^ (stream * 0x9E3779B9)) ^ (counter * 0x85EBCA6B) ^ (stream * 0xC2B2AE35))


@triton.jit
def _sample(x0, x1, x2, x3, u1):
    """Sample two of four as functional.mvue does, compressed: first and second value, and the nibble. ``u1`` is 1 + u.

    With R the sum of all but the largest magnitude, the spacing of the two points is min(R, (R + largest) / 2), and no
    magnitude counts for more than the spacing: a dominant entry then fills one spacing and is always hit. What is kept
    becomes as large as the spacing, or stays as it is if it is larger. A group without a finite sum becomes NaN.

    q - p is exactly the spacing, so the points never fall on one entry: p >= e_i implies q >= e_i + (entry i + 1).
    """
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    high, low = tl.maximum(a0, a1), tl.minimum(a0, a1)
    high2, low2 = tl.maximum(a2, a3), tl.minimum(a2, a3)
    rest = (low + low2) + tl.minimum(high, high2)
    spacing = tl.minimum(rest, (rest + tl.maximum(high, high2)) * 0.5)
    reach = tl.maximum(spacing, 1.1754943508222875e-38)  # a lone entry still fills something
    e0 = tl.minimum(a0, reach)
    e1 = e0 + tl.minimum(a1, reach)
    e2 = e1 + tl.minimum(a2, reach)
    q = u1 * reach
    p = q - reach
    second1, second2 = q < e1, (q < e2) | (a3 == 0)  # rounding must not push the point on an entry that is zero
    first0, first1 = (p < e0) | (second2 & ~(p < e1)) | ~(p < e2), p < e1  # the second took entry 2, or only one is there
    x = tl.where(first0, x0, tl.where(first1, x1, x2))
    y = tl.where(second1, x1, tl.where(second2, x2, x3))
    nibble = tl.where(first0, 0, tl.where(first1, 1, 2)) | tl.where(second1, 4, tl.where(second2, 8, 12))
    whole = (a0 + a1) + (a2 + a3)
    poison = whole - whole  # 0, or NaN; adding it also makes a -0.0 positive
    return with_sign(tl.maximum(tl.abs(x), spacing), x) + poison, with_sign(tl.maximum(tl.abs(y), spacing), y) + poison, nibble


@triton.jit
def column_numbers(column, stream_ptr, counter_ptr, COLUMNS: tl.constexpr):
    """The key of a gradient's random numbers, and the half of them that belongs to its columns."""
    stream = tl.load(stream_ptr).to(tl.uint32, bitcast=True)
    counter = tl.load(counter_ptr).to(tl.uint32, bitcast=True)
    of_column = _bits((column + tl.arange(0, COLUMNS)).to(tl.uint32), stream ^ 0xFFFFFFFF, counter)
    return stream, counter, of_column


@triton.jit
def pack_sample(x0, x1, x2, x3, stream, counter, of_column, m_ptr, row, column, columns, left, COLUMNS: tl.constexpr):
    """Draw two of the four rows from ``row``, store them M-major, and return the nibbles."""
    of_row = _bits((row // 4).to(tl.uint32), stream, counter)
    u1 = ((_mix_pair(of_row ^ of_column) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    first, second, nibbles = _sample(x0, x1, x2, x3, u1)
    store_column_values(first, second, m_ptr, row, column, columns, left, COLUMNS)
    return nibbles


def tile_grid(columns: int, rows: int) -> tuple[tuple[int, int], int]:
    """A grid of so many tiles, and the axis of its rows: tiles side by side first, as they lie in memory, unless there are more
    rows than a grid's second axis can have."""
    return ((columns, rows), 1) if rows <= SECOND_AXIS else ((rows, columns), 0)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, wherever its arguments are."""
    here = not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device_of(tensor)
