import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F
from nmsparse.functional._random import counter_bits

WORDS = st.integers(-(2**31), 2**31 - 1)
MASK = 0xFFFFFFFF


def mix(h):
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    return h ^ h >> 16


def word(element, stream, counter):
    """The 32 random bits of one element, in Python integers."""
    return mix(mix(element ^ stream * 0x9E3779B9 & MASK) ^ counter * 0x85EBCA6B & MASK ^ stream * 0xC2B2AE35 & MASK)


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


@given(WORDS, WORDS)
def test_numbers_are_the_documented_hash(stream, counter):
    expected = [(word(element, stream, counter) >> 9) * 2.0**-23 for element in range(16)]
    assert F.counter_uniform((16,), stream, counter).tolist() == expected


def test_numbers_do_not_change_between_releases():
    assert F.hash_integers(1, 2, 3) == -684549662
    assert (F.counter_uniform((3,), 12345, 678) * 2**23).int().tolist() == [1227994, 5682032, 7822212]


@given(WORDS, WORDS)
def test_the_same_key_gives_the_same_numbers(stream, counter):
    assert torch.equal(F.counter_uniform((3, 5), stream, counter), F.counter_uniform((3, 5), stream, counter))


@given(WORDS, WORDS)
def test_tensors_and_python_integers_are_one_key(stream, counter):
    expected = F.counter_uniform((33,), stream, counter)
    for dtype in (torch.int32, torch.int64):
        as_tensors = F.counter_uniform((33,), torch.tensor(stream, dtype=dtype), torch.tensor(counter, dtype=dtype))
        assert torch.equal(as_tensors, expected)
    assert torch.equal(F.counter_uniform((33,), stream, torch.tensor([counter], dtype=torch.int32)), expected)


@given(WORDS, WORDS)
def test_keys_count_modulo_two_to_the_thirty_two(stream, counter):
    assert torch.equal(F.counter_uniform((9,), stream + 2**32, counter - 2**32), F.counter_uniform((9,), stream, counter))


def test_global_random_state_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    first = F.counter_uniform((64,), 1, 1)
    torch.manual_seed(99)
    second = F.counter_uniform((64,), 1, 1)
    torch.set_rng_state(state)
    assert torch.equal(first, second)


def test_the_shape_only_folds_the_sequence():
    flat = F.counter_uniform((24,), 3, 4)
    assert torch.equal(F.counter_uniform((2, 3, 4), 3, 4), flat.view(2, 3, 4))
    assert torch.equal(F.counter_uniform((10,), 3, 4), flat[:10])
    assert F.counter_uniform((), 3, 4).item() == flat[0].item()
    assert F.counter_uniform((0, 4), 3, 4).shape == (0, 4)


def test_numbers_are_multiples_of_two_to_the_minus_twenty_four_below_one():
    u = F.counter_uniform((1 << 16,), 5, 6)
    assert u.dtype == torch.float32
    assert (u >= 0).all()
    assert (u < 1).all()
    assert torch.equal(u * 2**23, (u * 2**23).round())
    assert ((u * 2**23).int() % 2).double().mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("stream", "counter"), [(0, 0), (1, 0), (0, 1), (F.hash_integers(7, 8), 123), (-1, -1)])
def test_numbers_are_uniform(stream, counter):
    count = 1 << 18
    u = F.counter_uniform((count,), stream, counter).double()
    assert u.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / count))
    assert u.var().item() == pytest.approx(1 / 12, rel=0.01)
    ordered = u.sort().values
    steps = torch.arange(count, dtype=torch.float64) / count
    # Kolmogorov-Smirnov distance at the 0.01 % level
    assert (ordered - steps).abs().max().item() < 2.23 / math.sqrt(count)
    bins = torch.bincount((u * 256).long(), minlength=256).double()
    chi_squared = ((bins - count / 256).square() / (count / 256)).sum().item()
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0), (1, 0)),
        ((0, 0), (0, 1)),
        ((1, 0), (0, 1)),
        ((5, 7), (7, 5)),
        ((3, 100), (3, 101)),
        ((-1, 2), (1, 2)),
        ((0, 0), (2**16, 0)),
    ],
)
def test_streams_and_counters_are_uncorrelated(one, other):
    count = 1 << 17
    a, b = F.counter_uniform((count,), *one), F.counter_uniform((count,), *other)
    bound = 5 / math.sqrt(count)
    assert abs(correlation(a, b)) < bound
    assert abs(correlation(a[1:], b[:-1])) < bound
    assert (a == b).sum() < 10


