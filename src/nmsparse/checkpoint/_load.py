"""Read a model back: dense or packed, into a plain or a sparsified model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nmsparse.checkpoint._files import TensorFiles
from nmsparse.checkpoint._own import memory_of, own_tensors, unwrapped
from nmsparse.nn import follow_loaded, sparse_modules, unpack_all_


@torch.no_grad()
def load(model: nn.Module, path: str | Path) -> nn.Module:
    """Read what :func:`save` wrote (or any safetensors checkpoint with this model's keys) into a model; return it.

    Tensors are read one at a time from memory-mapped files. Names, shapes and the positions of packed values are checked before
    anything is written. A name that the checkpoint lacks may be that of a weight which the model ties to one that it has. What
    ``accelerate_`` packed is plain again afterwards: the new weights may break its pattern.
    """
    inner = unwrapped(model)
    with TensorFiles(path) as files:
        sources = _match(own_tensors(inner), files)
        unpack_all_(model)
        own = own_tensors(inner)  # unpacking put the parameters back
        for name, source in sources.items():
            own[name].copy_(files.dense(source).to(own[name].dtype))
    _refresh(model)
    return model


def _match(own: dict[str, Tensor], files: TensorFiles) -> dict[str, str]:
    """For each tensor of the model, the name under which the checkpoint has it."""
    present = set(files.plain_names())
    sources = {name: files.shared.get(name, name) for name in own}
    _follow_ties(sources, own, present)
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
        files.check(source)
    return sources


def _follow_ties(sources: dict[str, str], own: dict[str, Tensor], present: set[str]) -> None:
    """Names that the checkpoint lacks take the source of another name of the tensor: transformers writes tied weights once."""
    stored = {memory_of(own[name]): source for name, source in sources.items() if source in present}
    for name, source in sources.items():
        if source not in present:
            sources[name] = stored.get(memory_of(own[name]), source)


def _refresh(model: nn.Module) -> None:
    """A sparsified model may hold packed copies, masks and scales of what was just replaced."""
    for _, module in sparse_modules(model):
        follow_loaded(module)
