"""Channel permutation search (Pool and Yu, NeurIPS 2021): order the columns of a weight so that N:M keeps more of it.

Columns are dealt into stripes of M. For every pair of stripes all ways to split their 2M columns into two are scored
(35 for M = 4); the best exchanges that do not overlap are applied, until none helps.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from time import monotonic

import torch
from torch import Tensor

from nmsparse.functional._groups import check_divisible
from nmsparse.functional._masks import magnitude_mask
from nmsparse.pattern import Pattern

WORTHWHILE = 1e-9
"""Relative gains below this are rounding, not progress."""
ELEMENTS_AT_ONCE = 1 << 24
LARGEST_PERMUTED_GROUP = 8
"""Largest M that is searched: two stripes of 8 split in 6,435 ways, two of 16 in 300 million."""


def channel_permutation(
    weight: Tensor, pattern: str | Pattern, *, escapes: int = 0, seed: int = 0, time_limit: float = 120.0
) -> Tensor:
    """Column order (int64) under which ``weight`` (rows, columns) keeps more magnitude than as it is; never less.

    ``escapes`` random exchanges are tried after the first optimum, each followed by a new descent. The search stops
    after ``time_limit`` seconds with the best order found so far.
    """
    pattern = Pattern(pattern)
    check_divisible(weight.shape, pattern, 1)
    magnitude = weight.detach().abs().float()
    deadline = monotonic() + time_limit
    order = torch.arange(weight.shape[1], device=weight.device)
    if pattern.n == pattern.m or weight.shape[1] < 2 * pattern.m or not weight.numel():
        return order
    if pattern.m > LARGEST_PERMUTED_GROUP:
        raise ValueError(
            f'pattern "{pattern}" has too many ways to exchange columns between groups of {pattern.m}; the search goes up '
            f"to groups of {LARGEST_PERMUTED_GROUP}."
        )
    best = order = _descend(magnitude, order, pattern, deadline)
    best_kept = _kept(magnitude[:, best], pattern)
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(escapes):
        if monotonic() > deadline:
            break
        a, b = torch.randint(len(order), (2,), generator=generator, device="cpu").tolist()
        order = best.clone()
        order[[a, b]] = order[[b, a]]
        order = _descend(magnitude, order, pattern, deadline)
        kept = _kept(magnitude[:, order], pattern)
        if kept > best_kept * (1 + WORTHWHILE):
            best, best_kept = order, kept
    return best


def permutation_efficacy(weight: Tensor, permutation: Tensor, pattern: str | Pattern) -> float:
    """Share of the magnitude that N:M loses against free pruning of each row, and that the permutation wins back."""
    pattern = Pattern(pattern)
    magnitude = weight.detach().abs().double()
    plain = _kept(magnitude, pattern)
    free = float(magnitude.topk(weight.shape[1] * pattern.n // pattern.m, dim=1).values.sum())
    return (_kept(magnitude[:, permutation], pattern) - plain) / (free - plain) if free > plain else 0.0


def _kept(magnitude: Tensor, pattern: Pattern) -> float:
    return float((magnitude.double() * magnitude_mask(magnitude, pattern)).sum())


@cache
def _splits(m: int) -> tuple[tuple[int, ...], ...]:
    """Every way to deal 2m columns into two unordered stripes, the present one first."""
    everything = set(range(2 * m))
    firsts = [(0, *rest) for rest in combinations(range(1, 2 * m), m - 1)]
    return tuple((*first, *sorted(everything - set(first))) for first in firsts)


def _descend(magnitude: Tensor, order: Tensor, pattern: Pattern, deadline: float) -> Tensor:
    """Apply the best exchanges between pairs of stripes until none gains."""
    stripes = order.view(-1, pattern.m).clone()
    pairs = torch.combinations(torch.arange(len(stripes), device=order.device))
    gain, split = _score(magnitude, stripes, pairs, pattern, deadline)
    floor = WORTHWHILE * float(magnitude.sum())
    while True:
        touched = _apply_best(stripes, pairs, gain, split, floor, pattern.m)
        if not touched.any() or monotonic() >= deadline:  # what was scored in time is applied
            break
        stale = touched[pairs].any(1)
        gain[stale], split[stale] = _score(magnitude, stripes, pairs[stale], pattern, deadline)
    return stripes.flatten()


def _score(magnitude: Tensor, stripes: Tensor, pairs: Tensor, pattern: Pattern, deadline: float) -> tuple[Tensor, Tensor]:
    """For each pair of stripes the gain of its best split over the present one, and which split it is; pairs that there is no
    time for gain nothing."""
    splits = torch.tensor(_splits(pattern.m), device=stripes.device)
    gains: list[Tensor] = []
    choices: list[Tensor] = []
    for part in pairs.split(max(1, ELEMENTS_AT_ONCE // (magnitude.shape[0] * splits.numel()))):
        if monotonic() >= deadline:
            gains.append(magnitude.new_zeros(len(part)))
            choices.append(torch.zeros(len(part), dtype=torch.long, device=part.device))
            continue
        columns = stripes[part].flatten(1)[:, splits]  # pairs, splits, 2m
        dealt = magnitude[:, columns].unflatten(-1, (2, pattern.m))
        kept = dealt.topk(pattern.n, dim=-1).values.sum((0, -1, -2))
        best = kept.max(1)
        gains.append(best.values - kept[:, 0])
        choices.append(best.indices)
    return torch.cat(gains), torch.cat(choices)


def _apply_best(stripes: Tensor, pairs: Tensor, gain: Tensor, split: Tensor, floor: float, m: int) -> Tensor:
    """Greedily apply the largest gains whose stripes are still untouched; return which stripes changed."""
    splits = torch.tensor(_splits(m), device=stripes.device)
    touched = torch.zeros(len(stripes), dtype=torch.bool, device="cpu")
    promising = (gain > floor).nonzero().flatten()
    by_gain = promising[gain[promising].argsort(descending=True)]
    for index, (a, b) in zip(by_gain.tolist(), pairs[by_gain].tolist(), strict=True):
        if touched[a] or touched[b]:
            continue
        dealt = stripes[[a, b]].flatten()[splits[split[index]]]
        stripes[a], stripes[b] = dealt[:m], dealt[m:]
        touched[a] = touched[b] = True
    return touched.to(stripes.device)
