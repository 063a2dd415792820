"""Write a model: pruned weights under stock keys, or packed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor, nn

from nmsparse._saved import describe
from nmsparse.checkpoint._format import INDEX, INDICES, SPARSITY, VALUES, VERSION, WEIGHTS, Layout, pack_tensor
from nmsparse.checkpoint._own import memory_of, own_name, own_tensors, unwrapped
from nmsparse.functional import violations
from nmsparse.nn import final_weight, grouped_weights, is_sharded, sparse_modules
from nmsparse.pattern import Pattern
from nmsparse.recipes import OUTPUT, Recipe, recipes

TEMPORARY = rf"\.(?:{re.escape(WEIGHTS)}\.\d+|{re.escape(INDEX)}|{re.escape(SPARSITY)}|config\.json)\.(\d+)\.tmp"
"""Names of files that are being written, with the process that writes them."""


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
    writes them. Nothing is replaced before all of them are written.

    A layer that breaks the pattern which its recipe promises is recorded as well, so that :func:`verify` finds it, and cannot be
    packed. What torch.compile and DistributedDataParallel wrapped is saved under its own names.
    """
    folder = Path(path)
    check_target(folder, format, shard_bytes)
    tensors, layouts, recipe = final_tensors(model, None if pattern is None else Pattern(pattern))
    if format == "packed":
        if not layouts:
            raise ValueError(_nothing_to_pack(pattern))
        check_patterns(tensors, layouts)
    shared = _without_aliases(tensors)
    _check_apart(tensors)
    layouts = {shared.get(name, name): layout for name, layout in layouts.items()}
    on_host = ((name, tensor.to("cpu").contiguous()) for name, tensor in tensors.items())
    write_folder(folder, on_host, layouts, format, shard_bytes, recipe=recipe, shared=shared)


def _nothing_to_pack(pattern: str | Pattern | None) -> str:
    if pattern is not None:
        return f"no linear layer or convolution of this model obeys {pattern}, so there is nothing to pack."
    return (
        "no layer of this model is sparse, so there is nothing to pack: sparsify it first, or give the pattern of a frozen model."
    )


# ---- what is written ----


def final_tensors(
    model: nn.Module, pattern: Pattern | None
) -> tuple[dict[str, Tensor], dict[str, Layout], dict[str, Any] | None]:
    """The state dict as ``freeze_`` would leave it, which of its tensors are sparse and how, and the recipe."""
    model = unwrapped(model)
    stored = own_tensors(model)
    sharded = next((name for name, tensor in stored.items() if is_sharded(tensor)), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded} is sharded over ranks, and a file holds whole tensors: on every rank call nmsparse.freeze_(model) and "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict, load the result into a plain model on one rank, and save that with its "
            "pattern."
        )
    finals: dict[int, Tensor] = {}
    claimed: dict[str, Recipe] = {}
    recipe = None
    for name, module in sparse_modules(model):
        key = own_name(module.key_in(name))
        # by identity: a module that is registered under two names comes by once, and its parameter is stored under both
        finals[id(stored[key])] = final_weight(module)
        claimed[key] = module._nmsparse.recipe
        recipe = describe(module._nmsparse.recipe)
    tensors = {name: finals.get(id(tensor), tensor.detach()) for name, tensor in stored.items()}
    layouts: dict[str, Layout] = {}
    for name, dim in grouped_weights(model):
        key = own_name(name)
        wanted = claimed[key].pattern if key in claimed else pattern
        if wanted is None or key not in tensors or tensors[key].shape[dim] % wanted.m:
            continue
        if (key in claimed and _ends_sparse(claimed[key])) or int(violations(tensors[key], wanted, dim)) == 0:
            layouts[key] = Layout.of(tensors[key], wanted, dim)
    return tensors, layouts, recipe


def _ends_sparse(recipe: Recipe) -> bool:
    """Whether the recipe promises its pattern in finished weights, so that one without is a mistake to report."""
    facts = next((info for info in recipes() if info.name == recipe.name), None)  # others need not be registered
    return OUTPUT in recipe.sparse_products and not (facts is not None and facts.ends_dense)


