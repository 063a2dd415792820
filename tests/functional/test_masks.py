import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F
from nmsparse import Pattern

from .oracles import FLOATS, SPECIAL, cases, finite, from_lists, groups_of, mask_of, patterns, samples, tied


def bits(mask):
    return mask.int().tolist()


# magnitude_mask


def test_the_two_largest_magnitudes_of_four_are_kept():
    x = torch.tensor([[3.0, -5.0, 1.0, 4.0, 0.1, 0.2, -0.4, 0.3]])
    assert bits(F.magnitude_mask(x, "2:4")) == [[0, 1, 0, 1, 0, 0, 1, 1]]


def test_groups_run_along_the_given_dim():
    x = torch.tensor([[1.0, 9.0], [2.0, 8.0], [3.0, 7.0], [4.0, 6.0]])
    assert bits(F.magnitude_mask(x, "2:4", dim=0)) == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert bits(F.magnitude_mask(x, "1:2")) == [[0, 1], [0, 1], [0, 1], [0, 1]]


def test_ties_keep_the_lower_index():
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 2.0, 2.0, 2.0], [2.0, 1.0, 1.0, 1.0]])
    assert bits(F.magnitude_mask(x, "2:4")) == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]


def test_zeros_are_kept_where_nothing_else_is_there():
    assert bits(F.magnitude_mask(torch.zeros(1, 8), "3:8")) == [[1, 1, 1, 0, 0, 0, 0, 0]]
    assert bits(F.magnitude_mask(torch.tensor([[0.0, -0.0, 0.0, 5.0]]), "2:4")) == [[1, 0, 0, 1]]


def test_nan_counts_as_the_largest_magnitude():
    x = torch.tensor([[math.inf, 1.0, math.nan, -math.inf], [math.nan, 9.0, math.nan, math.nan]])
    assert bits(F.magnitude_mask(x, "2:4")) == [[1, 0, 1, 0], [1, 0, 1, 0]]


def test_keeping_all_keeps_all():
    assert F.magnitude_mask(torch.zeros(2, 12), "4:4").all()


@pytest.mark.parametrize("spec", ["2:4", "5:16"])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 16)])
def test_an_empty_tensor_has_an_empty_mask(spec, shape):
    mask = F.magnitude_mask(torch.empty(shape), spec)
    assert mask.shape == shape
    assert mask.dtype == torch.bool


@given(cases(patterns(), st.one_of(tied(), st.sampled_from(SPECIAL), finite())))
def test_masks_equal_sorting_by_hand(case):
    pattern, x, dim = case
    expected = [mask_of(group, pattern.n) for group in groups_of(x, pattern.m, dim)]
    mask = F.magnitude_mask(x, pattern, dim)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, from_lists(expected, x, dim))
    assert torch.equal(mask, F.magnitude_mask(x, pattern, dim - 3))


@given(cases(patterns(), finite()), st.sampled_from(FLOATS))
def test_every_dtype_gives_the_mask_of_the_same_numbers_in_float64(case, dtype):
    pattern, x, dim = case
    x = x.to(dtype)
    assert torch.equal(F.magnitude_mask(x, pattern, dim), F.magnitude_mask(x.double(), pattern, dim))


@given(patterns(largest=16), st.integers(0, 2**31))
def test_one_row_is_enough(pattern, seed):
    x = torch.randn(3 * pattern.m, generator=torch.Generator().manual_seed(seed))
    assert F.magnitude_mask(x, pattern).view(3, pattern.m).sum(1).tolist() == [pattern.n] * 3
    assert torch.equal(F.magnitude_mask(x, pattern), F.magnitude_mask(x[None], pattern)[0])


