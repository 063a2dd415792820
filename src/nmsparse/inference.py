"""Inference: pack the linear layers of a frozen 2:4 model for this GPU, where that is faster than leaving them dense.

A weight is packed once and for all, so only the products are compared. Legend: T tokens of a call, O out_features, I in_features.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from nmsparse.functional import violations
from nmsparse.kernels import SPARSE_MATMUL, Product, hardware, misfit, packed_size, padded, select, serving_times, time_products
from nmsparse.nn import (
    PackedMixin,
    densify_,
    grouped_dim,
    keep_forwards_,
    layer_sizes,
    pack_,
    packed_class,
    reshard,
    sparse_modules,
)
from nmsparse.plan import MARGIN, NOT_FASTER, LayerPlan, Plan, ProductTime
from nmsparse.recipes import OUTPUT

logger = logging.getLogger("nmsparse")
PATTERN = "2:4"
SPARSE = "sparse"
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class LayerVerdict(Protocol):
    """Says of which layers the product pays: a plan, or something of the user's."""

    def unprofitable(self, name: str, product: str, out_features: int, in_features: int) -> str | None:
        """Why a layer should stay dense; None if it should be sparse."""


@dataclass(eq=False)
class Accelerated:
    """What :func:`accelerate_` did, and the way back."""

    model: nn.Module
    layers: dict[str, str]
    """Every linear layer: "sparse", or why it stayed dense."""
    plan: Plan | None
    """The times behind the choice, where they were measured here; pass it to ``accelerate_`` next time, or save it."""
    dense_bytes: int = 0
    packed_bytes: int = 0
    """Of the layers that were packed, before and after."""
    keep_dense: bool = True

    @property
    def packed(self) -> list[str]:
        """Names of the layers that run on sparse tensor cores."""
        return [name for name, how in self.layers.items() if how == SPARSE]

    def undo(self) -> nn.Module:
        """Plain layers with dense weights again; what ``nmsparse.densify_`` does too. Returns the model."""
        return densify_(self.model)

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for name, how in self.layers.items():
            if how != SPARSE:
                reasons.setdefault(how, []).append(name)
        lines = [f"{len(self.packed)} of {len(self.layers)} linear layers run on sparse tensor cores"]
        lines += [f"dense: {_some(names)}: {why}" for why, names in reasons.items()]
        if self.plan is not None and self.packed:
            lines.append(f"these products: {self.plan.dense_ms:.3f} ms dense, {self.plan.planned_ms:.3f} ms planned")
        return "\n".join(lines)


def accelerate_(
    model: nn.Module,
    *,
    tokens: int = 512,
    plan: LayerVerdict | None = None,
    dtype: torch.dtype | None = None,
    keep_dense: bool = True,
) -> Accelerated:
    """Pack the linear layers of a frozen 2:4 model for this GPU, in place; returns the handle that says what and why.

    Call it on the model as it will run: on its GPU, after ``freeze_`` or after loading a checkpoint. Each layer whose weight
    obeys 2:4 is timed, dense and sparse with the fastest algorithm found, at ``tokens`` rows per call (batch times length of a
    prefill, or the batch of a decoding step); a layer is packed only where that is faster, and every other one says why it is
    dense. A ``plan`` (``.plan`` of an earlier handle) takes the place of measuring. On a machine without support nothing is
    changed, and one warning says so.

    ``dtype`` is the type of the products: that of the weights, or bfloat16 for float32 weights, which then run packed under
    ``torch.autocast`` only. ``keep_dense=False`` drops the dense weights: 9/16 of the bytes remain, from which state dicts and
    ``densify_`` restore them exactly; it needs 16-bit weights. With the dense weight kept, a call with gradients or in another
    type runs dense, with a warning; without it that is an error.

    Undo with ``handle.undo()`` or ``nmsparse.densify_(model)``. Loading other weights, or moving the model to another device or
    type, turns layers back into plain ones.
    """
    _check(model, tokens, dtype)
    reshard(model)  # after a forward pass FSDP2 leaves whole weights in some modules, and they would go with the next
    found = {name: module for name, module in _linear_layers(model).items() if not isinstance(module, PackedMixin)}
    ties = _tied(model)
    layers = {name: _obstacle(name, module, dtype, keep_dense, ties) for name, module in found.items()}
    open_ = {name: found[name] for name, why in layers.items() if why is None}
    measured = _measure(open_, tokens, dtype) if plan is None and open_ else None
    verdict = measured if plan is None else plan
    handle = Accelerated(model, {}, measured, keep_dense=keep_dense)
    for name, why in layers.items():
        if why is None and verdict is not None:
            out_features, in_features, *_ = _sizes(found[name])
            why = verdict.unprofitable(name, OUTPUT, out_features, in_features)
        handle.layers[name] = why or _pack(found[name], name, dtype, handle)
    keep_forwards_(model)
    _tell(handle)
    return handle


