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
    KINDS,
    TILE_ROWS,
    column_numbers,
    column_words,
    entry_rows,
    metadata_of,
    on_device,
    pack_sample,
    store_column_values,
    store_column_words,
    tile_grid,
    with_sign,
)


@triton.jit
def _two_of(a, b, c):
    return (a & b) | (a & c) | (b & c)


@triton.jit
def _kept(x0, x1, x2, x3):
    """Flags of the two largest magnitudes; ties keep the lower position. An entry is dropped when two others beat it.

    Magnitudes are compared as integers, which puts NaN above everything, as functional's magnitude_key does.
    """
    k0, k1 = x0.to(tl.int32, bitcast=True) & 0x7FFFFFFF, x1.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    k2, k3 = x2.to(tl.int32, bitcast=True) & 0x7FFFFFFF, x3.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b10, b20, b30 = k1 > k0, k2 > k0, k3 > k0
    b21, b31, b32 = k2 > k1, k3 > k1, k3 > k2
    return (
        ~_two_of(b10, b20, b30),
        ~_two_of(~b10, b21, b31),
        ~_two_of(~b20, ~b21, b32),
        ~_two_of(~b30, ~b31, ~b32),
    )


@triton.jit
def _compressed(x0, x1, x2, x3, k0, k1, k2, k3):
    """First and second kept value, and the nibble of their positions; exactly two flags are set."""
    first = tl.where(k0, x0, tl.where(k1, x1, x2))
    second = tl.where(k3, x3, tl.where(k2, x2, x1))
    nibble = tl.where(k0, 0, tl.where(k1, 1, 2)) | tl.where(k3, 12, tl.where(k2, 8, 4))
    return first + 0.0, second + 0.0, nibble  # adding 0 makes a -0.0 positive


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
    """The four entries of a group as a direction sees them, and flags of what it keeps.

    Of the soft flags fewer than two may be set, where magnitudes are equal or zero.
    """
    if SOFT:
        t = _threshold(x0, x1, x2, x3)
        p0, k0 = _shrink(x0, t, scale)
        p1, k1 = _shrink(x1, t, scale)
        p2, k2 = _shrink(x2, t, scale)
        p3, k3 = _shrink(x3, t, scale)
    else:
        k0, k1, k2, k3 = _kept(x0, x1, x2, x3)
        p0, p1, p2, p3 = tl.where(k0, x0, 0.0), tl.where(k1, x1, 0.0), tl.where(k2, x2, 0.0), tl.where(k3, x3, 0.0)
    return p0, p1, p2, p3, k0, k1, k2, k3


@triton.jit
def _compress_projected(p0, p1, p2, p3, k0, k1, k2, k3, SOFT: tl.constexpr):
    if SOFT:
        k0 = k0 | ~_two_of(k1, k2, k3)  # fewer than two survive: position 0, or 0 and 1, with a zero
    return _compressed(p0, p1, p2, p3, k0, k1, k2, k3)


@triton.jit
def _split4(x, GROUPS: tl.constexpr):
    """(4, 4 * GROUPS) into the four entries of its groups along columns, each (4, GROUPS)."""
    even, odd = tl.split(tl.reshape(x, (4, GROUPS, 2, 2)))
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    return e0, e1, e2, e3


@triton.jit
def _join4(e0, e1, e2, e3, GROUPS: tl.constexpr):
    """Undo _split4."""
    return tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), (4, 4 * GROUPS))


