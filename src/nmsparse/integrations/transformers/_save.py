"""A folder that ``from_pretrained`` reads: packed weights and the model's config.json."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from nmsparse.checkpoint import TensorFiles, packed_config, save, unwrapped
from nmsparse.pattern import Pattern


def save_packed(
    model: nn.Module, folder: str | Path, *, pattern: str | Pattern | None = None, shard_bytes: int = 5_000_000_000
) -> None:
    """Write a transformers model as ``nmsparse.save(format="packed")`` does, with a config.json that names the format.

    The model, which torch.compile may have wrapped, is not changed. A frozen one has no recipe any more: give its ``pattern``.
    Reading needs ``import nmsparse.integrations.transformers``, then ``AutoModel.from_pretrained(folder)`` or that of any other
    class. Add the tokenizer with its own ``save_pretrained``.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"save_packed takes a transformers model, got {type(model).__name__}: unwrap it, or use nmsparse.save.")
    save(model, folder, format="packed", pattern=pattern, shard_bytes=shard_bytes)
    with TensorFiles(folder) as files:
        packed = packed_config(files.layouts)
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.quantization_config = packed
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
