"""The module classes that a conversion swaps in: the user's own modules, with another forward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from nmsparse.nn._conv1d import is_hf_conv1d
from nmsparse.nn._layer import Layer
from nmsparse.nn._products import ConvProducts, LinearProducts, forward_weight, wide
from nmsparse.nn._sharded import is_sharded, part_size, spread, whole
from nmsparse.nn._swapped import Swapped, Unannounced, behaves_as, dense_class, reduced_by
from nmsparse.recipes import GRAD_INPUT, OUTPUT


class SparseMixin(Swapped):
    """What the sparse classes share. The record of the layer is the plain attribute ``_nmsparse``."""

    _nmsparse: Layer
    weight: nn.Parameter
    training: bool
    is_transposed = False
    """The weight of a linear layer is stored as (I, O)."""
    is_stack = False
    """Not a module, but one of the 3-D parameters of a module of experts."""

    @property
    def holder(self) -> nn.Module:
        """The module that has the parameter."""
        return cast(nn.Module, self)

    def key_in(self, name: str) -> str:
        """Of the parameter in the state dict of a model where this is called ``name``."""
        return f"{name}.weight" if name else "weight"

    def view_weight(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as an (O, ..., I) view."""
        return tensor

    @property
    def multiplies_matrices(self) -> bool:
        """The layer is one matrix product per pass, so its products can run on sparse tensor cores."""
        return True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._nmsparse.forget_weight()
        super()._load_from_state_dict(*args, **kwargs)  # pyrefly: ignore
        self._nmsparse.to(self.weight.device)  # assign=True puts in another tensor
        follow_loaded(self)

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise refuse_data_parallel(self._nmsparse.name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._nmsparse.forget_weight()
        module = super()._apply(fn, recurse)  # pyrefly: ignore
        self._nmsparse.to(self.weight.device)
        return cast(nn.Module, module)

    def extra_repr(self) -> str:
        recipe = self._nmsparse.recipe
        return f"{super().extra_repr()}, {recipe.name} {recipe.pattern}"  # pyrefly: ignore


@torch.no_grad()
def follow_loaded(module: SparseMixin) -> None:
    """After other weights were loaded: at the start of a run take from them what the recipe takes, and pack them.

    A weight that is not here in one piece is for the run to look at, before its next forward pass, and so is an order to search.
    """
    layer, weight = module._nmsparse, module.weight
    if not layer.has_started and layer.recipe.starts_from_weights:
        is_whole = not weight.is_meta and not is_sharded(weight)
        layer.was_loaded = layer.has_clock and not (is_whole and layer.recipe.row_order(layer.state) is None)
        if is_whole:
            for name, value in layer.recipe.init_state(wide(module.view_weight(weight)), layer.groups).items():
                layer.state[name].copy_(value)
    layer.refresh(weight)


def refuse_data_parallel(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name or 'this layer'}: nn.DataParallel runs copies of a layer in threads, which would share its masks and packed "
        "weights across GPUs. Start one process per GPU with torchrun (DistributedDataParallel), or show the program one GPU "
        "(CUDA_VISIBLE_DEVICES=0)."
    )


