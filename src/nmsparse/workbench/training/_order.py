"""Which examples an update sees, and with which learning rate: functions of the seed and the step, so resuming needs no state."""

from __future__ import annotations

import math

import torch

from nmsparse.functional import hash_integers


class Order:
    """Every epoch goes through all examples once, each time in another order."""

    def __init__(self, examples: int, batch: int, seed: int) -> None:
        self.examples = examples
        self.batch = batch
        self.seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int, part: int = 0, parts: int = 1) -> list[int]:
        """Examples of one part (micro-batch of a process) of an update."""
        size = self.batch // parts
        start = step * self.batch + part * size
        return [self._at(position) for position in range(start, start + size)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.examples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(hash_integers(self.seed, epoch, 0x0DE))
            self._permutation = torch.randperm(self.examples, generator=generator)
            self._epoch = epoch
        return int(self._permutation[place])


def learning_rate(step: int, steps: int, peak: float, schedule: str, warmup: float) -> float:
    """Linear rise over the warm-up, then cosine or linear fall towards 0, or constant."""
    rise = round(warmup * steps)
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak * (1 - done) if schedule == "linear" else peak
