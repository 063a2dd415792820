"""What one call of a served linear layer takes, dense and packed.

The search for algorithms multiplies one operand over and over. A served model comes back to a weight when all others have been
through the GPU's cache; and it is replayed from a CUDA graph, where launching costs nothing. Both matter for few tokens, whose
time is that of reading the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from nmsparse.kernels._cusparselt import Product
from nmsparse.kernels._layout import packed_size, random_packed
from nmsparse.kernels._ops import sparse_matmul
from nmsparse.kernels._search import device_milliseconds

COLD_BYTES = 128 << 20
"""Weights of so many bytes in turn: more than the caches of the GPUs that are served (50 MB) can keep."""
MOST_WEIGHTS = 512
"""As many as the smallest layers that can be packed need: 512 x 512 takes 0.3 MB."""
AT_LEAST_MS = 20.0


@torch.inference_mode()
def serving_times(product: Product, tokens: int, has_bias: bool, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a layer's call on ``tokens`` rows, dense and packed, everything that a call does included.

    ``product`` is that of the forward pass; its rows may be those of the tokens, filled up. Its algorithms have been searched, so
    that nothing untried runs in this process.
    """
    m, k, dtype = product.m, product.k, product.dtype
    x = torch.randn(tokens, k, device=device).to(dtype)
    bias = torch.randn(m, device=device).to(dtype) if has_bias else None

    def dense(weight: Tensor) -> Tensor:
        if not product.m_major:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def packed(values: Tensor) -> Tensor:
        return sparse_matmul(values, x, bias, m, k, product.m_major, True, True)

    shape = (k, m) if product.m_major else (m, k)
    with torch.cuda.device(device):
        dense_ms = _in_turn(dense, lambda: torch.randn(shape, device=device).to(dtype), m * k * dtype.itemsize)
        size = packed_size(m, k) * dtype.itemsize
        return dense_ms, _in_turn(packed, lambda: random_packed(m, k, dtype, device), size)


def _in_turn(call: Callable[[Tensor], Tensor], make: Callable[[], Tensor], size: int) -> float:
    """Mean time of a call on weights that the cache has lost meanwhile."""
    count = min(MOST_WEIGHTS, max(2, -(-COLD_BYTES // size)))
    weights = [make() for _ in range(count)]
    turn = cycle(weights)
    return device_milliseconds(lambda: call(next(turn)), AT_LEAST_MS, count)
