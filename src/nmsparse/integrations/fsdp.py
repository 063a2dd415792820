"""FSDP2 with a compressed all-gather: each rank prunes and packs its shard of a weight before it travels.

    run = nmsparse.sparsify_(model, nmsparse.SRSTE("2:4"))
    compressed_all_gather(model, dtype=torch.bfloat16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    run.attach(optimizer)

FSDP2 asks the tensor that holds a shard what to send, and what to make of what arrives (``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``). Ours sends N values of every M and their places: at 2:4 in bf16 that is 9/16 of the bytes. What arrives
is unpacked into the weight that the layer then projects as always, which leaves it as it is. Gradients, the optimizer and saved
checkpoints know nothing of this: they have the dense shard.

Masks come from the master weights, before they are rounded to the type that travels; plain FSDP2 with mixed precision rounds
first, and a layer then breaks the ties that rounding made.

    shard (rows, I) --project--> N of M --pack--> values (rows, I*N/M), places (rows, bytes)  ~~all-gather~~>  (O, I) with zeros
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from nmsparse.functional import magnitude_mask, soft_threshold
from nmsparse.nn import RemovedWithSparsity, SparseMixin, SparseModule, is_sharded, sparse_modules
from nmsparse.pattern import Pattern
from nmsparse.recipes import OUTPUT, Recipe

BYTE = 8


def compressed_all_gather(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Send the weights of sparse layers pruned and packed when FSDP2 gathers them. Returns the layers that travel as they are,
    with the reason.

    Call it after ``sparsify_`` and before ``fully_shard``. ``dtype`` is the type in which the layers compute, that is, the
    ``param_dtype`` of the mixed precision policy (None: the type of the parameters). It is for recipes whose forward weight is a
    hard or soft N:M projection at every moment; others are refused, because what they need of a weight is more than N of M.
    ``reshard_after_forward`` must be True or False: FSDP2 cannot reshard such a parameter to a smaller number of ranks.
    """
    layers = dict(sparse_modules(model))
    if not layers:
        raise ValueError("no layer of this model is sparse: call nmsparse.sparsify_ before compressed_all_gather.")
    for recipe in {id(module._nmsparse.recipe): module._nmsparse.recipe for module in layers.values()}.values():
        _check_recipe(recipe)
    for name, module in layers.items():
        if is_sharded(module.weight):
            raise ValueError(f"{name}.weight is sharded already: call compressed_all_gather before fully_shard.")
        if isinstance(module.weight, PackedShard):
            raise ValueError(f"{name}.weight travels packed already: call compressed_all_gather once.")
    plain = {name: reason for name, module in layers.items() if (reason := _obstacle(module)) is not None}
    if len(plain) == len(layers):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(plain.items())[:4])
        raise ValueError(f"no sparse layer of this model can travel packed: {reasons}.")
    packed = {name: module for name, module in layers.items() if name not in plain}
    for name, module in packed.items():
        courier = Courier(name, module._nmsparse.recipe, module, tuple(module.weight.shape), dtype)
        module.weight = nn.Parameter(PackedShard.of(module.weight.detach(), courier), module.weight.requires_grad)
    model.register_forward_pre_hook(_TravelsWhole(list(packed.values())))
    return plain


def _check_recipe(recipe: Recipe) -> None:
    """The layer must make of what arrives what it would have made of the whole weight, at every update of the run."""
    kind = type(recipe)
    if OUTPUT not in recipe.sparse_products:
        reason = "its forward product sees all of the weight"
    elif kind.active_products is not Recipe.active_products:
        reason = "its forward product sees more than N of M in a part of the run"
    elif recipe.packing is None:
        reason = "its forward weight is not the N largest of M along rows"
    elif recipe.packing.mask is not None:
        reason = "its mask is not a function of the weight"
    elif kind.weight_grad is not Recipe.weight_grad:
        reason = "its gradient depends on weights that would not travel"
    else:
        return
    raise ValueError(
        f"{recipe.name} cannot travel packed: {reason}. Use plain fully_shard, or a recipe such as ste, sr-ste, s-ste, bi-mask "
        "or trio."
    )


def _obstacle(module: SparseModule) -> str | None:
    if module.is_stack:
        return "it is a stack of experts"
    if module.is_transposed:
        return "it stores its weight as (in_features, out_features), so a border between ranks can cut through groups"
    if not module.weight.is_contiguous():
        return "its weight is not contiguous in memory"
    return None


# ---- the N values of every M, and their places ----


