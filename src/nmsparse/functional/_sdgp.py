"""SDGP's pruning of the output gradient: the largest magnitudes, rescaled so that the L1 norm survives."""

from __future__ import annotations

import torch
from torch import Tensor

from nmsparse.functional._groups import computing_dtype
from nmsparse.functional._masks import magnitude_mask
from nmsparse.pattern import Pattern


def sdgp(
    grad: Tensor,
    pattern: str | Pattern,
    dim: int = -1,
    rescale: bool = True,
    *,
    over: int | tuple[int, ...] | None = None,
) -> Tensor:
    """Keep the N largest magnitudes of every M along ``dim``; with ``rescale`` restore the L1 norm taken over ``over``.

    ``over`` defaults to ``dim`` itself: each token keeps its norm, whatever the batch. A convolution passes its pixels,
    so that each sample and channel keeps its norm, as published. Scaling the gradient scales the result. With
    ``rescale``, a NaN or an infinity turns all entries that share its norm into NaN.
    """
    kept = torch.where(magnitude_mask(grad, pattern, dim), grad, 0)
    if not rescale:
        return kept
    dims = dim if over is None else over
    wide = computing_dtype(grad)
    before = grad.abs().sum(dims, keepdim=True, dtype=wide)
    after = kept.abs().sum(dims, keepdim=True, dtype=wide)
    factor = torch.where(after == 0, 1, before / torch.where(after == 0, 1, after))
    return (kept * factor).to(grad.dtype)
