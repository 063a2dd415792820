"""Tensors of a safetensors file or folder, sharded or not, read lazily and without trust."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nmsparse.checkpoint._format import INDEX, INDICES, SPARSITY, VALUES, VERSION, Layout, check_packed, unpack_tensor

LARGEST_JSON = 64 << 20
"""Bytes of an index or sparsity.json that we are willing to parse."""


def read_json(path: Path) -> Any:
    """A JSON file that anybody may have written."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON >> 20} MiB")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}).") from error


def _shards(path: Path) -> list[Path]:
    """The files that hold the tensors."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: give a .safetensors file or a folder with some.")
    if (path / INDEX).exists():
        index = read_json(path / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{path / INDEX} has no weight_map of tensor names to file names.")
        names = sorted(set(weight_map.values()))
        for name in names:
            if name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
                raise ValueError(f"{path / INDEX} points to {name!r}, which is no plain file name beside it; it is not followed.")
        return [path / name for name in names]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{path} holds no .safetensors file.")
    part = next((file.name for file in found if re.fullmatch(r"model-\d{5}-of-(?!00001)\d{5}\.safetensors", file.name)), None)
    if part is not None:  # parts of an older save may lie beside it
        raise ValueError(
            f"{path}: {part} is one of several parts, and {INDEX}, which says where each tensor is, is missing: a save into this "
            "folder was interrupted, or a copy of it is incomplete; write it again."
        )
    return found


class TensorFiles:
    """An open checkpoint: tensor names, their slices, and what sparsity.json says. A context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self.shards = _shards(self.path)
        for shard in self.shards:
            try:
                opened = self._stack.enter_context(safe_open(shard, framework="pt"))
                names = list(opened.keys())
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise ValueError(f"{shard} is not a readable safetensors file ({error}).") from error
            twice = next((name for name in names if name in self._where), None)
            if twice is not None:
                self._stack.close()
                raise ValueError(f"{self.path}: tensor {twice!r} is in two files, so which one counts is not clear.")
            self._where |= dict.fromkeys(names, opened)
        self.layouts: dict[str, Layout] = {}
        self.shared: dict[str, str] = {}
        """Names of tied tensors that are not stored, to the name under which they are."""
        self.format: str | None = None
        self.recipe: Any = None
        """What sparsity.json says about the recipe, as it stands there."""
        if self.path.is_dir() and (self.path / SPARSITY).exists():
            self._read_sparsity(self.path / SPARSITY)

    def _read_sparsity(self, file: Path) -> None:
        saved = read_json(file)
        if not isinstance(saved, dict) or not isinstance(saved.get("tensors"), dict):
            raise ValueError(f"{file} does not describe tensors; it was not written by nmsparse.save.")
        if saved.get("version") != VERSION:
            raise ValueError(f"{file} has version {saved.get('version')!r}; this nmsparse reads version {VERSION}.")
        shared = saved.get("shared", {})
        if not isinstance(shared, dict) or not all(isinstance(name, str) for name in shared.values()):
            raise ValueError(f"{file}: shared maps names to names.")
        self.layouts = {name: Layout.read(name, entry) for name, entry in saved["tensors"].items()}
        self.shared, self.format, self.recipe = shared, saved.get("format"), saved.get("recipe")

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def plain_names(self) -> list[str]:
        """Tensors by their own names, whether packed or not; names and sparsity.json must fit each other."""
        names: dict[str, None] = {}
        for stored in self.names:
            name = stored.removesuffix(INDICES) if stored.endswith(INDICES) else stored.removesuffix(VALUES)
            if name != stored and not self.is_packed(name):
                raise ValueError(
                    f"{self.path}: {stored} is half of a packed tensor, but no sparsity.json describes {name!r}; give the folder "
                    "that nmsparse.save wrote, with all of its files."
                )
            if name == stored and self.is_packed(name):
                raise ValueError(f"{self.path}: {name!r} is stored both whole and packed, so which one counts is not clear.")
            names[name] = None
        missing = next((name for name in self.layouts if name not in names), None)
        if missing is not None:
            raise ValueError(f"{self.path}: sparsity.json names {missing!r}, which the weights do not hold.")
        return list(names)

    def is_packed(self, name: str) -> bool:
        """Whether a tensor, by its own name, is stored as values and indices."""
        return name in self.layouts and name + VALUES in self

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, packed or not; what sparsity.json says of one that is there must be true."""
        if self.is_packed(name):
            return self.layouts[name].shape
        shape = tuple(self.slice(name).get_shape())
        if name in self.layouts and self.layouts[name].shape != shape:
            raise ValueError(f"{self.path}: {name} has shape {shape}, sparsity.json says {self.layouts[name].shape}.")
        return shape

    def check(self, name: str) -> None:
        """Raise where :meth:`dense` would: values stay on disk, and so do index bits whose every position exists."""
        if self.is_packed(name):
            values = prod(self.slice(name + VALUES).get_shape())
            check_packed(values, self._indices(name), self.layouts[name], name)

    def dense(self, name: str) -> Tensor:
        """A tensor, unpacked where it is packed."""
        if not self.is_packed(name):
            return self.tensor(name)
        return unpack_tensor(self.tensor(name + VALUES), self._indices(name), self.layouts[name], name)

    def _indices(self, name: str) -> Tensor:
        if name + INDICES not in self:
            raise ValueError(f"{self.path}: {name} has values but no indices.")
        return self.tensor(name + INDICES)

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        try:
            found: Tensor = self._where[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path}: tensor {name!r} cannot be read ({error}).") from error
        return found

    def slice(self, name: str) -> Any:
        """A lazy view: ``get_shape()``, ``get_dtype()``, and rows by indexing."""
        return self._where[name].get_slice(name)
