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

from nmsparse._saved import put_together, taken_apart

LARGEST = 1 << 34
"""Bytes that a compressed state may unfold to."""


def to_json(value: Any) -> dict[str, Any]:
    """Nested dicts, lists and tuples of plain values and tensors."""
    plain, tensors = taken_apart(value, _on_host)
    blob = zlib.compress(save(tensors), level=1) if tensors else b""
    return {"values": plain, "tensors": base64.b64encode(blob).decode("ascii")}


def from_json(saved: Any) -> Any:
    """Undo :func:`to_json`; anybody may have written the file."""
    try:
        blob = base64.b64decode(saved["tensors"], validate=True)
        tensors = load(_inflate(blob)) if blob else {}
        return put_together(saved["values"], tensors)
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


def _on_host(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "full_tensor"):  # gathering takes every rank, but only one writes trainer_state.json
        raise NotImplementedError(
            "this recipe keeps sharded tensors, which trainer_state.json cannot take: save the run with "
            "torch.distributed.checkpoint, or train under DDP."
        )
    return tensor.detach().to("cpu").contiguous()
