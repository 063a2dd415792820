"""Packing and sparse products as torch ops: opaque to compilers, with shapes they can trace.

On CUDA they run the Triton kernels and cuSPARSELt; on the CPU the same layout in plain torch, for tests of everything
around them. Legend: T tokens, O out_features, I in_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nmsparse.functional import counter_uniform_grid, magnitude_mask, mvue, soft_threshold
from nmsparse.kernels._cusparselt import Product
from nmsparse.kernels._layout import ATOM_ROWS, compress, decompress, packed_size, padded

ALIGNMENT = 16
DENSE_ROWS = 8
"""Tokens of a dense 16-bit operand come in multiples of this."""
LONGEST = 2_097_120
"""Rows or columns of D that cuSPARSELt 0.8.0 takes; it compares with this number, whatever the memory."""


# ---- D = A @ B with a packed A ----


def _sparse_matmul(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    m: int,
    k: int,
    m_major: bool,
    b_transposed: bool,
    d_transposed: bool,
) -> Tensor:
    """D (m x n) = A (m x k, packed) @ B, plus a bias of m entries: see nmsparse.kernels._cusparselt for the layouts.

    The dense operand may have fewer rows than the product needs; it is filled up, and D cut, inside.
    """
    _check_operands(packed, dense, m, k, b_transposed)
    if not dense.shape[0] or not packed.shape[0]:
        return _fake_sparse_matmul(packed, dense, bias, m, k, m_major, b_transposed, d_transposed).zero_()
    b = _fit_rows(dense, k, b_transposed)
    n = b.shape[0] if b_transposed else b.shape[1]
    product = Product(m, n, k, m_major, b_transposed, d_transposed, packed.dtype, bias is not None)
    out = _multiply(packed, b, product, bias)
    if not b_transposed or n == dense.shape[0]:
        return out
    return out[: dense.shape[0]] if d_transposed else out[:, : dense.shape[0]].contiguous()


def _fake_sparse_matmul(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    m: int,
    k: int,
    m_major: bool,
    b_transposed: bool,
    d_transposed: bool,
) -> Tensor:
    n = dense.shape[0] if b_transposed else dense.shape[1]
    return packed.new_empty((n, m) if d_transposed else (m, n))


def _check_operands(packed: Tensor, dense: Tensor, m: int, k: int, b_transposed: bool) -> None:
    """The library is given addresses only: whatever does not fit must be found here."""
    if dense.dtype != packed.dtype or dense.device != packed.device:
        raise RuntimeError(
            f"a sparse product needs both operands in one type on one device, got a packed weight or gradient in {packed.dtype} "
            f"on {packed.device} and {dense.dtype} on {dense.device}; call the layer under torch.autocast, or cast its input."
        )
    missing = k - dense.shape[0]
    if (dense.shape[1] != k) if b_transposed else not 0 <= missing < ATOM_ROWS:
        raise RuntimeError(f"a packed {m} x {k} operand cannot be multiplied with an operand of shape {tuple(dense.shape)}.")
    if packed.shape[0] != packed_size(m, k):
        raise RuntimeError(f"{packed.shape[0]} packed entries are no {m} x {k} operand, which takes {packed_size(m, k)}.")


def _fit_rows(dense: Tensor, k: int, b_transposed: bool) -> Tensor:
    """The dense operand, contiguous, with as many rows as hardware and product ask for.

    Rows along k meet packed zeros, and must be zeros themselves. What n is filled up with ends in columns of D that are cut off,
    so anything will do: a copy is one kernel, padding would be two.
    """
    rows = padded(dense.shape[0], DENSE_ROWS) if b_transposed else k
    missing = rows - dense.shape[0]
    if not missing:
        return dense.contiguous()
    if not b_transposed:
        return F.pad(dense, (0, 0, 0, missing))
    filled = dense.new_empty(rows, dense.shape[1])
    filled[: dense.shape[0]] = dense
    return filled


def _multiply(packed: Tensor, b: Tensor, product: Product, bias: Tensor | None = None) -> Tensor:
    if product.m > LONGEST:  # tokens of a gradient that was packed whole
        raise RuntimeError(
            f"sparse tensor cores multiply at most {LONGEST} rows of a packed gradient at once, and this one has {product.m}: "
            "use smaller micro-batches, or sparsify with emulate=True."
        )
    if product.n > LONGEST and product.b_transposed and product.d_transposed:  # tokens of a dense operand
        parts = b.split(LONGEST)
        return torch.cat([_multiply(packed, part, product._replace(n=part.shape[0]), bias) for part in parts])
    if not packed.is_cuda:
        return _reference_matmul(packed, b, product, bias)
    from nmsparse.kernels._engine import engine

    out = packed.new_empty((product.n, product.m) if product.d_transposed else (product.m, product.n))
    with torch.cuda.device(packed.device):
        fitting_bias = None if bias is None else _aligned(bias.to(packed.dtype).contiguous())
        engine(packed.get_device()).plan(product).run(packed, _aligned(b), out, fitting_bias)
    return out


def _aligned(operand: Tensor) -> Tensor:
    """A part of a flat buffer may begin anywhere; the library is told that operands begin at multiples of 16 bytes."""
    return operand.clone() if operand.data_ptr() % ALIGNMENT else operand


def _reference_matmul(packed: Tensor, b: Tensor, product: Product, bias: Tensor | None) -> Tensor:
    stored = decompress(packed, product.m, product.k, "m" if product.m_major else "k")
    a = (stored.t() if product.m_major else stored).float()
    d = a @ (b.t() if product.b_transposed else b).float()
    d = d if bias is None else d + bias.float()[:, None]
    return (d.t() if product.d_transposed else d).to(packed.dtype).contiguous()


# ---- packing of output gradients ----


def _pack_gradient(
    grad: Tensor, stream: Tensor | None, counter: Tensor | None, along_tokens: bool, along_channels: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Prune and pack a (T, O) gradient; tokens are padded with zeros to a multiple of 64.

    Returns an MVUE sample along tokens (M-major, for `grad_weight`), the two largest of four channels (K-major, for
    `grad_input`), and the (2, T) sums of magnitudes before and after the latter; what was not asked for is empty.
    """
    if not grad.shape[0]:
        return _fake_pack_gradient(grad, stream, counter, along_tokens, along_channels)
    grad = grad.contiguous()
    majors = (["m"] if along_tokens else []) + (["k"] if along_channels else [])
    if majors and all(kernel_packs(grad, major) for major in majors):
        from nmsparse.kernels._pack import pack_gradient as kernel

        tokens, channels, sums = kernel(grad, stream, counter, along_tokens=along_tokens, along_channels=along_channels)
        spare = grad.new_empty(0)
        return (
            spare if tokens is None else tokens,
            spare if channels is None else channels,
            grad.new_empty(0, dtype=torch.float32) if sums is None else sums,
        )
    return _pack_gradient_plainly(grad, stream, counter, along_tokens, along_channels)