@pytest.mark.parametrize("spec", ["2:4", "3:8", "8:16"])
def test_memory_layout_does_not_matter(spec):
    x = samples("gaussian", 32, 32, 16).round(decimals=1)
    expected = F.magnitude_mask(x, spec, 1)
    strided = torch.empty(64, 32, 32)[::2, :, ::2]
    strided.copy_(x)
    for layout in (x.transpose(0, 2).contiguous().transpose(0, 2), x.movedim(1, 2).contiguous().movedim(2, 1), strided):
        assert not layout.is_contiguous()
        assert torch.equal(F.magnitude_mask(layout, spec, 1), expected)
    assert torch.equal(F.magnitude_mask(x[:1].expand(5, -1, -1), spec, 1), expected[:1].expand(5, -1, -1))


@given(cases(patterns(largest=16), finite(bound=1e3)), st.sampled_from([-1.0, 2.0**-20, 2.0**20]))
def test_scaling_changes_no_mask(case, factor):
    pattern, x, dim = case
    assert torch.equal(F.magnitude_mask(x, pattern, dim), F.magnitude_mask(x * factor, pattern, dim))


@given(st.permutations(range(8)), patterns(largest=8, smallest=8), st.integers(0, 2**31))
def test_the_mask_moves_with_its_entries(order, pattern, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(F.magnitude_mask(x[:, order], pattern), F.magnitude_mask(x, pattern)[:, order])


def test_the_input_is_left_alone():
    x = samples("gaussian", 4, 16)
    before = x.clone()
    F.magnitude_mask(x, "2:4")
    assert torch.equal(x, before)


KEPT = {
    "1:2": (0.707, 0.818),
    "2:4": (0.745, 0.868),
    "4:8": (0.768, 0.897),
    "8:16": (0.782, 0.912),
    "1:4": (0.459, 0.618),
    "2:8": (0.484, 0.665),
    "1:8": (0.279, 0.432),
}


def kept_shares(x, mask):
    x = x.double().abs()
    return float((x * mask).sum() / x.sum()), float((x * mask).square().sum() / x.square().sum())


@pytest.mark.parametrize("spec", KEPT)
def test_share_of_a_gaussian_that_survives(spec):
    x = samples("gaussian", 1024, 1024)
    assert kept_shares(x, F.magnitude_mask(x, spec)) == pytest.approx(KEPT[spec], abs=0.002)


def test_share_of_uniform_and_laplace_data_that_survives():
    uniform, laplace = samples("uniform", 1024, 1024), samples("laplace", 1024, 1024)
    assert kept_shares(uniform, F.magnitude_mask(uniform, "2:4")) == pytest.approx((7 / 10, 4 / 5), abs=0.002)
    assert kept_shares(laplace, F.magnitude_mask(laplace, "2:4"))[0] == pytest.approx(19 / 24, abs=0.002)


# backward_mask


def test_the_backward_mask_keeps_two_of_four_rows_among_the_kept():
    weight = torch.tensor(
        [
            [9.0, 8.0, 0.1, 0.2],
            [7.0, 6.0, 0.1, 0.2],
            [5.0, 0.1, 4.0, 0.2],
            [1.0, 0.1, 0.3, 2.0],
        ]
    )
    assert bits(F.backward_mask(weight, "2:4")) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_pruned_weight_never_comes_back():
    # row 0 drops its 8s, though they are the largest of their columns
    weight = torch.tensor([[9.0, 9.0, 8.0, 8.0]] + [[3.0, 2.0, 1.0, 1.0]] * 3)
    assert bits(F.backward_mask(weight, "2:4")) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_permutation_regroups_the_rows():
    weight = torch.tensor([[4.0, 0.0], [3.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    assert bits(F.backward_mask(weight, "1:2")) == [[1, 0], [0, 0], [1, 0], [0, 0]]
    assert bits(F.backward_mask(weight, "1:2", torch.tensor([0, 3, 1, 2]))) == [[1, 0], [1, 0], [0, 0], [0, 0]]


def test_ties_keep_the_lower_permuted_index():
    weight = torch.ones(2, 2)
    assert bits(F.backward_mask(weight, "1:2")) == [[1, 0], [0, 0]]
    assert bits(F.backward_mask(weight, "1:2", torch.tensor([1, 0]))) == [[0, 0], [1, 0]]


def test_zeros_are_never_kept_by_the_backward_mask():
    assert not F.backward_mask(torch.zeros(4, 4), "2:4").any()


def test_a_nan_survives_both_masks():
    weight = torch.ones(4, 4)
    weight[3, 3] = math.nan
    assert F.backward_mask(weight, "2:4")[3, 3]


def oracle_backward(weight, pattern, order):
    forward = [mask_of(group, pattern.n) for group in groups_of(weight, pattern.m)]
    kept = torch.where(from_lists(forward, weight), weight, 0)
    rows = kept[order]
    mask = from_lists([mask_of(group, pattern.n) for group in groups_of(rows, pattern.m, 0)], rows, 0) & (rows != 0)
    natural = torch.zeros_like(mask)
    for place, row in enumerate(order):
        natural[row] = mask[place]
    return natural, kept


@given(st.data(), patterns(largest=12))
def test_backward_masks_equal_the_definition(data, pattern):
    rows, columns = (pattern.m * data.draw(st.integers(1, 2)) for _ in range(2))
    values = data.draw(st.lists(st.one_of(tied(), finite()), min_size=rows * columns, max_size=rows * columns))
    weight = torch.tensor(values).view(rows, columns)
    order = data.draw(st.permutations(range(rows)))
    mask = F.backward_mask(weight, pattern, torch.tensor(order))
    expected, kept = oracle_backward(weight, pattern, order)
    assert torch.equal(mask, expected)
    assert not (mask & ~F.magnitude_mask(weight, pattern)).any()
    per_group = mask[order].view(-1, pattern.m, columns).sum(1)
    available = (kept[order] != 0).view(-1, pattern.m, columns).sum(1)
    assert torch.equal(per_group, available.clamp(max=pattern.n))


@given(patterns(largest=8), st.integers(0, 2**31))
def test_the_identity_is_no_permutation(pattern, seed):
    weight = torch.randn(2 * pattern.m, 2 * pattern.m, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(F.backward_mask(weight, pattern, torch.arange(2 * pattern.m)), F.backward_mask(weight, pattern))


@given(st.permutations(range(8)), st.integers(0, 2**31))
def test_permuting_beforehand_gives_the_same_product(order, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, grad = torch.randn(8, 8, generator=generator).double(), torch.randn(5, 8, generator=generator).double()
    in_place = grad @ (weight * F.backward_mask(weight, "2:4", torch.tensor(order)))
    permuted = grad[:, order] @ (weight[order] * F.backward_mask(weight[order], "2:4"))
    assert torch.allclose(in_place, permuted, rtol=1e-12, atol=1e-12)


def test_each_tap_of_a_convolution_is_its_own_matrix():
    weight = samples("gaussian", 8, 3, 8)
    mask = F.backward_mask(weight, "2:4")
    for tap in range(3):
        assert torch.equal(mask[:, tap], F.backward_mask(weight[:, tap], "2:4"))


def test_backward_masks_need_rows_that_fit():
    with pytest.raises(ValueError, match=r'size 6 of dim 0 \(shape \(6, 8\)\) is not a multiple of 4, so pattern "2:4"'):
        F.backward_mask(torch.ones(6, 8), "2:4")


BACKWARD = {
    "2:4": (0.8125, 0.6875, 0.406, 0.880, 0.926),
    "4:8": (0.863, 0.637, 0.432, 0.918, 0.954),
    "1:4": (0.684, 0.738, 0.171, 0.747, 0.802),
    "2:8": (0.767, 0.678, 0.192, 0.822, 0.868),
    "1:16": (0.644, 0.736, 0.040, 0.684, 0.724),
}


@pytest.mark.parametrize("spec", BACKWARD)
def test_what_the_backward_mask_costs_a_gaussian(spec):
    pattern = Pattern(spec)
    size = 2048 if spec == "2:4" else 1024
    weight = samples("gaussian", size, size)
    forward, mask = F.magnitude_mask(weight, pattern), F.backward_mask(weight, pattern)
    survivors, eligible, density, *shares = BACKWARD[spec]
    tolerance = 0.001 if spec == "2:4" else 0.003
    assert float(mask.sum() / forward.sum()) == pytest.approx(survivors, abs=tolerance)
    per_group = forward.view(-1, pattern.m, size).sum(1)
    assert float((per_group <= pattern.n).double().mean()) == pytest.approx(eligible, abs=0.002)
    assert float(mask.double().mean()) == pytest.approx(density, abs=0.001)
    assert kept_shares(weight * forward, mask) == pytest.approx(shares, abs=tolerance)


# violations


def test_violations_count_groups_with_too_many_non_zeros():
    x = torch.tensor([[1.0, 2.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0.0] * 8])
    assert F.violations(x, "2:4").item() == 1
    assert F.violations(x, "1:4").item() == 2
    assert F.violations(x, "4:4").item() == 0
    assert F.violations(x, "1:2", dim=0).item() == 0


def test_nan_is_a_non_zero_and_negative_zero_is_not():
    assert F.violations(torch.tensor([math.nan, -0.0]), "1:2").item() == 0
    assert F.violations(torch.tensor([math.nan, 1.0]), "1:2").item() == 1


@given(cases(patterns(), tied(-1, 1)))
def test_violations_equal_counting_by_hand(case):
    pattern, x, dim = case
    expected = sum(sum(value != 0 for value in group) > pattern.n for group in groups_of(x, pattern.m, dim))
    count = F.violations(x, pattern, dim)
    assert count.shape == ()
    assert count.item() == expected
    assert F.violations(torch.where(F.magnitude_mask(x, pattern, dim), x, 0), pattern, dim).item() == 0


def test_an_empty_tensor_violates_nothing():
    assert F.violations(torch.empty(0, 4), "2:4").item() == 0


# flip_rate


def test_flip_rate_is_the_share_of_changed_entries():
    a = torch.tensor([True, True, False, False])
    assert F.flip_rate(a, a).item() == 0.0
    assert F.flip_rate(a, ~a).item() == 1.0
    swapped_pair = torch.tensor([True, False, True, False])
    assert F.flip_rate(a, swapped_pair).item() == 0.5
    assert F.flip_rate(a, swapped_pair).shape == ()


def test_empty_masks_do_not_flip():
    assert F.flip_rate(torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.bool)).item() == 0.0


def test_masks_of_two_shapes_are_not_compared():
    with pytest.raises(ValueError, match=r"flip_rate compares masks of one shape, got \(4,\) and \(2, 2\)"):
        F.flip_rate(torch.ones(4, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("spec", "rate"), [("1:2", 0.5), ("2:4", 0.5), ("4:8", 0.5), ("8:16", 0.5), ("1:4", 0.375), ("1:8", 0.219)]
)
def test_flip_rate_of_two_independent_draws(spec, rate):
    a, b = (F.magnitude_mask(samples("gaussian", 1024, 512, seed=seed), spec) for seed in (1, 2))
    assert F.flip_rate(a, b).item() == pytest.approx(rate, abs=0.003)


@pytest.mark.parametrize(("step", "rate"), [(0.01, 0.0067), (0.1, 0.0645)])
def test_flip_rate_of_a_small_step(step, rate):
    weight, noise = samples("gaussian", 2048, 2048, seed=1), samples("gaussian", 2048, 2048, seed=2)
    flips = F.flip_rate(F.magnitude_mask(weight, "2:4"), F.magnitude_mask(weight + step * noise, "2:4"))
    assert flips.item() == pytest.approx(rate, rel=0.02)
