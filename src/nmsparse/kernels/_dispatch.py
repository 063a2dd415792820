"""The one door to kernels: which implementation serves an operation here, and why.

A second engine (another GPU, another library) is one more row of the table; nothing else asks what hardware it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nmsparse.kernels._cusparselt import Product
from nmsparse.kernels._search import Choice

SPARSE_MATMUL = "sparse_matmul"


@dataclass(frozen=True)
class Row:
    """One implementation of an operation."""

    operation: str
    name: str
    dtypes: tuple[torch.dtype, ...]
    unavailable: Callable[[torch.device], str | None]
    """Why it cannot run on a device; None if it can."""


@dataclass(frozen=True)
class Selected:
    """What serves an operation: an implementation, or None with the reason."""

    name: str | None
    reason: str


def _cusparselt(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "sparse tensor cores need a CUDA GPU"
    if find_spec("triton") is None:
        return "the pack kernels need Triton, which is not installed"
    from nmsparse.kernels._engine import unavailable

    return unavailable(_index(device))


def _reference(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "the reference runs on the CPU"


REFERENCE = Row(SPARSE_MATMUL, "reference", (torch.bfloat16, torch.float16), _reference)
"""The packed layout multiplied in plain torch: slower than any product, and there to test what surrounds the kernels."""
TABLE: list[Row] = [Row(SPARSE_MATMUL, "cusparselt", (torch.bfloat16, torch.float16), _cusparselt)]


def select(operation: str, dtype: torch.dtype, device: torch.device) -> Selected:
    """The first row that can serve an operation, with the reasons of those that cannot."""
    reasons = []
    for row in TABLE:
        if row.operation != operation:
            continue
        why = row.unavailable(device)
        if why is None and dtype not in row.dtypes:
            names = [str(t).removeprefix("torch.") for t in (*row.dtypes, dtype)]
            why = f"{row.name} computes in {' and '.join(names[:-1])}, not in {names[-1]}"
        if why is None:
            return Selected(row.name, f"{row.name} serves {operation}")
        reasons.append(why)
    return Selected(None, "; ".join(reasons) or f"nothing serves {operation}")


def time_products(products: Iterable[Product], device: torch.device) -> dict[Product, Choice | None]:
    """What the sparse engine of a device needs for these products, and what dense ones need; searched where unknown."""
    from nmsparse.kernels._engine import engine

    return engine(_index(device)).search(products)


def hardware(device: torch.device) -> dict[str, Any]:
    """What measurements on this device depend on."""
    if device.type != "cuda":
        return {"device": device.type}
    from nmsparse.kernels._search import hardware as of_gpu

    return of_gpu(_index(device)) if _cusparselt(device) is None else {"gpu": torch.cuda.get_device_name(device)}


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def transposable_kernel(weight: Tensor, pattern: str) -> Callable[[Tensor], Tensor] | None:
    """The search for transposable masks in one kernel, or None where plain torch must do it."""
    is_matrix = weight.ndim == 2 and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not weight.is_cuda or pattern != "2:4" or not is_matrix or find_spec("triton") is None:
        return None
    from nmsparse.kernels._transposable import transposable_mask_kernel

    def search(weight: Tensor) -> Tensor:
        if not weight.is_contiguous():  # a (I, O) weight seen as (O, I): the transpose of a transposable mask is one
            return search(weight.t()).t() if weight.t().is_contiguous() else search(weight.contiguous())
        mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
        transposable_mask_kernel(weight, mask)
        return mask

    return search


@cache
def frozen_adamw_kernel() -> Callable[..., Any] | None:
    """The fused AdamW step under a frozen variance, or None without Triton."""
    try:
        from nmsparse.kernels._frozen_adamw import frozen_adamw
    except ImportError:
        return None
    return frozen_adamw
