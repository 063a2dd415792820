"""Sparse weights of an ONNX graph: found again after the exporter worked on them, mended, and read back from the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmsparse.checkpoint._format import Layout
from nmsparse.functional import violations


@dataclass(frozen=True)
class OnnxWeight:
    """A sparse weight as the file holds it."""

    name: str
    """In the model's state dict."""
    initializer: str
    """In the file; a weight that the exporter transposed says so in its name."""
    shape: tuple[int, ...]
    pattern: str
    dim: int
    """Along which its groups run, in the file."""
    density: float


@dataclass(frozen=True)
class Place:
    """Where a sparse weight is in the graph."""

    value: Any
    """The graph's own record of an initializer: its name, and the tensor."""
    pattern: str
    dim: int


def find_weights(graph: Any, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, Place]:
    """The initializers that hold sparse weights: by name, or else, among matrices, by where their zeros are."""
    by_zeros: dict[str, Any] = {}
    if any(key not in graph.initializers for key in layouts):
        by_zeros = {_zeros(value.const_value.numpy()): value for value in graph.initializers.values() if _is_matrix(value)}
    places: dict[str, Place] = {}
    for key, layout in layouts.items():
        value, dim = graph.initializers.get(key), layout.dim
        if value is None and len(layout.shape) == 2:
            kept = (tensors[key] != 0).numpy()
            value = by_zeros.get(_zeros(kept))
            if value is None:
                value, dim = by_zeros.get(_zeros(kept.T)), 1 - dim % 2
        if value is not None:
            places[key] = Place(value, layout.pattern, dim)
    return places


def mend_weights(places: Mapping[str, Place], layouts: Mapping[str, Layout]) -> None:
    """Give sparse weights their names back, and make all their zeros +0.0."""
    numpy, intermediate = import_module("numpy"), import_module("onnx_ir")
    named = {place.value.name for key, place in places.items() if place.value.name == key}
    for key, place in places.items():
        if place.value.name not in named:  # equal weights share one initializer, which keeps the first name
            place.value.name = key if place.dim == layouts[key].dim else f"{key}_transposed"
            named.add(place.value.name)
        array = place.value.const_value.numpy()
        if numpy.signbit(array[array == 0]).any():
            positive = numpy.where(array == 0, numpy.zeros((), array.dtype), array)
            place.value.const_value = intermediate.tensor(positive, name=place.value.name)


def read_weights(onnx: Any, file: Path, places: Mapping[str, Place]) -> list[OnnxWeight]:
    """The sparse weights of a file, each of which must keep its pattern with zeros of positive sign."""
    initializers = {tensor.name: tensor for tensor in onnx.load(str(file)).graph.initializer}
    weights: list[OnnxWeight] = []
    for key, place in places.items():
        tensor = torch.from_numpy(onnx.numpy_helper.to_array(initializers[place.value.name]).astype("float64"))
        broken, negative = int(violations(tensor, place.pattern, place.dim)), int(torch.signbit(tensor[tensor == 0]).sum())
        if broken or negative:
            raise RuntimeError(
                f"{key}: the exporter left {broken} groups with more non-zeros than {place.pattern} allows and {negative} zeros "
                "of negative sign, so nothing was written."
            )
        density = float((tensor != 0).double().mean())
        weights.append(OnnxWeight(key, place.value.name, tuple(tensor.shape), place.pattern, place.dim, density))
    return weights


def _is_matrix(value: Any) -> bool:
    return value.const_value is not None and len(value.const_value.shape) == 2


def _zeros(matrix: Any) -> str:
    """Shape and places of zeros of a matrix: weights that the exporter renamed are known by these."""
    numpy = import_module("numpy")
    bits = numpy.packbits(numpy.ascontiguousarray(matrix != 0))
    return f"{tuple(matrix.shape)} {hashlib.blake2b(bits.tobytes()).hexdigest()}"
