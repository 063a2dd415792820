"""Which tensors of a traced model hold their channels in one order.

The channels of every tensor get an :class:`Axis`, which stands for one order. The layers that write a tensor and those
that read it share its axis; a sum of two tensors unites their axes. Whatever is not known to treat all channels alike
freezes the axes that it meets.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import lcm
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nmsparse.nn._conv1d import is_hf_conv1d

# ---- the trace ----


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a forward that counts its calls in a buffer must not count the trace

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_hf_conv1d(type(m)) or super().is_leaf_module(m, module_qualified_name)


def graphs_of(model: nn.Module) -> list[fx.Graph]:
    """The paths through the model: in training and in evaluation, with and without its optional inputs."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise ValueError(f"{name or 'the model'} has a forward hook or a replaced forward, which may look at any channel")
    inputs = inspect.signature(model.forward).parameters.values()
    defaults = {item.name: item.default for item in inputs if item.default is not item.empty}
    # the copy has the same tensors, so it costs nothing, and modules of its own: what forward writes to them is dropped
    copy = deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    variants = product((True, False), (None, defaults) if defaults else (None,))
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        return [_Tracer().trace(copy.train(is_training), concrete) for is_training, concrete in variants]


# ---- which channels share one order ----

LAST, IMAGE, PIXEL = "last dim", "third dim from the end", "third dim from the end, before 1 x 1"
_FACTS = ("shape", "dtype", "device", "ndim", "size", "dim")
"""What can be asked of a tensor without looking at its values."""
_NORMS = {
    nn.LayerNorm: (LAST,),
    nn.RMSNorm: (LAST,),
    nn.BatchNorm1d: (LAST,),
    nn.BatchNorm2d: (IMAGE, PIXEL),
    nn.InstanceNorm2d: (IMAGE, PIXEL),
}


def _named(owners: Sequence[Any], names: str) -> frozenset[Any]:
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


_ALIKE_NAMES = (
    "add sub mul div truediv neg abs pow square sqrt rsqrt exp maximum minimum clamp sin cos erf add_ sub_ mul_ div_ clamp_ "
    "relu relu_ relu6 leaky_relu gelu silu mish elu selu celu sigmoid tanh softplus softsign logsigmoid sigmoid_ tanh_ "
    "hardswish hardsigmoid hardtanh dropout dropout2d contiguous clone detach to float half bfloat16 double type_as"
)
_ALIKE = _named([operator, torch, F], _ALIKE_NAMES) | set(_ALIKE_NAMES.split())
"""Functions, and names of methods, that do the same to every element; so do these modules."""
_ALIKE_MODULES = _named(
    [nn],
    "Identity Dropout Dropout1d Dropout2d AlphaDropout ReLU ReLU6 LeakyReLU GELU SiLU Mish ELU SELU CELU Sigmoid Tanh "
    "Softplus Softsign LogSigmoid Hardswish Hardsigmoid Hardtanh Tanhshrink Softshrink Hardshrink Threshold",
)
_SPATIAL = _named([F, torch], "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate")
_SPATIAL_MODULES = _named(
    [nn],
    "MaxPool2d AvgPool2d AdaptiveAvgPool2d AdaptiveMaxPool2d LPPool2d Upsample UpsamplingNearest2d UpsamplingBilinear2d "
    "ZeroPad2d ConstantPad2d ReflectionPad2d ReplicationPad2d",
)


@dataclass(eq=False)
class Axis:
    """Channels in one order, which may change within each of ``blocks`` equal parts unless ``frozen`` says why not."""

    size: int
    blocks: int = 1
    frozen: str | None = None
    merged: Axis | None = None

    def root(self) -> Axis:
        axis = self
        while axis.merged is not None:
            axis = axis.merged
        return axis

    def unite(self, other: Axis) -> None:
        a, b = self.root(), other.root()
        if a is not b:
            a.blocks, a.frozen, b.merged = lcm(a.blocks, b.blocks), a.frozen or b.frozen, a