@triton.jit
def _store_row(
    first,
    second,
    nibbles,
    out_ptr,
    meta_ptr,
    row,
    j,
    i: tl.constexpr,
    column,
    columns,
    left,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Values and metadata of entry i's rows, K-major. A pair of values is one 32-bit word; rows r and r + 8 share a byte."""
    low = first.to(KIND).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = second.to(KIND).to(tl.uint16, bitcast=True).to(tl.uint32)
    g = tl.arange(0, GROUPS)[None, :]
    address = (row + entry_rows(j, i)[:, None]) * (columns // 4) + column // 4 + g
    tl.store(out_ptr + address, (low | (high << 16)).to(tl.int32, bitcast=True), 4 * g < left)
    halves = tl.reshape(nibbles, (2, 2, GROUPS))
    both = tl.sum(halves << (4 * tl.arange(0, 2))[None, :, None], 1)
    block = row % 64 // 16 + tl.arange(0, 2)[:, None]
    group = column // 4 + g
    byte = row // 64 * 8 * columns + block * 64 + (4 * j + i) * 8 + group // 8 * 256 + group % 4 * 2 + group // 4 % 2
    tl.store(meta_ptr + byte, both.to(tl.uint8), (4 * g < left) & (block >= 0))


@triton.jit
def _load(
    x_ptr,
    mask_ptr,
    row,
    j,
    i: tl.constexpr,
    column,
    rows,
    columns,
    left,
    HAS_MASK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Entry i of the row groups of pass j in fp32; zero where masked, and past the last row."""
    c = tl.arange(0, COLUMNS)[None, :]
    r = row + entry_rows(j, i)[:, None]
    inside = c < left if ALL_ROWS else (c < left) & (r < rows)
    x = tl.load(x_ptr + r * columns + column + c, inside, other=0.0).to(tl.float32)
    if HAS_MASK:
        x = tl.where(tl.load(mask_ptr + r * columns + column + c, inside, other=0) != 0, x, 0.0)
    return x


@triton.jit
def _weight_kernel(
    x_ptr, mask_ptr, scale_ptr, m_ptr, k_packed, rows, columns,
    SOFT: tl.constexpr, HAS_MASK: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EMIT_M: tl.constexpr, EMIT_K: tl.constexpr,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """Project along one direction, keep the two largest of that along the other, and pack either or both.

    The K-major copy has its groups along columns, the M-major one along rows.
    """
    GROUPS: tl.constexpr = COLUMNS // 4
    row = tl.program_id(ROW_AXIS).to(tl.int64) * 32
    column = tl.program_id(1 - ROW_AXIS) * COLUMNS
    left = columns - column
    scale = tl.load(scale_ptr) if SOFT else 1.0
    m_meta = metadata_of(m_ptr, rows, columns, tl.int32)
    k_ptr, k_meta = k_packed.to(tl.pointer_type(tl.int32)), metadata_of(k_packed, rows, columns, tl.uint8)
    words = tl.full((2, COLUMNS), 0, tl.int32)
    for j in tl.range(2):
        x0 = _load(x_ptr, mask_ptr, row, j, 0, column, rows, columns, left, HAS_MASK, True, COLUMNS)
        x1 = _load(x_ptr, mask_ptr, row, j, 1, column, rows, columns, left, HAS_MASK, True, COLUMNS)
        x2 = _load(x_ptr, mask_ptr, row, j, 2, column, rows, columns, left, HAS_MASK, True, COLUMNS)
        x3 = _load(x_ptr, mask_ptr, row, j, 3, column, rows, columns, left, HAS_MASK, True, COLUMNS)
        if COLUMNS_FIRST:
            x0 = _project_row(x0, scale, k_ptr, k_meta, row, j, 0, column, columns, left, SOFT, EMIT_K, KIND, GROUPS)
            x1 = _project_row(x1, scale, k_ptr, k_meta, row, j, 1, column, columns, left, SOFT, EMIT_K, KIND, GROUPS)
            x2 = _project_row(x2, scale, k_ptr, k_meta, row, j, 2, column, columns, left, SOFT, EMIT_K, KIND, GROUPS)
            x3 = _project_row(x3, scale, k_ptr, k_meta, row, j, 3, column, columns, left, SOFT, EMIT_K, KIND, GROUPS)
            if EMIT_M:
                k0, k1, k2, k3 = _kept(x0, x1, x2, x3)
                first, second, nibbles = _compressed(x0, x1, x2, x3, k0, k1, k2, k3)
                store_column_values(first, second, m_ptr, row, j, column, columns, left, COLUMNS)
                words += column_words(nibbles, j, COLUMNS)
        else:
            x0, x1, x2, x3, k0, k1, k2, k3 = _project(x0, x1, x2, x3, scale, SOFT)
            if EMIT_M:
                first, second, nibbles = _compress_projected(x0, x1, x2, x3, k0, k1, k2, k3, SOFT)
                store_column_values(first, second, m_ptr, row, j, column, columns, left, COLUMNS)
                words += column_words(nibbles, j, COLUMNS)
            if EMIT_K:
                _project_row(x0, scale, k_ptr, k_meta, row, j, 0, column, columns, left, False, True, KIND, GROUPS)
                _project_row(x1, scale, k_ptr, k_meta, row, j, 1, column, columns, left, False, True, KIND, GROUPS)
                _project_row(x2, scale, k_ptr, k_meta, row, j, 2, column, columns, left, False, True, KIND, GROUPS)
                _project_row(x3, scale, k_ptr, k_meta, row, j, 3, column, columns, left, False, True, KIND, GROUPS)
    if EMIT_M:
        store_column_words(words, m_meta, row, column, rows, left, COLUMNS)


@triton.jit
def _project_row(
    x, scale, k_ptr, k_meta, row, j, i: tl.constexpr, column, columns, left,
    SOFT: tl.constexpr, EMIT: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Project entry i's rows along columns, and store their packed copy if asked to."""
    e0, e1, e2, e3 = _split4(x, GROUPS)
    p0, p1, p2, p3, k0, k1, k2, k3 = _project(e0, e1, e2, e3, scale, SOFT)
    if EMIT:
        first, second, nibbles = _compress_projected(p0, p1, p2, p3, k0, k1, k2, k3, SOFT)
        _store_row(first, second, nibbles, k_ptr, k_meta, row, j, i, column, columns, left, KIND, GROUPS)
    return _join4(p0, p1, p2, p3, GROUPS)


@triton.jit
def _gradient_kernel(
    x_ptr, stream_ptr, counter_ptr, m_ptr, k_packed, sums_ptr, rows, padded_rows, columns,
    EMIT_M: tl.constexpr, EMIT_K: tl.constexpr, ALL_ROWS: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """An output gradient (tokens, channels): MVUE along tokens, M-major; the two largest of four channels, K-major.

    The K-major copy comes with the sums of |G| before and after pruning, for each tile and token.
    """
    GROUPS: tl.constexpr = COLUMNS // 4
    row = tl.program_id(ROW_AXIS).to(tl.int64) * 32
    column = tl.program_id(1 - ROW_AXIS) * COLUMNS
    left = columns - column
    words = tl.full((2, COLUMNS), 0, tl.int32)
    m_meta = metadata_of(m_ptr, padded_rows, columns, tl.int32)
    k_ptr, k_meta = k_packed.to(tl.pointer_type(tl.int32)), metadata_of(k_packed, padded_rows, columns, tl.uint8)
    stream, counter, of_column = 0, 0, 0
    if EMIT_M:
        stream, counter, of_column = column_numbers(column, stream_ptr, counter_ptr, COLUMNS)
    for j in tl.range(2):
        x0 = _load(x_ptr, x_ptr, row, j, 0, column, rows, columns, left, False, ALL_ROWS, COLUMNS)
        x1 = _load(x_ptr, x_ptr, row, j, 1, column, rows, columns, left, False, ALL_ROWS, COLUMNS)
        x2 = _load(x_ptr, x_ptr, row, j, 2, column, rows, columns, left, False, ALL_ROWS, COLUMNS)
        x3 = _load(x_ptr, x_ptr, row, j, 3, column, rows, columns, left, False, ALL_ROWS, COLUMNS)
        if EMIT_M:
            words += pack_sample(x0, x1, x2, x3, stream, counter, of_column, m_ptr, row, j, column, columns, left, COLUMNS)
        if EMIT_K:
            _emit_token(x0, k_ptr, k_meta, sums_ptr, row, j, 0, column, padded_rows, columns, left, KIND, GROUPS)
            _emit_token(x1, k_ptr, k_meta, sums_ptr, row, j, 1, column, padded_rows, columns, left, KIND, GROUPS)
            _emit_token(x2, k_ptr, k_meta, sums_ptr, row, j, 2, column, padded_rows, columns, left, KIND, GROUPS)
            _emit_token(x3, k_ptr, k_meta, sums_ptr, row, j, 3, column, padded_rows, columns, left, KIND, GROUPS)
    if EMIT_M:
        store_column_words(words, m_meta, row, column, padded_rows, left, COLUMNS)


@triton.jit
def _emit_token(
    x,
    k_ptr,
    k_meta,
    sums_ptr,
    row,
    j,
    i: tl.constexpr,
    column,
    padded_rows,
    columns,
    left,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    e0, e1, e2, e3 = _split4(x, GROUPS)
    k0, k1, k2, k3 = _kept(e0, e1, e2, e3)
    first, second, nibbles = _compressed(e0, e1, e2, e3, k0, k1, k2, k3)
    _store_row(first, second, nibbles, k_ptr, k_meta, row, j, i, column, columns, left, KIND, GROUPS)
    sums = sums_ptr + (column // (4 * GROUPS)).to(tl.int64) * 2 * padded_rows + row + entry_rows(j, i)
    tl.store(sums, tl.sum(tl.abs(x), 1))
    tl.store(sums + padded_rows, tl.sum(tl.abs(first) + tl.abs(second), 1))


# Columns of a tile and warps of a program, the fastest of seven on an H200 (14336 x 4096 weight, 16384 x 14336 gradient):
# all of these kernels are bound by instructions, and what fits in registers without spilling predicates wins
M_MAJOR, K_MAJOR, BOTH_SOFT, BOTH_HARD = (128, 1), (64, 2), (64, 1), (64, 2)
TOKENS, CHANNELS = (128, 1), (64, 1)
# the M-major copy alone, of what a projection along columns left (the backward copy, packed late): 0.0911 ms for that weight in
# fp32, where (64, 1) takes 0.0954 and (128, 1) 0.1165
M_MAJOR_AFTER_COLUMNS = (64, 2)


def _weight_tile(emits_k: bool, emits_m: bool, columns_first: bool, is_soft: bool) -> tuple[int, int]:
    if emits_k and emits_m:
        return BOTH_SOFT if is_soft else BOTH_HARD
    if emits_k:
        return K_MAJOR
    return M_MAJOR_AFTER_COLUMNS if columns_first else M_MAJOR


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
    wide, warps = tile or _weight_tile(along_columns is not None, along_rows is not None, columns_first, scale is not None)
    some = along_rows if along_columns is None else along_columns
    assert some is not None, "at least one copy is asked for"
    grid, row_axis = tile_grid(triton.cdiv(width, wide), height // TILE_ROWS)
    with on_device(weight):
        _weight_kernel[grid](
            weight, weight if mask is None else mask.contiguous().view(torch.uint8), weight if scale is None else scale,
            some if along_rows is None else along_rows, some if along_columns is None else along_columns, height, width,
            SOFT=scale is not None, HAS_MASK=mask is not None, COLUMNS_FIRST=columns_first,
            EMIT_M=along_rows is not None, EMIT_K=along_columns is not None,
            KIND=KINDS[some.dtype], COLUMNS=wide, ROW_AXIS=row_axis, num_warps=warps,
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
        # from one read, registers run out: 0.59 ms for 16384 x 14336 on an H200, where one kernel after the other takes 0.50
        sampled, _, _ = pack_gradient(grad, stream, counter, along_tokens=True, along_channels=False)
        return sampled, *pack_gradient(grad, None, None, along_tokens=False, along_channels=True)[1:]
    tokens, channels = grad.shape
    rows = padded(tokens)
    wide, warps = tile or (CHANNELS if along_channels else TOKENS)
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
            KIND=KINDS[grad.dtype], COLUMNS=wide, ROW_AXIS=row_axis, num_warps=warps,
        )  # fmt: skip
    return m_copy, k_copy, None if sums is None else sums.sum(0)[:, :tokens].contiguous()
