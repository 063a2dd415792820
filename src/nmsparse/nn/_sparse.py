"""The products of a linear layer on sparse tensor cores.

A weight is pruned and packed between optimizer steps, into buffers with fixed addresses: compiled graphs and CUDA graphs
see constants, and micro-batches share them. A weight that FSDP2 gathers for each pass is packed in that pass. Gradients are
packed in the backward pass. A stored weight is (O, I), or (I, O)
in transformers' Conv1D; which copy is K-major and which M-major follows from that, and nothing is ever transposed.

Legend: T tokens, O out_features, I in_features; x (T, I), grad (T, O).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from nmsparse.kernels import (
    SPARSE_MATMUL,
    misfit,
    pack_gradient,
    pack_sparse,
    pack_weight,
    pack_weight_,
    packed_size,
    padded,
    sampled_grad_weight,
    select,
    sparse_matmul,
)
from nmsparse.nn._compiled import fast
from nmsparse.recipes import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, PRODUCTS, Packing, Recipe, State

HARDWARE_PATTERN = "2:4"


def obstacles(
    recipe: Recipe, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype, dense: dict[str, str]
) -> dict[str, str | None]:
    """For every sparse product of a recipe, why it cannot run on sparse tensor cores; None if it can."""
    general = None
    if str(recipe.pattern) != HARDWARE_PATTERN:
        general = f"sparse tensor cores multiply {HARDWARE_PATTERN}, not {recipe.pattern}"
    elif recipe.runs_in_fp8:
        general = "its FP8 products are emulated"
    else:
        found = select(SPARSE_MATMUL, dtype, device)
        general = None if found.name is not None else found.reason
    sizes = {OUTPUT: (out_features, in_features), GRAD_INPUT: (in_features, out_features), GRAD_WEIGHT: (out_features, 64)}
    if recipe.prunes_channels:
        sizes[GRAD_INPUT] = (64, out_features)  # G itself is packed, whatever the number of tokens
    reasons = {product: general or dense.get(product) or misfit(*sizes[product]) for product in recipe.sparse_products}
    for product in (GRAD_WEIGHT, GRAD_INPUT) if recipe.prunes_channels else (GRAD_WEIGHT,):
        if in_features % 8 and reasons.get(product, "") is None:  # where G is packed, inputs are a side of the dense operand
            reasons[product] = f"in_features = {in_features} is not a multiple of 8"
    return reasons


@dataclass(eq=False)
class SparseProducts:
    """Which products of a layer run on sparse tensor cores, and the packed copies of its weight."""

    dtype: torch.dtype
    reasons: dict[str, str | None]
    """Every sparse product of the recipe: None if it runs on sparse tensor cores, else why it does not."""
    is_transposed: bool
    device: torch.device
    unpruned: frozenset[str] = frozenset()
    """Backward products that stay dense because that is as fast: their operand is then not pruned either."""
    output: bool = False
    grad_input: bool = False
    grad_weight: bool = False
    """What runs so at present: a recipe may be in a dense phase. Plain attributes, for compilers to guard on."""
    copies: dict[str, Tensor] = field(default_factory=dict)
    """The packed weight for `output` and for `grad_input`."""
    packs_late: bool = False
    """The copy for `grad_input` is not kept: each backward pass makes it anew, which costs a read of the weight."""
    packs_in_passes: bool = False
    """No copy is kept: between passes the weight is sharded, and FSDP2 gathers it for each of them."""
    meets_parts: bool = False
    """A pass was given a part of the weight: tensor parallelism, which is emulated."""
    packed_from: tuple[int, int] | None = None
    """Address and version of the weight when it was packed."""
    packed_weight: ReferenceType[Tensor] | None = None
    """The weight itself: another may come to lie at its address."""
    has_engine: bool = False
    """The device has sparse tensor cores that we can use, in some type."""
    judged_dtype: torch.dtype | None = None
    """The type that the reasons are for."""
    met_dtype: torch.dtype | None = None
    """Another type in which the layer was called."""
    misses_layout: bool = False
    """A convolution was called with an input that is not in channels_last memory format."""

    def __post_init__(self) -> None:
        self.judged_dtype = self.dtype
        self.has_engine = any(select(SPARSE_MATMUL, dtype, self.device).name for dtype in (torch.bfloat16, torch.float16))

    def is_fresh(self, weight: Tensor) -> bool:
        """The copies in use are of this weight as it is. What changes it behind torch's back (``.data``, a fused optimizer)
        goes unseen here."""
        in_use = not self.packs_in_passes and (self.output or (self.grad_input and GRAD_INPUT in self.copies))
        is_the_same = self.packed_weight is not None and self.packed_weight() is weight
        return not in_use or (is_the_same and self.packed_from == (weight.data_ptr(), weight._version))

    def note_packed(self, weight: Tensor) -> None:
        self.packed_from, self.packed_weight = (weight.data_ptr(), weight._version), ref(weight)

    def set_active(self, products: tuple[str, ...]) -> None:
        self.output, self.grad_input, self.grad_weight = (p in products and self.reasons.get(p, "") is None for p in PRODUCTS)

    @property
    def is_active(self) -> bool:
        return self.output or self.grad_input or self.grad_weight

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether a call in this type can use what is packed."""
        return dtype == self.dtype and self.is_active and not self.meets_parts

    # ---- between steps ----

    @torch.no_grad()
    def pack(self, weight: Tensor, recipe: Recipe, state: State) -> None:
        """Prune and pack the stored weight for the products that are active."""
        if self.packs_in_passes:
            return
        stored = weight.detach().flatten(1)  # a 1x1 convolution is (O, I, 1, 1)
        wants_backward = self.grad_input and not recipe.prunes_channels and not self.packs_late
        if self.packs_late:
            self.copies.pop(GRAD_INPUT, None)
        forward = self._copy(OUTPUT, stored) if self.output else None
        backward = self._copy(GRAD_INPUT, stored) if wants_backward else None
        self.note_packed(weight)
        if forward is None and backward is None:
            return
        packing, order = recipe.packing, recipe.row_order(state)
        if packing is None or (order is not None and wants_backward):
            self._pack_projected(stored, recipe, state, forward, backward, order)
            return
        mask, scale = self._operands_of(packing, state)
        along = (backward, forward) if self.is_transposed else (forward, backward)
        pack_weight_(stored, *along, columns_first=not self.is_transposed, mask=mask, scale=scale)

    def _operands_of(self, packing: Packing, state: State) -> tuple[Tensor | None, Tensor | None]:
        """Mask, as the weight is stored, and scale."""
        mask = None if packing.mask is None else state[packing.mask].flatten(1)
        scale = None if packing.scale is None else state[packing.scale]
        return mask.t() if mask is not None and self.is_transposed else mask, scale

    def _copy(self, product: str, stored: Tensor) -> Tensor:
        present = self.copies.get(product)
        if present is None or present.dtype != self.dtype or present.device != stored.device:
            present = torch.empty(packed_size(*stored.shape), dtype=self.dtype, device=stored.device)
            torch._dynamo.mark_static_address(present)  # CUDA graphs of torch.compile need not copy it at every replay
            self.copies[product] = present
        return present

    def _pack_projected(
        self, stored: Tensor, recipe: Recipe, state: State, forward: Tensor | None, backward: Tensor | None, order: Tensor | None
    ) -> None:
        """For recipes that no kernel knows: project in plain torch, then pack what is 2:4 already."""
        view = stored.t() if self.is_transposed else stored
        if forward is not None:
            seen = fast(_project_forward, view)(recipe, view, state, self.dtype)
            self._pack_one(seen, forward, along_inputs=True)
        if backward is not None:
            seen = fast(_project_backward, view)(recipe, view, state, self.dtype, order)
            self._pack_one(seen, backward, along_inputs=False)

    def _pack_one(self, seen: Tensor, copy: Tensor, along_inputs: bool) -> None:
        stored = (seen.t() if self.is_transposed else seen).contiguous()
        columns_first = along_inputs is not self.is_transposed
        pack_weight_(stored, *((copy, None) if columns_first else (None, copy)), columns_first=columns_first)

    # ---- in forward and backward ----

    def _sizes(self, weight: Tensor) -> tuple[int, int]:
        """O and I of a stored weight."""
        rows, columns = weight.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    def multiply_forward(self, x: Tensor, bias: Tensor | None, weight: Tensor, recipe: Recipe, state: State) -> Tensor:
        """Y = X Wf^T + b."""
        out_features, in_features = self._sizes(weight)
        copy = self._pack_here(weight, recipe, state, along_inputs=True) if self.packs_in_passes else self.copies[OUTPUT]
        return sparse_matmul(copy, x, bias, out_features, in_features, self.is_transposed, True, True)

    def multiply_backward(
        self, grad: Tensor, weight: Tensor, recipe: Recipe, state: State, packed_from: tuple[int, int] | None
    ) -> Tensor:
        """dX = G Wb. ``packed_from`` is what was packed when the forward pass began: ``weight`` itself may come from elsewhere
        (``torch.autograd.graph.save_on_cpu``)."""
        out_features, in_features = self._sizes(weight)
        order = recipe.row_order(state)
        rows = grad if order is None else grad.index_select(1, order)
        copy = self._backward_copy(weight, recipe, state, packed_from)
        return sparse_matmul(copy, rows, None, in_features, out_features, not self.is_transposed, True, True)

    def _backward_copy(self, weight: Tensor, recipe: Recipe, state: State, packed_from: tuple[int, int] | None) -> Tensor:
        is_kept = not self.packs_late and not self.packs_in_passes
        if is_kept and packed_from in (None, self.packed_from):
            return self.copies[GRAD_INPUT]
        if recipe.packing is None or recipe.row_order(state) is not None:
            raise RuntimeError(
                "the backward pass of a sparse layer met another weight than the one packed last: between its forward and its "
                "backward pass the layer was called with other weights (functional_call, a teacher). Call those in eval mode, or "
                "sparsify with emulate=True."
            )
        return self._pack_here(weight, recipe, state, along_inputs=False)

    def _pack_here(self, weight: Tensor, recipe: Recipe, state: State, *, along_inputs: bool) -> Tensor:
        """A copy that lives as long as the product it is for."""
        assert recipe.packing is not None, "a recipe that no kernel knows packs between steps only"
        mask, scale = self._operands_of(recipe.packing, state)
        along_columns = along_inputs is not self.is_transposed
        packed: Tensor = pack_weight(weight, mask, scale, not self.is_transposed, along_columns, self.dtype)
        return packed

    def pack_gradient(
        self, recipe: Recipe, grad: Tensor, state: State, counter: Tensor | None, want_x: bool, want_w: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """G packed along tokens for `grad_weight`, packed along channels for `grad_input`, and what the latter product has
        still to be multiplied with, token by token; None for what is not wanted, or is packed where it is used."""
        want_tokens, want_channels = want_w and self.grad_weight, want_x and self.grad_input and recipe.prunes_channels
        by_kernel = want_tokens and recipe.samples_tokens, want_channels and recipe.prunes_channels_by_magnitude
        tokens = channels = factor = None
        if by_kernel[1]:
            stream, count = (state["stream"], counter) if by_kernel[0] else (None, None)
            tokens, channels, sums = pack_gradient(grad, stream, count, *by_kernel)
            if recipe.rescales_channels:
                before, after = sums.unbind(0)
                factor = torch.where(after == 0, 1, before / torch.where(after == 0, 1, after))
        if want_tokens and not recipe.samples_tokens:
            tokens = pack_sparse(recipe.grad_weight_grad(grad, state, counter), True)
        if want_channels and not by_kernel[1]:
            channels = pack_sparse(recipe.grad_input_grad(grad, state, counter), False)
        return tokens if want_tokens else None, channels, factor

    def multiply_weight(self, tokens: Tensor | None, grad: Tensor, x: Tensor, state: State, counter: Tensor | None) -> Tensor:
        """dW = Gw^T X, stored as the weight is; G is sampled here unless it comes packed."""
        if tokens is None:
            assert counter is not None, "random recipes get a counter"
            return sampled_grad_weight(grad, x, state["stream"], counter, self.is_transposed)
        return sparse_matmul(tokens, x, None, grad.shape[1], padded(grad.shape[0]), True, False, self.is_transposed)

    def multiply_channels(self, packed: Tensor, factor: Tensor | None, weight: Tensor, tokens: int) -> Tensor:
        """dX = Gd W with a packed Gd and the whole stored weight."""
        out_features, _ = self._sizes(weight)
        grad_x = sparse_matmul(packed, weight, None, padded(tokens), out_features, False, self.is_transposed, False)[:tokens]
        return grad_x if factor is None else (grad_x * factor[:, None]).to(grad_x.dtype)


def _project_forward(recipe: Recipe, view: Tensor, state: State, dtype: torch.dtype) -> Tensor:
    return recipe.output_weight(view.float(), state).to(dtype)


def _project_backward(recipe: Recipe, view: Tensor, state: State, dtype: torch.dtype, order: Tensor | None) -> Tensor:
    seen = recipe.grad_input_weight(view.float(), state).to(dtype)
    return seen if order is None else seen.index_select(0, order)