def check_patterns(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    """For formats that hold no weight which breaks its pattern."""
    for name, layout in layouts.items():
        broken = int(violations(tensors[name], layout.pattern, layout.dim))
        if broken:
            raise ValueError(
                f"{name}: {broken} groups of its final weight have more non-zeros than {layout.pattern} keeps, so it can only be "
                'saved with format="dense": its recipe does not prune what it promises; repair that.'
            )


def _without_aliases(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Drop tensors that are another one by a second name (tied weights); return them as alias to kept name."""
    seen: dict[tuple[Any, ...], str] = {}
    shared: dict[str, str] = {}
    for name, tensor in list(tensors.items()):
        kept = seen.setdefault(memory_of(tensor), name)
        if kept != name:
            shared[name] = kept
            del tensors[name]
    return shared


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """What is written from where it lies may not overlap, says safetensors; all else is copied on the way."""
    lying = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu" and tensor.is_contiguous()}
    in_order = sorted((name for name in lying if lying[name].numel()), key=lambda name: lying[name].data_ptr())
    for first, second in pairwise(in_order):
        if lying[second].data_ptr() < lying[first].data_ptr() + lying[first].nbytes:
            raise ValueError(
                f"{first} and {second} overlap in memory without being one tensor, which a file cannot express: give one of them "
                "memory of its own (its clone) before saving."
            )


# ---- how it is written ----


def check_target(folder: Path, format: str, shard_bytes: int) -> None:
    """What every writer of a folder is asked for, checked before anything is read."""
    if format not in ("dense", "packed"):
        raise ValueError(f'format is "dense" or "packed", got {format!r}.')
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes counts bytes from 1, got {shard_bytes!r}.")
    if folder.is_file():
        raise ValueError(f"{folder} is a file; what is written is a folder.")


def write_folder(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    layouts: Mapping[str, Layout],
    format: str,
    shard_bytes: int,
    *,
    recipe: Any,
    shared: Mapping[str, str],
) -> None:
    """Write tensors as they come, with one shard of them in memory at a time, and sparsity.json."""
    if format == "packed":
        _check_packable(layouts)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    _write_shards(folder, _stored(tensors, layouts) if format == "packed" else tensors, shard_bytes)
    facts = {"version": VERSION, "format": format, "recipe": recipe, "shared": shared}
    facts["tensors"] = {name: asdict(layout) for name, layout in layouts.items()}
    replace_text(folder / SPARSITY, json.dumps(facts, indent=1))


def _check_packable(layouts: Mapping[str, Layout]) -> None:
    for name, layout in layouts.items():
        if layout.dtype.startswith("float8"):  # torch cannot gather and scatter them
            raise ValueError(f'{name} is {layout.dtype}, which cannot be packed: use format="dense", or store it in 16 bit.')


def _stored(tensors: Iterable[tuple[str, Tensor]], layouts: Mapping[str, Layout]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the packed format stores them."""
    for name, tensor in tensors:
        if name in layouts:
            values, indices = pack_tensor(tensor, layouts[name])
            yield name + VALUES, values
            yield name + INDICES, indices
        else:
            yield name, tensor


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], limit: int) -> None:
    """One file, or several and their index. Nothing is replaced before all is written; files of an earlier save that would be
    read beside the new ones go away."""
    with _temporary_files() as written:
        contents: list[dict[str, int]] = []
        for shard in _shards(tensors, limit):
            written.append(folder / f".{WEIGHTS}.{len(written)}.{os.getpid()}.tmp")
            save_file(shard, written[-1], {"format": "pt"})
            contents.append({name: tensor.nbytes for name, tensor in shard.items()})
            shard.clear()  # the next shard is filled while this name still holds the present one
        count = len(written)
        names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for described in (INDEX, SPARSITY):  # a kill from here on leaves what cannot be read, not old and new side by side
            (folder / described).unlink(missing_ok=True)
        for file, name in zip(written, names, strict=True):
            os.replace(file, folder / name)
    for old in folder.glob("model*.safetensors"):
        if old.name not in names and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()
    if count == 1:
        return
    weight_map = {tensor: name for name, content in zip(names, contents, strict=True) for tensor in content}
    total = sum(size for content in contents for size in content.values())
    replace_text(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in the order they come, as many together as the limit allows."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if filled and filled + tensor.nbytes > limit:
            yield shard
            shard = dict[str, Tensor]()
            filled = 0
        shard[name] = tensor
        filled += tensor.nbytes
    yield shard


def replace_text(target: Path, text: str) -> None:
    """Put a file in place in one step: a reader sees the old one or the new one."""
    with _temporary_files() as written:
        written.append(target.with_name(f".{target.name}.{os.getpid()}.tmp"))
        written[0].write_text(text)
        os.replace(written[0], target)


def _remove_leftovers(folder: Path) -> None:
    """Temporary files of processes that were killed while they saved."""
    for file in folder.glob(".*.tmp"):
        found = re.fullmatch(TEMPORARY, file.name)
        if found and not _is_another_that_runs(int(found[1])):
            file.unlink(missing_ok=True)


def _is_another_that_runs(process: int) -> bool:
    if os.name != "posix":
        return True  # there os.kill would end it
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)  # asks only
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


@contextmanager
def _temporary_files() -> Iterator[list[Path]]:
    """A list for files to write; those that were not put in their place are removed at the end."""
    written: list[Path] = []
    try:
        yield written
    finally:
        for file in written:
            file.unlink(missing_ok=True)