def _fake_pack_gradient(
    grad: Tensor, stream: Tensor | None, counter: Tensor | None, along_tokens: bool, along_channels: bool
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, channels = grad.shape
    size = packed_size(padded(tokens), channels)
    return (
        grad.new_empty(size if along_tokens else 0),
        grad.new_empty(size if along_channels else 0),
        grad.new_empty((2, tokens) if along_channels else 0, dtype=torch.float32),
    )


def _pack_gradient_plainly(
    grad: Tensor, stream: Tensor | None, counter: Tensor | None, along_tokens: bool, along_channels: bool
) -> tuple[Tensor, Tensor, Tensor]:
    count = grad.shape[0]
    full = F.pad(grad, (0, 0, 0, padded(count) - count))
    tokens, features, sums = grad.new_empty(0), grad.new_empty(0), grad.new_empty(0, dtype=torch.float32)
    if along_tokens:
        assert stream is not None, "MVUE draws numbers"
        assert counter is not None, "MVUE draws numbers"
        tokens = compress_stored(sampled(full, stream, counter), "m")
    if along_channels:
        kept = torch.where(magnitude_mask(full, "2:4"), full, 0)
        features = compress_stored(kept, "k")
        sums = torch.stack([full.float().abs().sum(1)[:count], kept.float().abs().sum(1)[:count]])
    return tokens, features, sums


def _sampled_grad_weight(grad: Tensor, x: Tensor, stream: Tensor, counter: Tensor, d_transposed: bool) -> Tensor:
    """dW (O, I) = MVUE(G)^T X, or (I, O): packing and product in one op, so that only one packed gradient is alive."""
    if not grad.shape[0]:
        return _fake_sampled_grad_weight(grad, x, stream, counter, d_transposed).zero_()
    if x.dtype != grad.dtype or x.device != grad.device or x.shape[0] != grad.shape[0]:
        raise RuntimeError(f"G is {tuple(grad.shape)} {grad.dtype} on {grad.device}, X {tuple(x.shape)} {x.dtype} on {x.device}.")
    packed = _pack_gradient(grad, stream, counter, True, False)[0]
    channels, rows = grad.shape[1], padded(grad.shape[0])
    product = Product(channels, x.shape[1], rows, True, False, d_transposed, grad.dtype)
    return _multiply(packed, _fit_rows(x, rows, False), product)


def sampled(full: Tensor, stream: Tensor, counter: Tensor) -> Tensor:
    """MVUE along tokens, of whole atoms of them."""
    tokens, channels = full.shape
    uniform = counter_uniform_grid(tokens // 4, channels, stream, counter, full.device)
    return mvue(full, "2:4", 0, uniform=uniform)


def _fake_sampled_grad_weight(grad: Tensor, x: Tensor, stream: Tensor, counter: Tensor, d_transposed: bool) -> Tensor:
    return grad.new_empty((x.shape[1], grad.shape[1]) if d_transposed else (grad.shape[1], x.shape[1]))


def _pack_sparse(x: Tensor, m_major: bool) -> Tensor:
    """Pack a (rows, columns) tensor that is 2:4 already: along columns, or along rows if M-major; rows are padded to 64."""
    rows, columns = x.shape
    if not rows:
        return _fake_pack_sparse(x, m_major)
    full = F.pad(x, (0, 0, 0, padded(rows) - rows)).contiguous()
    if kernel_packs(full, "m" if m_major else "k"):
        from nmsparse.kernels._pack import pack_weight as kernel

        packed = full.new_empty(packed_size(full.shape[0], columns))
        copies = (None, packed) if m_major else (packed, None)
        kernel(full, *copies, columns_first=not m_major)
        return packed
    return compress_stored(full, "m" if m_major else "k")


def _fake_pack_sparse(x: Tensor, m_major: bool) -> Tensor:
    return x.new_empty(packed_size(padded(x.shape[0]), x.shape[1]))


def _pack_weight(
    weight: Tensor, mask: Tensor | None, scale: Tensor | None, columns_first: bool, along_columns: bool, dtype: torch.dtype
) -> Tensor:
    """One packed copy of a weight, made where it is used: :func:`pack_weight_` with memory of its own."""
    packed = _fake_pack_weight(weight, mask, scale, columns_first, along_columns, dtype)
    copies = (packed, None) if along_columns else (None, packed)
    pack_weight_(weight, *copies, columns_first=columns_first, mask=mask, scale=scale)
    return packed


def _fake_pack_weight(
    weight: Tensor, mask: Tensor | None, scale: Tensor | None, columns_first: bool, along_columns: bool, dtype: torch.dtype
) -> Tensor:
    return weight.new_empty(packed_size(*weight.shape), dtype=dtype)


# ---- registration: by hand, because the wrapper of torch.library.custom_op takes longer than a small product ----

_LIBRARY = torch.library.Library("nmsparse", "FRAGMENT")


def register(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    # without the second tag inductor may hand over tensors in another layout, which would be copied here
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for kind in ("CPU", "CUDA"):
        _LIBRARY.impl(name, real, kind)
    torch.library.register_fake(f"nmsparse::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.nmsparse, name).default


sparse_matmul = register(
    "sparse_matmul(Tensor packed, Tensor dense, Tensor? bias, SymInt m, SymInt k, bool m_major, bool b_transposed, "
    "bool d_transposed) -> Tensor",
    _sparse_matmul,
    _fake_sparse_matmul,
)
pack_gradient = register(
    "pack_gradient(Tensor grad, Tensor? stream, Tensor? counter, bool along_tokens, bool along_channels) "
    "-> (Tensor, Tensor, Tensor)",
    _pack_gradient,
    _fake_pack_gradient,
)
sampled_grad_weight = register(
    "sampled_grad_weight(Tensor grad, Tensor x, Tensor stream, Tensor counter, bool d_transposed) -> Tensor",
    _sampled_grad_weight,
    _fake_sampled_grad_weight,
)
pack_weight = register(
    "pack_weight(Tensor weight, Tensor? mask, Tensor? scale, bool columns_first, bool along_columns, ScalarType dtype) -> Tensor",
    _pack_weight,
    _fake_pack_weight,
)
pack_sparse = register("pack_sparse(Tensor x, bool m_major) -> Tensor", _pack_sparse, _fake_pack_sparse)


# ---- packing of weights: as a rule between steps, into memory that graphs have captured ----


def pack_weight_(
    weight: Tensor,
    along_columns: Tensor | None,
    along_rows: Tensor | None,
    *,
    columns_first: bool,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Project a stored weight as a recipe's Packing says, and write its packed copies into the given buffers.

    ``columns_first``: the projection runs along columns, and along rows the two largest of that are kept; else the other
    way round. ``along_columns`` is K-major, ``along_rows`` M-major.
    """
    copies = [("k", along_columns), ("m", along_rows)]
    weight = weight.contiguous()
    if weight.is_cuda and all(buffer is None or _trusts(buffer, major) for major, buffer in copies):
        from nmsparse.kernels._pack import pack_weight as kernel

        kernel(weight, along_columns, along_rows, columns_first=columns_first, mask=mask, scale=scale)
        return
    dims = (-1, 0) if columns_first else (0, -1)
    x = weight.float() if mask is None else torch.where(mask, weight, 0).float()
    if scale is not None:
        first = soft_threshold(x, "2:4", dims[0]) * scale
    else:
        first = torch.where(magnitude_mask(x, "2:4", dims[0]), x, 0)
    second = torch.where(magnitude_mask(first, "2:4", dims[1]), first, 0)
    for (major, buffer), projected in zip(copies, (first, second) if columns_first else (second, first), strict=True):
        if buffer is not None:
            buffer.copy_(compress_stored(projected.to(buffer.dtype), major))


def unpack_sparse(packed: Tensor, m: int, k: int, m_major: bool) -> Tensor:
    """Undo pack_sparse of m x k entries: the stored (m, k) matrix, or (k, m) if M-major. Plain torch, for once in a while."""
    return decompress(packed, m, k, "m" if m_major else "k")


def trusts_layout(x: Tensor) -> bool:
    """Whether our kernels may pack in this type on this GPU, in both directions."""
    return _trusts(x, "k") and _trusts(x, "m")


def kernel_packs(x: Tensor, major: str) -> bool:
    """Whether our kernels may write this tensor's packed copy."""
    return x.is_cuda and _trusts(x, major)


def _trusts(x: Tensor, major: str) -> bool:
    from nmsparse.kernels._engine import engine

    return engine(x.get_device()).trusts_layout(x.dtype, "m" if major == "m" else "k")


def compress_stored(stored: Tensor, major: str) -> Tensor:
    """Without our kernels: the library's compression on a GPU, the reference on the CPU."""
    if not stored.is_cuda:
        return compress(stored, "m" if major == "m" else "k")
    from nmsparse.kernels._engine import engine

    return engine(stored.get_device()).compress(stored.contiguous(), "m" if major == "m" else "k")
