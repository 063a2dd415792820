"""The plain forms that every reader returns: a training part and a validation part of something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Splits(Generic[T]):
    """What is trained on, and what is validated on. Test sets are not read."""

    train: T
    valid: T


@dataclass(frozen=True)
class Images:
    """Pixels as bytes (count, channels, side, side), and one label each."""

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Text:
    """A long text as token ids, in the smallest type that holds them."""

    splits: Splits[Tensor]
    vocabulary: int
    is_characters: bool
    """Whether a token is a character or a byte, so that bits per character can be told."""


class Sentence(NamedTuple):
    """A sentence, or two, with a class or a score."""

    first: str
    second: str | None
    label: float


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def smallest_type(vocabulary: int) -> torch.dtype:
    """The smallest integer type for ids below ``vocabulary``: a text of 10^8 tokens should not take 8 bytes for each."""
    return torch.uint8 if vocabulary <= 1 << 8 else torch.int16 if vocabulary <= 1 << 15 else torch.int32


def bytes_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
