"""What every task has: examples for training and validation, facts for the model, and how outputs are measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from nmsparse.workbench.tasks._facts import Facts

Batch = dict[str, Tensor]
"""Keyword arguments of a model's forward, "labels" among them."""

IGNORED = -100
"""Label of padding: transformers' losses, and torch's cross entropy, leave it out."""


class Examples(Protocol):
    """A map-style data set that collates by itself.

    A DataLoader calls ``__getitems__`` with the indices of a batch; give it ``collate_fn=lambda batch: batch``.
    """

    def __len__(self) -> int: ...

    def __getitems__(self, indices: list[int]) -> Batch: ...


class Outputs(Protocol):
    """What a model returns: the mean loss over its labels, and the logits."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def logits(self) -> Tensor: ...


class Task(ABC):
    """Something to learn. Metrics come from sums over batches, so that batches, and ranks, of any size can be added up."""

    unit: str = "tokens"
    """What throughput counts."""
    headline: str = "loss"
    """The metric that users compare."""
    higher_is_better: bool = False
    """Whether more of the headline is better."""

    def __init__(self, name: str, facts: Facts, train: Examples, valid: Examples) -> None:
        self.name = name
        self.facts = facts
        self.train = train
        self.valid = valid

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A training batch, varied at random; here: as it is. ``generator`` is a CPU generator, the batch may be elsewhere."""
        return batch

    @abstractmethod
    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Sums over one batch, as float64 or int64 tensors that are added up over batches and ranks."""

    @abstractmethod
    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Metrics from the added sums: always "loss", and the headline."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """How many units of work a batch is: its tokens or its images.

        Padding counts: it is computed too, and to count without it the CPU would have to wait for the GPU.
        """


def exact(tensor: Tensor) -> Tensor:
    """A tensor in which sums over a whole data set keep their digits: float64, or float32 on devices that lack it."""
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def mean(totals: dict[str, Tensor], name: str) -> float:
    """A sum divided by the sum "count"; NaN where nothing was counted."""
    count = float(totals["count"])
    return float(totals[name]) / count if count else float("nan")


def classified(outputs: Outputs, labels: Tensor) -> dict[str, Tensor]:
    """Sums of the loss and of right answers over all labels that count."""
    count = (labels != IGNORED).sum()
    right = (outputs.logits.argmax(-1) == labels).sum()
    return {"loss": exact(outputs.loss) * count, "correct": right, "count": count}
