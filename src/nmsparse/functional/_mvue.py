"""Minimum-variance unbiased N:M pruning of gradients.

An entry is kept with probability p and then divided by p. Among all choices with sum(p) = N, the variance is least for
p = min(1, c * |x|): entries that reach 1 are kept as they are, the others share what is left in proportion to their size.
One uniform number per group draws the survivors by systematic sampling (evenly spaced points on the cumulated p).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from nmsparse.functional._groups import UNROLLED, computing_dtype, from_groups, magnitude_rank, to_groups
from nmsparse.pattern import Pattern


def _certain(magnitude: Tensor, pattern: Pattern, axis: int) -> tuple[Tensor, Tensor | int]:
    """Which entries have p = 1, and how many slots remain in the group for the others."""
    if pattern.n == 1:
        return torch.zeros_like(magnitude, dtype=torch.bool), 1
    if pattern.n == 2:  # only the largest can be certain, and then it is unique: no sort needed
        largest = magnitude.amax(axis, keepdim=True)
        dominant = 2 * largest > magnitude.sum(axis, keepdim=True)
        few = (magnitude != 0).sum(axis, keepdim=True) <= 2
        return (few & (magnitude != 0)) | (dominant & (magnitude == largest)), torch.where(dominant, 1, 2)
    ordered = magnitude.sort(dim=axis, descending=True).values
    rest = ordered.flip(axis).cumsum(axis).flip(axis).narrow(axis, 0, pattern.n)
    shape = [1] * magnitude.ndim
    shape[axis] = pattern.n
    slots = torch.arange(pattern.n, 0, -1, device=magnitude.device).view(shape)
    fits = slots * ordered.narrow(axis, 0, pattern.n) <= rest
    # the last slot always fits (an entry is never larger than a sum that contains it)
    certain = (~fits).to(torch.int8).cumprod(axis).sum(axis, keepdim=True)
    # with at most N non-zeros all are certain; the rounding of the sums above must not decide
    non_zeros = (magnitude != 0).sum(axis, keepdim=True)
    certain = torch.where(non_zeros <= pattern.n, non_zeros, certain).clamp(max=pattern.n - 1)
    return magnitude_rank(magnitude, axis) < certain, pattern.n - certain


def _shares(x: Tensor, pattern: Pattern, axis: int) -> tuple[Tensor, Tensor, Tensor | int, Tensor]:
    """Certain entries, the magnitudes of the others (0 for certain ones), their slots, and their sum."""
    magnitude = x.abs().to(computing_dtype(x))
    certain, slots = _certain(magnitude, pattern, axis)
    open_ = torch.where(certain, 0, magnitude)
    return certain, open_, slots, open_.sum(axis, keepdim=True)


def mvue_probabilities(x: Tensor, pattern: str | Pattern, dim: int = -1) -> Tensor:
    """The probability with which :func:`mvue` keeps each entry (float32, or float64 for float64 input)."""
    pattern = Pattern(pattern)
    groups, axis = to_groups(x, pattern, dim)
    if pattern.n == pattern.m:
        return torch.ones_like(x, dtype=computing_dtype(x))
    certain, open_, slots, total = _shares(groups, pattern, axis)
    share = slots * open_ / torch.where(total == 0, 1, total)
    return from_groups(torch.where(certain, 1, share), axis)


def _uniforms(groups: Tensor, axis: int, generator: torch.Generator | None, uniform: Tensor | None, per_group: int) -> Tensor:
    """``per_group`` uniforms for each group, group axis kept."""
    shape = list(groups.shape)
    shape[axis] = per_group
    if uniform is None:
        return torch.rand(shape, generator=generator, dtype=computing_dtype(groups), device=groups.device)
    if uniform.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"uniform must hold {per_group} number(s) per group, {torch.Size(shape).numel()} in all, got {uniform.numel()}."
        )
    return uniform.to(computing_dtype(groups)).reshape(shape)


def mvue(
    x: Tensor,
    pattern: str | Pattern,
    dim: int = -1,
    generator: torch.Generator | None = None,
    *,
    uniform: Tensor | None = None,
) -> Tensor:
    """An unbiased sample of ``x`` with at most N non-zeros in every group of M, of least variance; exact for any N:M.

    ``uniform`` (one number in [0, 1) per group, laid out like ``x`` with ``dim`` divided by M) replaces the generator.
    Groups with at most N non-zeros pass unchanged. A group whose magnitudes have no finite sum (a NaN, an infinity, an
    overflow) becomes NaN in its first N entries, so that a loss scaler sees it.
    """
    pattern = Pattern(pattern)
    groups, axis = to_groups(x, pattern, dim)
    if pattern.n == pattern.m:
        return x.clone()
    u = _uniforms(groups, axis, generator, uniform, 1)
    if pattern.n <= 2 and pattern.m <= UNROLLED:
        return from_groups(torch.stack(_sample_entries(groups.unbind(axis), pattern, u.squeeze(axis)), axis), axis)
    certain, open_, slots, total = _shares(groups, pattern, axis)
    upper = open_.cumsum(axis)
    end = upper.narrow(axis, pattern.m - 1, 1)
    upper = slots * (upper / torch.where(end == 0, 1, end))
    points = torch.ceil(upper - u)  # how many of u, u+1, ... lie below each upper edge
    before = torch.cat([torch.zeros_like(points.narrow(axis, 0, 1)), points.narrow(axis, 0, pattern.m - 1)], axis)
    value = torch.copysign(total / slots, groups)
    sampled = torch.where((points > before) & (open_ > 0), value, 0).to(x.dtype)
    out = torch.where(certain, groups, sampled)
    return from_groups(_spread_nan(out, groups, pattern, axis), axis)


def _sample_entries(entries: Sequence[Tensor], pattern: Pattern, u: Tensor) -> list[Tensor]:
    """The same draw for N <= 2, entry by entry: one pass when compiled. ``entries[i]`` is the i-th entry of all groups."""
    magnitudes = [entry.abs().to(computing_dtype(entry)) for entry in entries]
    whole = reduce(torch.add, magnitudes)
    largest = reduce(torch.maximum, magnitudes)
    spacing = whole
    if pattern.n == 2:
        # half of all, but a dominant entry counts for no more than all others together: it fills one spacing, is hit by
        # exactly one point, and the other point falls on the rest
        rest = _sum_without_largest(magnitudes)
        spacing = torch.minimum(rest, (rest + largest) * 0.5)
    reach = spacing.clamp(min=torch.finfo(spacing.dtype).tiny)  # a lone entry still fills something
    uppers = list(accumulate(torch.minimum(magnitude, reach) for magnitude in magnitudes))
    left = torch.zeros_like(whole)
    for i in reversed(range(pattern.m)):  # rounding must not push a point past the last non-zero
        uppers[i] = torch.where(left == 0, torch.inf, uppers[i])
        left = left + magnitudes[i]
    bits = 2.0 ** (23 if u.dtype == torch.float32 else 52)
    points = [u * reach]
    if pattern.n == 2:
        last = (1 + (u * bits).floor() / bits) * reach  # 1 + u is exact
        points = [last - reach, last]  # and so is the difference: the two never fall on one entry
    out = []
    for i, (entry, magnitude) in enumerate(zip(entries, magnitudes, strict=True)):
        hits = [point < uppers[i] if i == 0 else (uppers[i - 1] <= point) & (point < uppers[i]) for point in points]
        is_hit = reduce(torch.logical_or, hits) & (magnitude > 0)
        sampled = torch.where(is_hit, torch.copysign(torch.maximum(magnitude, spacing), entry), 0).to(entry.dtype)
        broken = torch.nan if i < pattern.n else 0.0
        out.append(torch.where(whole.isfinite(), sampled, broken))
    return out


def _sum_without_largest(magnitudes: Sequence[Tensor]) -> Tensor:
    """The sum of all but the largest, without subtracting: pairs pass their smaller members on to the sum."""
    if len(magnitudes) == 4:  # the order in which the kernel adds
        (a, b, c, d) = magnitudes
        return (torch.minimum(a, b) + torch.minimum(c, d)) + torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    rest, largest = torch.zeros_like(magnitudes[0]), magnitudes[0]
    for magnitude in magnitudes[1:]:
        rest, largest = rest + torch.minimum(largest, magnitude), torch.maximum(largest, magnitude)
    return rest


def mvue_approximate(
    x: Tensor,
    pattern: str | Pattern = "2:4",
    dim: int = -1,
    generator: torch.Generator | None = None,
    *,
    uniform: Tensor | None = None,
) -> Tensor:
    """The unbiased estimator that the papers train with: two draws without replacement, each in proportion to ``|x|``.

    For N = 2 only. Its variance is up to twice that of :func:`mvue` (6 % more in total for Gaussian data). ``uniform``
    holds two numbers per group, laid out like ``x`` with ``dim`` of size 2 per group.
    """
    pattern = Pattern(pattern)
    if pattern.n != 2 or pattern.m < 3:
        raise ValueError(
            f'the approximate estimator draws two of at least three entries; pattern "{pattern}" needs mvue instead.'
        )
    groups, axis = to_groups(x, pattern, dim)
    magnitude = groups.abs().to(computing_dtype(x))
    total = magnitude.sum(axis, keepdim=True)
    u = _uniforms(groups, axis, generator, uniform, 2)
    first = _draw(magnitude, u.narrow(axis, 0, 1), axis)
    second = _draw(torch.where(first, 0, magnitude), u.narrow(axis, 1, 1), axis)
    probability = _two_draw_probability(magnitude, total, axis)
    scaled = (groups / torch.where(probability == 0, 1, probability)).to(x.dtype)
    few = (magnitude != 0).sum(axis, keepdim=True) <= 2  # then both are certain: copied, not divided by a rounded 1
    out = torch.where(few, groups, torch.where(first | second, scaled, 0))
    return from_groups(_spread_nan(out, groups, pattern, axis), axis)


def _draw(magnitude: Tensor, u: Tensor, axis: int) -> Tensor:
    """One-hot choice of an entry with probability in proportion to its magnitude; none if all are 0."""
    upper = magnitude.cumsum(axis)
    point = u * upper.narrow(axis, magnitude.shape[axis] - 1, 1)
    above = (point < upper) & (magnitude > 0)
    return above & (above.cumsum(axis) == 1)


def _two_draw_probability(magnitude: Tensor, total: Tensor, axis: int) -> Tensor:
    """``t_i + a_i * sum over j != i of t_j / (S - a_j)`` with t = a / S."""
    first = magnitude / torch.where(total == 0, 1, total)
    # S - a_j as a sum of the others: the difference would cancel where one entry dominates
    others = _sums_without(magnitude, axis)
    ratio = first / torch.where(others == 0, 1, others)
    return first + magnitude * _sums_without(ratio, axis)


def _sums_without(x: Tensor, axis: int) -> Tensor:
    """For each entry, the sum of the others along ``axis``, without subtracting."""
    below = x.cumsum(axis)
    above = x.flip(axis).cumsum(axis).flip(axis)
    zero = torch.zeros_like(x.narrow(axis, 0, 1))
    size = x.shape[axis] - 1
    return torch.cat([zero, below.narrow(axis, 0, size)], axis) + torch.cat([above.narrow(axis, 1, size), zero], axis)


def _spread_nan(out: Tensor, groups: Tensor, pattern: Pattern, axis: int) -> Tensor:
    """NaN in the first N entries, and nothing else, in every group whose sum of magnitudes is not finite."""
    broken = ~groups.abs().to(computing_dtype(groups)).sum(axis, keepdim=True).isfinite()
    shape = [1] * groups.ndim
    shape[axis] = pattern.m
    first = torch.arange(pattern.m, device=groups.device).view(shape) < pattern.n
    return torch.where(broken, torch.where(first, torch.nan, 0).to(out.dtype), out)
