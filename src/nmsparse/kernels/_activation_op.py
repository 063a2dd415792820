"""The backward pass of an MLP's activation with both gradients packed, as a torch op; plain torch where no kernel serves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nmsparse.kernels._layout import packed_size, padded
from nmsparse.kernels._ops import compress_stored, kernel_packs, register, sampled

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu_squared")


def activate(x: Tensor, activation: str) -> Tensor:
    """An activation by name; "gelu" is the exact one."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu_squared":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _slope(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(torch.ones_like(x), x)
    if activation == "relu_squared":
        return 2 * F.relu(x)
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activation_backward(
    grad: Tensor, inner: Tensor, factor: Tensor | None, keys: list[Tensor], activation: str, want_hidden: bool
) -> list[Tensor]:
    """Of H = f(A) or f(A) * B, with A = ``inner`` and B = ``factor``, all (T, O): the gradients of A and B, their MVUE samples
    along tokens (M-major, tokens padded to a multiple of 64 by zeros), and H if it is wanted, in one list.

    ``keys`` are stream and counter of A's layer, then those of B's.
    """
    if not grad.shape[0]:
        return _fake_activation_backward(grad, inner, factor, keys, activation, want_hidden)
    grad, inner, factor = grad.contiguous(), inner.contiguous(), None if factor is None else factor.contiguous()
    if kernel_packs(grad, "m"):
        from nmsparse.kernels._activation import activation_backward as kernel

        grads, packed, hidden = kernel(grad, inner, factor, keys, activation, want_hidden=want_hidden)
        return [*grads, *packed, *([] if hidden is None else [hidden])]
    wide, value, slope = grad.float(), activate(inner.float(), activation), _slope(inner.float(), activation)
    grads = [wide * slope] if factor is None else [wide * factor.float() * slope, wide * value]
    grads = [g.to(grad.dtype) for g in grads]
    packed = [_packed(g, *keys[2 * i : 2 * i + 2]) for i, g in enumerate(grads)]
    hidden = value if factor is None else value * factor.float()
    return [*grads, *packed, *([hidden.to(grad.dtype)] if want_hidden else [])]


def _fake_activation_backward(
    grad: Tensor, inner: Tensor, factor: Tensor | None, keys: list[Tensor], activation: str, want_hidden: bool
) -> list[Tensor]:
    tokens, channels = grad.shape
    count = 1 if factor is None else 2
    shapes = [
        *count * [(tokens, channels)],
        *count * [(packed_size(channels, padded(tokens)),)],
        *want_hidden * [(tokens, channels)],
    ]
    return [grad.new_empty(shape) for shape in shapes]


def _packed(grad: Tensor, stream: Tensor, counter: Tensor) -> Tensor:
    full = F.pad(grad, (0, 0, 0, padded(grad.shape[0]) - grad.shape[0]))
    return compress_stored(sampled(full, stream, counter), "m")


activation_backward = register(
    "activation_backward(Tensor grad, Tensor inner, Tensor? factor, Tensor[] keys, str activation, bool want_hidden) -> Tensor[]",
    _activation_backward,
    _fake_activation_backward,
)