def autocast_operands(x: Tensor, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Cast as autocast would cast a dense layer, but leave the weight alone: it is projected from its master first."""
    kind = x.device.type
    # there is no autocast on meta, and even asking is an error
    if x.is_meta or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64 or not x.is_floating_point():
        return x, bias, weight.dtype
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), None if bias is None else bias.to(dtype), dtype


class SparseLinear(SparseMixin, nn.Linear):  # pyrefly: ignore[inconsistent-inheritance]
    """``nn.Linear`` whose products follow a recipe."""

    def forward(self, input: Tensor) -> Tensor:
        return _nested_linear(self, input) if input.is_nested else _linear(self, input)


def begin_call(module: SparseMixin) -> None:
    """Let the run know that this layer is called, and raise where the call could not be what the recipe wants."""
    layer = module._nmsparse
    if torch.compiler.is_compiling():
        layer.note_trace()
    else:
        layer.was_called = True
    if layer.awaits_optimizer and module.training and torch.is_grad_enabled() and module.weight.requires_grad:
        raise RuntimeError(
            f"{layer.name or 'this layer'} was sparsified with {layer.recipe.name}, whose schedule or decay runs on the "
            "optimizer, but no attached optimizer updates it: call run.attach(optimizer, total_steps=...) before training."
        )
    if is_sharded(module.weight):
        _check_parallel(module)


def _check_parallel(module: SparseMixin) -> None:
    """Under tensor parallelism a layer multiplies with a part of its weight, which some recipes cannot do."""
    layer, recipe = module._nmsparse, module._nmsparse.recipe
    why = _parallel_obstacle(module)
    if why is not None:
        raise NotImplementedError(
            f"{layer.name or 'this layer'}: {recipe.name} {recipe.pattern} cannot run on its {tuple(module.weight.shape)} "
            f"weight, which tensor parallelism splits: {why}. Leave the layer out of parallelize_module or of sparsify_, shard "
            'with fully_shard (FSDP2) instead, or use a recipe such as sr-ste, step, mask-decay or SSTE("2:4", mvue=False).'
        )


def _parallel_obstacle(module: SparseMixin) -> str | None:
    layer, recipe = module._nmsparse, module._nmsparse.recipe
    whole_state = [name for name, value in layer.state.items() if value.ndim]
    if whole_state:
        return f"its state ({', '.join(whole_state)}) is of the whole weight"
    if any(name in layer.state for name in recipe.host_state):
        return "the operation that makes its mask wants the whole weight"
    if recipe.is_random and module.training:
        return "its random numbers are drawn for the whole gradient"
    rows, columns = (1, 0) if module.is_transposed else (0, 1)
    for product, dim, name in ((OUTPUT, columns, "in_features"), (GRAD_INPUT, rows, "out_features")):
        size = part_size(module.weight, dim)
        if product in recipe.sparse_products and not layer.leaves_dense(product) and size % recipe.pattern.m:
            return f"a rank holds {size} of its {module.weight.shape[dim]} {name}, not a multiple of {recipe.pattern.m}"
    return None


def _prepare_sparse(module: SparseMixin, dtype: torch.dtype) -> None:
    """Note a call in a type that is not packed, or with a part of the weight, for the run to see; pack again what was changed by
    hand."""
    layer = module._nmsparse
    if layer.sparse is None or not module.training:
        return
    if is_sharded(module.weight):
        if not layer.sparse.meets_parts:  # written once: compilers guard on it
            layer.sparse.meets_parts = True
        return
    if layer.sparse.has_engine and dtype != layer.sparse.judged_dtype and layer.sparse.met_dtype != dtype:
        layer.sparse.met_dtype = dtype
    if not torch.compiler.is_compiling():  # a compiled graph holds no check; the run's does, before the next update
        layer.refresh_if_stale(module.weight)


def _apply_products(
    products: Any, layer: Layer, training: bool, form: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Run an autograd function outside autocast: the products choose their own types."""
    if x.is_meta:
        return cast(Tensor, products.apply(layer, training, form, x, weight, bias, dtype))
    with torch.autocast(x.device.type, enabled=False):
        return cast(Tensor, products.apply(layer, training, form, x, weight, bias, dtype))


def prepare_call(module: Any, input: Tensor) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Before the products of a linear layer: its input and bias as autocast wants them, and the type to compute in."""
    begin_call(module)
    x, bias, dtype = autocast_operands(input, module.bias, module.weight)
    _prepare_sparse(module, dtype)
    return x, bias, dtype


def _linear(module: Any, input: Tensor) -> Tensor:
    x, bias, dtype = prepare_call(module, input)
    return _apply_products(LinearProducts, module._nmsparse, module.training, module.is_transposed, x, module.weight, bias, dtype)


def _nested_linear(module: SparseLinear, input: Tensor) -> Tensor:
    """Sequences of several lengths: what nn.TransformerEncoder makes of a padding mask in evaluation, and jagged tensors."""
    if input.layout is torch.jagged:
        jagged: Any = input
        if jagged._ragged_idx != 1:  # torch's own layer refuses it too
            name = module._nmsparse.name or "this layer"
            raise ValueError(f"{name}: its input is a transposed jagged tensor; make it contiguous first.")
        values = _linear(module, jagged.values())
        return cast(Tensor, torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), jagged.lengths()))
    if torch.is_grad_enabled() and (input.requires_grad or module.weight.requires_grad):
        raise NotImplementedError(
            f"{module._nmsparse.name or 'this layer'}: its input is a nested tensor of strided layout, through which a sparse "
            "layer has no gradients: use layout=torch.jagged, or call it under torch.no_grad()."
        )
    x, bias, dtype = autocast_operands(input, module.bias, module.weight)
    return F.linear(x, forward_weight(module._nmsparse, module.training, module.weight).to(dtype), bias)


def _pad_sizes(conv: nn.Conv2d) -> tuple[int, ...]:
    """Left, right, top, bottom, as torch pads. Zeros follow ``padding`` as it is now, which subclasses and whoever dilates a
    network set after construction; every other mode keeps what the constructor made of it."""
    if conv.padding_mode != "zeros":
        return tuple(conv._reversed_padding_repeated_twice)
    if conv.padding == "valid":
        return 0, 0, 0, 0
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(_pair(conv.dilation), conv.kernel_size, strict=True)]
        (top, bottom), (left, right) = [(total // 2, total - total // 2) for total in totals]
        return left, right, top, bottom
    rows, columns = _pair(conv.padding)
    return columns, columns, rows, rows


class SparseConv2d(SparseMixin, nn.Conv2d):
    """``nn.Conv2d`` whose products follow a recipe; groups of weights run along its input channels."""

    def view_weight(self, tensor: Tensor) -> Tensor:
        return tensor.permute(0, 2, 3, 1)

    @property
    def multiplies_matrices(self) -> bool:
        pointwise = self.kernel_size == (1, 1) and self.stride == (1, 1) and self.groups == 1
        return pointwise and _pad_sizes(self) == (0, 0, 0, 0)

    def forward(self, input: Tensor) -> Tensor:
        begin_call(self)
        x, bias, dtype = autocast_operands(input, self.bias, self.weight)
        sparse = self._nmsparse.sparse
        if self.training and sparse is not None and sparse.is_active:
            _prepare_sparse(self, dtype)
            is_channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
            if sparse.misses_layout is is_channels_last:  # written only where it changes: compilers guard on it
                sparse.misses_layout = not is_channels_last
            if is_channels_last and sparse.serves(dtype):
                pixels, weight = x.permute(0, 2, 3, 1), self.weight.flatten(1)
                y = _apply_products(LinearProducts, self._nmsparse, True, False, pixels, weight, bias, dtype)
                return y.permute(0, 3, 1, 2)
        is_single = x.ndim == 3
        x, padding = self._pad(x.unsqueeze(0) if is_single else x)
        geometry = (_pair(self.stride), padding, _pair(self.dilation), self.groups)
        y = _apply_products(ConvProducts, self._nmsparse, self.training, geometry, x, self.weight, bias, dtype)
        return y.squeeze(0) if is_single else y

    def _pad(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Padding as two symmetric numbers of zeros; anything else is applied to the input."""
        left, right, top, bottom = _pad_sizes(self)
        if self.padding_mode == "zeros" and left == right and top == bottom:
            return x, (top, left)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, (left, right, top, bottom), mode=mode), (0, 0)


