import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import nmsparse.functional as F
from nmsparse import Pattern
from nmsparse.functional._transposable import _round_greedily

from .oracles import FLOATS, finite, samples, tied

ABOVE_FOUR = ["1:8", "2:8", "3:8", "4:8", "5:8", "7:8", "8:8", "2:5", "3:7", "8:16", "4:16", "13:16"]
UP_TO_FOUR = ["1:1", "1:2", "2:2", "1:3", "2:3", "1:4", "2:4", "3:4", "4:4"]


def legal_blocks(n, m):
    """Every m x m block with n ones per row and column, as rows of bits, the largest number first."""
    rows = [sum(1 << (m - 1 - i) for i in kept) for kept in itertools.combinations(range(m), n)]
    blocks = []
    for choice in itertools.product(rows, repeat=m):
        if all(sum(row >> bit & 1 for row in choice) == n for bit in range(m)):
            number = 0
            for row in choice:
                number = number << m | row
            blocks.append(number)
    blocks.sort(reverse=True)
    return [[number >> bit & 1 for bit in reversed(range(m * m))] for number in blocks]


def best_block(values, table):
    """The first pattern of the table with the largest kept sum."""
    magnitudes = [abs(value) for value in values]
    scores = [sum(value for value, bit in zip(magnitudes, pattern, strict=True) if bit) for pattern in table]
    return table[scores.index(max(scores))]


