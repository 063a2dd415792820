"""Language modelling: predict each token of a text from those before it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nmsparse.workbench.datasets import Text
from nmsparse.workbench.tasks._facts import Facts
from nmsparse.workbench.tasks._task import IGNORED, Batch, Outputs, Task, exact, mean


class Windows:
    """A text cut into windows of ``length`` tokens that do not overlap; a shorter rest at the end is left out."""

    def __init__(self, tokens: Tensor, length: int, limit: int | None) -> None:
        count = len(tokens) // length
        self._windows = tokens[: count * length].view(count, length)[:limit]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: list[int]) -> Batch:
        ids = self._windows[torch.tensor(indices)].long()
        return {"input_ids": ids, "labels": ids}  # models shift the labels by themselves


class LanguageTask(Task):
    """Compared by the loss in nats per predicted token."""

    def __init__(self, name: str, text: Text, length: int, limit: int | None) -> None:
        shortest = min(len(text.splits.train), len(text.splits.valid))
        if not 2 <= length <= shortest:
            raise ValueError(f"{name}: length = {length} does not fit; windows have 2 .. {shortest:,} tokens.")
        train, valid = (Windows(part, length, limit) for part in (text.splits.train, text.splits.valid))
        super().__init__(name, Facts("language", vocabulary=text.vocabulary, length=length), train, valid)
        self._is_characters = text.is_characters

    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        return {"loss": exact(outputs.loss) * count, "count": count}

    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        loss = mean(totals, "loss")
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        return {**metrics, "bits_per_character": loss / math.log(2)} if self._is_characters else metrics

    def tokens(self, batch: Batch) -> int:
        return batch["input_ids"].numel()


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
