"""The bundled text (tiny Shakespeare, public domain), as characters."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor


@dataclass(frozen=True)
class CharacterText:
    """A text as integers, split into a training part and the last tenth for validation."""

    vocabulary: str
    train: Tensor
    valid: Tensor

    def batch(self, split: str, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows and the same windows one character on: two (size, length) tensors."""
        data = self.train if split == "train" else self.valid
        starts = torch.randint(len(data) - length, (size,), generator=generator)
        windows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


def embedded_text() -> CharacterText:
    """Tiny Shakespeare: 1,115,394 characters, 65 different ones."""
    packed = files("nmsparse.workbench").joinpath("data/tinyshakespeare.txt.xz").read_bytes()
    text = lzma.decompress(packed).decode()
    vocabulary = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(vocabulary)}
    codes = torch.tensor([index[character] for character in text])
    cut = len(codes) * 9 // 10
    return CharacterText(vocabulary, codes[:cut], codes[cut:])
