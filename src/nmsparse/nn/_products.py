"""The three products of a layer, side by side, with what the recipe makes of each operand.

Legend: T tokens, O out_features, I in_features; x (T, I), weight (O, I), grad (T, O).
Only the input and the parameter itself are saved for the backward pass: projected weights are computed again there, so no
second copy of a weight outlives the product that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmsparse.functional import matmul_fp8, quantize_fp8
from nmsparse.nn._layer import Layer
from nmsparse.nn._sparse import SparseProducts
from nmsparse.recipes import GRAD_INPUT, GRAD_WEIGHT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, padding, dilation and groups of a convolution."""


def wide(weight: Tensor) -> Tensor:
    """16-bit parameters are projected in fp32: their own rounding would make ties."""
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def forward_weight(layer: Layer, training: bool, weight: Tensor) -> Tensor:
    """What `output` sees of an (O, ..., I) weight."""
    project = layer.recipe.output_weight if training else layer.recipe.final_weight
    return project(wide(weight), layer.state)


def backward_weight(layer: Layer, training: bool, weight: Tensor) -> Tensor:
    """What `grad_input` sees of an (O, ..., I) weight."""
    if not training or layer.leaves_dense(GRAD_INPUT):
        return forward_weight(layer, training, weight)
    return layer.recipe.grad_input_weight(wide(weight), layer.state)


def input_grad(layer: Layer, training: bool, grad: Tensor, counter: Tensor | None) -> Tensor:
    """What `grad_input` sees of the output gradient, channels last."""
    if not training or layer.leaves_dense(GRAD_INPUT):
        return grad
    return layer.recipe.grad_input_grad(grad, layer.state, counter)


def weight_sample(layer: Layer, training: bool, grad: Tensor, counter: Tensor | None) -> Tensor:
    """What `grad_weight` sees of the output gradient, channels last."""
    if not training or layer.leaves_dense(GRAD_WEIGHT):
        return grad
    return layer.recipe.grad_weight_grad(grad, layer.state, counter)


def snapshot(layer: Layer) -> Tensor | None:
    """The random counter of this forward pass: the backward pass may come after other forward passes moved it on."""
    counter = layer.state.get("counter")
    return None if counter is None else counter.clone()


class LinearProducts(torch.autograd.Function):
    """y = x Wf^T + b, and its gradients."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        layer: Layer,
        training: bool,
        is_transposed: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        counter = snapshot(layer)
        ctx.layer, ctx.training, ctx.is_transposed, ctx.has_bias = layer, training, is_transposed, bias is not None
        ctx.sparse = layer.sparse if training and layer.sparse is not None and layer.sparse.serves(dtype) else None
        ctx.save_for_backward(*((x, weight) if counter is None else (x, weight, counter)))
        weight_oi = weight.t() if is_transposed else weight
        if ctx.sparse is not None and ctx.sparse.output:
            y = ctx.sparse.multiply_forward(x.reshape(-1, x.shape[-1]), bias, (weight_oi.shape[0], weight_oi.shape[1]))
            return y.view(*x.shape[:-1], y.shape[-1])
        used = forward_weight(layer, training, weight_oi).to(dtype)
        if layer.recipe.runs_in_fp8:
            y = matmul_fp8(x.reshape(-1, x.shape[-1]), used.t(), E4M3).view(*x.shape[:-1], used.shape[0])
            return y if bias is None else y + bias
        return F.linear(x, used, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        layer, training = ctx.layer, ctx.training
        x, weight, *rest = ctx.saved_tensors
        counter = rest[0] if rest else None
        weight_oi = weight.t() if ctx.is_transposed else weight
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        in_fp8 = layer.recipe.runs_in_fp8
        grad_x = grad_w = grad_b = None
        want_x, want_w = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        tokens = None
        if ctx.sparse is not None:
            tokens, grad_x = _sparse_gradients(ctx.sparse, layer, grad, weight, counter, want_x, want_w)
            grad_x = None if grad_x is None else grad_x.view(x.shape)
        if want_x and grad_x is None:
            pruned = input_grad(layer, training, grad, counter)
            used = backward_weight(layer, training, weight_oi).to(grad.dtype)
            grad_x = (matmul_fp8(pruned, used, E5M2) if in_fp8 else pruned @ used).view(x.shape)
        if want_w and ctx.sparse is not None and ctx.sparse.grad_weight:
            product = ctx.sparse.multiply_weight(tokens, grad, x.reshape(-1, x.shape[-1]), layer.state, counter)
            product = product.t() if ctx.is_transposed else product  # stored as the weight is, seen as (O, I)
            product = layer.recipe.weight_grad(product, weight_oi, layer.state)
            grad_w = (product.t() if ctx.is_transposed else product).to(weight.dtype)
        elif want_w:
            sample = weight_sample(layer, training, grad, counter)
            x_ti = x.reshape(-1, x.shape[-1])
            product = matmul_fp8(sample.t(), x_ti, E5M2) if in_fp8 else sample.t() @ x_ti
            if training:
                product = layer.recipe.weight_grad(product, weight_oi, layer.state)
            grad_w = (product.t() if ctx.is_transposed else product).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[5]:
            grad_b = grad.sum(0)
        return None, None, None, grad_x, grad_w, grad_b, None


def _sparse_gradients(
    sparse: SparseProducts, layer: Layer, grad: Tensor, weight: Tensor, counter: Tensor | None, want_x: bool, want_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """G packed for `grad_weight`, and the gradient of the input; None for what does not run on sparse tensor cores."""
    recipe, state = layer.recipe, layer.state
    tokens, channels, factor = sparse.pack_gradient(recipe, grad, state, counter, want_x, want_w)
    if channels is not None:
        return tokens, sparse.multiply_channels(channels, factor, weight.to(grad.dtype), grad.shape[0])
    if want_x and sparse.grad_input and not recipe.prunes_channels:
        sizes = (weight.shape[1], weight.shape[0]) if sparse.is_transposed else (weight.shape[0], weight.shape[1])
        return tokens, sparse.multiply_backward(grad, sizes, recipe.row_order(state))
    return tokens, None


def _like(weight: Tensor, projected: Tensor, dtype: torch.dtype) -> Tensor:
    """An (O, kh, kw, I) result as (O, I, kh, kw), laid out in memory as the parameter is, so that the convolution
    picks the same algorithm and output layout as for the dense layer."""
    channels_last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return projected.to(dtype).permute(0, 3, 1, 2).contiguous(memory_format=layout)


def _with_channels_last(grad: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to a (samples, O, height, width) gradient seen as (samples, height, width, O)."""
    seen = grad.permute(0, 2, 3, 1)
    changed = change(seen)
    if changed is seen:
        return grad
    back: Tensor = changed.permute(0, 3, 1, 2)
    return back.contiguous(memory_format=torch.channels_last if not grad.is_contiguous() else torch.contiguous_format)


