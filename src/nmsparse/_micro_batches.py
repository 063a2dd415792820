"""Random numbers of micro-batches: each draws its own, whatever the number of ranks, and again the same when recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nmsparse.functional import hash_integers, wrap_int32
from nmsparse.nn import Layer, Permuted, RemovedWithSparsity, rank, ranks
from nmsparse.recipes import Recipe


def first_counter(seed: int, step: int) -> int:
    """The random counter of a rank before its first micro-batch of an update.

    Micro-batch i of rank r is number i * ranks + r of the update: two ranks draw what one draws that accumulates the same two.
    """
    return wrap_int32(hash_integers(seed, step, 0) + 1 + rank() - ranks())


class BeforeForward(RemovedWithSparsity):
    """Forward pre-hook of the model: a new micro-batch moves the random counters on.

    Only tensors change here, so a compiler may trace it. Activation checkpointing re-runs blocks, not the model, and
    therefore draws the same numbers again.
    """

    def __init__(self, layers: list[Layer], recipe: Recipe, permuted: Permuted) -> None:
        self.layers = layers
        self.recipe = recipe
        self.permuted = permuted
        self.run: Any = None
        """The Run that the model belongs to, which imports this file."""
        self.was_called = False
        """Gradients come from the model, in Python: nobody has computed them by hand."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy (deepcopy, pickle) of the model belongs to no run."""
        return {**self.__dict__, "run": None}

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and self.run is not None:
            self.run.follow_loaded()
        if not (module.training and torch.is_grad_enabled()):
            return
        self.move_on()

    def move_on(self) -> None:
        """The next micro-batch of this rank: the ranks take turns, so that what is drawn does not depend on their number."""
        if not torch.compiler.is_compiling():
            self.was_called = True
        if self.recipe.is_random:
            torch._foreach_add_([layer.state["counter"] for layer in self.layers], ranks())

    def undo(self) -> None:
        self.permuted.undo_()
