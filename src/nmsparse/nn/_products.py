"""The three products of a layer, side by side, with what the recipe makes of each operand.

Legend: T tokens, O out_features, I in_features; x (T, I), weight (O, I), grad (T, O).
Only the input and the parameter itself are saved for the backward pass: projected weights are computed again there, so no
second copy of a weight outlives the product that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def serving(layer: Layer, training: bool, dtype: torch.dtype) -> SparseProducts | None:
    """What runs a call in this type on sparse tensor cores; None where everything is emulated."""
    return layer.sparse if training and layer.sparse is not None and layer.sparse.serves(dtype) else None


def call_of(layer: Layer, training: bool, is_transposed: bool, dtype: torch.dtype) -> LinearCall:
    sparse = serving(layer, training, dtype)
    is_checked = sparse is not None and not torch.compiler.is_compiling()
    return LinearCall(layer, training, is_transposed, sparse, sparse.packed_from if is_checked else None)


def unflattened(y: Tensor, x: Tensor) -> Tensor:
    """A (T, O) result with the leading dims of the input.

    As a dense layer returns it, not as a view: FSDP2 puts a backward hook on what a layer returns, and a change in place would
    take it off a view.
    """
    shaped: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return shaped


@dataclass(frozen=True)
class LinearCall:
    """One call of a linear layer: what its products have in common. Inputs and gradients are matrices here."""

    layer: Layer
    training: bool
    is_transposed: bool
    sparse: SparseProducts | None
    packed_from: tuple[int, int] | None = None
    """The weight that was packed when this call began; None in a compiled graph, which holds no check."""

    def _view(self, matrix: Tensor) -> Tensor:
        """A weight as (O, I), or back as it is stored."""
        return matrix.t() if self.is_transposed else matrix

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.sparse is not None and self.sparse.output:
            return self.sparse.multiply_forward(x, bias, weight, self.layer.recipe, self.layer.state)
        used = forward_weight(self.layer, self.training, self._view(weight)).to(dtype)
        if self.layer.recipe.runs_in_fp8:
            y = matmul_fp8(x, used.t(), E4M3)
            return y if bias is None else y + bias
        return F.linear(x, used, bias)

    def gradients(
        self,
        grad: Tensor,
        x: Tensor | None,
        weight: Tensor,
        counter: Tensor | None,
        want_x: bool,
        want_w: bool,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Those of input and weight. ``tokens`` is G packed for `grad_weight`, where that has been done already; ``x`` is
        needed for the weight's only."""
        grad_x = None
        if self.sparse is not None:
            packed, grad_x = _sparse_gradients(self, grad, weight, counter, want_x, want_w)
            tokens = packed if tokens is None else tokens
        if want_x and grad_x is None:
            grad_x = self._emulated_grad_input(grad, weight, counter)
        if not want_w:
            return grad_x, None
        assert x is not None, "needed for the gradient of the weight"
        return grad_x, self._grad_weight(tokens, grad, x, weight, counter)

    def _emulated_grad_input(self, grad: Tensor, weight: Tensor, counter: Tensor | None) -> Tensor:
        pruned = input_grad(self.layer, self.training, grad, counter)
        used = backward_weight(self.layer, self.training, self._view(weight)).to(grad.dtype)
        return matmul_fp8(pruned, used, E5M2) if self.layer.recipe.runs_in_fp8 else pruned @ used

    def _grad_weight(self, tokens: Tensor | None, grad: Tensor, x: Tensor, weight: Tensor, counter: Tensor | None) -> Tensor:
        if self.sparse is not None and self.sparse.grad_weight:
            product = self._view(self.sparse.multiply_weight(tokens, grad, x, self.layer.state, counter))
        else:
            sample = weight_sample(self.layer, self.training, grad, counter)
            product = matmul_fp8(sample.t(), x, E5M2) if self.layer.recipe.runs_in_fp8 else sample.t() @ x
        if self.training:
            product = self.layer.recipe.weight_grad(product, self._view(weight), self.layer.state)
        return self._view(product).to(weight.dtype)


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
        call = ctx.call = call_of(layer, training, is_transposed, dtype)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(*((x, weight) if counter is None else (x, weight, counter)))
        return unflattened(call.output(x.reshape(-1, x.shape[-1]), weight, bias, dtype), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight, *rest = ctx.saved_tensors
        counter = rest[0] if rest else None
        grad, flat = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
        wants = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        grad_x, grad_w = ctx.call.gradients(grad, flat, weight, counter, *wants)
        grad_b = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[5] else None
        return None, None, None, None if grad_x is None else grad_x.view(x.shape), grad_w, grad_b, None


def _sparse_gradients(
    call: LinearCall, grad: Tensor, weight: Tensor, counter: Tensor | None, want_x: bool, want_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """G packed for `grad_weight`, and the gradient of the input; None for what does not run on sparse tensor cores."""
    sparse, recipe, state = call.sparse, call.layer.recipe, call.layer.state
    assert sparse is not None, "asked by the caller"
    tokens, channels, factor = sparse.pack_gradient(recipe, grad, state, counter, want_x, want_w)
    if channels is not None:
        return tokens, sparse.multiply_channels(channels, factor, weight.to(grad.dtype), grad.shape[0])
    if want_x and sparse.grad_input and not recipe.prunes_channels:
        return tokens, sparse.multiply_backward(grad, weight, recipe, state, call.packed_from)
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