def _check(model: nn.Module, tokens: int, dtype: torch.dtype | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate_ takes an nn.Module, got {type(model).__name__}.")
    if tokens < 1:
        raise ValueError(f"tokens counts the rows of a call from 1, got {tokens!r}.")
    if dtype is not None and dtype not in SIXTEEN_BIT:
        raise ValueError(f"sparse products are computed in bfloat16 or float16, not in {dtype}.")
    training = next((name for name, _ in sparse_modules(model)), None)
    if training is not None:
        raise ValueError(
            f"{training or 'this layer'} is still a training layer whose mask moves: call nmsparse.freeze_(model) first, which "
            "bakes the zeros into plain layers."
        )


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers of all kinds, the head included: their weights say whether they are sparse."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) or _is_packable(module)}


def _is_packable(module: nn.Module) -> bool:
    return packed_class(type(module)) is not None


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """Names of the parameters that several modules hold."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def _sizes(module: nn.Module) -> tuple[int, int, bool, torch.device, torch.dtype]:
    sizes = layer_sizes(module)
    assert sizes is not None, "packable layers are matrix products"
    return sizes


def _kind(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The type of the products."""
    return dtype or (stored if stored in SIXTEEN_BIT else torch.bfloat16)


def _obstacle(
    name: str, module: nn.Module, dtype: torch.dtype | None, keep_dense: bool, ties: Mapping[int, list[str]]
) -> str | None:
    """Why a layer cannot be packed; None if it can."""
    if not _is_packable(module):
        return f"{type(module).__name__} may read its weight in ways of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the layer itself, as accelerate's hooks do"
    if nn.utils.parametrize.is_parametrized(module):
        return "a parametrization computes its weight or its bias"
    weight: Any = module._parameters.get("weight")
    if nn.parameter.is_lazy(weight):
        return "its weight has no size yet: run one forward pass first"
    if weight is None or type(weight.data).__name__ == "DTensor" or weight.is_meta:
        return "its weight is computed, sharded or on the meta device"
    out_features, in_features, _, device, stored = _sizes(module)
    kind = _kind(stored, dtype)
    served = select(SPARSE_MATMUL, kind, device)
    if served.name is None:
        return served.reason
    wrong_size = misfit(out_features, in_features)
    if wrong_size is not None:
        return wrong_size
    if not keep_dense and stored != kind:
        return f"keep_dense=False would lose bits of its {str(stored).removeprefix('torch.')} weight: convert the model first"
    if not keep_dense and id(weight) in ties:
        return f"keep_dense=False cannot drop a weight that {' and '.join(ties[id(weight)])} share"
    dim = grouped_dim(module)
    assert dim is not None, "a packable layer"
    broken = int(violations(weight.detach(), PATTERN, dim))
    return f"{broken} of {weight.numel() // 4} groups of its weight break {PATTERN}" if broken else None


def _measure(layers: Mapping[str, nn.Module], tokens: int, dtype: torch.dtype | None) -> Plan:
    """Algorithms for all products, searched in one go; times of calls with them, and the choice for each layer."""
    products: dict[str, tuple[Product, torch.device]] = {}
    for name, module in layers.items():
        out_features, in_features, is_transposed, device, stored = _sizes(module)
        product = Product(out_features, padded(tokens, 8), in_features, is_transposed, True, True, _kind(stored, dtype))
        products[name] = product, device
    plans: dict[str, LayerPlan] = {}
    devices = {device for _, device in products.values()}
    for device in devices:
        own = {name: product for name, (product, where) in products.items() if where == device}
        choices = time_products(dict.fromkeys(own.values()), device)
        timed: dict[tuple[Product, bool], LayerPlan] = {}
        for name, product in own.items():
            kind = product, layers[name].bias is not None
            if kind not in timed:
                times = serving_times(product, tokens, kind[1], device) if choices.get(product) is not None else None
                timed[kind] = _judged(product, times)
            plans[name] = timed[kind]
    facts = {"name": "inference", "pattern": PATTERN}
    return Plan(facts, tokens, 1, hardware(next(iter(devices))), {name: plans[name] for name in layers})


def _judged(product: Product, times: tuple[float, float] | None) -> LayerPlan:
    if times is None:
        unknown = ProductTime(None, None, 0.0, "no algorithm of the library computes it")
        return LayerPlan(product.m, product.k, {OUTPUT: unknown}, 0.0, 0.0)
    dense_ms, sparse_ms = times
    pays = sparse_ms < (1 - MARGIN) * dense_ms
    measured = ProductTime(dense_ms, sparse_ms, 0.0, None if pays else NOT_FASTER)
    return LayerPlan(product.m, product.k, {OUTPUT: measured}, dense_ms, sparse_ms if pays else dense_ms)


def _pack(module: nn.Module, name: str, dtype: torch.dtype | None, handle: Accelerated) -> str:
    """Pack one layer; returns what became of it."""
    out_features, in_features, _, _, stored = _sizes(module)
    kind = _kind(stored, dtype)
    why = pack_(module, name or type(module).__name__, kind, handle.keep_dense)
    if why is not None:
        return why
    handle.dense_bytes += out_features * in_features * stored.itemsize
    handle.packed_bytes += packed_size(out_features, in_features) * kind.itemsize
    handle.packed_bytes += out_features * in_features * stored.itemsize if handle.keep_dense else 0
    return SPARSE


def _tell(handle: Accelerated) -> None:
    """One warning where nothing came of it, a line in the log otherwise."""
    if handle.packed or not handle.layers:
        logger.info("nmsparse: %s.", str(handle).replace("\n", "; "))
        return
    reasons = list(handle.layers.values())
    common = max(dict.fromkeys(reasons), key=reasons.count)
    warnings.warn(f"accelerate_ left the model as it is, at the speed of dense layers: {common}.", stacklevel=3)


def _some(names: list[str], most: int = 3) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
