"""Does a checkpoint keep its pattern? Any safetensors file or folder, ours or not, read in pieces."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmsparse.checkpoint._files import TensorFiles
from nmsparse.functional import violations
from nmsparse.pattern import Pattern

PIECE = 1 << 24
"""Entries looked at together."""
FLOATS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Types of weights, in the words of safetensors, to those of torch."""


@dataclass(frozen=True)
class Checked:
    """One tensor: how much of it is there, and how many groups break the pattern."""

    name: str
    shape: tuple[int, ...]
    pattern: str
    dim: int
    density: float
    groups: int
    violations: int
    status: str
    """"ok", "violated", or "dense": nothing says that it should be sparse, and most of its groups are full."""


@dataclass(frozen=True)
class Report:
    """What :func:`verify` found."""

    path: str
    format: str | None
    tensors: list[Checked]
    skipped: dict[str, str]

    @property
    def ok(self) -> bool:
        return all(tensor.status != "violated" for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def verify(path: str | Path, pattern: str | Pattern | None = None) -> Report:
    """Count density and violated groups of every sparse tensor in a safetensors file or folder.

    With ``sparsity.json`` beside it, what that names is checked, for its own pattern or for the one given. Without, every
    matrix (groups along its last dim, or the one before where that fits better: GPT-2 stores weights transposed) and every
    convolution (along its input channels) is compared with ``pattern`` (default "2:4"); a tensor of which fewer than half of the
    groups obey is taken for dense, not for violated. A file in which there is nothing to check is an error.
    """
    with TensorFiles(path) as files:
        names = files.plain_names()
        if files.layouts:
            wanted = {name: (Pattern(pattern or layout.pattern), layout.dim) for name, layout in files.layouts.items()}
            checked = [check_tensor(files, name, *how, claimed=True) for name, how in wanted.items()]
            return Report(str(path), files.format, checked, {})
        return _verify_all(files, names, Pattern("2:4" if pattern is None else pattern))


def _verify_all(files: TensorFiles, names: list[str], pattern: Pattern) -> Report:
    checked: list[Checked] = []
    skipped: dict[str, str] = {}
    for name in names:
        found = files.slice(name)
        shape = tuple(found.get_shape())
        if found.get_dtype() not in FLOATS or len(shape) < 2:
            skipped[name] = f"{found.get_dtype()} of shape {shape} is no weight matrix"
        elif dims := grouped_dims(shape, pattern):
            checked.append(_best(files, name, pattern, dims))
        else:
            skipped[name] = f"of shape {shape}, no dim along which groups run is a multiple of {pattern.m}"
    if not checked:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:2]) or "it holds no tensor"
        raise ValueError(f"{files.path} holds no tensor that could be {pattern}, so nothing was checked ({why}).")
    return Report(str(files.path), files.format, checked, skipped)


def grouped_dims(shape: tuple[int, ...], pattern: Pattern) -> list[int]:
    """Dims along which groups of a weight may run and which the pattern divides, the likeliest first."""
    last = len(shape) - 1
    dims = {2: (1, 0), 3: (2, 1), 4: (1,)}.get(len(shape), (last,) if last > 0 else ())
    return [dim for dim in dims if shape[dim] % pattern.m == 0]


def _best(files: TensorFiles, name: str, pattern: Pattern, dims: list[int]) -> Checked:
    """How a tensor fares along the dim that fits it best."""
    best = check_tensor(files, name, pattern, dims[0], claimed=False)
    for dim in dims[1:]:
        if best.violations:
            best = min(best, check_tensor(files, name, pattern, dim, claimed=False), key=lambda found: found.violations)
    return best


def check_tensor(files: TensorFiles, name: str, pattern: Pattern, dim: int, claimed: bool) -> Checked:
    """Count what a tensor has and breaks; ``claimed`` when something says that it is sparse."""
    shape, pieces = _pieces(files, name, dim)
    if shape[dim] % pattern.m:
        raise ValueError(f"{files.path}: {name} has size {shape[dim]} along dim {dim}, which {pattern} does not divide.")
    entries = non_zero = broken = 0
    for piece in pieces:
        entries += piece.numel()
        non_zero += int((piece != 0).sum())
        broken += int(violations(piece, pattern, dim))
    groups = entries // pattern.m
    status = "ok" if not broken else "violated" if claimed or 2 * broken <= groups else "dense"
    return Checked(name, shape, str(pattern), dim, non_zero / max(entries, 1), groups, broken, status)


def _pieces(files: TensorFiles, name: str, dim: int) -> tuple[tuple[int, ...], Any]:
    """The shape of a tensor, and parts of it that cut no group."""
    shape = files.shape(name)
    if files.is_packed(name):
        return shape, iter([files.dense(name)])
    if dim % len(shape) == 0:  # groups run along the rows that pieces would be cut from
        return shape, iter([files.tensor(name)])
    return shape, _rows(files.slice(name), shape)


def _rows(found: Any, shape: tuple[int, ...]) -> Any:
    per_row = max(1, torch.Size(shape[1:]).numel())
    step = max(1, PIECE // per_row)
    for start in range(0, shape[0], step):
        rows: Tensor = found[start : start + step]
        yield rows
