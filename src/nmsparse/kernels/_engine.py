"""Sparse products on one GPU: plans in a cache, the searched algorithm for each, and trust in our layout tested first."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from nmsparse.kernels._cusparselt import TESTED, Algorithm, CusparseLtError, Plan, Product, library, version
from nmsparse.kernels._layout import Major, compress
from nmsparse.kernels._pack import pack_weight
from nmsparse.kernels._search import Choice, Choices

logger = logging.getLogger("nmsparse")
PLANS = 512
"""Plans kept: each holds some 100 kB."""


class Engine:
    """cuSPARSELt on one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.choices = Choices(device)
        self.plans: dict[Product, Plan] = {}
        self._layout_holds: dict[tuple[torch.dtype, Major], bool] = {}
        self._lock = threading.RLock()
        if version(device) not in TESTED:
            logger.info("nmsparse: cuSPARSELt %d was not tested with this version of nmsparse.", version(device))

    def plan(self, product: Product) -> Plan:
        """A plan with the fastest algorithm known; searched on first use, by one thread for all."""
        with self._lock:
            plan = self.plans.pop(product, None)
            if plan is None:
                plan = self._make(product)
                if len(self.plans) >= PLANS:  # the one not used for longest: batches of varying length would pile them up
                    self.plans.pop(next(iter(self.plans))).close()
            self.plans[product] = plan
            return plan

    def _make(self, product: Product) -> Plan:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the product {product} has no plan yet, and none can be searched while a CUDA graph is captured: run one "
                "training step before the capture."
            )
        known = product._replace(has_bias=False)
        choice = self.choices.near(known) or self.choices.search([known])[known]
        if choice is None:
            warnings.warn(f"no algorithm could be timed for {product}; the library's default is used.", stacklevel=2)
            return Plan(product, self.device)
        try:
            return Plan(product, self.device, Algorithm(choice.algorithm, choice.split_k))
        except CusparseLtError:  # chosen for a neighbour, and not legal for these sizes
            return Plan(product, self.device)

    def search(self, products: Iterable[Product]) -> dict[Product, Choice | None]:
        """Times of these products, searched all at once where they are not known."""
        return self.choices.search(products)

    def trusts_layout(self, dtype: torch.dtype, major: Major) -> bool:
        """Whether our packed bytes equal the library's own, tested once; a warning if they do not."""
        known = self._layout_holds.get((dtype, major))
        if known is None:
            known = self._layout_holds[dtype, major] = self._bytes_agree(dtype, major)
            if not known:
                warnings.warn(
                    f"cuSPARSELt {version(self.device)} compresses {dtype} {major.upper()}-major operands into another layout "
                    "than nmsparse's kernels write; its own compression is used in their place, which is far slower.",
                    stacklevel=2,
                )
        return known

    def _bytes_agree(self, dtype: torch.dtype, major: Major) -> bool:
        m = k = 128
        draw = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}  # whatever the user's default device is
        positions = torch.rand(m, k // 4, 4, **draw).argsort(2)[..., :2]
        values = torch.rand(m, k // 4, 2, **draw) + 1  # no zeros: two in every group, and where is no question
        dense = torch.zeros(m, k // 4, 4, device="cpu").scatter_(2, positions, values).flatten(1).to(dtype)
        stored = (dense if major == "k" else dense.t().contiguous()).to(f"cuda:{self.device}")
        theirs = Plan(Product(m, 64, k, major == "m", True, True, dtype), self.device).compress(stored)
        ours = compress(stored, major)
        by_kernel = torch.zeros_like(ours)
        pack_weight(stored, *((by_kernel, None) if major == "k" else (None, by_kernel)), columns_first=major == "k")
        same = torch.equal(ours.view(torch.uint8), by_kernel.view(torch.uint8))
        return same and theirs.numel() == ours.numel() and torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))

    def compress(self, stored: Tensor, major: Major) -> Tensor:
        """The library's own compression of a matrix that is 2:4 along k."""
        m, k = stored.shape if major == "k" else stored.shape[::-1]
        packed = Plan(Product(m, 64, k, major == "m", True, True, stored.dtype), self.device).compress(stored)
        return packed[: m * k // 2 + m * k // 16]


@cache
def engine(device: int) -> Engine:
    """The engine of a device."""
    return Engine(device)


@cache
def unavailable(device: int) -> str | None:
    """Why there is no engine on this device; None if there is one."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the packed layout is known for Hopper GPUs (SM 9.0) only, and this one is SM {major}.{minor}"
    try:
        library()
        version(device)
    except (OSError, AttributeError, CusparseLtError) as error:
        return f"cuSPARSELt, which torch's CUDA wheels bring, does not load ({error})"
    return None
