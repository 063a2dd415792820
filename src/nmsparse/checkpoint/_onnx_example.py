"""An example through torch and through onnxruntime: what goes in, what comes out, and how far apart they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Example = tuple[Tensor, ...] | dict[str, Tensor]
"""What a model is called with: positional arguments, or keyword arguments."""


def inputs_of(example: Any, dynamic_batch: bool) -> Example:
    """The example on the CPU; ``dynamic_batch`` asks that its tensors share their first dim."""
    values: list[Any] = []
    if isinstance(example, dict):
        values = list(example.values())
    elif isinstance(example, tuple):
        values = list(example)
    if not values or not all(isinstance(value, Tensor) for value in values):
        held = " and ".join(sorted({type(value).__name__ for value in values}))
        raise ValueError(
            "the example is a tuple of tensors, or a dict of names to tensors, that the model can be called with, got a "
            f"{type(example).__name__}{f' of {held}' if held else ''}."
        )
    firsts = {tuple(value.shape[:1]) for value in values}
    if dynamic_batch and (len(firsts) > 1 or () in firsts):
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ValueError(
            f"inputs of shapes {shapes} do not share a first dim, so it is no batch: pass dynamic_batch=False for fixed shapes."
        )
    return mapped(example, lambda tensor: tensor.detach().to("cpu"))


def mapped(example: Example, change: Callable[[Tensor], T]) -> tuple[T, ...] | dict[str, T]:
    """Every tensor of an example changed."""
    if isinstance(example, dict):
        return {name: change(tensor) for name, tensor in example.items()}
    return tuple(change(tensor) for tensor in example)


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The tensors that a model returns, by name; of transformers' outputs only the logits."""
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(getattr(result, "logits", None), Tensor):
        return {"logits": result.logits}
    named: Iterable[tuple[str, Any]] = []
    if isinstance(result, Mapping):
        named = result.items()
    elif isinstance(result, Sequence):
        named = ((f"output_{index}", value) for index, value in enumerate(result))
    found = {name: value for name, value in named if isinstance(value, Tensor)}
    if not found:
        raise ValueError(f"the model returns a {type(result).__name__} without tensors, so there is nothing to export.")
    return found


@torch.no_grad()
def run_torch(model: nn.Module, example: Example) -> dict[str, Tensor]:
    """What the model returns for an example."""
    return outputs_of(model(**example) if isinstance(example, dict) else model(*example))


def compare(file: Path, runs: list[Example], expected: list[dict[str, Tensor]]) -> tuple[float | None, str | None]:
    """The largest difference between onnxruntime and torch, or None and why there is none."""
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return None, 'onnxruntime is not installed (pip install "nmsparse[onnx]")'
    if any(tensor.dtype == torch.bfloat16 for example in (*runs, *expected) for tensor in _tensors(example)):
        return None, "onnxruntime takes and returns numpy arrays, which have no bfloat16"
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings are about its own choices
    try:
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        results = [_run_file(session, run) for run in runs]
    except runtime.capi.onnxruntime_pybind11_state.NotImplemented as error:
        return None, f"onnxruntime lacks an operation on the CPU ({str(error).splitlines()[0]})"
    except Exception as error:  # its errors have no base class of their own
        raise RuntimeError(f"onnxruntime cannot run the exported model: {str(error).splitlines()[0]}") from error
    apart = [
        _difference(result, wanted)
        for found, outputs in zip(results, expected, strict=True)
        for result, wanted in zip(found, outputs.values(), strict=True)
    ]
    return float(torch.stack(apart).max()), None  # torch's max keeps a NaN, Python's may not


def _tensors(example: Example) -> list[Tensor]:
    return list(example.values() if isinstance(example, dict) else example)


def _run_file(session: Any, example: Example) -> list[Tensor]:
    names = [entry.name for entry in session.get_inputs()]
    feed = example if isinstance(example, dict) else dict(zip(names, example, strict=True))
    return [torch.from_numpy(result) for result in session.run(None, {name: feed[name].numpy() for name in names})]


def _difference(result: Tensor, wanted: Tensor) -> Tensor:
    """The largest distance, as a share of the largest wanted value where that is above 1; NaN where only one of them is NaN."""
    a, b = result.double(), wanted.double()
    size = b.where(b.isfinite(), 0).abs().amax().clamp(min=1) if b.numel() else b.new_ones(())
    is_same = (a == b) | (a.isnan() & b.isnan())
    distance = ((a - b) / size).abs().where(~is_same, 0)
    return distance.amax() if distance.numel() else distance.new_zeros(())
