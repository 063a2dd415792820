"""Write a model: pruned weights under stock keys, or packed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor, nn

from nmsparse._saved import describe
from nmsparse.checkpoint._format import INDEX, INDICES, SPARSITY, VALUES, VERSION, WEIGHTS, Layout, pack_tensor
from nmsparse.functional import violations
from nmsparse.nn import final_weight, grouped_dim, sparse_modules
from nmsparse.pattern import Pattern


def save(
    model: nn.Module,
    path: str | Path,
    format: Literal["dense", "packed"] = "dense",
    *,
    pattern: str | Pattern | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``model.safetensors`` and ``sparsity.json`` into a folder; the model is not changed.

    Sparse layers are written as :func:`nmsparse.freeze_` would leave them: under their final pattern, zeros as +0.0. "dense"
    keeps the stock keys and shapes, which every runtime reads; "packed" stores kept values and index bits, 9/16 of the bytes at
    2:4 in 16 bit. A model that was frozen before has no recipe any more: give its ``pattern``, and every linear layer or
    convolution that obeys it is recorded. Above ``shard_bytes`` the weights go into several files with an index, as transformers
    writes them. Files are replaced one by one, never left half written.
    """
    if format not in ("dense", "packed"):
        raise ValueError(f'format is "dense" or "packed", got {format!r}.')
    folder = Path(path)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes counts bytes from 1, got {shard_bytes!r}.")
    if folder.is_file():
        raise ValueError(f"{folder} is a file; save writes a folder.")
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    layouts, recipe = _prune(model, tensors, None if pattern is None else Pattern(pattern))
    if format == "packed" and not layouts:
        raise ValueError(
            "no layer of this model is sparse, so there is nothing to pack: sparsify it first, or give the pattern of a frozen "
            "model."
        )
    shared = _without_aliases(tensors)
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        on_host = tensor.to("cpu").contiguous()
        if format == "packed" and name in layouts:
            written[name + VALUES], written[name + INDICES] = pack_tensor(on_host, layouts[name])
        else:
            written[name] = on_host
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"version": VERSION, "format": format, "recipe": recipe, "shared": shared}
    facts["tensors"] = {name: asdict(layout) for name, layout in layouts.items()}
    _write_shards(folder, written, shard_bytes)
    with _replacing(folder / SPARSITY) as file:
        file.write_text(json.dumps(facts, indent=1))


def _prune(
    model: nn.Module, tensors: dict[str, Tensor], pattern: Pattern | None
) -> tuple[dict[str, Layout], dict[str, Any] | None]:
    """Put final weights into the state dict; say which tensors are sparse and how."""
    layouts: dict[str, Layout] = {}
    recipe = None
    for name, module in sparse_modules(model):
        key = f"{name}.weight" if name else "weight"
        layer_recipe = module._nmsparse.recipe
        tensors[key] = final_weight(module)
        recipe = describe(layer_recipe)
        dim = grouped_dim(module)
        if dim is not None and int(violations(tensors[key], layer_recipe.pattern, dim)) == 0:
            layouts[key] = Layout.of(tensors[key], layer_recipe.pattern, dim)
    if pattern is not None:
        for name, module in model.named_modules():
            key, dim = f"{name}.weight" if name else "weight", grouped_dim(module)
            if dim is None or key in layouts or key not in tensors or tensors[key].shape[dim] % pattern.m:
                continue
            if int(violations(tensors[key], pattern, dim)) == 0:
                layouts[key] = Layout.of(tensors[key], pattern, dim)
    return layouts, recipe


def _without_aliases(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Drop tensors that are another one by a second name (tied weights); return them as alias to kept name."""
    seen: dict[tuple[Any, ...], str] = {}
    shared: dict[str, str] = {}
    for name, tensor in list(tensors.items()):
        if not tensor.numel():
            continue
        identity = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if identity in seen:
            shared[name] = seen[identity]
            del tensors[name]
        else:
            seen[identity] = name
    return shared


def _write_shards(folder: Path, tensors: dict[str, Tensor], limit: int) -> None:
    """One file, or several and their index; files of an earlier save that would be read beside them go away."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    names = [WEIGHTS] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        with _replacing(folder / name) as file:
            save_file(shard, file, {"format": "pt"})
    for old in folder.glob("model*.safetensors"):
        if old.name not in names and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()
    if len(shards) == 1:
        (folder / INDEX).unlink(missing_ok=True)
        return
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    with _replacing(folder / INDEX) as file:
        file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A file to write beside the target, put in its place in one step."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
