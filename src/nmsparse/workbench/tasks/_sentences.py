"""Classification of a sentence or of two, or a score for two sentences."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from nmsparse.workbench.datasets import Sentence, Splits
from nmsparse.workbench.tasks._facts import Facts, SpecialTokens
from nmsparse.workbench.tasks._ragged import Ragged
from nmsparse.workbench.tasks._task import Batch, Outputs, Task, exact, mean

SHORTEST = 4
"""Tokens that [CLS], [SEP] and at least one word of each sentence take."""


class SentenceTokenizer(SpecialTokens, Protocol):
    """Turns sentences into ids between a begin and an end; BERT's does, and the toy tasks' own."""

    def encode(self, sentences: list[Sentence], length: int) -> list[tuple[list[int], int]]:
        """Ids of each example, at most ``length``, and the position where its second sentence starts."""
        ...


class SentenceExamples:
    """Token ids with what BERT wants beside them: which tokens are padding, and which belong to the second sentence."""

    def __init__(self, sentences: list[Sentence], tokenizer: SentenceTokenizer, length: int, labels: torch.dtype) -> None:
        encoded = tokenizer.encode(sentences, length)
        self._rows = Ragged([ids for ids, _ in encoded], tokenizer.vocabulary)
        self._seconds = torch.tensor([second for _, second in encoded])
        self._labels = torch.tensor([sentence.label for sentence in sentences], dtype=labels)
        self._padding, self._length = tokenizer.padding, length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        ids, mask = self._rows.padded(chosen, self._padding, self._length)
        is_second = torch.arange(ids.shape[1]) >= self._seconds[chosen, None]
        return {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "token_type_ids": (is_second & mask).long(),
            "labels": self._labels[chosen],
        }


class SentenceTask(Task):
    """What classification and scoring share."""

    higher_is_better = True

    def __init__(
        self,
        name: str,
        sentences: Splits[list[Sentence]],
        tokenizer: SentenceTokenizer,
        classes: int,
        length: int,
        limit: int | None,
    ) -> None:
        if length < SHORTEST:
            raise ValueError(f"{name}: length = {length} is too short; sentences take at least {SHORTEST} tokens.")
        labels = torch.float32 if classes == 1 else torch.long
        train, valid = (SentenceExamples(part[:limit], tokenizer, length, labels) for part in (sentences.train, sentences.valid))
        facts = Facts(
            "sentences",
            vocabulary=tokenizer.vocabulary,
            length=length,
            classes=classes,
            padding=tokenizer.padding,
            begin=tokenizer.begin,
            end=tokenizer.end,
        )
        super().__init__(name, facts, train, valid)

    def tokens(self, batch: Batch) -> int:
        return batch["input_ids"].numel()


class ClassificationTask(SentenceTask):
    """Compared by accuracy, or by the headline given: "f1" and "matthews" are for two classes, of which 1 is the positive."""

    def __init__(
        self,
        name: str,
        sentences: Splits[list[Sentence]],
        tokenizer: SentenceTokenizer,
        length: int,
        limit: int | None,
        classes: int = 2,
        headline: str = "accuracy",
        also: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, sentences, tokenizer, classes, length, limit)
        self.headline = headline
        self._metrics = (headline, *also)

    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        labels = batch["labels"]
        count = torch.tensor(len(labels), device=labels.device)
        predicted = outputs.logits.argmax(-1)
        return {
            "loss": exact(outputs.loss) * count,
            "count": count,
            "correct": (predicted == labels).sum(),
            "true_positive": ((predicted == 1) & (labels == 1)).sum(),
            "predicted_positive": (predicted == 1).sum(),
            "positive": (labels == 1).sum(),
        }

    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        numbers = {name: float(total) for name, total in totals.items()}
        known = {"accuracy": _accuracy, "f1": _f1, "matthews": _matthews}
        return {"loss": mean(totals, "loss"), **{metric: known[metric](numbers) for metric in self._metrics}}


class ScoreTask(SentenceTask):
    """Regression, compared by Pearson's correlation of scores and predictions."""

    headline = "pearson"

    def __init__(
        self, name: str, sentences: Splits[list[Sentence]], tokenizer: SentenceTokenizer, length: int, limit: int | None
    ) -> None:
        super().__init__(name, sentences, tokenizer, 1, length, limit)

    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        x, y = exact(outputs.logits).view(-1), exact(batch["labels"])
        count = torch.tensor(len(y), device=y.device)
        return {
            "loss": exact(outputs.loss) * count,
            "count": count,
            "x": x.sum(),
            "y": y.sum(),
            "xx": x.square().sum(),
            "yy": y.square().sum(),
            "xy": (x * y).sum(),
        }

    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": mean(totals, "loss"), "pearson": _pearson({name: float(total) for name, total in totals.items()})}


def _accuracy(totals: dict[str, float]) -> float:
    return _ratio(totals["correct"], totals["count"])


def _f1(totals: dict[str, float]) -> float:
    return _ratio(2 * totals["true_positive"], totals["predicted_positive"] + totals["positive"])


def _matthews(totals: dict[str, float]) -> float:
    """Correlation of two binary variables; 0 where one of them does not vary."""
    count, predicted, positive = totals["count"], totals["predicted_positive"], totals["positive"]
    spread = math.sqrt(predicted * (count - predicted) * positive * (count - positive))
    return _ratio(totals["true_positive"] * count - predicted * positive, spread)


def _pearson(totals: dict[str, float]) -> float:
    """Correlation; 0 where predictions or scores do not vary."""
    count, x, y = totals["count"], totals["x"], totals["y"]
    variances = (count * totals["xx"] - x * x) * (count * totals["yy"] - y * y)
    return _ratio(count * totals["xy"] - x * y, math.sqrt(variances) if variances > 0 else 0.0)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
