"""Checkpoints of a run: safetensors and JSON in one folder per step, complete or absent.

    checkpoints/step-00000200/
        model.safetensors      parameters and buffers, dense, under stock keys
        training.safetensors   optimizer state and the run's masks and counters
        checkpoint.json        everything that is not a tensor; size and SHA-256 of the two files; SHA-256 of itself

A checkpoint is written under another name and renamed when all of it is on disk, so a kill at any moment leaves those before
it as they were. Before anything is loaded, the files are compared with their checksums and with the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import nmsparse as nm
from nmsparse._saved import put_together, taken_apart
from nmsparse.workbench.training._telemetry import MaskWatch

VERSION = 1
MODEL, TRAINING, FACTS = "model.safetensors", "training.safetensors", "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; nothing was loaded from it."""


@dataclass(frozen=True)
class Restorable:
    """What a checkpoint holds: taken from these objects, and put back into them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: nm.Run
    watch: MaskWatch
    scaler: Any | None = None


class Checkpoints:
    """The checkpoints of one run, the newest ``keep`` of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        found = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name) for name in found if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, step: int, state: Restorable, facts: dict[str, Any], is_writer: bool = True) -> None:
        """Every process takes part in gathering sharded tensors; one writes."""
        model, (plain, training) = _model_tensors(state.model), taken_apart(_training_state(state), _whole)
        _check_finite(step, model, state.model)
        if is_writer:
            self._write(step, model, training, {**facts, "state": plain})

    def _write(self, step: int, model: dict[str, Tensor], training: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._sweep()
        temporary = self.folder / f".writing-{step}-{os.getpid()}"
        try:
            _fill(temporary, model, training, {"version": VERSION, "step": step, **facts})
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
            raise OSError(f"{self.path(step)} cannot be written ({error}): make room, then resume the run") from error
        if self.path(step).exists():
            self._remove(self.path(step))
        os.replace(temporary, self.path(step))
        _flush(self.folder)
        for old in self.steps()[: -self.keep]:
            self._remove(self.path(old))

    def _remove(self, path: Path) -> None:
        """Out of sight first: a kill in the middle must not leave half a checkpoint."""
        doomed = self.folder / f".removing-{path.name}-{os.getpid()}"
        os.replace(path, doomed)
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """What a killed process left."""
        for pattern in (".writing-*", ".removing-*"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)


def read_facts(path: Path) -> dict[str, Any]:
    """checkpoint.json of a checkpoint whose files are whole."""
    try:
        facts = json.loads((path / FACTS).read_text())
        version, files = facts["version"], facts["files"]
        if version != VERSION:
            raise CheckpointError(f"{path} has version {version!r}; this nmsparse reads version {VERSION}.")
        broken = [name for name in (MODEL, TRAINING) if files[name] != _fingerprint(path / name)]
        if facts.pop("checksum") != _checksum(facts):
            broken.append(FACTS)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}). {_advice(path)}") from error
    if broken:
        raise CheckpointError(f"{path} is damaged: {', '.join(broken)} is not what was written. {_advice(path)}")
    return facts


def _advice(path: Path) -> str:
    others = sorted(other for other in path.parent.glob("step-*") if other != path)
    return f"Delete it to resume from {others[-1].name}." if others else "There is no other checkpoint: start anew."


