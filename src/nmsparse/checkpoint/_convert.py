"""A checkpoint in the other format, without a model: dense to packed and back, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nmsparse.checkpoint._files import TensorFiles, read_json
from nmsparse.checkpoint._format import METHOD, VALUES, Layout, packed_config
from nmsparse.checkpoint._save import check_target, replace_text, write_folder
from nmsparse.checkpoint._verify import FLOATS, check_tensor, grouped_dims
from nmsparse.pattern import Pattern

CONFIG = "config.json"
COMPANIONS = (
    CONFIG,
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
)
"""Files beside the weights that transformers and runtimes need; others, which may be large or private, are left."""


@dataclass(frozen=True)
class Converted:
    """What :func:`convert` wrote."""

    source: str
    target: str
    format: str
    sparse: dict[str, str]
    """Names of sparse tensors, to their pattern."""
    copied: list[str]
    """Files that were taken along."""
    bytes_before: int
    bytes_after: int
    """Of the weight files."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    source: str | Path,
    target: str | Path,
    format: Literal["dense", "packed"],
    pattern: str | Pattern | None = None,
    *,
    shard_bytes: int = 5_000_000_000,
) -> Converted:
    """Write a safetensors file or folder again, dense or packed, as :func:`save` would have written it.

    Which tensors are sparse comes from ``sparsity.json`` in the source. With a ``pattern``, every further matrix or convolution
    that obeys it counts: a matrix along its last dim or else its first (GPT-2 stores weights transposed), a convolution along
    its input channels. Names, shapes and every value stay as they are. Configuration and tokenizer files of a folder are copied;
    config.json names the packed format, by which transformers knows it, where the copy is packed.
    All is checked before anything is written. One tensor is read at a time; one shard of the result is held in memory.
    """
    folder = Path(target)
    check_target(folder, format, shard_bytes)
    with TensorFiles(source) as files:
        home = files.path if files.path.is_dir() else files.path.parent
        if folder.resolve() == home.resolve():
            raise ValueError(f"{folder} is where the source lies; give another folder, so that the source stays as it is.")
        names = files.plain_names()
        layouts = _layouts(files, names, None if pattern is None else Pattern(pattern))
        if format == "packed" and not layouts:
            raise ValueError(_nothing_to_pack(files, pattern))
        config = _config(files.path, layouts if format == "packed" else {})
        tensors = ((name, files.dense(name).contiguous()) for name in names)
        write_folder(folder, tensors, layouts, format, shard_bytes, recipe=files.recipe, shared=files.shared)
        copied = list(_copy_companions(files.path, folder))
        if config is not None:
            replace_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        before = sum(shard.stat().st_size for shard in files.shards)
    with TensorFiles(folder) as written:
        after = sum(shard.stat().st_size for shard in written.shards)
    sparse = {name: layout.pattern for name, layout in layouts.items()}
    return Converted(str(source), str(target), format, sparse, copied, before, after)


def _layouts(files: TensorFiles, names: list[str], pattern: Pattern | None) -> dict[str, Layout]:
    """Which tensors are sparse: those that sparsity.json names, and those that obey the pattern."""
    layouts: dict[str, Layout] = {}
    for name in names:
        if name in files.layouts:
            _check_claim(files, name)
            layouts[name] = files.layouts[name]
        elif pattern is not None:
            found = _obeying(files, name, pattern)
            if found is not None:
                layouts[name] = found
    return layouts


def _check_claim(files: TensorFiles, name: str) -> None:
    """What sparsity.json says of a tensor, which goes into the copy, must be true."""
    layout = files.layouts[name]
    stored = files.slice(name + VALUES if files.is_packed(name) else name).get_dtype()
    if FLOATS.get(stored) != layout.dtype:
        raise ValueError(f"{files.path}: {name} is stored as {stored}, sparsity.json says {layout.dtype}.")
    broken = check_tensor(files, name, Pattern(layout.pattern), layout.dim, claimed=True).violations
    if broken:
        raise ValueError(
            f"{files.path}: {broken} groups of {name} have more non-zeros than the {layout.pattern} that sparsity.json claims; "
            "nmsparse verify shows where, and pruning it again repairs it."
        )


def _obeying(files: TensorFiles, name: str, pattern: Pattern) -> Layout | None:
    """How a tensor of which nothing is said obeys the pattern; None for those that do not, and for what is no weight."""
    found = files.slice(name)
    shape = tuple(found.get_shape())
    if found.get_dtype() not in FLOATS or 0 in shape:
        return None
    for dim in grouped_dims(shape, pattern):
        if check_tensor(files, name, pattern, dim, claimed=False).violations == 0:
            return Layout(str(pattern), dim, shape, FLOATS[found.get_dtype()])
    return None


def _nothing_to_pack(files: TensorFiles, pattern: str | Pattern | None) -> str:
    if pattern is None:
        return f'{files.path} does not say which of its tensors are sparse: give their pattern, such as "2:4".'
    return (
        f"no tensor of {files.path} obeys {pattern}, so there is nothing to pack; nmsparse verify shows how far they are from it."
    )


def _config(source: Path, packed: Mapping[str, Layout]) -> dict[str, Any] | None:
    """The source's config.json, which names our format exactly where the copy is packed; None where it stays as it is."""
    if not (source / CONFIG).is_file():
        return None
    config = read_json(source / CONFIG)
    if not isinstance(config, dict):
        return None
    present = config.get("quantization_config")
    is_ours = isinstance(present, dict) and present.get("quant_method") == METHOD
    if present is not None and not is_ours:
        return None
    if packed:
        return {**config, "quantization_config": packed_config(packed)}
    return {name: value for name, value in config.items() if name != "quantization_config"} if is_ours else None


def _copy_companions(source: Path, target: Path) -> Iterator[str]:
    if source.is_dir():
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
                yield name