class _TransposedMixin(SparseMixin):
    """Conv1D of GPT-2 is a linear layer that stores its weight as (I, O)."""

    is_transposed = True

    def view_weight(self, tensor: Tensor) -> Tensor:
        return tensor.t()

    def forward(self, x: Tensor) -> Tensor:
        return _linear(self, x)


@cache
def _sparse_conv1d(base: type[nn.Module]) -> type[nn.Module]:
    return type(
        "SparseConv1D",
        (_TransposedMixin, base),
        {"__module__": "nmsparse.nn", "__doc__": "transformers' ``Conv1D`` whose products follow a recipe."},
    )


@cache
def _sparse_subclass(kind: type[nn.Module], sparse: type[nn.Module]) -> type[nn.Module]:
    """For somebody's subclass that leaves the forward as torch has it."""
    contents = {"__module__": "nmsparse.nn", "__doc__": sparse.__doc__, "__reduce_ex__": reduced_by(sparse_class)}
    own_copy = {"__deepcopy__": _sparse_copy} if hasattr(kind, "__deepcopy__") else {}
    return type(f"Sparse{kind.__name__}", (Unannounced, sparse, kind), contents | own_copy)


def _sparse_copy(module: Any, memo: dict[int, Any]) -> Any:
    """``__deepcopy__`` where a class has its own: the copy that it makes, sparse as the layer is."""
    swapped = type(module)
    kind: Any = dense_class(swapped)
    twin = kind.__deepcopy__(module, memo)
    if type(twin) is kind:
        memo[id(module)] = twin  # the record may lead back here, through the model
        twin._nmsparse = deepcopy(module._nmsparse, memo)
        twin._nmsparse.to(twin.weight.device)
        twin.__class__ = swapped
    return twin


