"""Translation by an encoder and a decoder: predict each token of the target from the source and the target's earlier tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nmsparse.workbench.datasets import Pair, Splits
from nmsparse.workbench.tasks._facts import Facts, SpecialTokens
from nmsparse.workbench.tasks._ragged import Ragged
from nmsparse.workbench.tasks._task import IGNORED, Batch, Outputs, Task, classified, mean


class PairTokenizer(SpecialTokens, Protocol):
    """Turns texts of both sides into ids of one vocabulary."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        ...


class TranslationExamples:
    """Sources and targets, cut to ``length`` tokens with the end; the padding of targets is -100, so that it is not learned."""

    def __init__(self, pairs: list[Pair], tokenizer: PairTokenizer, length: int) -> None:
        self._source, self._target = (
            Ragged([[*ids[: length - 1], tokenizer.end] for ids in tokenizer.encode(list(side))], tokenizer.vocabulary)
            for side in (
                [pair.source for pair in pairs],
                [pair.target for pair in pairs],
            )
        )
        self._padding, self._length = tokenizer.padding, length

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        ids, mask = self._source.padded(chosen, self._padding, self._length)
        labels, _ = self._target.padded(chosen, IGNORED, self._length)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


class TranslationTask(Task):
    """Compared by the loss per target token; accuracy is that of the next token after the true ones."""

    def __init__(self, name: str, pairs: Splits[list[Pair]], tokenizer: PairTokenizer, length: int, limit: int | None) -> None:
        if length < 2:
            raise ValueError(f"{name}: length = {length} is too short; a text takes at least one token and the end.")
        train, valid = (TranslationExamples(part[:limit], tokenizer, length) for part in (pairs.train, pairs.valid))
        facts = Facts(
            "translation",
            vocabulary=tokenizer.vocabulary,
            length=length,
            padding=tokenizer.padding,
            begin=tokenizer.begin,
            end=tokenizer.end,
        )
        super().__init__(name, facts, train, valid)

    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        return classified(outputs, batch["labels"])

    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": mean(totals, "loss"), "accuracy": mean(totals, "correct")}

    def tokens(self, batch: Batch) -> int:
        return batch["input_ids"].numel() + batch["labels"].numel()
