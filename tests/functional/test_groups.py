import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F
from nmsparse import Pattern
from nmsparse.functional import _groups

from .oracles import FLOATS, SPECIAL, cases, finite, from_lists, groups_of, largest_positions, patterns, tied


def test_groups_are_consecutive_entries_of_the_last_dim():
    view, axis = F.to_groups(torch.arange(8).view(1, 8), Pattern("2:4"), -1)
    assert axis == 2
    assert view.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_groups_are_consecutive_entries_of_the_first_dim():
    view, axis = F.to_groups(torch.arange(8).view(4, 2), Pattern("1:2"), 0)
    assert axis == 1
    assert view.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@given(cases(patterns(), tied()))
def test_groups_go_back_to_the_tensor_they_came_from(case):
    pattern, x, dim = case
    view, axis = F.to_groups(x, pattern, dim)
    assert view.movedim((axis - 1, axis), (-2, -1)).reshape(-1, pattern.m).tolist() == groups_of(x, pattern.m, dim)
    assert torch.equal(F.from_groups(view, axis), x)


def test_an_indivisible_size_names_size_dim_and_pattern():
    with pytest.raises(ValueError, match=r'size 6 of dim 1 \(shape \(2, 6\)\) is not a multiple of 4, so pattern "2:4"'):
        F.check_divisible(torch.Size((2, 6)), Pattern("2:4"), -1)


def test_an_indivisible_size_says_how_far_to_pad():
    with pytest.raises(ValueError, match="pad that dim to 8 or choose another pattern"):
        F.check_divisible(torch.Size((2, 6)), Pattern("2:4"), 1)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_does_not_exist_is_named(dim):
    with pytest.raises(ValueError, match=rf"dim {dim} does not exist in a tensor of shape \(4, 4\)"):
        F.check_divisible(torch.Size((4, 4)), Pattern("2:4"), dim)


def test_a_single_number_has_no_groups():
    with pytest.raises(ValueError, match=r"dim -1 does not exist in a tensor of shape \(\)"):
        F.magnitude_mask(torch.tensor(1.0), "1:1")


def test_divisibility_returns_the_dim_counted_from_the_front():
    assert F.check_divisible(torch.Size((2, 8)), Pattern("2:4"), -1) == 1
    assert F.check_divisible(torch.Size((8, 3)), Pattern("2:4"), -2) == 0


REFUSALS = {
    "magnitude_mask": lambda x: F.magnitude_mask(x, "2:4"),
    "soft_threshold": lambda x: F.soft_threshold(x, "2:4"),
    "soft_threshold_scale": lambda x: F.soft_threshold_scale(x, "2:4"),
    "mvue": lambda x: F.mvue(x, "2:4"),
    "mvue_probabilities": lambda x: F.mvue_probabilities(x, "2:4"),
    "mvue_approximate": lambda x: F.mvue_approximate(x, "2:4"),
    "sdgp": lambda x: F.sdgp(x, "2:4"),
    "violations": lambda x: F.violations(x, "2:4"),
    "pack": lambda x: F.pack(x, "2:4"),
    "backward_mask": lambda x: F.backward_mask(x, "2:4"),
    "transposable_mask": lambda x: F.transposable_mask(x, "2:4"),
    "channel_permutation": lambda x: F.channel_permutation(x, "2:4"),
    "mvue, all kept": lambda x: F.mvue(x, "4:4"),
    "staged_mask": lambda x: F.staged_mask(x, torch.tensor(0.0), [2], [4]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_function_refuses_an_indivisible_size_in_the_same_words(name):
    with pytest.raises(ValueError, match=r'size 6 of dim 1 \(shape \(4, 6\)\) is not a multiple of 4, so pattern "[24]:4"'):
        REFUSALS[name](torch.ones(4, 6))


@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "staged_mask"])
def test_every_function_refuses_a_string_that_is_no_pattern(name):
    function = getattr(F, name.split(",")[0])
    with pytest.raises(ValueError, match="'two of four' is not a pattern"):
        function(torch.ones(4, 4), "two of four")


def test_rank_counts_from_the_largest_magnitude():
    assert F.magnitude_rank(torch.tensor([[3.0, -5.0, 1.0, 4.0]]), 1).tolist() == [[2, 0, 3, 1]]


def test_equal_magnitudes_rank_by_index():
    assert F.magnitude_rank(torch.tensor([[-2.0, 2.0, -2.0, 2.0]]), 1).tolist() == [[0, 1, 2, 3]]


@given(cases(patterns(), st.one_of(tied(), st.sampled_from(SPECIAL), finite())))
def test_ranks_are_the_order_of_a_stable_sort(case):
    pattern, x, dim = case
    view, axis = F.to_groups(x, pattern, dim)
    expected = []
    for group in groups_of(x, pattern.m, dim):
        places = [set(largest_positions(group, n + 1)) - set(largest_positions(group, n)) for n in range(len(group))]
        order = [place.pop() for place in places]
        expected.append([order.index(index) for index in range(len(group))])
    ranks = F.from_groups(F.magnitude_rank(view, axis), axis)
    assert torch.equal(ranks.long(), from_lists(expected, x, dim))


@given(cases(patterns(), st.one_of(tied(), st.sampled_from(SPECIAL), finite())))
def test_sorting_entries_and_pairs_rank_alike(case):
    pattern, x, dim = case
    view, axis = F.to_groups(x, pattern, dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_groups, "UNROLLED", 0)
        by_sorting = F.magnitude_rank(view, axis)
        patch.setattr(_groups, "UNROLLED", 64)
        by_entries = F.magnitude_rank(view, axis)
    assert torch.equal(by_sorting.long(), by_entries.long())
    assert torch.equal(by_sorting.long(), _groups.pair_ranks(_groups.magnitude_key(view), axis).long())


def test_all_pairs_at_once_is_for_gpus_and_small_groups(monkeypatch):
    class Key:
        """A key as its place and size look."""

        def __init__(self, is_cuda, groups, size):
            self.is_cuda, self.entries = is_cuda, groups * size

        def numel(self):
            return self.entries

    def compares(is_cuda, groups, size):
        return _groups._compares_pairs(Key(is_cuda, groups, size), size)

    assert not compares(False, 10, 4)
    assert compares(True, 10, 4)
    assert compares(True, 10, 64)
    assert not compares(True, 10, 128)
    assert not compares(True, 1 << 22, 32)  # 12 GiB of comparisons
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert compares(True, 1 << 22, 32)  # which a compiled reduction does not keep
    assert not compares(True, 10, 4)  # entry by entry fuses with what is around it


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_nan_ranks_alike_and_above_infinity(dtype):
    # a quiet NaN, one with its sign set, and infinities around them
    x = torch.tensor([[float("inf"), float("nan"), float("-inf"), 0.0]], dtype=dtype)
    x[0, 3] = -x[0, 1]
    assert F.magnitude_rank(x, 1).tolist() == [[2, 0, 3, 1]]


def test_the_payload_of_a_nan_does_not_count():
    words = torch.tensor([[0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1]], dtype=torch.int32)
    assert F.magnitude_rank(words.view(torch.float32), 1).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_numbers_of_a_dtype_rank_above_zero(dtype):
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([[0.0, -tiny, -0.0, 2 * tiny]], dtype=dtype)
    assert F.magnitude_rank(x, 1).tolist() == [[2, 1, 3, 0]]


def test_float64_magnitudes_that_are_one_float32_rank_apart():
    x = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert F.magnitude_rank(x, 1).tolist() == [[1, 0]]
