"""ONNX: a frozen copy of a model, exported by torch, read back from the file, and run beside the original.

The exporter folds transposes into weights, and scales of batch norms into convolutions. That keeps every zero, but it turns some
into -0.0 and gives weights other names; both are put right before the file is written, and what was written is checked.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmsparse.checkpoint._format import Layout
from nmsparse.checkpoint._onnx_example import Example, compare, inputs_of, mapped, outputs_of, run_torch
from nmsparse.checkpoint._onnx_weights import OnnxWeight, find_weights, mend_weights, read_weights
from nmsparse.checkpoint._own import unwrapped
from nmsparse.checkpoint._save import check_patterns, final_tensors
from nmsparse.nn import freeze_
from nmsparse.pattern import Pattern

logger = logging.getLogger(__name__)
NOISY = (
    "torch.onnx._internal.exporter._registration",  # which optional operators it lacks
    "torch.onnx._internal.exporter._compat",  # how it goes about an opset; whether it got there is checked
    "onnxscript.version_converter",
)
"""Loggers to quieten while torch exports."""


@dataclass(frozen=True)
class OnnxReport:
    """What :func:`export_onnx` wrote, and what was checked."""

    path: str
    opset: int
    bytes: int
    weights: list[OnnxWeight]
    missing: list[str]
    """Sparse weights that the file does not hold: the example did not reach their layers."""
    checked: bool
    """Whether the file was run and compared with torch."""
    difference: float | None
    """The largest difference to torch, as a share of the largest output where that is above 1."""
    why_unchecked: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example: tuple[Any, ...] | dict[str, Any],
    *,
    pattern: str | Pattern | None = None,
    opset: int | None = None,
    dynamic_batch: bool = True,
    tolerance: float = 1e-4,
) -> OnnxReport:
    """Write a model as ONNX, with exact zeros where it is sparse; the model is not changed.

    ``example`` holds the tensors that the model is called with, as a tuple or by name. The file computes the model's tensors, or
    only its ``logits`` where it has such, at any size of the batch (the first dim of every input) unless ``dynamic_batch`` is
    off. ``opset`` is torch's recommended one unless given. A model that was frozen before has no recipe any more: give its
    ``pattern``, and its sparse weights are checked too.

    The file is checked by ``onnx``, read back for the pattern of each sparse weight, and run by ``onnxruntime``, if that is
    installed, on the example and on a batch of twice its size. If a check fails nothing is left behind.
    """
    onnx = _package("onnx")
    _package("onnxscript")
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target} is a folder; give a file name, such as {target / 'model.onnx'}.")
    inputs = inputs_of(example, dynamic_batch)
    frozen, layouts = _frozen_copy(model, None if pattern is None else Pattern(pattern))
    runs = [inputs, mapped(inputs, lambda tensor: torch.cat([tensor, tensor]))] if dynamic_batch else [inputs]
    expected = [run_torch(frozen, run) for run in runs]
    # with the larger batch, since torch takes a size of 1 for a constant
    program = _export(frozen, runs[-1], list(expected[0]), opset, dynamic_batch)
    written = int(program.model.opset_imports[""])
    if opset not in (None, written):
        raise RuntimeError(f"torch could not write opset {opset}; leave opset out for the recommended one.")
    places = find_weights(program.model.graph, frozen.state_dict(), layouts)
    mend_weights(places, layouts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".onnx-") as folder:
        file = Path(folder) / target.name
        program.save(file)
        _check_file(onnx, file)
        weights = read_weights(onnx, file, places)
        difference, why_unchecked = compare(file, runs, expected)
        if difference is not None and not difference <= tolerance:
            raise RuntimeError(
                f"the exported model differs from torch by {difference:.2g}, more than the tolerance of {tolerance:g}, so it was "
                "not written; 16-bit models need a larger tolerance."
            )
        size = _put_in_place(file, target)
    if why_unchecked is not None:
        logger.warning("%s was not compared with torch: %s", target, why_unchecked)
    missing = [key for key in layouts if key not in places]
    if missing:
        logger.warning("%s lacks %s: the example did not reach these layers", target, ", ".join(missing[:4]))
    return OnnxReport(str(target), written, size, weights, missing, difference is not None, difference, why_unchecked)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f'ONNX export needs the package {name}, which is not installed: pip install "nmsparse[onnx]".'
        ) from error


# ---- export ----


def _frozen_copy(model: nn.Module, pattern: Pattern | None) -> tuple[nn.Module, dict[str, Layout]]:
    """The model as inference sees it, and which of its weights are sparse."""
    copy = deepcopy(unwrapped(model)).to("cpu").eval()
    tensors, layouts, _ = final_tensors(copy, pattern)
    check_patterns(tensors, layouts)
    return freeze_(copy), layouts


def _export(model: nn.Module, example: Example, names: list[str], opset: int | None, dynamic_batch: bool) -> Any:
    if callable(getattr(model, "set_attn_implementation", None)):
        # torch takes fused attention apart into products of other strides, on which a later view may fail (T5 in torch 2.13)
        model.set_attn_implementation("eager")  # pyrefly: ignore
    forward = model.forward

    @wraps(forward)
    def only_tensors(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(outputs_of(forward(*args, **kwargs)).values())

    model.forward = only_tensors  # on the module itself: one around it would prefix the names of all weights
    shapes = mapped(example, lambda tensor: {0: "batch"}) if dynamic_batch else None
    args, kwargs = ((), example) if isinstance(example, dict) else (example, None)
    try:
        with _quiet():
            return torch.onnx.export(
                model,
                args,
                kwargs=kwargs,
                dynamic_shapes=shapes,
                opset_version=opset,
                output_names=names,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise RuntimeError(f"torch cannot export this {type(model).__name__} as ONNX: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the packages below say about themselves, on which no user can act."""
    noisy = [logging.getLogger(name) for name in NOISY]
    for each in noisy:
        each.addFilter(_is_of_use)
    try:
        with warnings.catch_warnings():
            # torch copies its own tree specs
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            # all inputs share the one name that we give to the batch
            warnings.filterwarnings("ignore", "# The axis name: batch will not be used", UserWarning)
            # constants are folded in numpy, also in branches that are never taken
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"onnx\.reference\.")
            yield
    finally:
        for each in noisy:
            each.removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return record.name == NOISY[0] and "torchvision is not installed" not in record.getMessage()


def _check_file(onnx: Any, file: Path) -> None:
    try:
        onnx.checker.check_model(str(file))
    except onnx.checker.ValidationError as error:
        raise RuntimeError(f"onnx refuses the file that torch exported: {str(error).splitlines()[0]}") from error


def _put_in_place(file: Path, target: Path) -> int:
    """Move the file, after the weights that it refers to where they are outside of it; return their size."""
    outside, place = file.with_name(f"{file.name}.data"), target.with_name(f"{target.name}.data")
    size = file.stat().st_size
    if outside.exists():
        size += outside.stat().st_size
        os.replace(outside, place)
    else:
        place.unlink(missing_ok=True)  # of an earlier, larger model
    os.replace(file, target)
    return size
