"""The one door to kernels: returns an implementation, or None where the plain-torch path must do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def frozen_adamw_kernel() -> Callable[..., Any] | None:
    """The fused AdamW step under a frozen variance, or None without Triton."""
    try:
        from nmsparse.kernels._frozen_adamw import frozen_adamw
    except ImportError:
        return None
    return frozen_adamw
