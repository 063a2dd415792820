"""Linear layers of a frozen 2:4 model, for inference: the weight packed once, the product on sparse tensor cores.

The class is swapped, as everywhere: same names, same keys. Without its dense copy a layer keeps an empty parameter in the place
of the weight; its packed copy holds every bit of it, so state dicts and the way back are exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmsparse.kernels import pack_weight_, packed_size, sparse_matmul, unpack_sparse
from nmsparse.nn._conv1d import is_hf_conv1d
from nmsparse.nn._modules import autocast_operands, grouped_dim, sparse_class
from nmsparse.nn._swapped import Swapped, Unannounced, behaves_as, dense_class, reduced_by


@dataclass(eq=False)
class PackedWeight:
    """What a packed layer keeps beside its parameters."""

    name: str
    values: Tensor
    """The packed operand, as the kernels know it."""
    out_features: int
    in_features: int
    is_transposed: bool
    """The weight is stored (I, O)."""
    has_dense: bool
    requires_grad: bool
    """Of the dense weight."""
    packed_from: tuple[int, int]
    """Address and version of the weight when it was packed."""

    def unpacked(self) -> Tensor:
        """The weight as it was stored."""
        return unpack_sparse(self.values, self.out_features, self.in_features, self.is_transposed)


class PackedMixin(Swapped):
    """What the packed classes share. The packed weight is the plain attribute ``_packed``: no buffer, no key."""

    _packed: PackedWeight
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        packed = self._packed
        x, bias, dtype = autocast_operands(input, self.bias, self.weight)
        why = self._needs_dense(x, dtype)
        if why is not None:
            return self._dense(input, why)
        rows, sizes = x.reshape(-1, x.shape[-1]), (packed.out_features, packed.in_features)
        y = sparse_matmul(packed.values, rows, bias, *sizes, packed.is_transposed, True, True)
        return cast(Tensor, y.view(*x.shape[:-1], packed.out_features))

    def _needs_dense(self, x: Tensor, dtype: torch.dtype) -> str | None:
        """Why a call cannot use the packed weight; None if it can."""
        packed = self._packed
        if x.is_nested:
            return "its input is a nested tensor; build nn.TransformerEncoder with enable_nested_tensor=False"
        wants_gradients = any(t is not None and t.requires_grad for t in (x, self.weight, self.bias))
        if torch.is_grad_enabled() and wants_gradients:  # the op has no backward pass
            return "it was called with gradients enabled; call the model under torch.inference_mode()"
        if dtype != packed.values.dtype or x.dtype != dtype:
            return f"it was called in {x.dtype}, and its weight is packed in {packed.values.dtype}"
        if packed.has_dense and not torch.compiler.is_compiling() and packed.packed_from != identity(self.weight):
            return "its weight was changed after it was packed; call nmsparse.accelerate_ again"
        return None

    def _dense(self, input: Tensor, why: str) -> Tensor:
        if not self._packed.has_dense:
            raise RuntimeError(f"{self._packed.name}: its dense weight was not kept (keep_dense=False), but {why}.")
        if not torch.compiler.is_compiling():
            warnings.warn(f"{self._packed.name} runs dense: {why}.", stacklevel=2)
        return cast(Tensor, super().forward(input))  # pyrefly: ignore

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # pyrefly: ignore
        if not self._packed.has_dense:
            destination[f"{prefix}weight"] = self._packed.unpacked()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        unpack_(cast(nn.Module, self))  # new weights need not be 2:4, so this is a plain layer again
        cast(Any, self)._load_from_state_dict(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyrefly: ignore
        self._packed.packed_from = identity(self.weight)  # a copy has another address

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            unpack_(cast(nn.Module, self))  # the packed copy is for one GPU and one type
            return cast(nn.Module, cast(nn.Module, self)._apply(fn, recurse))
        return cast(nn.Module, super()._apply(fn, recurse))  # pyrefly: ignore


class PackedLinear(PackedMixin, nn.Linear):  # pyrefly: ignore[inconsistent-inheritance]
    """``nn.Linear`` of a frozen 2:4 model."""


@cache
def packed_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class to swap in for a class of linear layers, or None."""
    if kind is nn.Linear:
        return PackedLinear
    if is_hf_conv1d(kind):
        bases: tuple[type, ...] = (PackedMixin, kind)
    elif behaves_as(kind) is nn.Linear and sparse_class(kind) is not None:
        bases = (Unannounced, PackedLinear, kind)
    else:
        return None
    contents = {"__doc__": f"``{kind.__name__}`` of a frozen 2:4 model.", "__reduce_ex__": reduced_by(packed_class)}
    own_copy = {"__deepcopy__": _packed_copy} if hasattr(kind, "__deepcopy__") else {}
    return type(f"Packed{kind.__name__}", bases, contents | own_copy)


def _packed_copy(module: Any, memo: dict[int, Any]) -> Any:
    """``__deepcopy__`` where a class has its own: that copies the plain layer which it knows, and the copy is packed again."""
    swapped, packed, weight = type(module), module._packed, module.weight
    try:
        unpack_(module)
        kind, twin = type(module), module.__deepcopy__(memo)
    finally:
        module.__class__, module._packed, module.weight = swapped, packed, weight
    if twin is not module and type(twin) is kind:
        twin._packed = deepcopy(packed, memo)
        if not packed.has_dense:
            twin.weight = deepcopy(weight, memo)
        twin._packed.packed_from = identity(twin.weight)
        twin.__class__ = swapped
    return twin


def identity(weight: Tensor) -> tuple[int, int]:
    """Changes when a tensor is replaced or written to (inference tensors do not count their versions)."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


@torch.no_grad()
def pack_(module: nn.Module, name: str, dtype: torch.dtype, keep_dense: bool) -> str | None:
    """Pack a layer whose weight is 2:4; returns why it was left alone, None if it is packed now.

    The caller has checked that the sizes fit and that the hardware serves the type.
    """
    weight = cast(nn.Parameter, module.weight)
    is_transposed = grouped_dim(module) == 0
    out_features, in_features = weight.shape[::-1] if is_transposed else weight.shape
    values = torch.empty(packed_size(out_features, in_features), dtype=dtype, device=weight.device)
    # not pack_sparse, which pads rows: here they are the k of an M-major operand
    copies = (None, values) if is_transposed else (values, None)
    pack_weight_(weight.detach().to(dtype), *copies, columns_first=not is_transposed)
    packed = PackedWeight(
        name, values, out_features, in_features, is_transposed, keep_dense, weight.requires_grad, identity(weight)
    )
    if not keep_dense and not torch.equal(packed.unpacked(), weight):
        return "this library's layout cannot be read back, so its dense weight must be kept"
    kind = packed_class(type(module))
    assert kind is not None, "checked by the caller"
    module._packed = packed  # pyrefly: ignore
    module.__class__ = kind
    if not keep_dense:
        module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return None


@torch.no_grad()
def unpack_(module: nn.Module) -> None:
    """The plain layer again, with its weight."""
    packed = cast(PackedMixin, module)._packed
    module.__class__ = dense_class(type(module))
    del module._packed
    if not packed.has_dense:
        module.weight = nn.Parameter(packed.unpacked(), requires_grad=packed.requires_grad)


def unpack_all_(model: nn.Module) -> list[str]:
    """Undo every packing in a model; returns the names of the layers."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedMixin)]
    for _, module in found:
        unpack_(cast(nn.Module, module))
    return [name for name, _ in found]