def test_neighbouring_elements_are_uncorrelated():
    u = F.counter_uniform((1 << 17,), 1, 1)
    for lag in (1, 2, 4, 64, 1024, 4096):
        assert abs(correlation(u[lag:], u[:-lag])) < 5 / math.sqrt(1 << 17)


def test_one_element_is_random_from_counter_to_counter():
    series = torch.stack([F.counter_uniform((4,), 11, counter) for counter in range(4000)])
    assert series.mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.025)
    for element in range(4):
        assert abs(correlation(series[1:, element], series[:-1, element])) < 0.08


def test_no_word_repeats_inside_a_stream():
    assert counter_bits(1 << 18, 9, 9).unique().numel() == 1 << 18


# keys


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5))
def test_keys_are_the_documented_hash_as_int32(values):
    key, expected = F.hash_integers(*values), 0
    for value in values:
        expected = mix((expected ^ value & MASK) * 0x9E3779B9 & MASK)
    assert key & MASK == expected
    assert -(2**31) <= key < 2**31
    assert key == F.hash_integers(*values)


def test_order_and_number_of_integers_matter():
    keys = [F.hash_integers(*values) for values in [(1,), (2,), (1, 2), (2, 1), (1, 2, 3), (3, 2, 1), (1, 1), (1, 2, 0)]]
    assert len(set(keys)) == len(keys)


def test_small_integers_give_keys_all_over_the_range():
    keys = {F.hash_integers(seed, layer) for seed in range(64) for layer in range(64)}
    assert len(keys) == 64 * 64
    assert sum(key < 0 for key in keys) / len(keys) == pytest.approx(0.5, abs=0.04)


# permutations


@given(st.integers(0, 100), WORDS, WORDS)
def test_every_index_occurs_once(count, stream, counter):
    order = F.counter_permutation(count, stream, counter)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(order, F.counter_permutation(count, stream, counter))


def test_permutations_sort_the_hash():
    signed = [(value ^ 1 << 31) - (1 << 31) for value in (word(element, 4, 5) for element in range(20))]
    assert F.counter_permutation(20, 4, 5).tolist() == sorted(range(20), key=signed.__getitem__)


def test_streams_that_differ_in_low_bits_are_not_permutations_of_each_other():
    first = F.counter_uniform((1 << 12,), 5, 7)
    for other in range(64):
        # a hash that took the stream in once would map close streams onto each other by an exclusive or of the index
        second = F.counter_uniform((1 << 12,), other, 7)
        assert other == 5 or len(set(first.tolist()) & set(second.tolist())) < 40


def test_other_keys_give_other_permutations():
    orders = {tuple(F.counter_permutation(16, stream, counter).tolist()) for stream in range(10) for counter in range(10)}
    assert len(orders) == 100


def test_every_place_is_equally_likely():
    first = torch.stack([F.counter_permutation(8, 21, counter) for counter in range(4000)])
    for place in range(8):
        counts = torch.bincount(first[:, place], minlength=8).double()
        assert ((counts - 500).square() / 500).sum().item() < 30  # chi squared with 7 degrees of freedom, 0.01 % level


# grids


def grid(rows, columns, stream, counter):
    return F.counter_uniform_grid(
        rows, columns, torch.tensor(stream, dtype=torch.int32), torch.tensor(counter, dtype=torch.int32)
    )


def grid_word(row, column, stream, counter):
    """The 32 bits of one entry of a grid, in Python integers."""
    h = (word(row, stream, counter) ^ word(column, ~stream, counter)) * 0x7FEB352D & MASK
    return (h ^ h >> 15) * 0x846CA68B & MASK


@given(WORDS, WORDS)
def test_grids_are_the_documented_hash_of_row_and_column(stream, counter):
    expected = [[(grid_word(row, column, stream, counter) >> 9) * 2.0**-23 for column in range(7)] for row in range(5)]
    assert grid(5, 7, stream, counter).tolist() == expected


def test_grids_do_not_change_between_releases():
    assert (grid(2, 3, 12345, 678) * 2**23).int().tolist() == [[4429024, 3764820, 1437977], [725031, 5141635, 2792124]]


@given(st.integers(0, 9), st.integers(0, 9), WORDS, WORDS)
def test_the_size_only_cuts_a_grid_out(rows, columns, stream, counter):
    part = grid(rows, columns, stream, counter)
    assert part.shape == (rows, columns)
    assert part.dtype == torch.float32
    assert torch.equal(part, grid(9, 9, stream, counter)[:rows, :columns])


