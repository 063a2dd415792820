"""Many short sequences of token ids, stored end to end and padded a batch at a time."""

from __future__ import annotations

from itertools import accumulate, chain

import torch
from torch import Tensor

from nmsparse.workbench.datasets import smallest_type

MULTIPLE = 8
"""Batches are padded to a multiple of this, so that few different shapes occur: each new one costs a compilation."""


class Ragged:
    """Sequences of ids below ``vocabulary``."""

    def __init__(self, sequences: list[list[int]], vocabulary: int) -> None:
        self._tokens = torch.tensor(list(chain.from_iterable(sequences)), dtype=smallest_type(vocabulary))
        ends = torch.tensor([0, *accumulate(map(len, sequences))])
        self._starts, self._lengths = ends[:-1], ends.diff()

    def __len__(self) -> int:
        return len(self._starts)

    def padded(self, indices: Tensor, fill: int, longest: int) -> tuple[Tensor, Tensor]:
        """The chosen sequences as rows of int64, and a mask of what is not ``fill``; never wider than ``longest``."""
        lengths = self._lengths[indices]
        width = min(-(-int(lengths.max()) // MULTIPLE) * MULTIPLE, longest)
        position = torch.arange(width)
        mask = position < lengths[:, None]
        where = (self._starts[indices, None] + position).clamp_max(len(self._tokens) - 1)
        return self._tokens[where].long().masked_fill(~mask, fill), mask
