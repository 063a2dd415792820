"""Plain-torch functions that run compiled on a GPU, outside the model's own graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def fast(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """On a GPU the compiled function, all layers in one call: outside the model's own graph, dozens of small kernels per
    layer would add up.

    Without Triton there is no compiler for the GPU, and the same function runs as it is.
    """
    return _compiled(function) if tensor.is_cuda and find_spec("triton") is not None else function
