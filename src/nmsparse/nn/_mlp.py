"""An MLP that keeps one wide tensor less for its backward pass, and packs gradients where the activation makes them.

    y = down(f(inner(x)))        or        y = down(f(inner(x)) * factor(x))

Of the wide tensors only the pre-activations are saved: the kernel that computes their gradients, and packs them for `grad_weight`
in the same pass, makes the hidden activation anew. It saves memory and no time (numbers in nmsparse.kernels._activation).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nmsparse.kernels import ACTIVATIONS, activate, activation_backward
from nmsparse.nn._modules import SparseConv2d, SparseMixin, prepare_call
from nmsparse.nn._products import LinearCall, call_of, serving, snapshot, unflattened


def fused_mlp(x: Tensor, *, up: nn.Module, down: nn.Module, gate: nn.Module | None = None, activation: str) -> Tensor:
    """``down(f(up(x)))``, or ``down(f(gate(x)) * up(x))`` with a gate; f is "silu", "gelu", "gelu_tanh" or "relu_squared".

    For the forward of a model's own MLP, before or after its layers were made sparse. Where sampled gradients of all
    pre-activations are multiplied on sparse tensor cores, the backward pass is fused; anything else (dense layers, evaluation,
    hooks on a layer) calls the modules as they are, with the same result up to rounding.

    What this saves is memory: the input of ``down`` is made anew in the backward pass instead of being saved. It need not
    save time: on an H200 the kernel's first form took 0.989 ms (silu with a gate, 16384 x 14336), and 1.177 with the input of
    ``down``, where the activation's backward pass by torch.compile and two packings took 0.952. ``nmsparse bench kernels``
    times today's.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    layers = (up, down) if gate is None else (gate, up, down)
    if not torch.is_grad_enabled() or not all(_is_sparse(module) for module in layers):
        return _composed(x, up, down, gate, activation)
    cast_x, dtype = x, x.dtype
    biases: list[Tensor | None] = []
    for module in layers:
        cast_x, bias, dtype = prepare_call(module, x)
        biases.append(bias)
    if not all(_packs_gradient(module, dtype) for module in layers[:-1]):
        return _composed(x, up, down, gate, activation)
    calls = tuple(_call(module, dtype) for module in layers)
    weights = [module.weight for module in layers]
    with torch.autocast(x.device.type, enabled=False):
        return cast(Tensor, MlpProducts.apply(calls, activation, dtype, cast_x, *weights, *biases))


def _composed(x: Tensor, up: nn.Module, down: nn.Module, gate: nn.Module | None, activation: str) -> Tensor:
    hidden = activate(up(x), activation) if gate is None else activate(gate(x), activation) * up(x)
    return cast(Tensor, down(hidden))


def _is_sparse(module: Any) -> bool:
    """A linear layer of ours in training, and nobody waits to be called around it."""
    if not isinstance(module, SparseMixin) or isinstance(module, SparseConv2d) or not module.training:
        return False
    watched: Any = module
    hooks = (watched._forward_hooks, watched._forward_pre_hooks, watched._backward_hooks, watched._backward_pre_hooks)
    return not any(hooks) and watched._compiled_call_impl is None


def _packs_gradient(module: Any, dtype: torch.dtype) -> bool:
    """Its weight's gradient is multiplied from a packed sample, and nothing else is made of the output gradient."""
    layer = module._nmsparse
    sparse = serving(layer, True, dtype)
    samples = layer.recipe.samples_tokens and not layer.recipe.prunes_channels
    return sparse is not None and sparse.grad_weight and samples and module.weight.requires_grad


def _call(module: Any, dtype: torch.dtype) -> LinearCall:
    return call_of(module._nmsparse, True, module.is_transposed, dtype)


class MlpProducts(torch.autograd.Function):
    """The three products of two or three layers, and the activation between them."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, calls: tuple[LinearCall, ...], activation: str, dtype: torch.dtype, x: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        weights = cast(tuple[Tensor, ...], parameters[: len(calls)])
        biases = parameters[len(calls) :]
        counters = [snapshot(call.layer) for call in calls]
        flat = x.reshape(-1, x.shape[-1])
        *first, down = zip(calls, weights, biases, strict=True)
        made = [call.output(flat, weight, bias, dtype) for call, weight, bias in first]
        hidden = activate(made[0], activation)
        hidden = hidden if len(made) == 1 else hidden * made[1]
        ctx.calls, ctx.activation = calls, activation
        ctx.save_for_backward(x, *made, *weights, *counters)
        return unflattened(down[0].output(hidden, *down[1:], dtype), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        calls, count = ctx.calls, len(ctx.calls)
        x, *saved = ctx.saved_tensors
        made, weights, counters = saved[: count - 1], saved[count - 1 : 2 * count - 1], saved[2 * count - 1 :]
        wants_x, wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        grad, flat = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
        down, down_weight, down_counter = calls[-1], weights[-1], counters[-1]
        grad_hidden, _ = down.gradients(grad, None, down_weight, down_counter, True, False)
        keys = [key for call, counter in zip(calls[:-1], counters, strict=False) for key in (call.layer.state["stream"], counter)]
        found = activation_backward(
            grad_hidden, made[0], made[1] if count == 3 else None, keys, ctx.activation, wanted[count - 1]
        )
        grads, packed, hidden = found[: count - 1], found[count - 1 : 2 * count - 2], found[2 * count - 2 :]
        grad_down = down.gradients(grad, hidden[0], down_weight, down_counter, False, True)[1] if hidden else None
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = []
        for call, g, tokens, weight, counter in zip(calls, grads, packed, weights, counters, strict=False):
            part, grad_weight = call.gradients(g, flat, weight, counter, wants_x, True, tokens)
            grad_x = part if grad_x is None else grad_x + part
            grad_weights.append(grad_weight)
        grad_biases = [g.sum(0) if want else None for g, want in zip((*grads, grad), wanted[count:], strict=True)]
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return None, None, None, grad_x, *grad_weights, grad_down, *grad_biases
