"""Which products of which layers run on sparse tensor cores, and keeping their packed weights current.

A verdict (a plan, or the default rule) says which of the possible products pay; the recipe's clock says which are sparse
at present. Weights are packed when an optimizer is attached and after each of its steps; sharded ones in each pass.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from nmsparse._update import LayerHandle
from nmsparse.kernels import trusts_layout
from nmsparse.nn import SparseProducts, is_sharded, obstacles, rank
from nmsparse.recipes import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Clock, Recipe

logger = logging.getLogger("nmsparse")
SPARSE = "sparse"
PARALLEL = "emulated: tensor parallelism splits its weight"
SPARES_MEMORY = True
"""Some layers make their backward copy in each backward pass, so that a model needs no more memory than in dense training."""
KEPT, LATE, MASK = 2, -7, 8
"""Eighths of a byte per weight beyond the 2 bytes that compiled dense training keeps from the forward to the backward pass:
with both copies (of 9/8 bytes each), and with the forward copy alone; a mask that the recipe keeps comes on top of either."""


class Verdict(Protocol):
    """Says which products pay."""

    def check(self, recipe: Recipe) -> None:
        """Raise where it was made for another recipe."""

    def unprofitable(self, name: str, product: str, out_features: int, in_features: int) -> str | None:
        """Why a product of a layer should stay dense although it could be sparse; None if it should be sparse."""


class Rule:
    """The default without a plan: the sizes from which a product paid on an H200 at 16,384 tokens, with some margin.

    A packed weight serves all tokens of an update, so what limits it are small products. A packed gradient costs the same
    for any number of inputs and gains in proportion to them.
    """

    FEATURES = 1024
    INPUTS_FOR_GRADIENTS = 2048

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.packs_gradient = {GRAD_WEIGHT, GRAD_INPUT} if recipe.prunes_channels else {GRAD_WEIGHT}

    def check(self, recipe: Recipe) -> None:
        assert recipe == self.recipe, "a rule is made where it is used"

    def unprofitable(self, name: str, product: str, out_features: int, in_features: int) -> str | None:
        if min(out_features, in_features) < self.FEATURES:
            why = f"it has fewer than {self.FEATURES} features"
        elif product in self.packs_gradient and in_features < self.INPUTS_FOR_GRADIENTS:
            why = f"packing the gradient pays from {self.INPUTS_FOR_GRADIENTS} inputs"
        else:
            return None
        return f"dense by the default rule, with its operand in full: {why}; nmsparse.plan measures what is faster here"


@cache
def tell_emulated(reason: str) -> None:
    """Once in a process, for each reason."""
    logger.warning("nmsparse: all products run emulated, at the speed of dense ones or below: %s.", reason)


class PackingGraph:
    """Packs the weights of many layers. Once nothing moves from one time to the next it replays a CUDA graph: with small
    layers, launching one kernel after another takes longer than the kernels.

    A graph is made anew where anything it has captured moves: a weight, a mask, a copy, a phase of the recipe.
    """

    def __init__(self) -> None:
        self.addresses: tuple[int, ...] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def pack(self, handles: Sequence[LayerHandle]) -> None:
        addresses = tuple(address for handle in handles for address in _addresses(handle))
        can_capture = all(self._is_kernel(handle) for handle in handles) and not torch.cuda.is_current_stream_capturing()
        if not can_capture or addresses != self.addresses:
            for handle in handles:
                handle.layer.refresh(handle.parameter)
            # taken again: packing may have made the copies
            self.addresses = tuple(address for handle in handles for address in _addresses(handle)) if can_capture else None
            self.graph = None
            return
        if self.graph is None:
            self.graph = self._capture(handles)
        self.graph.replay()
        for handle in handles:
            assert handle.layer.sparse is not None, "only such layers are packed"
            handle.layer.sparse.note_packed(handle.parameter)

    @staticmethod
    def _capture(handles: Sequence[LayerHandle]) -> torch.cuda.CUDAGraph:
        graph, device = torch.cuda.CUDAGraph(), handles[0].parameter.device
        torch.cuda.synchronize(device)
        # a stream of this device: torch's own for captures belongs to the one that was captured on first; and only this
        # thread is held to the rules of a capture, because another may be pinning memory meanwhile
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for handle in handles:
                handle.layer.refresh(handle.parameter)
        return graph

    @staticmethod
    def _is_kernel(handle: LayerHandle) -> bool:
        """Packing is one launch; recipes that plain torch projects are compiled at first, which cannot be captured."""
        recipe, sparse = handle.layer.recipe, handle.layer.sparse
        assert sparse is not None, "only such layers are packed"
        copies = sparse.copies.values()
        if not handle.parameter.is_cuda or recipe.packing is None or recipe.row_order(handle.state) is not None:
            return False
        return bool(copies) and all(trusts_layout(copy) for copy in copies)


def _addresses(handle: LayerHandle) -> list[int]:
    sparse = handle.layer.sparse
    assert sparse is not None, "only such layers are packed"
    tensors = [handle.parameter, *sparse.copies.values(), *handle.state.values()]
    return [*(tensor.data_ptr() for tensor in tensors), sparse.output, sparse.grad_input, id(sparse.dtype)]


class TensorCores:
    """The sparse products of a run."""

    def __init__(self, recipe: Recipe, verdict: Verdict | None) -> None:
        self.recipe = recipe
        self.verdict = verdict
        self._told_dtype = False
        self._graphs: dict[tuple[torch.device, str], PackingGraph] = {}

    def _packing(self, layers: Sequence[LayerHandle]) -> None:
        by_device: dict[torch.device, list[LayerHandle]] = {}
        for handle in layers:
            sparse = handle.layer.sparse
            if sparse is None or sparse.packs_in_passes:
                continue
            if sparse.output or (sparse.grad_input and not self.recipe.prunes_channels):
                by_device.setdefault(handle.parameter.device, []).append(handle)
        for device, handles in by_device.items():
            # by the first layer as well: each optimizer packs its own
            self._graphs.setdefault((device, handles[0].name), PackingGraph()).pack(handles)

    def engage(self, layers: Sequence[LayerHandle], clock: Clock, memory: dict[str, Any]) -> None:
        """Decide for layers that are new here, follow the recipe's phase, and pack the weights."""
        if self.verdict is None or not self.recipe.sparse_products:
            return
        active = self.recipe.active_products(clock, memory)
        for handle in layers:
            layer = handle.layer
            if layer.sparse is None:
                layer.sparse = self._examine(handle, self.verdict)
            self._follow_calls(handle, layer.sparse)
            layer.sparse.set_active(active)
        self._spare_memory(layers)
        self._packing(layers)
        self._tell(layers)

    def _spare_memory(self, layers: Sequence[LayerHandle]) -> None:
        """Choose the layers that pack late: as few as make up for what the others keep, spread over the model."""
        excess, packing = 0, self.recipe.packing
        mask = 0 if packing is None or packing.mask is None else MASK
        for handle in layers:
            sparse = handle.layer.sparse
            assert sparse is not None, "decided before"
            is_kernel = packing is not None and self.recipe.row_order(handle.state) is None
            has_both = sparse.output and sparse.grad_input and not self.recipe.prunes_channels
            if not SPARES_MEMORY or not is_kernel or not has_both or sparse.packs_in_passes:
                sparse.packs_late = False
                continue
            size = handle.parameter.numel()
            sparse.packs_late = excess + (KEPT + mask) * size > 0
            excess += (mask + (LATE if sparse.packs_late else KEPT)) * size

    def _examine(self, handle: LayerHandle, verdict: Verdict) -> SparseProducts:
        weight = handle.parameter
        dtype = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        is_transposed = handle.view(weight).stride(-1) != 1 and weight.ndim == 2
        sparse = SparseProducts(dtype, {}, is_transposed, weight.device, packs_in_passes=is_sharded(weight))
        self._decide(handle, sparse, dtype, verdict)
        return sparse

    def _decide(self, handle: LayerHandle, sparse: SparseProducts, dtype: torch.dtype, verdict: Verdict) -> None:
        """Fill in what can run on tensor cores in a type, and what of that pays."""
        view = handle.view(handle.parameter)
        sizes = view.shape[0], view.shape[-1]
        general = self._obstacle(handle)
        if general is not None:
            sparse.reasons = dict.fromkeys(self.recipe.sparse_products, general)
            return
        reasons = obstacles(self.recipe, *sizes, handle.parameter.device, dtype, handle.layer.dense)
        if sparse.packs_in_passes:
            reasons |= self._obstacles_of_shards(handle, reasons)
        verdicts = {p: verdict.unprofitable(handle.name, p, *sizes) for p, reason in reasons.items() if reason is None}
        sparse.reasons = {product: verdicts.get(product, reason) for product, reason in reasons.items()}
        # the forward product defines the model and keeps its mask; backward ones lose nothing by an operand in full
        sparse.unpruned = frozenset(p for p, why in verdicts.items() if why is not None and p != OUTPUT)

    def _obstacle(self, handle: LayerHandle) -> str | None:
        """Why no product of a layer can run on tensor cores, whatever its size."""
        weight, recipe = handle.parameter, self.recipe
        if weight.ndim < 2:
            return "its weight is flattened"
        if weight.dtype == torch.float64:
            return "float64 is not computed on tensor cores"
        if handle.module.is_stack:
            return "the experts' module multiplies them itself"
        if not handle.module.multiplies_matrices:
            return "only 1x1 convolutions of stride 1 are matrix products"
        packing = recipe.packing
        has_state = packing is None or packing.mask is not None or recipe.row_order(handle.state) is not None
        if weight.ndim > 2 and (has_state or recipe.prunes_channels):
            return f"{recipe.name} keeps a state per weight of a convolution that the kernels do not read"
        if not weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last):
            return "its weight is not contiguous in memory"
        return None

    def _obstacles_of_shards(self, handle: LayerHandle, reasons: Mapping[str, str | None]) -> dict[str, str | None]:
        """What is packed within a pass is packed by one kernel: other projections of the weight happen between updates."""
        recipe = self.recipe
        by_kernel = recipe.packing is not None and recipe.row_order(handle.state) is None
        why = f"its weight is sharded, and {recipe.name} is not packed by one kernel"
        of_weights = (OUTPUT,) if recipe.prunes_channels else (OUTPUT, GRAD_INPUT)
        return {p: why for p in of_weights if not by_kernel and p in reasons and reasons[p] is None}

    def _follow_calls(self, handle: LayerHandle, sparse: SparseProducts) -> None:
        """What was seen in forward passes: parts of weights, and other types."""
        if sparse.meets_parts:
            sparse.reasons = dict.fromkeys(self.recipe.sparse_products, PARALLEL)
            return
        self._follow_dtype(handle, sparse)

    def _follow_dtype(self, handle: LayerHandle, sparse: SparseProducts) -> None:
        """Pack in the type that the layer is called in, once that is seen to be another."""
        met = sparse.met_dtype
        sparse.met_dtype = None
        if met is None or met == sparse.judged_dtype or self.verdict is None:
            return
        was_possible = None in sparse.reasons.values()
        self._decide(handle, sparse, met, self.verdict)
        sparse.judged_dtype = met
        if None in sparse.reasons.values():
            sparse.dtype = met
            return
        if not was_possible or self._told_dtype:
            return
        self._told_dtype = True
        warnings.warn(
            f"{handle.name} computes in {met}, so its products run emulated: sparse tensor cores multiply bfloat16 and "
            "float16. Train under torch.autocast, or in 16 bit, for speed.",
            stacklevel=2,
        )

    def check_fresh(self, layers: Sequence[LayerHandle]) -> None:
        """Weights that changed after they were packed went unseen by a compiled forward pass."""
        for handle in layers:
            sparse = handle.layer.sparse
            if sparse is not None and sparse.is_active and not sparse.is_fresh(handle.parameter):
                warnings.warn(
                    f"{handle.name}: its weight was changed by hand after it was packed, so passes of a compiled model since "
                    "then may have used the old one. Call run.refresh() after such a change.",
                    stacklevel=2,
                )
                handle.layer.refresh(handle.parameter)

    def describe(self, handle: LayerHandle) -> dict[str, str]:
        sparse = handle.layer.sparse
        if sparse is None:
            why = "emulate=True" if self.verdict is None else "decided when an optimizer is attached"
            return dict.fromkeys(self.recipe.sparse_products, why)
        flags = {OUTPUT: sparse.output, GRAD_INPUT: sparse.grad_input, GRAD_WEIGHT: sparse.grad_weight}
        if sparse.meets_parts:
            return dict.fromkeys(sparse.reasons, PARALLEL)
        if sparse.misses_layout:
            return dict.fromkeys(sparse.reasons, "emulated: its input is not in channels_last memory format")
        dense_now = f"{self.recipe.name} is in a dense phase"
        return {product: reason or (SPARSE if flags[product] else dense_now) for product, reason in sparse.reasons.items()}

    def _tell(self, layers: Sequence[LayerHandle]) -> None:
        """One warning per run of a program and reason where nothing runs on tensor cores: the ranks would all say the same."""
        reasons = [reason for handle in layers if handle.layer.sparse for reason in handle.layer.sparse.reasons.values()]
        if reasons and all(reasons) and rank() == 0:
            tell_emulated(str(reasons[0]))