def restore(path: Path, state: Restorable) -> dict[str, Any]:
    """Put a checkpoint back; return its facts. All is checked before anything changes."""
    facts = read_facts(path)
    with safe_open(path / TRAINING, "pt") as file:
        training = put_together(facts["state"], {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    with safe_open(path / MODEL, "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    own = dict(_unique_tensors(state.model))
    _check_same("tensors", path, own, saved)
    odd = [name for name, tensor in own.items() if tensor.shape != saved[name].shape]
    if odd:
        raise CheckpointError(
            f"{path}: {odd[0]} has shape {tuple(saved[odd[0]].shape)}, the model's is {tuple(own[odd[0]].shape)}."
        )
    names = _parameter_names(state.model)
    _check_same("parameters with optimizer state", path, _owned_names(state.optimizer, names), training["optimizer"]["order"])
    try:
        state.run.load_state_dict(training["run"])  # checks everything before it changes anything
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_placed(saved[name], tensor))
    _load_optimizer(state.optimizer, names, training["optimizer"])
    state.run.refresh()
    state.watch.load(training["watch"])
    if state.scaler is not None:
        state.scaler.load_state_dict(training["scaler"])
    return facts


def _check_same(what: str, path: Path, own: Any, saved: Any) -> None:
    missing, extra = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    if missing or extra:
        words = [f"lacks {', '.join(missing[:4])}"] if missing else []
        words += [f"has {', '.join(extra[:4])} besides"] if extra else []
        raise CheckpointError(f"{path} does not fit this model: of {what} it {' and '.join(words)}.")


def _check_finite(step: int, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """A checkpoint is one to go back to: weights that an update spoiled, which the next loss would tell, are not written."""
    for name in _parameter_names(model).values():
        if name in tensors and not bool(torch.isfinite(tensors[name]).all()):
            raise FloatingPointError(f"{name} holds NaN or Inf after update {step}")


# ---- what is taken ----


def _unique_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; a tied one under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(tensor) for name, tensor in _unique_tensors(model)}


def _training_state(state: Restorable) -> dict[str, Any]:
    names = _parameter_names(state.model)
    saved: dict[str, Any] = {
        "optimizer": _optimizer_state(state.optimizer, names),
        "run": state.run.state_dict(),
        "watch": state.watch.state(),
    }
    if state.scaler is not None:
        saved["scaler"] = state.scaler.state_dict()
    return saved


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _owned_names(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[str]:
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Keyed by parameter name: positions change with the code that builds the optimizer."""
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"order": _owned_names(optimizer, names), "state": state, "groups": groups}


def _load_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str], saved: dict[str, Any]) -> None:
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    positions = {name: position for position, name in enumerate(_owned_names(optimizer, names))}
    packed = optimizer.state_dict()
    packed["state"] = {
        positions[name]: {key: _placed_like(value, parameters[name]) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    for group, values in zip(packed["param_groups"], saved["groups"], strict=True):
        group.update(values)
    optimizer.load_state_dict(packed)


def _whole(tensor: Tensor) -> Tensor:
    """A tensor on the host, gathered if it is sharded."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyrefly: ignore
    return gathered.detach().to("cpu").contiguous().clone()


def _placed(saved: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    if not hasattr(like, "device_mesh"):
        return saved.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(like.device), like.device_mesh, like.placements)  # pyrefly: ignore


def _placed_like(value: Any, parameter: Tensor) -> Any:
    """Moments are sharded as their parameter is, or lie in memory as it does, which fused optimizers demand (channels-last
    convolutions); step counts and scalars are not."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    placed = _placed(value, parameter)
    return placed if hasattr(parameter, "device_mesh") else torch.empty_like(parameter, dtype=value.dtype).copy_(placed)


# ---- files ----


def _fill(folder: Path, model: dict[str, Tensor], training: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """All files of a checkpoint, down to the disk."""
    folder.mkdir(parents=True)
    for name, tensors in ((MODEL, model), (TRAINING, training)):
        save_file(tensors, folder / name, {"format": "pt"})
        _flush(folder / name)
    described = {**facts, "files": {name: _fingerprint(folder / name) for name in (MODEL, TRAINING)}}
    (folder / FACTS).write_text(json.dumps({**described, "checksum": _checksum(described)}))
    _flush(folder / FACTS)
    _flush(folder)


def _checksum(facts: dict[str, Any]) -> str:
    """Of everything else in checkpoint.json, which reads and writes again as it was."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _fingerprint(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _flush(path: Path) -> None:
    """Onto the disk, so that the rename cannot overtake the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
