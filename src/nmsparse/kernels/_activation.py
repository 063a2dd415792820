"""Triton kernel for the backward pass of an MLP between two sparse layers: the activation's gradients, written densely and
packed for `grad_weight` in the same pass.

    H = f(A)            plain                  dA = dH f'(A)
    H = f(A) * B        gated                  dA = dH B f'(A),  dB = dH f(A)

A packed copy is that of the gradient as it was rounded for storage, bit for bit what the pack kernel makes of it. H may be
written again as well, so that it need not be kept from the forward pass.

Bytes per element: 2 for each of dH, A, B read and dA, dB, H written, 1.125 for each packed copy; a gated pass by itself and two
packings read both gradients once more. In its first form that saved no time on an H200, where instructions bound it: for a gated
16384 x 14336 it took 0.989 ms, inductor's backward pass of the activation and two packings 0.952. What it saves is memory: H.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmsparse.kernels._layout import packed_size, padded
from nmsparse.kernels._tile import (
    EXACT,
    KINDS,
    TILE_ROWS,
    column_numbers,
    metadata_of,
    on_device,
    pack_sample,
    store_column_words,
    tile_grid,
)

PLAIN_TILE, GATED_TILE = (128, 1), (128, 1)
"""Columns of a tile and warps of a program: four columns of a thread, which fit in registers without spilling."""


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """f(x) and f'(x) in fp32."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the logistic function of 2z
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * s, s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive


@triton.jit
def _rounded(x, ptr, offset, inside):
    """Store a value, and return what was stored."""
    stored = x.to(ptr.dtype.element_ty)
    tl.store(ptr + offset, stored, inside)
    return stored.to(tl.float32)