def _fake_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to FP8 and back: there is no FP8 convolution to call."""
    quantized, scale = quantize_fp8(x, dtype)
    return (quantized.float() / scale).to(x.dtype)


class ConvProducts(torch.autograd.Function):
    """y = conv2d(x, Wf, b), and its gradients."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        layer: Layer,
        training: bool,
        geometry: Geometry,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        counter = snapshot(layer)
        ctx.layer, ctx.training, ctx.geometry, ctx.has_bias = layer, training, geometry, bias is not None
        ctx.save_for_backward(*((x, weight) if counter is None else (x, weight, counter)))
        used = _like(weight, forward_weight(layer, training, weight.permute(0, 2, 3, 1)), dtype)
        if layer.recipe.runs_in_fp8:
            x, used = _fake_fp8(x, E4M3), _fake_fp8(used, E4M3)
        return F.conv2d(x, used, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        layer, training = ctx.layer, ctx.training
        x, weight, *rest = ctx.saved_tensors
        counter = rest[0] if rest else None
        weight_oi = weight.permute(0, 2, 3, 1)

        def rounded(t: Tensor) -> Tensor:
            return _fake_fp8(t, E5M2) if layer.recipe.runs_in_fp8 else t

        want_x, want_w, want_b = ctx.needs_input_grad[3], ctx.needs_input_grad[4], ctx.has_bias and ctx.needs_input_grad[5]
        pruned = sample = grad
        if training and want_x:
            pruned = _with_channels_last(grad, lambda g: input_grad(layer, training, g, counter))
        if training and want_w:
            sample = _with_channels_last(grad, lambda g: weight_sample(layer, training, g, counter))
        used = _like(weight, backward_weight(layer, training, weight_oi), grad.dtype) if want_x else weight.to(grad.dtype)
        if layer.recipe.runs_in_fp8 or pruned is not grad or sample is not grad:
            grad_x = _conv_backward(rounded(pruned), x, rounded(used), ctx.geometry, (want_x, False, False))[0]
            grad_w = _conv_backward(rounded(sample), rounded(x), used, ctx.geometry, (False, want_w, False))[1]
            grad_b = _conv_backward(grad, x, used, ctx.geometry, (False, False, want_b))[2]
        else:  # nothing pruned in G: one call, and every bit as the dense layer computes it
            grad_x, grad_w, grad_b = _conv_backward(grad, x, used, ctx.geometry, (want_x, want_w, want_b))
        if grad_w is not None:
            if training:
                grad_w = _like(weight, layer.recipe.weight_grad(grad_w.permute(0, 2, 3, 1), weight_oi, layer.state), grad_w.dtype)
            grad_w = grad_w.to(weight.dtype)
        return None, None, None, grad_x, grad_w, grad_b, None


def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients of a convolution: input, weight, bias."""
    stride, padding, dilation, groups = geometry
    if not any(wanted):
        return None, None, None
    bias_sizes = [weight.shape[0]] if wanted[2] else None
    backward = torch.ops.aten.convolution_backward
    gradients = backward(grad, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0], groups, list(wanted))
    return gradients[0], gradients[1], gradients[2]