def optimum(block, n):
    """Largest kept sum of |x| by linear programming; the constraints are totally unimodular, so it is attained by a mask."""
    m = len(block)
    cost = [-abs(value) for row in block.tolist() for value in row]
    sums = [[float(index // m == row) for index in range(m * m)] for row in range(m)]
    sums += [[float(index % m == column) for index in range(m * m)] for column in range(m)]
    return -linprog(cost, A_eq=sums, b_eq=[n] * (2 * m), bounds=(0, 1)).fun


def block_sums(mask, m):
    """Kept entries per row and per column of every m x m block of a matrix."""
    blocks = mask.unflatten(0, (-1, m)).unflatten(2, (-1, m)).transpose(1, 2)
    return blocks.sum(3), blocks.sum(2)


def assert_exact(mask, pattern):
    rows, columns = block_sums(mask, pattern.m)
    assert (rows == pattern.n).all()
    assert (columns == pattern.n).all()


# the table


@pytest.mark.parametrize("spec", UP_TO_FOUR)
def test_the_table_holds_every_legal_block_from_the_largest_number_down(spec):
    pattern = Pattern(spec)
    assert [list(block) for block in F.block_patterns(pattern.n, pattern.m)] == legal_blocks(pattern.n, pattern.m)


def test_there_are_ninety_two_four_blocks_and_the_nearest_differ_in_four_bits():
    table = F.block_patterns(2, 4)
    assert len(set(table)) == 90
    assert table[0] == (1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1)
    distances = [sum(x != y for x, y in zip(a, b, strict=True)) for a, b in itertools.combinations(table, 2)]
    assert min(distances) == 4


# two of four: exact


def test_the_best_block_is_found_where_rows_alone_would_disagree():
    x = torch.tensor([[9.0, 8.0, 1.0, 1.0], [9.0, 8.0, 1.0, 1.0], [7.0, 6.0, 2.0, 1.0], [1.0, 1.0, 2.0, 3.0]])
    assert F.transposable_mask(x, "2:4").int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_a_constant_block_takes_the_first_pattern(value):
    mask = F.transposable_mask(torch.full((4, 8), value), "2:4")
    assert mask[:, :4].int().tolist() == mask[:, 4:].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_random_blocks_equal_brute_force():
    table = legal_blocks(2, 4)
    blocks = samples("gaussian", 1000, 4, 4)
    found = F.transposable_mask(blocks.transpose(0, 1).reshape(4, 4000), "2:4").view(4, 1000, 4).transpose(0, 1)
    for block, mask in zip(blocks, found, strict=True):
        assert mask.flatten().int().tolist() == best_block(block.flatten().tolist(), table)


@given(st.sampled_from(UP_TO_FOUR), st.lists(tied(), min_size=16, max_size=16))
def test_blocks_full_of_ties_take_the_first_best_pattern(spec, values):
    pattern = Pattern(spec)
    values = values[: pattern.m**2]
    mask = F.transposable_mask(torch.tensor(values).view(pattern.m, pattern.m), spec)
    assert mask.flatten().int().tolist() == best_block(values, legal_blocks(pattern.n, pattern.m))


def test_every_tile_of_a_matrix_is_solved_on_its_own():
    x = samples("gaussian", 12, 20).round(decimals=1)
    mask = F.transposable_mask(x, "2:4")
    for row, column in itertools.product(range(0, 12, 4), range(0, 20, 4)):
        tile = (slice(row, row + 4), slice(column, column + 4))
        assert torch.equal(mask[tile], F.transposable_mask(x[tile], "2:4"))


def test_masked_weights_fit_both_products():
    x = samples("gaussian", 64, 96)
    pruned = x * F.transposable_mask(x, "2:4")
    assert F.violations(pruned, "2:4").item() == F.violations(pruned, "2:4", dim=0).item() == 0


@pytest.mark.parametrize("spec", ["2:4", "1:4", "3:4"])
def test_a_transposed_matrix_keeps_the_same_sum(spec):
    x = samples("gaussian", 64, 64).double()
    kept, transposed = ((part.abs() * F.transposable_mask(part, spec)).sum().item() for part in (x, x.t()))
    assert kept == pytest.approx(transposed, rel=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_gives_the_mask_of_the_same_numbers_in_float64(dtype):
    x = samples("gaussian", 32, 32).to(dtype)
    for spec in ("2:4", "4:8"):
        mask = F.transposable_mask(x, spec)
        assert mask.dtype == torch.bool
        assert torch.equal(mask, F.transposable_mask(x.double(), spec))


# larger groups: near the optimum


@pytest.mark.parametrize(
    ("spec", "blocks", "loss"), [("4:8", 64, 0.002), ("8:16", 16, 0.002), ("2:8", 64, 0.005), ("4:16", 12, 0.01)]
)
def test_large_blocks_lose_next_to_nothing_against_linear_programming(spec, blocks, loss):
    pattern = Pattern(spec)
    x = samples("gaussian", pattern.m, blocks * pattern.m, seed=2)
    mask = F.transposable_mask(x, spec)
    kept = (x.double().abs() * mask).view(pattern.m, blocks, pattern.m).sum((0, 2))
    best = torch.tensor([optimum(block, pattern.n) for block in x.double().split(pattern.m, 1)], dtype=torch.float64)
    assert (kept <= best * (1 + 1e-9)).all()
    assert 1 - (kept.sum() / best.sum()).item() <= loss


@given(st.sampled_from(ABOVE_FOUR), st.data())
def test_large_blocks_hold_exactly_n_per_row_and_column(spec, data):
    pattern = Pattern(spec)
    values = data.draw(st.one_of(st.just(tied(0, 1)), st.just(tied()), st.just(finite())))
    x = torch.tensor(data.draw(st.lists(values, min_size=pattern.m**2, max_size=pattern.m**2))).view(pattern.m, pattern.m)
    assert_exact(F.transposable_mask(x, spec), pattern)


@pytest.mark.parametrize("spec", [*ABOVE_FOUR, "16:32", "5:32"])
def test_every_block_of_a_gaussian_holds_exactly_n_per_row_and_column(spec):
    pattern = Pattern(spec)
    assert_exact(F.transposable_mask(samples("gaussian", 4 * pattern.m, 4 * pattern.m), spec), pattern)


@pytest.mark.parametrize("spec", UP_TO_FOUR + ABOVE_FOUR)
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, -1e30])
def test_constant_blocks_hold_exactly_n_per_row_and_column(spec, value):
    pattern = Pattern(spec)
    assert_exact(F.transposable_mask(torch.full((pattern.m, 2 * pattern.m), value), spec), pattern)


@pytest.mark.parametrize("spec", ["1:8", "3:8", "7:8", "8:16"])
def test_heavy_tails_and_lone_entries_still_fill_every_row_and_column(spec):
    pattern = Pattern(spec)
    x = samples("log-normal", 4 * pattern.m, 4 * pattern.m).pow(4)
    assert_exact(F.transposable_mask(x, spec), pattern)
    lone = torch.zeros(pattern.m, pattern.m)
    lone[3, 5] = 2.0
    mask = F.transposable_mask(lone, spec)
    assert_exact(mask, pattern)
    assert mask[3, 5]


def test_a_block_that_fits_already_keeps_all_of_itself():
    for spec in ("2:4", "4:8", "3:8", "8:16"):
        pattern = Pattern(spec)
        shift = torch.arange(pattern.m)
        legal = (shift[:, None] - shift) % pattern.m < pattern.n
        x = torch.where(legal, 1 + samples("laplace", pattern.m, pattern.m), 0)
        assert torch.equal(F.transposable_mask(x, spec), legal)


@pytest.mark.parametrize("spec", ["2:4", "4:8"])
@pytest.mark.parametrize("factor", [2.0**-40, -(2.0**40)])
def test_scaling_changes_no_mask(spec, factor):
    x = samples("gaussian", 32, 32)
    assert torch.equal(F.transposable_mask(x * factor, spec), F.transposable_mask(x, spec))


def test_blocks_do_not_depend_on_their_neighbours():
    x = samples("gaussian", 8, 64)
    assert torch.equal(F.transposable_mask(x, "4:8")[:, 16:24], F.transposable_mask(x[:, 16:24], "4:8"))


# shapes and edges


@pytest.mark.parametrize("spec", ["2:4", "4:8"])
def test_each_tap_of_a_convolution_is_its_own_matrix(spec):
    weight = samples("gaussian", 16, 3, 24)
    mask = F.transposable_mask(weight, spec)
    assert mask.shape == weight.shape
    for tap in range(3):
        assert torch.equal(mask[:, tap], F.transposable_mask(weight[:, tap], spec))
    taps = weight.view(16, 3, 1, 24).expand(-1, -1, 2, -1)
    assert torch.equal(F.transposable_mask(taps, spec), mask.view(16, 3, 1, 24).expand(-1, -1, 2, -1))


def test_memory_layout_does_not_matter():
    x = samples("gaussian", 16, 16)
    strided = torch.empty(32, 32)[::2, ::2]
    strided.copy_(x)
    for layout in (x.t().contiguous().t(), strided):
        assert torch.equal(F.transposable_mask(layout, "2:4"), F.transposable_mask(x, "2:4"))


@pytest.mark.parametrize("spec", ["2:4", "4:8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_entries_are_kept(spec, bad):
    x = samples("gaussian", 8, 8) * 1e20
    places = [(0, 0), (1, 0), (1, 2), (2, 3), (7, 7)]
    for place in places:
        x[place] = bad
    mask = F.transposable_mask(x, spec)
    assert all(mask[place] for place in places)
    assert_exact(mask, Pattern(spec))


@pytest.mark.parametrize("spec", ["2:4", "4:8"])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 3, 8), (8, 0, 8)])
def test_an_empty_weight_has_an_empty_mask(spec, shape):
    mask = F.transposable_mask(torch.empty(shape), spec)
    assert mask.shape == shape
    assert mask.dtype == torch.bool


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"a transposable mask needs a matrix, got shape \(8,\)"):
        F.transposable_mask(torch.ones(8), "2:4")