@triton.jit
def _backward(
    grad_ptr, a_ptr, b_ptr, a_grad_ptr, b_grad_ptr, hidden_ptr, row, column, rows, columns, left,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EMIT_HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: read, differentiate, store; returns the stored gradients of A and B, zero past the last row."""
    c = tl.arange(0, COLUMNS)
    inside = (c < left) & (row < rows)
    offset = row * columns + column + c
    grad = tl.load(grad_ptr + offset, inside, other=0.0).to(tl.float32)
    value, slope = _activate(tl.load(a_ptr + offset, inside, other=0.0).to(tl.float32), ACTIVATION)
    b_grad = grad * value
    if GATED:
        b = tl.load(b_ptr + offset, inside, other=0.0).to(tl.float32)
        grad = grad * b
        b_grad = _rounded(b_grad, b_grad_ptr, offset, inside)
        value = value * b
    if EMIT_HIDDEN:
        tl.store(hidden_ptr + offset, value.to(hidden_ptr.dtype.element_ty), inside)
    return _rounded(grad * slope, a_grad_ptr, offset, inside), b_grad


@triton.jit
def _pass(
    grad_ptr, a_ptr, b_ptr, a_key, a_count, a_numbers, b_key, b_count, b_numbers, a_grad_ptr, b_grad_ptr, a_packed, b_packed,
    hidden_ptr, row, column, rows, columns, left,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EMIT_HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Four rows; returns the nibbles of both gradients."""
    a0, b0 = _backward(
        grad_ptr, a_ptr, b_ptr, a_grad_ptr, b_grad_ptr, hidden_ptr, row, column, rows, columns, left,
        ACTIVATION, GATED, EMIT_HIDDEN, COLUMNS,
    )  # fmt: skip
    a1, b1 = _backward(
        grad_ptr, a_ptr, b_ptr, a_grad_ptr, b_grad_ptr, hidden_ptr, row + 1, column, rows, columns, left,
        ACTIVATION, GATED, EMIT_HIDDEN, COLUMNS,
    )  # fmt: skip
    a2, b2 = _backward(
        grad_ptr, a_ptr, b_ptr, a_grad_ptr, b_grad_ptr, hidden_ptr, row + 2, column, rows, columns, left,
        ACTIVATION, GATED, EMIT_HIDDEN, COLUMNS,
    )  # fmt: skip
    a3, b3 = _backward(
        grad_ptr, a_ptr, b_ptr, a_grad_ptr, b_grad_ptr, hidden_ptr, row + 3, column, rows, columns, left,
        ACTIVATION, GATED, EMIT_HIDDEN, COLUMNS,
    )  # fmt: skip
    a_nibbles = pack_sample(a0, a1, a2, a3, a_key, a_count, a_numbers, a_packed, row, column, columns, left, COLUMNS)
    b_nibbles = a_nibbles
    if GATED:
        b_nibbles = pack_sample(b0, b1, b2, b3, b_key, b_count, b_numbers, b_packed, row, column, columns, left, COLUMNS)
    return a_nibbles, b_nibbles


@triton.jit
def _activation_kernel(
    grad_ptr, a_ptr, b_ptr, a_stream, a_counter, b_stream, b_counter,
    a_grad_ptr, b_grad_ptr, a_packed, b_packed, hidden_ptr, rows, padded_rows, columns,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EMIT_HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(ROW_AXIS).to(tl.int64) * 32
    column = tl.program_id(1 - ROW_AXIS) * COLUMNS
    left = columns - column
    a_key, a_count, a_numbers = column_numbers(column, a_stream, a_counter, COLUMNS)
    b_key, b_count, b_numbers = column_numbers(column, b_stream, b_counter, COLUMNS)
    a_words0, a_words1 = tl.full((COLUMNS,), 0, tl.int32), tl.full((COLUMNS,), 0, tl.int32)
    b_words0, b_words1 = tl.full((COLUMNS,), 0, tl.int32), tl.full((COLUMNS,), 0, tl.int32)
    for p in tl.range(8):
        h, j, q = p // 4, p // 2 % 2, p % 2
        a_nibbles, b_nibbles = _pass(
            grad_ptr, a_ptr, b_ptr, a_key, a_count, a_numbers, b_key, b_count, b_numbers, a_grad_ptr, b_grad_ptr,
            a_packed, b_packed, hidden_ptr, row + 16 * h + 8 * q + 4 * j, column, rows, columns, left,
            ACTIVATION, GATED, EMIT_HIDDEN, COLUMNS,
        )  # fmt: skip
        a_word, b_word = a_nibbles << (16 * j + 8 * h), b_nibbles << (16 * j + 8 * h)
        a_words0, a_words1 = a_words0 | (a_word & (q - 1)), a_words1 | (a_word & -q)
        b_words0, b_words1 = b_words0 | (b_word & (q - 1)), b_words1 | (b_word & -q)
    meta = metadata_of(a_packed, padded_rows, columns, tl.int32)
    store_column_words(a_words0, a_words1, meta, row, column, padded_rows, left, COLUMNS)
    if GATED:
        meta = metadata_of(b_packed, padded_rows, columns, tl.int32)
        store_column_words(b_words0, b_words1, meta, row, column, padded_rows, left, COLUMNS)


def activation_backward(
    grad: Tensor,
    inner: Tensor,
    factor: Tensor | None,
    keys: Sequence[Tensor],
    activation: str,
    *,
    want_hidden: bool,
    tile: tuple[int, int] | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Gradients of A = ``inner`` and, if given, B = ``factor`` from that of H, all (tokens, channels) and contiguous.

    ``keys`` are stream and counter of A's layer, then those of B's. Returns the gradients, their MVUE samples along tokens
    (M-major, tokens padded to a multiple of 64 by zeros), and H if it is wanted.
    """
    assert grad.dtype in KINDS, "stored in 16 bit"
    tokens, channels = grad.shape
    rows, count = padded(tokens), 1 if factor is None else 2
    wide, warps = tile or (PLAIN_TILE if factor is None else GATED_TILE)
    grads = [torch.empty_like(grad) for _ in range(count)]
    packed = [grad.new_empty(packed_size(channels, rows)) for _ in range(count)]
    hidden = torch.empty_like(grad) if want_hidden else None
    grid, row_axis = tile_grid(triton.cdiv(channels, wide), rows // TILE_ROWS)
    with on_device(grad):
        _activation_kernel[grid](
            grad, inner, inner if factor is None else factor, *keys[:2], *keys[-2:],
            grads[0], grads[-1], packed[0], packed[-1], grads[0] if hidden is None else hidden, tokens, rows, channels,
            ACTIVATION=activation, GATED=factor is not None, EMIT_HIDDEN=want_hidden, COLUMNS=wide, ROW_AXIS=row_axis,
            num_warps=warps, **EXACT,
        )  # fmt: skip
    return grads, packed, hidden
