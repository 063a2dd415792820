"""AdamW step under a frozen variance, one pass over memory.

Reads parameter, gradient, momentum and variance; writes parameter and momentum: 24 bytes per fp32 weight against 28 for
the ordinary fused AdamW. Loss scale, overflow flag and step count are read on the device, so nothing waits for the host.
The reference is ``nmsparse.optim._frozen_foreach``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, step_ptr, scale_ptr, inf_ptr, count,
    lr, log_beta1, new_share, eps, decay, v_scale, v_floor, max_update,
    HAS_SCALE: tl.constexpr, HAS_INF: tl.constexpr, MAXIMIZE: tl.constexpr, EPS_INSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if HAS_INF:
        if tl.load(inf_ptr) > 0:
            return
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    p = tl.load(p_ptr + offset, inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offset, inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + offset, inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + offset, inside, other=1.0).to(tl.float32)
    if HAS_SCALE:
        g = g / tl.load(scale_ptr)
    if MAXIMIZE:
        g = -g
    m = m + new_share * (g - m)
    v = tl.maximum(v * v_scale, v_floor)
    if EPS_INSIDE:
        denominator = tl.sqrt(v + eps)
    else:
        denominator = tl.sqrt(v) + eps
    correction = 1.0 - tl.exp(tl.load(step_ptr).to(tl.float32) * log_beta1)
    update = m / (denominator * correction)
    update = tl.minimum(tl.maximum(update, -max_update), max_update)
    tl.store(p_ptr + offset, p * decay - lr * update, inside)
    tl.store(m_ptr + offset, m, inside)


def _is_dense(*tensors: Tensor) -> bool:
    """All elements in one block of memory, in the same order: a flat walk then visits matching entries."""
    first = tensors[0]
    in_memory_order = first.permute(sorted(range(first.ndim), key=first.stride, reverse=True))
    return in_memory_order.is_contiguous() and all(t.stride() == first.stride() for t in tensors)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyrefly: ignore


def frozen_adamw(
    p: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    variance: Tensor,
    group: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update one parameter in place; ``state`` holds exp_avg, step, frozen_scale and frozen_floor."""
    p, grad, momentum, variance = (_local(t) for t in (p, grad, state["exp_avg"], variance))
    step, beta1 = state["step"], float(group["betas"][0])
    if not _is_dense(p, momentum, variance):
        raise ValueError(
            f"the fused step needs a parameter in one block of memory, got shape {tuple(p.shape)} with strides "
            f"{p.stride()}; use fused=False."
        )
    if grad.stride() != p.stride():
        grad = torch.empty_strided(p.shape, p.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
    # GradScaler sums the flag over devices, so it may exceed 1
    step += 1 if found_inf is None else (found_inf == 0).to(step.device, step.dtype)
    lr = float(group["lr"])
    scale_or_any, inf_or_any = (step if t is None else t.to(p.device) for t in (grad_scale, found_inf))
    with torch.cuda.device_of(p):  # Triton launches on the current device, wherever its arguments are
        _kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p, grad, momentum, variance, step, scale_or_any, inf_or_any,
            p.numel(), lr, math.log(beta1) if beta1 > 0 else -1e30, 1 - beta1, group["eps"], 1 - lr * group["weight_decay"],
            state["frozen_scale"], state["frozen_floor"], float("inf") if group["max_update"] is None else group["max_update"],
            HAS_SCALE=grad_scale is not None, HAS_INF=found_inf is not None,
            MAXIMIZE=group["maximize"], EPS_INSIDE=group["eps_inside"], BLOCK=BLOCK,
        )  # fmt: skip