@dataclass(frozen=True)
class Channels:
    """Where a tensor has its channels, and the axes that they are made of; a concatenation has several."""

    layout: str
    axes: tuple[Axis, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def spans(self) -> Iterator[tuple[int, Axis]]:
        """First channel and axis of each part."""
        for index, axis in enumerate(self.axes):
            yield sum(self.sizes[:index]), axis.root()


Value = Channels | str | None
"""The channels of a tensor, or what fixes their order, or None for what is not a tensor."""


class Walk:
    """Follows the graphs of a model and collects which tensors lie along which axes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.places: dict[tuple[str, str, int], Value] = {}
        """Module name, tensor name, dim: the channels that lie there."""
        self.called: set[str] = set()
        self.read: set[str] = set()
        """Parameters and buffers that forward uses itself, not by calling their module."""

    def follow(self, graph: fx.Graph) -> None:
        values: dict[fx.Node, Value] = {}
        for node in graph.nodes:
            inputs = [values[before] for before in node.all_input_nodes]
            if node.op == "placeholder":
                values[node] = "the model's input"
            elif node.op == "output":
                self._freeze(inputs, "the model's output")
            elif node.op == "get_attr":
                values[node] = f"the tensor {node.target}"
                if not all(_is_fact(user) for user in node.users):
                    self.read.add(str(node.target))
            elif node.op == "call_module":
                self.called.add(str(node.target))
                values[node] = self._call_module(str(node.target), inputs)
            else:
                values[node] = self._call_function(node, [value for value in inputs if value is not None])

    def freeze_shared(self) -> None:
        """A tensor that somebody else uses too keeps its order, and so does everything along its axes."""
        owners = Counter(_storage(tensor) for module in self.model.modules() for tensor in _tensors(module))
        for (name, key, _), value in self.places.items():
            if owners[_storage(getattr(self.modules[name], key))] > 1 or f"{name}.{key}" in self.read:
                self._freeze([value], f"{name}.{key}, which is used elsewhere too")

    def unseen_parameter(self) -> str | None:
        """A parameter that no graph uses: probably another method does, and it may read channels that we would reorder."""
        for name, _ in self.model.named_parameters():
            parts = name.split(".")
            if name not in self.read and not any(".".join(parts[:end]) in self.called for end in range(1, len(parts))):
                return name
        return None

    def _freeze(self, values: Sequence[Value], why: str) -> str:
        why = next((value for value in values if isinstance(value, str)), why)
        for value in values:
            for axis in value.axes if isinstance(value, Channels) else ():
                axis.root().frozen = axis.root().frozen or why
        return why

    def _join(self, values: Sequence[Value], why: str) -> Value:
        """One order for tensors that meet element by element. Broadcasting counts dims from the end, as layouts do."""
        channels = [value for value in values if isinstance(value, Channels)]
        kinds = {(value.layout == LAST, value.sizes) for value in channels}
        if len(kinds) != 1 or len(channels) < len(values):
            return self._freeze(values, why) if values else None
        for other in channels:
            for a, b in zip(channels[0].axes, other.axes, strict=True):
                a.unite(b)
        return next((value for value in channels if value.layout == IMAGE), channels[0])

    def _fit(self, value: Value, layouts: Sequence[str], why: str, *, size: int | None = None, to: str | None = None) -> Value:
        """The channels where they lie as expected, in layout ``to`` from here on; frozen otherwise."""
        if isinstance(value, Channels) and value.layout in layouts and size in (None, sum(value.sizes)):
            return Channels(to or value.layout, value.axes)
        return self._freeze([value], why)

    def _place(self, name: str, key: str, dim: int, value: Value) -> None:
        """Note what lies along a dim of a tensor. A module that is called again needs the same order again."""
        if getattr(self.modules[name], key, None) is not None:
            before = [self.places[name, key, dim]] if (name, key, dim) in self.places else []
            self.places[name, key, dim] = self._join([*before, value], name)

    def _call_module(self, name: str, inputs: list[Value]) -> Value:
        module = self.modules[name]
        kind, why = type(module), f"{type(module).__name__} ({name})"
        if len(inputs) != 1:
            return self._freeze(inputs, why)
        if kind in _ALIKE_MODULES:
            return inputs[0]
        if kind in _SPATIAL_MODULES:
            return self._pool(inputs[0], getattr(module, "output_size", None), why)
        if kind in _NORMS:
            shape: Any = getattr(module, "normalized_shape", None) or (module.num_features,)
            value = self._fit(inputs[0], _NORMS[kind] if len(shape) == 1 else (), why, size=shape[0])
            return self._call_per_channel(name, value)
        if isinstance(module, nn.Flatten):
            return self._flatten(inputs[0], (module.start_dim, module.end_dim), why)
        if weight_dims(module) is not None:
            return self._call_layer(name, inputs[0], why)
        self._freeze(inputs, why)
        return self._write(name, 1, LAST) if kind is nn.Embedding else why

    def _call_layer(self, name: str, value: Value, why: str) -> Value:
        """A linear layer or a convolution reads one set of channels and writes another."""
        module: Any = self.modules[name]
        out_dim, in_dim = cast(tuple[int, int], weight_dims(module))
        layouts = (IMAGE, PIXEL) if isinstance(module, nn.Conv2d) else (LAST,)
        groups = conv_groups(module)
        value = self._fit(value, layouts, why, size=module.weight.shape[in_dim] * groups)
        if 1 < groups == module.in_channels == module.out_channels:
            return self._call_per_channel(name, value)
        if groups > 1 and isinstance(value, Channels):
            # channels stay in their group; a concatenation could split a group, which is not worth following
            value = self._fit(value, layouts if len(value.axes) == 1 else (), why)
            for axis in value.axes if isinstance(value, Channels) else ():
                axis.root().blocks = lcm(axis.root().blocks, groups)
        self._place(name, "weight", in_dim, value)
        return self._write(name, out_dim, layouts[0], groups)

    def _call_per_channel(self, name: str, value: Value) -> Value:
        """Norms and depthwise convolutions hold some numbers for every channel, and pass the channels on."""
        for key in ("weight", "bias", "running_mean", "running_var"):
            self._place(name, key, 0, value)
        return value

    def _write(self, name: str, dim: int, layout: str, blocks: int = 1) -> Value:
        """The channels that a layer writes: the same at every call."""
        if (name, "weight", dim) not in self.places:
            channels = Channels(layout, (Axis(cast(Tensor, self.modules[name].weight).shape[dim], blocks),))
            self._place(name, "weight", dim, channels)
            self._place(name, "bias", 0, channels)
        return self.places[name, "weight", dim]

    def _call_function(self, node: fx.Node, inputs: list[Value]) -> Value:
        """Functions, and methods of tensors."""
        target: Any = node.target
        why = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        is_arithmetic = getattr(target, "__module__", None) == "_operator"
        if _is_fact(node) or (is_arithmetic and not inputs):
            return None
        if target in _ALIKE:
            return self._join(inputs, why)
        if target in (torch.cat, torch.concat, torch.concatenate):
            return self._concatenate(inputs, _argument(node, 1, "dim", 0), why)
        if len(inputs) == 1 and target in _SPATIAL:
            return self._pool(inputs[0], _argument(node, 1, "output_size", None) if "adaptive" in why else None, why)
        if len(inputs) == 1 and target in ("flatten", torch.flatten):
            return self._flatten(inputs[0], (_argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1)), why)
        if len(inputs) == 1 and target in ("mean", torch.mean):
            is_spatial = _argument(node, 1, "dim", None) in ((2, 3), [2, 3], (-2, -1), [-2, -1], (-1, -2), [-1, -2])
            to = PIXEL if _argument(node, 2, "keepdim", False) else LAST
            return self._fit(inputs[0], (IMAGE, PIXEL) if is_spatial else (), why, to=to)
        return self._freeze(inputs, why)

    def _pool(self, value: Value, size: object, why: str) -> Value:
        """What treats the pixels of each channel by themselves."""
        return self._fit(value, (IMAGE, PIXEL), why, to=PIXEL if size in (1, (1, 1), [1, 1]) else IMAGE)

    def _flatten(self, value: Value, dims: tuple[object, object], why: str) -> Value:
        """With one pixel per channel the channels stay what they were; otherwise they mix with the pixels."""
        return self._fit(value, (PIXEL,) if dims == (1, -1) else (), why, to=LAST)

    def _concatenate(self, values: list[Value], dim: object, why: str) -> Value:
        """Channels side by side. Should dim 1 not hold the channels after all, the next layer finds their number wrong."""
        channels = [value for value in values if isinstance(value, Channels)]
        layouts = {value.layout for value in channels}
        if len(channels) < len(values) or len(layouts) != 1 or dim not in (1, -1 if LAST in layouts else -3):
            return self._freeze(values, why)
        return Channels(channels[0].layout, tuple(axis for value in channels for axis in value.axes))


def weight_dims(module: nn.Module) -> tuple[int, int] | None:
    """Dims of the weight along output and input channels, for the layers that we know."""
    if type(module) in (nn.Linear, nn.Conv2d):
        return 0, 1
    return (1, 0) if is_hf_conv1d(type(module)) else None


def conv_groups(module: nn.Module) -> int:
    return module.groups if isinstance(module, nn.Conv2d) else 1


def _argument(node: fx.Node, index: int, name: str, default: object) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _is_fact(node: fx.Node) -> bool:
    asked = node.args[1] if node.target is getattr else node.target
    return node.op in ("call_function", "call_method") and asked in _FACTS


def _tensors(module: nn.Module) -> list[Tensor]:
    held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
