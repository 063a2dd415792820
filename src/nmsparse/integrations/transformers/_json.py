"""The state of a run as JSON: plain values as they are, all tensors in one compressed safetensors blob.

The Trainer hands a callback neither the folder it saves to nor the one it resumes from, only trainer_state.json; so tensors
travel inside it. Masks take one bit per weight before compression: some 14 MB of text for BERT-base. Recipes whose masks are a
function of the weights have next to none.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

TENSOR, TUPLE = "__tensor__", "__tuple__"
LARGEST = 1 << 34
"""Bytes that a compressed state may unfold to."""


def to_json(value: Any) -> dict[str, Any]:
    """Nested dicts, lists and tuples of plain values and tensors."""
    tensors: dict[str, Tensor] = {}
    plain = _flatten(value, tensors)
    blob = zlib.compress(save(tensors), level=1) if tensors else b""
    return {"values": plain, "tensors": base64.b64encode(blob).decode("ascii")}


def from_json(saved: Any) -> Any:
    """Undo :func:`to_json`; anybody may have written the file."""
    try:
        blob = base64.b64decode(saved["tensors"], validate=True)
        tensors = load(_inflate(blob)) if blob else {}
        return _unflatten(saved["values"], tensors)
    except (KeyError, TypeError, ValueError, zlib.error, SafetensorError) as error:
        raise ValueError(
            f"the state of SparsityCallback in trainer_state.json is damaged ({type(error).__name__}: {error}): resume from "
            "another checkpoint."
        ) from error


def _inflate(blob: bytes) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(blob, LARGEST)
    if inflater.unconsumed_tail:
        raise ValueError(f"its tensors take more than {LARGEST >> 30} GiB")
    return data


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):  # gathering takes every rank, but only one writes trainer_state.json
            raise NotImplementedError(
                "this recipe keeps sharded tensors, which trainer_state.json cannot take: save the run with "
                "torch.distributed.checkpoint, or train under DDP."
            )
        key = str(len(tensors))
        tensors[key] = value.detach().to("cpu").contiguous()
        return {TENSOR: key}
    if isinstance(value, dict):
        return {key: _flatten(entry, tensors) for key, entry in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [_flatten(entry, tensors) for entry in value]}
    return [_flatten(entry, tensors) for entry in value] if isinstance(value, list) else value


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        if set(value) == {TUPLE}:
            return tuple(_unflatten(entry, tensors) for entry in value[TUPLE])
        return {key: _unflatten(entry, tensors) for key, entry in value.items()}
    return [_unflatten(entry, tensors) for entry in value] if isinstance(value, list) else value