@given(WORDS, WORDS)
def test_the_same_key_gives_the_same_grid_in_every_form(stream, counter):
    expected = grid(6, 5, stream, counter)
    assert torch.equal(grid(6, 5, stream, counter), expected)
    for dtype in (torch.int32, torch.int64):
        keys = torch.tensor([stream], dtype=dtype), torch.tensor([counter], dtype=dtype)
        assert torch.equal(F.counter_uniform_grid(6, 5, *keys), expected)


def test_grids_neither_read_nor_move_the_global_random_state():
    state = torch.get_rng_state()
    first = grid(8, 8, 1, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    second = grid(8, 8, 1, 1)
    torch.set_rng_state(state)
    assert torch.equal(first, second)


GRID_KEYS = pytest.mark.parametrize(("stream", "counter"), [(0, 0), (1, 0), (0, 1), (F.hash_integers(7, 8), 123), (-1, -1)])


@GRID_KEYS
def test_grids_are_uniform(stream, counter):
    u = grid(512, 512, stream, counter).double().flatten()
    count = u.numel()
    assert u.min() >= 0
    assert u.max() < 1
    assert torch.equal(u * 2**23, (u * 2**23).round())
    assert ((u * 2**23).long() % 2).double().mean().item() == pytest.approx(0.5, abs=2 / math.sqrt(count))
    assert u.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / count))
    assert u.var().item() == pytest.approx(1 / 12, rel=0.01)
    steps = torch.arange(count, dtype=torch.float64) / count
    # Kolmogorov-Smirnov distance at the 0.01 % level
    assert (u.sort().values - steps).abs().max().item() < 2.23 / math.sqrt(count)
    bins = torch.bincount((u * 256).long(), minlength=256).double()
    chi_squared = ((bins - count / 256).square() / (count / 256)).sum().item()
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


@GRID_KEYS
@pytest.mark.parametrize("along", [0, 1], ids=["rows", "columns"])
def test_every_line_of_a_grid_is_uniform_and_unrelated_to_the_others(stream, counter, along):
    lines = grid(512, 512, stream, counter).double()
    lines = lines.t() if along else lines
    assert (lines.mean(1) - 0.5).abs().max().item() < 5 * math.sqrt(1 / 12 / 512)
    assert (lines.var(1) - 1 / 12).abs().max().item() < 5 * math.sqrt(1 / 180 / 512)
    # 130816 pairs: the largest of as many normal deviates is about 4.6
    assert torch.corrcoef(lines).fill_diagonal_(0).abs().max().item() < 6 / math.sqrt(512)


@GRID_KEYS
def test_the_corners_of_rectangles_are_unrelated(stream, counter):
    z = grid(512, 512, stream, counter).double() - 0.5
    for down, right in [(1, 1), (1, 2), (2, 1), (16, 1), (4, 8), (64, 64)]:
        # two rows and two columns have four words whose exclusive or is 0: what is left of that after the last mixing?
        product = z[:-down, :-right] * z[down:, :-right] * z[:-down, right:] * z[down:, right:]
        assert abs(product.mean().item()) < 5 / 144 / math.sqrt(product.numel())


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (0, 1)), ((5, 7), (7, 5)), ((3, 100), (3, 101)), ((-1, 2), (1, 2))],
)
def test_grids_of_other_streams_and_counters_are_uncorrelated(one, other):
    a, b = grid(384, 384, *one), grid(384, 384, *other)
    bound = 5 / 384
    assert abs(correlation(a.flatten(), b.flatten())) < bound
    assert abs(correlation(a.flatten(), b.t().flatten())) < bound
    assert abs(correlation(a[1:].flatten(), b[:-1].flatten())) < bound
    assert (a == b).sum() < 10


def test_a_grid_is_unrelated_to_the_numbers_of_the_same_key():
    assert abs(correlation(grid(256, 256, 3, 4).flatten(), F.counter_uniform((256 * 256,), 3, 4))) < 5 / 256


def test_one_entry_of_a_grid_is_random_from_counter_to_counter():
    series = torch.stack([grid(2, 2, 11, counter).flatten() for counter in range(4000)])
    assert series.mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.025)
    assert torch.corrcoef(series.t()).fill_diagonal_(0).abs().max().item() < 0.08
    for entry in range(4):
        assert abs(correlation(series[1:, entry], series[:-1, entry])) < 0.08