@pytest.mark.parametrize(("shape", "size", "dim"), [((6, 8), 6, 0), ((8, 6), 6, 1), ((8, 3, 10), 10, 2)])
def test_both_dims_must_fit(shape, size, dim):
    with pytest.raises(ValueError, match=f"size {size} of dim {dim} .* is not a multiple of 4"):
        F.transposable_mask(torch.ones(shape), "2:4")


# what transposability costs


@pytest.mark.parametrize(("kind", "l1", "squared"), [("gaussian", 0.702, 0.818), ("uniform", 0.662, 0.743)])
def test_share_that_the_best_two_four_blocks_keep(kind, l1, squared):
    x = samples(kind, 1024, 1024).double().abs()
    kept = x * F.transposable_mask(x, "2:4")
    assert (kept.sum() / x.sum()).item() == pytest.approx(l1, abs=0.002)
    assert (kept.square().sum() / x.square().sum()).item() == pytest.approx(squared, abs=0.002)


@pytest.mark.parametrize(
    ("spec", "ratio", "size"),
    [
        ("2:4", 0.943, 1024),
        ("4:8", 0.967, 512),
        ("8:16", 0.982, 512),
        ("16:32", 0.992, 512),
        ("2:8", 0.941, 512),
        ("4:16", 0.967, 512),
    ],
)
def test_price_of_transposability(spec, ratio, size):
    x = samples("gaussian", size, size, seed=4).double().abs()
    both, rows = (x * F.transposable_mask(x, spec)).sum(), (x * F.magnitude_mask(x, spec)).sum()
    assert (both / rows).item() == pytest.approx(ratio, abs=0.006)


def test_greedy_rounding_alone_loses_one_and_a_half_per_cent():
    blocks = samples("gaussian", 20_000, 4, 4).double().abs()
    flat = blocks.transpose(0, 1).reshape(4, 80_000)
    best = (flat * F.transposable_mask(flat, "2:4")).sum()
    greedy = _round_greedily(blocks, 2)
    assert (1 - (blocks * greedy).sum() / best).item() == pytest.approx(0.015, abs=0.001)
    filled = greedy.sum((1, 2)).double()
    assert filled.mean().item() == pytest.approx(7.84, abs=0.01)
    assert (filled == 8).double().mean().item() == pytest.approx(0.84, abs=0.01)


def test_two_independent_masks_differ_in_half_of_their_entries():
    a, b = (F.transposable_mask(samples("gaussian", 512, 512, seed=seed), "2:4") for seed in (1, 2))
    assert F.flip_rate(a, b).item() == pytest.approx(0.5, abs=0.003)
