"""Transposable masks: N of M along both dims of a matrix, so that a weight is N:M for `output` and for `grad_input`.

Blocks of M x M are solved one by one, all at once. Up to M = 4 every legal pattern is enumerated (90 for 2:4), which is
exact. Above, the assignment polytope is approached by entropic projections (TSENOR, arXiv 2505.23949), rounded
greedily, and completed by exchanges until every row and column holds exactly N; typically within 0.2 % of the optimum.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

from nmsparse.functional._groups import check_divisible
from nmsparse.pattern import Pattern

ENUMERATED = 4
"""Largest M whose patterns are enumerated."""
SHARPNESS = 40.0
"""Inverse temperature of the entropic projection, relative to the block's largest magnitude."""
PROJECTIONS = 100
"""Rounds of row, column and capacity projections."""
BLOCKS_AT_ONCE = 1 << 16
"""Blocks solved together: bounds the memory of the pattern scores and of the exchanges."""
LARGEST_MAGNITUDE = 1e300
"""What NaN and infinities count as: above every sane weight, and its sums over a block stay finite."""


def transposable_mask(x: Tensor, pattern: str | Pattern) -> Tensor:
    """Bool mask with exactly N true entries in every row and column of every M x M block, of largest kept ``sum |x|``.

    ``x`` is (O, ..., I); blocks lie in the plane of its first and last dim. On ties the pattern wins whose bits, read
    row by row, form the largest number (M <= 4). NaN and infinities count as the largest magnitude.
    """
    pattern = Pattern(pattern)
    if x.ndim < 2:
        raise ValueError(f"a transposable mask needs a matrix, got shape {tuple(x.shape)}.")
    for dim in (0, -1):
        check_divisible(x.shape, pattern, dim)
    blocks, shape = _to_blocks(x, pattern.m)
    solve = _best_pattern if pattern.m <= ENUMERATED else _entropic_mask
    # float64 scores: float32 sums depend on their order, and TF32 would pick worse patterns
    masks = [solve(_finite(part.abs().double()), pattern) for part in blocks.split(BLOCKS_AT_ONCE)]
    return _from_blocks(torch.cat(masks), shape, x.shape)


def _finite(magnitude: Tensor) -> Tensor:
    """NaN, infinities and everything else above ``LARGEST_MAGNITUDE`` as that value."""
    return magnitude.nan_to_num(nan=LARGEST_MAGNITUDE).clamp(max=LARGEST_MAGNITUDE)


def _to_blocks(x: Tensor, m: int) -> tuple[Tensor, torch.Size]:
    planes = x[:, None].flatten(1, -2).movedim(1, 0)
    tiles = planes.unflatten(2, (planes.shape[2] // m, m)).unflatten(1, (planes.shape[1] // m, m)).transpose(2, 3)
    return tiles.reshape(-1, m, m), tiles.shape


def _from_blocks(blocks: Tensor, tiles: torch.Size, shape: torch.Size) -> Tensor:
    planes = blocks.view(tiles).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return planes.movedim(0, 1).reshape(shape)


@cache
def block_patterns(n: int, m: int) -> tuple[tuple[int, ...], ...]:
    """All m x m 0/1 blocks with n ones in every row and column, flattened, the largest binary number first."""
    rows = [tuple(int(i in kept) for i in range(m)) for kept in combinations(range(m), n)]
    legal = [
        sum(choice, ()) for choice in product(rows, repeat=m) if all(sum(column) == n for column in zip(*choice, strict=True))
    ]
    return tuple(sorted(legal, reverse=True))


def _best_pattern(magnitude: Tensor, pattern: Pattern) -> Tensor:
    table = torch.tensor(block_patterns(pattern.n, pattern.m), dtype=torch.float64, device=magnitude.device)
    scores = magnitude.flatten(1) @ table.t()
    return table.bool()[scores.argmax(1)].view_as(magnitude)


def _entropic_mask(magnitude: Tensor, pattern: Pattern) -> Tensor:
    if pattern.n == pattern.m:
        return torch.ones_like(magnitude, dtype=torch.bool)
    fractional = _project_entropically(magnitude, pattern.n)
    return _complete(_round_greedily(fractional, pattern.n), magnitude, pattern.n)


def _project_entropically(magnitude: Tensor, n: int) -> Tensor:
    """Dykstra's algorithm in the log domain: rows sum to n, columns sum to n, no entry above 1."""
    peak = magnitude.amax((1, 2), keepdim=True)
    log_s = SHARPNESS * magnitude / torch.where(peak == 0, 1, peak)
    log_q = torch.zeros_like(log_s)
    log_n = torch.log(torch.tensor(float(n), dtype=log_s.dtype, device=log_s.device))
    for _ in range(PROJECTIONS):
        log_s = log_s - log_s.logsumexp(2, keepdim=True) + log_n
        log_s = log_s - log_s.logsumexp(1, keepdim=True) + log_n
        log_z = log_s + log_q
        log_s = log_z.clamp(max=0)
        log_q = log_z - log_s
    return log_s


def _round_greedily(score: Tensor, n: int) -> Tensor:
    """From the highest score down, keep an entry while its row and its column hold fewer than n."""
    blocks, m, _ = score.shape
    order = score.flatten(1).sort(dim=1, descending=True, stable=True).indices
    every = torch.arange(blocks, device=score.device)
    mask = torch.zeros_like(score, dtype=torch.bool)
    rows, columns = (torch.zeros(blocks, m, dtype=torch.int16, device=score.device) for _ in range(2))
    for entry in order.unbind(1):
        row, column = entry // m, entry % m
        free = (rows[every, row] < n) & (columns[every, column] < n)
        mask[every, row, column] = free
        rows[every, row] += free
        columns[every, column] += free
    return mask


def _complete(mask: Tensor, magnitude: Tensor, n: int) -> Tensor:
    """Add one entry per round to every block that lacks some: directly, or by the best exchange around a full cell."""
    while True:
        short = (mask.sum((1, 2)) < n * mask.shape[1]).nonzero().flatten()
        if not len(short):
            return mask
        for part in short.split(max(1, (1 << 24) // mask.shape[1] ** 3)):
            mask[part] = _add_one(mask[part], magnitude[part], n)


def _add_one(mask: Tensor, magnitude: Tensor, n: int) -> Tensor:
    """One more kept entry per block. A legal step always exists: where no exchange does, a direct cell is free."""
    blocks, m, _ = mask.shape
    every = torch.arange(blocks, device=mask.device)
    open_row, open_column = mask.sum(2) < n, mask.sum(1) < n
    low = torch.finfo(magnitude.dtype).min
    direct = magnitude.masked_fill(mask | ~(open_row[:, :, None] & open_column[:, None, :]), low).flatten(1)
    place = direct.argmax(1)
    is_direct = direct[every, place] > low
    # exchange: drop (r, c); add (i, c) and (r, j) for the first open row i and open column j
    i, j = open_row.int().argmax(1), open_column.int().argmax(1)
    gain = magnitude[every, i][:, None, :] + magnitude[every, :, j][:, :, None] - magnitude
    legal = mask & ~mask[every, i][:, None, :] & ~mask[every, :, j][:, :, None]
    swap = gain.masked_fill(~legal, low).flatten(1).argmax(1)
    out = mask.clone()
    out[every[is_direct], place[is_direct] // m, place[is_direct] % m] = True
    e, r, c = every[~is_direct], swap[~is_direct] // m, swap[~is_direct] % m
    out[e, r, c] = False
    out[e, i[e], c] = True
    out[e, r, j[e]] = True
    return out
