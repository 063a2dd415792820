"""FP8 with per-tensor current scaling, as S-STE trains: real casts, fp32 accumulation."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast ``x * s`` to ``dtype`` with ``s = max / amax``; return the cast tensor and s (fp32, 1 where amax is 0)."""
    amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    limit = torch.finfo(dtype).max
    scale = torch.where(amax > 0, limit / amax, 1)
    # an amax so small that limit / amax overflows is as good as zero; NaN and infinity must stay visible
    scale = torch.where(scale.isinf(), 1, scale)
    return (x.float() * scale).clamp(-limit, limit).to(dtype), scale


def matmul_fp8(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` with both operands quantised to ``dtype``; the result has a's dtype.

    On a GPU with FP8 tensor cores the product of two e4m3 matrices runs there. The library behind it refuses e5m2
    against e5m2 and sizes that 16 does not divide: those products run on the quantised values in a wider type, which
    holds every FP8 number exactly.
    """
    qa, sa = quantize_fp8(a, dtype)
    qb, sb = quantize_fp8(b, dtype)
    if _runs_on_tensor_cores(a, b, dtype):
        column_major = qb.t().contiguous().t()
        return torch._scaled_mm(qa.contiguous(), column_major, scale_a=1 / sa, scale_b=1 / sb, out_dtype=torch.bfloat16)
    # fp16 would overflow on products of e5m2 values; bf16 operands still accumulate in fp32
    wide = torch.bfloat16 if a.dtype == torch.bfloat16 else torch.float32
    # one scale after the other: their product overflows for two small operands
    return ((qa.to(wide) @ qb.to(wide)).float() / sa / sb).to(a.dtype)


def _runs_on_tensor_cores(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    if dtype != torch.float8_e4m3fn or a.dtype != torch.bfloat16 or not a.is_cuda or torch.version.hip:
        return False
    sizes = (*a.shape, b.shape[1])
    return torch.cuda.get_device_capability(a.device) >= (8, 9) and all(size and size % 16 == 0 for size in sizes)
