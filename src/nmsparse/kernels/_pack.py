"""Triton kernels that prune and pack in one pass: read the dense tensor once, write the hardware's layout (see _layout).

Tiles and passes are those of _tile. Bytes per element: source (2 or 4) + 1.125 for each packed copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmsparse.kernels._layout import packed_size, padded
from nmsparse.kernels._tile import (
    EXACT,
    TILE_ROWS,
    column_numbers,
    metadata_of,
    on_device,
    pack_sample,
    store_column_values,
    store_column_words,
    tile_grid,
    with_sign,
)


@triton.jit
def _magnitude(x):
    """Orders magnitudes, NaN above everything, as functional's magnitude_key does. A shift and not a mask: comparisons and masks
    share one pipe of the GPU, which is what limits these kernels, and a shift runs on the multipliers."""
    return x.to(tl.uint32, bitcast=True) << 1


@triton.jit
def _largest(x0, x1, x2, x3):
    """The two largest magnitudes in order of position, and their code: the nibble, above it a flag for each kept entry. Ties
    keep the lower position.

    Either one pair has both (``low``, ``high``), or each pair its larger one. Four comparisons instead of the six of all
    entries, and the code outlives them: a thread has seven predicates, and spilling them would cost more than comparing.
    """
    k0, k1, k2, k3 = _magnitude(x0), _magnitude(x1), _magnitude(x2), _magnitude(x3)
    low = tl.minimum(k0, k1) >= tl.maximum(k2, k3)
    high = tl.minimum(k2, k3) > tl.maximum(k0, k1)
    is1, is3 = (k1 > k0) & ~low, (k3 > k2) | high
    first = tl.where(high, x2, tl.where(is1, x1, x0))
    second = tl.where(low, x1, tl.where(is3, x3, x2))
    code = tl.where(high, 0x42, tl.where(is1, 0x21, 0x10)) + tl.where(low, 0x24, tl.where(is3, 0x8C, 0x48))
    return first + 0.0, second + 0.0, code  # adding 0 makes a -0.0 positive


@triton.jit
def _threshold(x0, x1, x2, x3):
    """The largest dropped magnitude: the third of four."""
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    second_or_third = tl.minimum(tl.maximum(a0, a1), tl.maximum(a2, a3))
    return tl.minimum(second_or_third, tl.maximum(tl.minimum(a0, a1), tl.minimum(a2, a3)))


@triton.jit
def _shrink(x, threshold, scale):
    """What soft thresholding leaves of an entry, and whether it survives. "not <=" lets NaN through."""
    magnitude = tl.abs(x)
    survives = ~(magnitude <= threshold)
    return tl.where(survives, with_sign(magnitude - threshold, x) * scale, 0.0), survives


@triton.jit
def _project(x0, x1, x2, x3, scale, SOFT: tl.constexpr):
    """The four entries of a group as a direction sees them; the first and second that it keeps, and the nibble."""
    if SOFT:
        t = _threshold(x0, x1, x2, x3)
        p0, k0 = _shrink(x0, t, scale)
        p1, k1 = _shrink(x1, t, scale)
        p2, k2 = _shrink(x2, t, scale)
        p3, k3 = _shrink(x3, t, scale)
        # the nibble of each set of survivors, from a table: fewer than two are filled up by position 0, or 0 and 1, with a zero.
        # Values chosen by the nibble and not by the flags need no predicate for long
        place = tl.where(k0, 4, 0) + tl.where(k1, 8, 0) + tl.where(k2, 16, 0)
        nibble = (tl.where(k3, -842084916, -1987558332) >> place) & 15  # 0xCDCECDCC, 0x89884444
        first = tl.where((nibble & 3) == 0, p0, tl.where((nibble & 1) != 0, p1, p2)) + 0.0
        second = tl.where((nibble & 12) == 12, p3, tl.where((nibble & 8) != 0, p2, p1)) + 0.0
    else:
        first, second, code = _largest(x0, x1, x2, x3)
        p0, p1 = tl.where((code & 0x10) != 0, x0, 0.0), tl.where((code & 0x20) != 0, x1, 0.0)
        p2, p3 = tl.where((code & 0x40) != 0, x2, 0.0), tl.where((code & 0x80) != 0, x3, 0.0)
        nibble = code & 15
    return p0, p1, p2, p3, first, second, nibble


@triton.jit
def _split4(x, GROUPS: tl.constexpr):
    """A row into the four entries of its groups, all in one thread."""
    even, odd = tl.split(tl.reshape(x, (GROUPS, 2, 2)))
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    return e0, e1, e2, e3


@triton.jit
def _join4(e0, e1, e2, e3, GROUPS: tl.constexpr):
    """Undo _split4."""
    return tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), (4 * GROUPS,))


@triton.jit
def _store_row(first, second, k_ptr, row, column, columns, left, GROUPS: tl.constexpr):
    """Two values of each group of a row, K-major."""
    c = tl.arange(0, 2 * GROUPS)
    both = tl.reshape(tl.join(first, second), (2 * GROUPS,)).to(k_ptr.dtype.element_ty)
    tl.store(k_ptr + row * (columns // 2) + column // 2 + c, both, c < left // 2)


@triton.jit
def _store_row_words(words0, words1, meta_ptr, row, column, columns, left, GROUPS: tl.constexpr):
    """K-major metadata of 16 rows, of which word q holds the nibbles of rows 8q to 8q + 7. Rows r and r + 8 share a byte."""
    even = (words0 & 0x0F0F0F0F) | ((words1 & 0x0F0F0F0F) << 4)  # four bytes: the even ones of eight pairs of rows
    odd = ((words0 >> 4) & 0x0F0F0F0F) | (words1 & -252645136)  # 0xF0F0F0F0
    bytes4 = tl.join(even, odd)[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
    # a group is 8 * a + 4 * b + c, and a row 2 * d + e: from (a, b, c, e, d) to the order of memory
    atoms = tl.reshape(bytes4.to(tl.uint8), (GROUPS // 8, 2, 4, 2, 4))
    atoms = tl.reshape(tl.permute(atoms, (0, 4, 3, 2, 1)), (GROUPS // 8, 64))
    atom = tl.arange(0, GROUPS // 8)[:, None]
    start = row // 64 * 8 * columns + row % 64 // 16 * 64 + column // 32 * 256
    tl.store(meta_ptr + start + atom * 256 + tl.arange(0, 64)[None, :], atoms, 32 * atom < left)


@triton.jit
def _load(x_ptr, mask_ptr, row, column, columns, left, HAS_MASK: tl.constexpr, COLUMNS: tl.constexpr):
    """A row in fp32, zero where masked. Past the last column it repeats others: a load with a condition costs registers of
    zeros, and nothing of these columns is stored."""
    c = tl.arange(0, COLUMNS)
    c = tl.max_contiguous(tl.multiple_of(tl.where(c < left, c, c % 8), 8), 8)
    start = row * columns + column
    x = tl.load(x_ptr + start + c).to(tl.float32)
    if HAS_MASK:
        x = tl.where(tl.load(mask_ptr + start + c) != 0, x, 0.0)
    return x


@triton.jit
def _project_row(
    x, scale, k_ptr, row, column, columns, left, words, shift,
    SOFT: tl.constexpr, EMIT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Project a row along columns, and store its packed values if asked to; returns it and the metadata with its nibbles."""
    e0, e1, e2, e3 = _split4(x, GROUPS)
    p0, p1, p2, p3, first, second, nibbles = _project(e0, e1, e2, e3, scale, SOFT)
    if EMIT:
        _store_row(first, second, k_ptr, row, column, columns, left, GROUPS)
        words += nibbles << shift
    return _join4(p0, p1, p2, p3, GROUPS), words