@dataclass(frozen=True)
class Courier:
    """What travels for one weight, and what becomes of it."""

    name: str
    recipe: Recipe
    module: SparseModule
    """Whose weight it is."""
    shape: tuple[int, ...]
    """Of the whole weight, as stored."""
    dtype: torch.dtype | None

    @property
    def pattern(self) -> Pattern:
        return self.recipe.pattern

    @property
    def is_needed(self) -> bool:
        """The layer is sparse; after ``densify_`` or ``freeze_`` its weight travels whole."""
        return isinstance(self.module, SparseMixin)

    def pack(self, rows: Tensor, padded_rows: int) -> tuple[Tensor, Tensor]:
        """Values and places of a rank's rows and of zeros below them, as many as the longest shard has.

        Both are (lines, ...), where a line is a row or, of a convolution, one tap of it.
        """
        padded = torch.cat([rows, rows.new_zeros(padded_rows - len(rows), *rows.shape[1:])])
        lines = self.module.view_weight(padded).flatten(0, -2)
        wide = lines.float() if lines.dtype in (torch.bfloat16, torch.float16) else lines
        packing = self.recipe.packing
        assert packing is not None, "checked when the model was prepared"
        sent = wide if packing.scale is None else soft_threshold(wide, self.pattern)
        kept = magnitude_mask(wide, self.pattern).unflatten(-1, (-1, self.pattern.m))
        # kept entries first, in their order; no step here depends on how many there are, so the device need not be waited for
        places = kept.byte().sort(dim=-1, descending=True, stable=True).indices[..., : self.pattern.n]
        values = sent.unflatten(-1, (-1, self.pattern.m)).gather(-1, places)
        return values.flatten(-2).to(self.dtype or rows.dtype), _to_bytes(places.flatten(-2), _bits(self.pattern))

    def unpack(self, values: Tensor, places: Tensor, out: Tensor) -> None:
        """Write the whole weight into ``out``."""
        view = self.module.view_weight(out)
        lines = view.shape[:-1].numel()
        groups = view.shape[-1] // self.pattern.m
        values, places = values[:lines], _from_bytes(places[:lines], _bits(self.pattern), groups * self.pattern.n)
        dense = values.new_zeros(lines, groups, self.pattern.m)
        dense.scatter_(-1, places.view(lines, groups, -1), values.view(lines, groups, -1))
        view.copy_(dense.view(view.shape))


def _bits(pattern: Pattern) -> int:
    """Of a place in a group; a divisor or a multiple of a byte, so that no place lies across two bytes."""
    needed = max(1, (pattern.m - 1).bit_length())
    return next(bits for bits in (1, 2, 4, 8, 16) if bits >= needed)


def _to_bytes(places: Tensor, bits: int) -> Tensor:
    """Small integers, several to the byte, the first in the lowest bits; each line on its own."""
    if bits > BYTE:
        return torch.stack([places & 0xFF, places >> BYTE], -1).flatten(-2).to(torch.uint8)
    per_byte = BYTE // bits
    filled = torch.nn.functional.pad(places, (0, -places.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte))
    shifts = torch.arange(0, BYTE, bits, device=places.device)
    return (filled << shifts).sum(-1).to(torch.uint8)


