"""Results that take long to compute, kept as safetensors in the cache folder; nothing is written beside the user's data."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nmsparse.kernels import cache_folder
from nmsparse.workbench.datasets._files import Source

logger = logging.getLogger("nmsparse")
FORMAT = 1


def cached(name: str, sources: Iterable[Source], build: Callable[[], dict[str, Tensor]], extra: str = "") -> dict[str, Tensor]:
    """What ``build`` returns; from the cache where the same files (path, size, time) and the same ``extra`` were met before."""
    stamps = [(str(source.file.resolve()), source.file.stat().st_size, source.file.stat().st_mtime_ns) for source in sources]
    key = hashlib.sha256(json.dumps([FORMAT, stamps, extra]).encode()).hexdigest()[:16]
    file = cache_folder() / "data" / f"{name}-{key}.safetensors"
    found = _read(file)
    if found is None:
        logger.info("preparing %s; the result is kept in %s", name, file)
        found = build()
        _write(file, found)
    return found


def _read(file: Path) -> dict[str, Tensor] | None:
    try:
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            saved = (opened.metadata() or {}).get("checksum")
        if saved != _checksum(tensors):
            raise ValueError("its checksum is wrong")
    except (OSError, ValueError, SafetensorError) as error:
        warnings.warn(f"{file} is ignored ({type(error).__name__}: {error}); it is computed again and replaced.", stacklevel=3)
        return None
    return tensors


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    """Replace the file in one step. A cache that cannot be written costs time, not the run."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {"checksum": _checksum(tensors)})
        os.replace(temporary, file)
    except (OSError, SafetensorError) as error:
        logger.warning("%s could not be written (%s); it will be computed again next time", file, error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _checksum(tensors: dict[str, Tensor]) -> str:
    """safetensors checks its header only; this finds bytes that changed in the data."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        flat = tensors[name].contiguous().view(-1)
        value = zlib.crc32(flat.view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