@triton.jit
def _weight_pass(
    x_ptr, mask_ptr, scale, m_ptr, k_ptr, row, column, columns, left, m_shift, k_shift,
    SOFT: tl.constexpr, HAS_MASK: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EMIT_M: tl.constexpr, EMIT_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Prune and store four rows; returns what they add to the metadata of their half."""
    GROUPS: tl.constexpr = COLUMNS // 4
    m_words, k_words = tl.full((COLUMNS,), 0, tl.int32), tl.full((GROUPS,), 0, tl.int32)
    x0 = _load(x_ptr, mask_ptr, row, column, columns, left, HAS_MASK, COLUMNS)
    x1 = _load(x_ptr, mask_ptr, row + 1, column, columns, left, HAS_MASK, COLUMNS)
    x2 = _load(x_ptr, mask_ptr, row + 2, column, columns, left, HAS_MASK, COLUMNS)
    x3 = _load(x_ptr, mask_ptr, row + 3, column, columns, left, HAS_MASK, COLUMNS)
    if not COLUMNS_FIRST:
        x0, x1, x2, x3, first, second, nibbles = _project(x0, x1, x2, x3, scale, SOFT)
        if EMIT_M:
            store_column_values(first, second, m_ptr, row, column, columns, left, COLUMNS)
            m_words = nibbles << m_shift
    if COLUMNS_FIRST or EMIT_K:
        S: tl.constexpr = SOFT and COLUMNS_FIRST
        x0, k_words = _project_row(x0, scale, k_ptr, row, column, columns, left, k_words, k_shift, S, EMIT_K, GROUPS)
        x1, k_words = _project_row(x1, scale, k_ptr, row + 1, column, columns, left, k_words, k_shift + 4, S, EMIT_K, GROUPS)
        x2, k_words = _project_row(x2, scale, k_ptr, row + 2, column, columns, left, k_words, k_shift + 8, S, EMIT_K, GROUPS)
        x3, k_words = _project_row(x3, scale, k_ptr, row + 3, column, columns, left, k_words, k_shift + 12, S, EMIT_K, GROUPS)
    if COLUMNS_FIRST and EMIT_M:
        _, _, _, _, first, second, nibbles = _project(x0, x1, x2, x3, scale, False)
        store_column_values(first, second, m_ptr, row, column, columns, left, COLUMNS)
        m_words = nibbles << m_shift
    return m_words, k_words


@triton.jit
def _weight_kernel(
    x_ptr, mask_ptr, scale_ptr, m_ptr, k_ptr, rows, columns,
    SOFT: tl.constexpr, HAS_MASK: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EMIT_M: tl.constexpr, EMIT_K: tl.constexpr,
    COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """A stored (rows, columns) weight: prune along columns and rows in either order, the second on the result of the first."""
    row = tl.program_id(ROW_AXIS).to(tl.int64) * 32
    column = tl.program_id(1 - ROW_AXIS) * COLUMNS
    left = columns - column
    scale = 0.0
    if SOFT:
        scale = tl.load(scale_ptr).to(tl.float32)
    m_words0, m_words1 = tl.full((COLUMNS,), 0, tl.int32), tl.full((COLUMNS,), 0, tl.int32)
    for h in tl.range(2):
        k_words0, k_words1 = tl.full((COLUMNS // 4,), 0, tl.int32), tl.full((COLUMNS // 4,), 0, tl.int32)
        for p in tl.range(4):
            j, q = p // 2, p % 2
            m_word, k_word = _weight_pass(
                x_ptr, mask_ptr, scale, m_ptr, k_ptr, row + 16 * h + 8 * q + 4 * j, column, columns, left, 16 * j + 8 * h, 16 * j,
                SOFT, HAS_MASK, COLUMNS_FIRST, EMIT_M, EMIT_K, COLUMNS,
            )  # fmt: skip
            m_words0, m_words1 = m_words0 | (m_word & (q - 1)), m_words1 | (m_word & -q)
            k_words0, k_words1 = k_words0 | (k_word & (q - 1)), k_words1 | (k_word & -q)
        if EMIT_K:
            meta = metadata_of(k_ptr, rows, columns, tl.uint8)
            _store_row_words(k_words0, k_words1, meta, row + 16 * h, column, columns, left, COLUMNS // 4)
    if EMIT_M:
        store_column_words(m_words0, m_words1, metadata_of(m_ptr, rows, columns, tl.int32), row, column, rows, left, COLUMNS)


@triton.jit
def _emit_token(x, k_ptr, sums_ptr, row, column, padded_rows, columns, left, words, shift, COLUMNS: tl.constexpr):
    """Keep the two largest of four channels of a token; returns the metadata with its nibbles."""
    GROUPS: tl.constexpr = COLUMNS // 4
    e0, e1, e2, e3 = _split4(x, GROUPS)
    first, second, code = _largest(e0, e1, e2, e3)
    _store_row(first, second, k_ptr, row, column, columns, left, GROUPS)
    sums = sums_ptr + (column // COLUMNS).to(tl.int64) * 2 * padded_rows + row
    tl.store(sums, tl.sum((tl.abs(e0) + tl.abs(e1)) + (tl.abs(e2) + tl.abs(e3)), 0))
    tl.store(sums + padded_rows, tl.sum(tl.abs(first) + tl.abs(second), 0))
    return words + ((code & 15) << shift)


@triton.jit
def _gradient_pass(
    x_ptr, stream, counter, of_column, m_ptr, k_ptr, sums_ptr, row, column, rows, padded_rows, columns, left,
    m_shift, k_shift,
    EMIT_M: tl.constexpr, EMIT_K: tl.constexpr, ALL_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Prune and store four tokens, which are zeros past the last; returns what they add to the metadata of their half."""
    m_words, k_words = tl.full((COLUMNS,), 0, tl.int32), tl.full((COLUMNS // 4,), 0, tl.int32)
    c = tl.arange(0, COLUMNS)
    address = x_ptr + row * columns + column + c
    x0 = tl.load(address, (c < left) & (ALL_ROWS or row < rows), other=0.0).to(tl.float32)
    x1 = tl.load(address + columns, (c < left) & (ALL_ROWS or row + 1 < rows), other=0.0).to(tl.float32)
    x2 = tl.load(address + 2 * columns, (c < left) & (ALL_ROWS or row + 2 < rows), other=0.0).to(tl.float32)
    x3 = tl.load(address + 3 * columns, (c < left) & (ALL_ROWS or row + 3 < rows), other=0.0).to(tl.float32)
    if EMIT_M:
        m_words = pack_sample(x0, x1, x2, x3, stream, counter, of_column, m_ptr, row, column, columns, left, COLUMNS) << m_shift
    if EMIT_K:
        k_words = _emit_token(x0, k_ptr, sums_ptr, row, column, padded_rows, columns, left, k_words, k_shift, COLUMNS)
        k_words = _emit_token(x1, k_ptr, sums_ptr, row + 1, column, padded_rows, columns, left, k_words, k_shift + 4, COLUMNS)
        k_words = _emit_token(x2, k_ptr, sums_ptr, row + 2, column, padded_rows, columns, left, k_words, k_shift + 8, COLUMNS)
        k_words = _emit_token(x3, k_ptr, sums_ptr, row + 3, column, padded_rows, columns, left, k_words, k_shift + 12, COLUMNS)
    return m_words, k_words


@triton.jit
def _gradient_kernel(
    x_ptr, stream_ptr, counter_ptr, m_ptr, k_ptr, sums_ptr, rows, padded_rows, columns,
    EMIT_M: tl.constexpr, EMIT_K: tl.constexpr, ALL_ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """An output gradient (tokens, channels): MVUE along tokens, M-major; the two largest of four channels, K-major.

    The K-major copy comes with the sums of |G| before and after pruning, for each tile and token.
    """
    row = tl.program_id(ROW_AXIS).to(tl.int64) * 32
    column = tl.program_id(1 - ROW_AXIS) * COLUMNS
    left = columns - column
    m_words0, m_words1 = tl.full((COLUMNS,), 0, tl.int32), tl.full((COLUMNS,), 0, tl.int32)
    stream, counter, of_column = 0, 0, 0
    if EMIT_M:
        stream, counter, of_column = column_numbers(column, stream_ptr, counter_ptr, COLUMNS)
    for h in tl.range(2):
        k_words0, k_words1 = tl.full((COLUMNS // 4,), 0, tl.int32), tl.full((COLUMNS // 4,), 0, tl.int32)
        for p in tl.range(4):
            j, q = p // 2, p % 2
            m_word, k_word = _gradient_pass(
                x_ptr, stream, counter, of_column, m_ptr, k_ptr, sums_ptr, row + 16 * h + 8 * q + 4 * j, column,
                rows, padded_rows, columns, left, 16 * j + 8 * h, 16 * j, EMIT_M, EMIT_K, ALL_ROWS, COLUMNS,
            )  # fmt: skip
            m_words0, m_words1 = m_words0 | (m_word & (q - 1)), m_words1 | (m_word & -q)
            k_words0, k_words1 = k_words0 | (k_word & (q - 1)), k_words1 | (k_word & -q)
        if EMIT_K:
            meta = metadata_of(k_ptr, padded_rows, columns, tl.uint8)
            _store_row_words(k_words0, k_words1, meta, row + 16 * h, column, columns, left, COLUMNS // 4)
    if EMIT_M:
        meta = metadata_of(m_ptr, padded_rows, columns, tl.int32)
        store_column_words(m_words0, m_words1, meta, row, column, padded_rows, left, COLUMNS)


TILE_BYTES = 512
"""Of a row of the source in a tile: eight columns in 16 bits, or four in 32, for each thread of the one warp. On an H200 the
fastest of five tiles, or as fast as any, for every kernel here. Wider ones share more of the work that a row costs, until
registers run out."""


def _tile_of(source: Tensor) -> tuple[int, int]:
    """Columns of a tile, and warps."""
    return TILE_BYTES // source.element_size(), 1


def pack_weight(
    weight: Tensor,
    along_columns: Tensor | None,
    along_rows: Tensor | None,
    *,
    columns_first: bool,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> None:
    """Project a stored (rows, columns) weight and write its packed copies into the given buffers.

    ``mask`` zeroes entries before anything else; ``scale`` switches from hard selection to soft thresholding times it. The
    direction that comes second keeps the two largest of what the first one left.
    """
    height, width = weight.shape
    wide, warps = tile or _tile_of(weight)
    some = along_rows if along_columns is None else along_columns
    assert some is not None, "at least one copy is asked for"
    grid, row_axis = tile_grid(triton.cdiv(width, wide), height // TILE_ROWS)
    with on_device(weight):
        _weight_kernel[grid](
            weight, weight if mask is None else mask.contiguous().view(torch.uint8), weight if scale is None else scale,
            some if along_rows is None else along_rows, some if along_columns is None else along_columns, height, width,
            SOFT=scale is not None, HAS_MASK=mask is not None, COLUMNS_FIRST=columns_first,
            EMIT_M=along_rows is not None, EMIT_K=along_columns is not None,
            COLUMNS=wide, ROW_AXIS=row_axis, num_warps=warps,
        )  # fmt: skip


def pack_gradient(
    grad: Tensor,
    stream: Tensor | None,
    counter: Tensor | None,
    *,
    along_tokens: bool,
    along_channels: bool,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Pack a (tokens, channels) output gradient.

    Returns the MVUE sample along tokens (M-major), the two largest of four channels (K-major), both with tokens padded to
    a multiple of 64 by zeros, and the (2, tokens) sums of magnitudes before and after the second pruning.
    """
    if along_tokens and along_channels and tile is None:
        # from one read, registers run out: 0.44 ms for 16384 x 14336 on an H200, where one kernel after the other takes 0.40
        sampled, _, _ = pack_gradient(grad, stream, counter, along_tokens=True, along_channels=False)
        return sampled, *pack_gradient(grad, None, None, along_tokens=False, along_channels=True)[1:]
    tokens, channels = grad.shape
    rows = padded(tokens)
    wide, warps = tile or _tile_of(grad)
    tiles = triton.cdiv(channels, wide)
    m_copy = grad.new_empty(packed_size(channels, rows)) if along_tokens else None
    k_copy = grad.new_empty(packed_size(rows, channels)) if along_channels else None
    sums = grad.new_empty((tiles, 2, rows), dtype=torch.float32) if along_channels else None
    grid, row_axis = tile_grid(tiles, rows // TILE_ROWS)
    with on_device(grad):
        _gradient_kernel[grid](
            grad, grad if stream is None else stream, grad if counter is None else counter,
            grad if m_copy is None else m_copy, grad if k_copy is None else k_copy, grad if sums is None else sums,
            tokens, rows, channels,
            EMIT_M=along_tokens, EMIT_K=along_channels, ALL_ROWS=rows == tokens,
            COLUMNS=wide, ROW_AXIS=row_axis, num_warps=warps, **EXACT,
        )  # fmt: skip
    return m_copy, k_copy, None if sums is None else sums.sum(0)[:, :tokens].contiguous()
