"""Read a model back: dense or packed, into a plain or a sparsified model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nmsparse.checkpoint._files import TensorFiles
from nmsparse.checkpoint._wrapped import own_tensors, unwrapped
from nmsparse.nn import sparse_modules, unpack_all_


@torch.no_grad()
def load(model: nn.Module, path: str | Path) -> nn.Module:
    """Read what :func:`save` wrote (or any safetensors checkpoint with this model's keys) into a model; return it.

    Tensors are read one at a time from memory-mapped files. Names and shapes are checked before anything is written. What
    ``accelerate_`` packed is plain again afterwards: the new weights may break its pattern.
    """
    unpack_all_(model)
    own = own_tensors(unwrapped(model))
    with TensorFiles(path) as files:
        sources = _match(own, files)
        for name, source in sources.items():
            own[name].copy_(files.dense(source).to(own[name].dtype))
    _refresh(model)
    return model


def _match(own: dict[str, Tensor], files: TensorFiles) -> dict[str, str]:
    """For each tensor of the model, the name under which the checkpoint has it."""
    present = set(files.plain_names())
    sources = {name: files.shared.get(name, name) for name in own}
    missing = sorted(name for name, source in sources.items() if source not in present)
    odd = sorted(present - set(sources.values()))
    if missing or odd:
        what = [f"lacks {', '.join(missing[:4])}"] if missing else []
        what += [f"has {', '.join(odd[:4])} besides"] if odd else []
        raise ValueError(f"{files.path} does not fit this {len(own)}-tensor model: it {' and '.join(what)}.")
    for name, source in sources.items():
        shape = files.shape(source)
        if tuple(own[name].shape) != shape:
            raise ValueError(
                f"{files.path}: {name} has shape {shape}, the model's is {tuple(own[name].shape)}; nothing was loaded."
            )
    return sources


def _refresh(model: nn.Module) -> None:
    """A sparsified model may hold packed copies of what was just replaced."""
    for _, module in sparse_modules(model):
        module._nmsparse.refresh(module.weight)
