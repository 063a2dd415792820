"""Triton kernel of the best 2:4 transposable mask: two of four in every row and every column of each 4 x 4 block.

Blocks are numbered row by row of blocks; a program owns BLOCKS neighbours, a thread one whole block. So a thread reads four
runs of four entries (16 bytes each in fp32) and writes four words of four flags, threads in a row next to each other, and
nothing is exchanged between threads.

All 90 legal patterns are scored in float64 as functional does, in the order of ``block_patterns``, and the first of the best
wins. A score is (row 0 + row 1) + (row 2 + row 3). It is exact, hence the same in any order, if the finite nonzero magnitudes
of a block lie within a factor 2^26 of each other (bf16: 2^42; fp16: always), or if the block holds a NaN or an infinity, which
outweighs the rest. Elsewhere the last bit of a score depends on the order, and functional's order on the BLAS it runs on.

Bytes per element: source (2 or 4) + 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmsparse.functional import LARGEST_MAGNITUDE, block_patterns

WARPS = 4

_ROWS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # what a row may keep, in the order of _pair_sums
_CHOICES = tuple(
    tuple(_ROWS.index(tuple(j for j in range(4) if pattern[4 * i + j])) for i in range(4)) for pattern in block_patterns(2, 4)
)
_COUNT = tl.constexpr(len(_CHOICES))
_CHOICE = tl.constexpr(_CHOICES)
_BITS = tl.constexpr(tuple(sum(bit << k for k, bit in enumerate(pattern)) for pattern in block_patterns(2, 4)))
_LARGEST = tl.constexpr(LARGEST_MAGNITUDE)


@triton.jit
def _pair_sums(x_ptr, offset, inside, BLOCKS: tl.constexpr):
    """Load one row of every block; the sums of its six pairs of magnitudes."""
    address = x_ptr + offset[:, None] + tl.arange(0, 4)[None, :]
    magnitude = tl.abs(tl.load(address, inside[:, None], 0.0).to(tl.float32)).to(tl.float64)
    magnitude = tl.where(magnitude < float("inf"), magnitude, _LARGEST)  # a NaN is not below either
    even, odd = tl.split(tl.reshape(magnitude, (BLOCKS, 2, 2)))
    m0, m2 = tl.split(even)
    m1, m3 = tl.split(odd)
    return m0 + m1, m0 + m2, m0 + m3, m1 + m2, m1 + m3, m2 + m3


@triton.jit
def _kernel(x_ptr, out_ptr, count, width, BLOCKS: tl.constexpr):
    """``count`` blocks, ``width`` of them side by side; ``out`` as words of four flags."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    word = (block // width).to(tl.int64) * (4 * width) + block % width
    row0 = _pair_sums(x_ptr, 4 * word, inside, BLOCKS)
    row1 = _pair_sums(x_ptr, 4 * (word + width), inside, BLOCKS)
    row2 = _pair_sums(x_ptr, 4 * (word + 2 * width), inside, BLOCKS)
    row3 = _pair_sums(x_ptr, 4 * (word + 3 * width), inside, BLOCKS)
    best = tl.full((BLOCKS,), -1.0, tl.float64)
    kept = tl.full((BLOCKS,), 0, tl.int32)
    for p in tl.static_range(_COUNT):
        top = row0[_CHOICE[p][0]] + row1[_CHOICE[p][1]]
        score = top + (row2[_CHOICE[p][2]] + row3[_CHOICE[p][3]])
        better = score > best
        best = tl.where(better, score, best)
        kept = tl.where(better, _BITS[p], kept)
    for i in tl.static_range(4):
        # bit j of a row's four becomes byte j of its word: four copies, 7 bits apart, never overlap
        flags = (((kept >> (4 * i)) & 15) * 0x204081) & 0x01010101
        tl.store(out_ptr + word + i * width, flags, inside)


def transposable_mask_kernel(x: Tensor, out: Tensor) -> None:
    """Write ``functional.transposable_mask(x, "2:4")`` into ``out``.

    ``x`` is a contiguous matrix in fp32, bf16 or fp16 with both sizes multiples of 4; ``out`` a contiguous bool matrix of
    its shape, aligned to 4 bytes.
    """
    height, width = x.shape[0], x.shape[1] // 4
    count = height // 4 * width
    if not count:
        return
    blocks = 32 * WARPS
    with torch.cuda.device_of(x):
        _kernel[(triton.cdiv(count, blocks),)](x, out.view(torch.int32), count, width, BLOCKS=blocks, num_warps=WARPS)
