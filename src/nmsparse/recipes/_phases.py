"""The three phases of progressive recipes: dense warm-up, an active span, and a fixed end at the final pattern."""

from __future__ import annotations

from dataclasses import dataclass

from nmsparse.recipes._base import Clock, share_of


@dataclass(frozen=True)
class Phases:
    """Shares of the run: dense before ``dense``, final in the last ``fixed``."""

    dense: float
    fixed: float

    def check(self) -> None:
        for name in ("dense", "fixed"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share of the run, at least 0 and below 1, got {getattr(self, name)!r}.")
        if self.dense + self.fixed >= 1:
            raise ValueError(f"dense = {self.dense} and fixed = {self.fixed} leave nothing of the run in between.")

    def start(self, clock: Clock) -> float:
        return self.dense * clock.total

    def end(self, clock: Clock) -> float:
        return (1 - self.fixed) * clock.total

    def is_dense(self, clock: Clock) -> bool:
        return clock.step < share_of(self.dense, clock)

    def is_final(self, clock: Clock) -> bool:
        return clock.step >= share_of(1 - self.fixed, clock)