def _from_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo :func:`_to_bytes`: ``count`` integers of every line."""
    wide = packed.long()
    if bits > BYTE:
        low, high = wide.unflatten(-1, (-1, 2)).unbind(-1)
        return low | (high << BYTE)
    shifts = torch.arange(0, BYTE, bits, device=packed.device)
    return ((wide[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)[:, :count]


# ---- the tensor that FSDP2 asks ----


class PackedShard(Tensor):
    """A weight, or a rank's rows of it, in ordinary memory; only FSDP2's all-gather treats it differently.

    What FSDP2 and ``Module.to`` make of a shard stays one; every other operation returns plain tensors.
    """

    courier: Courier
    padded_rows: int
    """Rows of the longest shard: all ranks must send the same number of bytes."""

    # DTensor calls operations on its shard below the level of this protocol
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]

    @staticmethod
    def of(tensor: Tensor, courier: Courier, padded_rows: int | None = None) -> PackedShard:
        shard = cast(PackedShard, Tensor._make_subclass(PackedShard, tensor))
        shard.courier = courier
        shard.padded_rows = tensor.shape[0] if padded_rows is None else padded_rows
        return shard

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with no_dispatch():
            result = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if func not in KEEPS_SHARD or not isinstance(first, PackedShard) or type(result) is not Tensor:
            return result
        # FSDP2 allocates the longest shard and narrows it to its own rows
        padded = result.shape[0] if func is torch.ops.aten.new_zeros.default else first.padded_rows
        return PackedShard.of(result, first.courier, padded)

    @property
    def plain(self) -> Tensor:
        """The same memory as an ordinary tensor."""
        return torch.ops.aten.alias(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedShard:
        courier = replace(self.courier, module=memo.get(id(self.courier.module), self.courier.module))
        copied = PackedShard.of(self.plain.clone(), courier, self.padded_rows)
        return cast(PackedShard, nn.Parameter(copied, self.requires_grad)) if isinstance(self, nn.Parameter) else copied

    def __reduce_ex__(self, proto: Any) -> Any:
        """On disk it is an ordinary tensor."""
        return self.plain.__reduce_ex__(proto)

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        self._check_needed()
        # FSDP2 counts the arguments, and lets a shard with fewer rows than others send something of another size only by the
        # shorter signature
        return self._send_short if self.shape[0] != self.padded_rows else self._send

    def _send(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        return self._send_short(mesh)

    def _send_short(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        with torch.no_grad():
            return self.courier.pack(self.plain, self.padded_rows), None

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        self._check_needed()
        return self._receive

    def _check_needed(self) -> None:
        """FSDP2 takes a shard without these two attributes for an ordinary tensor."""
        if not self.courier.is_needed:
            raise AttributeError(f"{self.courier.name} is not sparse any more, so its weight travels whole.")
        if self.padded_rows == self.courier.shape[0]:  # FSDP2's short cut for one rank copies the first of several tensors only
            raise AttributeError(f"{self.courier.name}.weight is whole on every rank, so nothing travels.")

    def _receive(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight: a new tensor at first, written in place afterwards."""
        values, places = outputs
        if values.dtype != param_dtype:
            raise TypeError(
                f"{self.courier.name}.weight travels as {values.dtype}, but FSDP computes in {param_dtype}: pass "
                f"compressed_all_gather(model, dtype={param_dtype})."
            )
        with torch.no_grad():
            if out is None:
                made = values.new_empty(self.courier.shape)
                self.courier.unpack(values, places, made)
                return made, (made,)
            # autograd saved this very tensor in the forward pass, and would take the same values for a change
            with torch.autograd._unsafe_preserve_version_counter(out):
                self.courier.unpack(values, places, out)
        return None


KEEPS_SHARD = frozenset(
    (
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.detach.default,
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten._pin_memory.default,
    )
)
"""``slice`` is what ``narrow`` calls."""


# ---- the first forward pass, and the way back ----


class _TravelsWhole(RemovedWithSparsity):
    """Goes with ``densify_`` and ``freeze_``: FSDP2 keeps the buffers of the first all-gather, too small for whole weights."""

    def __init__(self, layers: list[SparseModule]) -> None:
        self.layers = layers
        self.looked = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.looked and not torch.compiler.is_compiling():
            self.looked = True
            self._tell_replaced(module)

    def _tell_replaced(self, model: nn.Module) -> None:
        """Whoever fills a sharded model by new parameters takes the tensors away that pack."""
        ours = {id(layer): layer._nmsparse.name for layer in self.layers if isinstance(layer, SparseMixin)}
        params = [param for param in _fsdp_params(model) if param._module_info.param_name == "weight"]
        lost = [name for p in params if (name := ours.get(id(p._module_info.module))) and not _is_packed(p)]
        if lost:
            warnings.warn(
                f"{len(lost)} of {len(ours)} weights travel whole, {lost[0]}.weight among them: after compressed_all_gather "
                "their parameters were replaced, as accelerate does with fsdp_cpu_ram_efficient_loading=True and "
                "load_state_dict with assign=True. Training is right, only the bytes are not saved; turn that option off.",
                stacklevel=2,
            )

    def check_removable(self, model: nn.Module) -> None:
        known = {id(param._module_info.module) for param in _fsdp_params(model)}
        lost = [layer for layer in self.layers if not isinstance(layer.weight, PackedShard) and id(layer) not in known]
        if lost:
            raise ValueError(
                f"{lost[0]._nmsparse.name}.weight travels packed and was sharded with a module outside of this "
                f"{type(model).__name__}: give densify_ or freeze_ the outermost module that fully_shard was called on."
            )

    def removed(self, model: nn.Module) -> None:
        for param in _fsdp_params(model):
            if _is_packed(param):
                param.all_gather_outputs.clear()
                param._unsharded_inner_tensors = ()
                param.__dict__.pop("_unsharded_param", None)


def _is_packed(param: Any) -> bool:
    return isinstance(param._sharded_local_tensor, PackedShard)


def _fsdp_params(model: nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it shards; torch has no public name for them."""
    states = [cast("Any", module)._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return [param for state in states for group in _param_groups(state) for param in group.fsdp_params]


def _param_groups(state: Any) -> list[Any]:
    """Up to torch 2.11 a state has one group or none, and later a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
