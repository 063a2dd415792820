"""The one notation of the library: ``"N:M"`` keeps N of every M consecutive entries."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_GROUP = 1024
"""Largest M. The mask maths works for any size; this bound only catches typing mistakes."""


@dataclass(frozen=True, init=False)
class Pattern:
    """Keep ``n`` of every ``m`` consecutive entries.

    >>> Pattern("2:4").density
    0.5
    >>> Pattern(1, 8)
    Pattern("1:8")
    """

    n: int
    m: int

    def __init__(self, spec: str | Pattern | int, m: int | None = None) -> None:
        n, m = _parse(spec, m)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "m", m)

    @property
    def density(self) -> float:
        return self.n / self.m

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def __repr__(self) -> str:
        return f'Pattern("{self}")'


def _parse(spec: object, m: object) -> tuple[int, int]:
    if isinstance(spec, Pattern) and m is None:
        return spec.n, spec.m
    if isinstance(spec, str) and m is None:
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", spec)
        if match is None:
            raise ValueError(
                f'{spec!r} is not a pattern: write two whole numbers with a colon, such as "2:4" (keep 2 of every 4).'
            )
        n, size = int(match[1]), int(match[2])
    elif type(spec) is int and type(m) is int:
        n, size = spec, m
    else:
        raise TypeError(
            f'a pattern is written as a string such as "2:4", got {spec!r}' + (f" and {m!r}." if m is not None else ".")
        )
    if not 1 <= n <= size:
        raise ValueError(f'pattern "{n}:{size}" keeps {n} of {size}: it must keep at least 1 and at most all of them.')
    if size > MAX_GROUP:
        raise ValueError(f'pattern "{n}:{size}" has groups of {size}; the largest group is {MAX_GROUP}.')
    return n, size