def sparse_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class to swap in for a class of dense layers, or None."""
    base = behaves_as(kind)
    if base is None:
        return _sparse_conv1d(kind) if is_hf_conv1d(kind) else None
    if kind.__name__ == "NonDynamicallyQuantizableLinear":  # nn.MultiheadAttention reads its weight without calling it
        return None
    sparse = SparseLinear if base is nn.Linear else SparseConv2d
    return sparse if kind is base else _sparse_subclass(kind, sparse)


def layer_of(module: nn.Module) -> Layer:
    """The record of a sparse module."""
    if not isinstance(module, SparseMixin):
        raise TypeError(f"{type(module).__name__} is not a sparse layer; convert the model with nmsparse.sparsify_ first.")
    return module._nmsparse


@torch.no_grad()
def final_weight(module: nn.Module) -> Tensor:
    """What ``freeze_`` would bake: the weight under the final, hard pattern, in its own shape and dtype, zeros as +0.0."""
    layer = layer_of(module)
    return _projected(cast(SparseMixin, module), lambda weight: layer.recipe.final_weight(wide(weight), layer.state) + 0.0)


def _projected(module: SparseMixin, project: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of the (O, ..., I) weight, stored and sharded as the weight is."""
    weight = whole(module.weight.detach())  # groups may straddle the borders between ranks
    out = torch.empty_like(weight)
    module.view_weight(out).copy_(project(module.view_weight(weight)))
    return spread(out, module.weight)


def grouped_dim(module: nn.Module) -> int | None:
    """The dim of a layer's weight along which its groups run; None for layers that cannot be sparse."""
    kind = dense_class(type(module))
    if behaves_as(kind) is not None:
        return 1
    return 0 if is_hf_conv1d(kind) else None


@torch.no_grad()
def effective_weight(module: nn.Module, parameter: str = "weight") -> Tensor:
    """What the forward product of a layer sees now, in the shape and dtype of its weight.

    In training mode this follows the schedule; in evaluation mode it is the final, hard pattern. A dense layer's
    effective weight is its weight. Of a sharded weight it is sharded likewise, and every rank must call this. A module of experts
    holds several weights: name one, ``effective_weight(experts, "down_proj")``.
    """
    stack = getattr(module, "_nmsparse_stacks", {}).get(parameter)
    weight = getattr(module, parameter, None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(module).__name__} has no {parameter} to look at.")
    packed = getattr(module, "_packed", None)
    if packed is not None:  # accelerate_ may have dropped the dense copy
        return cast(Tensor, packed.unpacked())
    sparse = module if stack is None else stack
    if not isinstance(sparse, SparseMixin):
        return weight.detach().clone()
    layer, training = sparse._nmsparse, sparse.training
    return _projected(sparse, lambda whole_weight: forward_weight(layer, training, whole_weight))
