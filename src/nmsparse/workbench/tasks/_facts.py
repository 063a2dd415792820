"""What a model must know about the data that it is built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["language", "images", "sentences", "translation"]


@dataclass(frozen=True)
class Facts:
    """Sizes and special token ids. Fields that do not concern a kind of task are 0."""

    kind: Kind
    vocabulary: int = 0
    """Token ids are 0 .. vocabulary - 1; source and target of a translation share one vocabulary."""
    length: int = 0
    """Most tokens in a sequence."""
    classes: int = 0
    """1 means regression: the label is a number."""
    channels: int = 0
    """Of an image: 1 or 3."""
    side: int = 0
    """Height and width of an image."""
    padding: int = 0
    """Token id that fills short sequences (sentences, translation)."""
    begin: int = 0
    """Token id that a sequence starts with (sentences), or that starts the decoder (translation)."""
    end: int = 0
    """Token id that a sequence ends with (sentences, translation)."""


class SpecialTokens(Protocol):
    """What every tokenizer knows beside its words."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def padding(self) -> int: ...

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...
