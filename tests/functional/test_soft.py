import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F
from nmsparse.functional import _groups

from .oracles import FLOATS, cases, finite, from_lists, groups_of, patterns, samples, tied


def soft(values, spec, dtype=torch.float32):
    return F.soft_threshold(torch.tensor(values, dtype=dtype), spec).tolist()


def test_every_entry_moves_towards_zero_by_the_largest_dropped_magnitude():
    assert soft([4.0, -3.0, 2.0, 1.0], "2:4") == [2.0, -1.0, 0.0, 0.0]
    assert soft([-5.0, 3.0], "1:2") == [-2.0, 0.0]
    assert soft([1.0, 2.0, 3.0, -7.0], "1:4") == [0.0, 0.0, 0.0, -4.0]


def test_equal_magnitudes_leave_zero():
    assert soft([3.0, 1.0, 1.0, 1.0], "2:4") == [2.0, 0.0, 0.0, 0.0]
    assert soft([2.0, -2.0, 2.0, -2.0], "2:4") == [0.0] * 4
    assert soft([0.0] * 4, "2:4") == [0.0] * 4


def test_keeping_all_changes_nothing():
    x = samples("gaussian", 3, 12)
    assert torch.equal(F.soft_threshold(x, "4:4"), x)


def test_zeros_come_out_positive():
    out = F.soft_threshold(torch.tensor([[-4.0, -3.0, -3.0, -0.0]]), "2:4")
    assert torch.equal(out.signbit(), torch.tensor([[True, False, False, False]]))


def test_all_orders_and_tie_patterns_of_four_equal_sorting_and_the_min_max_network():
    x = torch.tensor(list(itertools.product(range(4), repeat=4)), dtype=torch.float32)
    a, b, c, d = x.unbind(1)
    lower = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
    upper = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    threshold = torch.minimum(lower, upper)
    assert torch.equal(threshold, x.sort(1).values[:, 1])
    assert torch.equal(F.soft_threshold(x, "2:4"), (x - threshold[:, None]).clamp(min=0))


@given(cases(patterns(), st.one_of(tied(), finite())))
def test_soft_thresholds_equal_the_formula(case):
    pattern, x, dim = case
    x = x.double()

    def formula(group):
        dropped = sorted(map(abs, group))[: pattern.m - pattern.n]
        threshold = dropped[-1] if dropped else 0.0
        return [math.copysign(max(abs(value) - threshold, 0.0), value) for value in group]

    expected = from_lists([formula(group) for group in groups_of(x, pattern.m, dim)], x, dim, torch.float64)
    out = F.soft_threshold(x, pattern, dim)
    assert torch.equal(out, expected)
    assert F.violations(out, pattern, dim).item() == 0
    assert not (out != 0).logical_and(~F.magnitude_mask(x, pattern, dim)).any()


@given(cases(patterns(largest=16), tied()), st.integers(0, 2**31), st.sampled_from([1e-6, 1e-3, 0.3, 2.0]))
def test_a_step_moves_the_result_by_at_most_twice_its_size(case, seed, size):
    pattern, on_ties, dim = case
    generator = torch.Generator().manual_seed(seed)
    x = on_ties.double() + torch.randn(on_ties.shape, generator=generator).double() * (seed % 2)
    step = size * (2 * torch.rand(x.shape, generator=generator).double() - 1)
    moved = F.soft_threshold(x + step, pattern, dim) - F.soft_threshold(x, pattern, dim)
    assert moved.abs().max() <= 2 * step.abs().max() + 1e-12


@given(cases(patterns(largest=16), finite(bound=1e3)), st.sampled_from([-1.0, -4.0, 2.0**-20, 2.0**20]))
def test_scaling_the_input_scales_the_result(case, factor):
    pattern, x, dim = case
    assert torch.equal(F.soft_threshold(x * factor, pattern, dim), F.soft_threshold(x, pattern, dim) * factor)


@given(st.permutations(range(8)), patterns(largest=8, smallest=8), st.lists(tied(), min_size=8, max_size=8))
def test_permuting_a_group_permutes_the_result(order, pattern, values):
    x = torch.tensor(values)
    assert torch.equal(F.soft_threshold(x[order], pattern), F.soft_threshold(x, pattern)[order])


@given(st.data(), cases(patterns(largest=12), finite()))
def test_single_signs_pass_through(data, case):
    pattern, x, dim = case
    signs = torch.tensor(data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=x.numel(), max_size=x.numel()))).view(x.shape)
    assert torch.equal(F.soft_threshold(x * signs, pattern, dim), F.soft_threshold(x, pattern, dim) * signs)


@given(cases(patterns(), st.one_of(tied(), finite())))
def test_unrolled_and_reduced_groups_agree(case):
    pattern, x, dim = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_groups, "UNROLLED", 0)
        reduced = F.soft_threshold(x, pattern, dim)
        patch.setattr(_groups, "UNROLLED", 64)
        unrolled = F.soft_threshold(x, pattern, dim)
    assert torch.equal(reduced, unrolled)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_dtype_stays(dtype):
    out = F.soft_threshold(torch.tensor([4.0, -3.0, 2.0, 1.0], dtype=dtype), "2:4")
    assert out.dtype == dtype
    assert out.tolist() == [2.0, -1.0, 0.0, 0.0]


def test_a_nan_survives_as_nan():
    out = soft([math.nan, 1.0, 2.0, 3.0], "2:4")
    assert math.isnan(out[0])
    assert out[1:] == [0.0, 0.0, 1.0]


def test_an_infinity_survives_a_finite_threshold():
    assert soft([-math.inf, 1.0, 2.0, 3.0], "2:4") == [-math.inf, 0.0, 0.0, 1.0]


def test_without_a_finite_threshold_infinities_become_zero_or_nan():
    assert soft([math.inf, math.inf, -math.inf, 1.0], "2:4") == [0.0] * 4
    out = soft([math.nan, math.nan, math.nan, math.inf], "2:4")
    assert [math.isnan(value) for value in out] == [True, True, False, False]


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
@pytest.mark.parametrize("spec", ["2:4", "3:16"])
def test_an_empty_tensor_stays_empty(shape, spec):
    assert F.soft_threshold(torch.empty(shape), spec).shape == shape


# the scale


def test_the_scale_is_the_least_squares_fit():
    x = torch.tensor([4.0, -3.0, 2.0, 1.0])
    # S(x) = (2, -1, 0, 0), so <x, S> = 11 and <S, S> = 5
    scale = F.soft_threshold_scale(x, "2:4")
    assert scale.shape == ()
    assert scale.item() == pytest.approx(11 / 5)


def test_nothing_to_scale_scales_by_one():
    assert F.soft_threshold_scale(torch.zeros(2, 4), "2:4").item() == 1.0
    assert F.soft_threshold_scale(torch.ones(2, 4), "2:4").item() == 1.0
    assert F.soft_threshold_scale(torch.empty(0, 4), "2:4").item() == 1.0


@pytest.mark.parametrize(
    ("dtype", "result"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_the_scale_is_at_least_float32(dtype, result):
    assert F.soft_threshold_scale(torch.ones(4, dtype=dtype), "2:4").dtype == result


def test_the_scale_of_float16_weights_does_not_overflow():
    x = samples("gaussian", 256, 256)
    assert F.soft_threshold_scale((x * 1000).half(), "2:4").item() == pytest.approx(
        F.soft_threshold_scale(x, "2:4").item(), rel=1e-3
    )


@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), patterns(largest=8, smallest=2))
def test_the_scale_does_not_depend_on_the_size_of_the_weights(seed, factor, pattern):
    x = torch.randn(8, pattern.m * 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert F.soft_threshold_scale(x * factor, pattern).item() == pytest.approx(
        F.soft_threshold_scale(x, pattern).item(), rel=1e-9
    )


@given(st.integers(0, 2**31), st.floats(0.1, 5))
def test_no_other_scale_fits_better(seed, other):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    projected = F.soft_threshold(x, "2:4")
    best = F.least_squares_scale(x, projected)
    assert (x - best * projected).norm() <= (x - other * projected).norm() + 1e-12


INITIALISATIONS = {
    "gaussian": (1.483, 2.513, 0.258, 0.132, 0.861),
    "gaussian cut at 2 sigma": (1.560, 2.684, 0.292, 0.151, 0.841),
    "uniform": (7 / 4, 3.335, 0.388, 0.200, 0.782),
    "laplace": (31 / 24, 2.000, 0.166, 0.080, 0.913),
}


@pytest.mark.parametrize("kind", INITIALISATIONS)
def test_scale_and_error_for_each_initialisation(kind):
    x = samples(kind, 1024, 1024)
    projected = F.soft_threshold(x, "2:4")
    scale, l1_scale, error, hard_error, norm = INITIALISATIONS[kind]
    beta = F.soft_threshold_scale(x, "2:4")
    assert beta.item() == pytest.approx(scale, abs=0.01)
    assert (x.abs().double().sum() / projected.abs().double().sum()).item() == pytest.approx(l1_scale, abs=0.02)
    squared = x.square().double().sum()
    assert ((x - beta * projected).square().double().sum() / squared).item() == pytest.approx(error, abs=0.003)
    hard = torch.where(F.magnitude_mask(x, "2:4"), 0, x)
    assert (hard.square().double().sum() / squared).item() == pytest.approx(hard_error, abs=0.002)
    assert ((beta * projected).norm() / x.norm()).item() == pytest.approx(norm, abs=0.003)


@pytest.mark.parametrize(
    ("spec", "scale"), [("1:2", 1.376), ("1:4", 1.888), ("4:8", 1.563), ("2:8", 2.067), ("1:8", 2.486), ("8:16", 1.614)]
)
def test_gaussian_scale_of_other_patterns(spec, scale):
    assert F.soft_threshold_scale(samples("gaussian", 1024, 1024), spec).item() == pytest.approx(scale, abs=0.01)


# both ways: the soft threshold as an operand of grad_input


def both_ways(x, spec="2:4"):
    return F.soft_threshold(F.soft_threshold(x, spec), spec, dim=0)


@given(st.lists(tied(), min_size=64, max_size=64), patterns(largest=4))
def test_thresholding_along_both_dims_keeps_both_patterns(values, pattern):
    x = torch.tensor(values).view(8, 8)[: 8 // pattern.m * pattern.m, : 8 // pattern.m * pattern.m]
    out = both_ways(x, pattern)
    assert F.violations(out, pattern).item() == F.violations(out, pattern, 0).item() == 0


@given(st.lists(tied(), min_size=64, max_size=64), st.integers(0, 2**31), st.sampled_from([1e-3, 0.3, 2.0]))
def test_thresholding_along_both_dims_moves_by_at_most_four_times_the_step(values, seed, size):
    x = torch.tensor(values, dtype=torch.float64).view(8, 8)
    step = size * (2 * torch.rand(8, 8, generator=torch.Generator().manual_seed(seed)).double() - 1)
    assert (both_ways(x + step) - both_ways(x)).abs().max() <= 4 * step.abs().max() + 1e-12


@pytest.mark.parametrize(("kind", "scale"), [("gaussian", 1.583), ("uniform", 1.866), ("laplace", 1.365)])
def test_scale_of_thresholding_along_both_dims(kind, scale):
    x = samples(kind, 1024, 1024)
    assert F.least_squares_scale(x, both_ways(x)).item() == pytest.approx(scale, abs=0.01)


def test_error_and_density_of_thresholding_along_both_dims():
    x = samples("gaussian", 1024, 1024)
    out = both_ways(x)
    error = (x - F.least_squares_scale(x, out) * out).square().sum() / x.square().sum()
    assert error.item() == pytest.approx(0.357, abs=0.003)
    assert (out != 0).double().mean().item() == pytest.approx(0.406, abs=0.001)


def test_the_soft_threshold_has_already_shrunk_what_the_backward_mask_drops():
    projected = F.soft_threshold(samples("gaussian", 2048, 2048), "2:4")
    backward = torch.where(F.backward_mask(projected, "2:4"), projected, 0)
    lost = (projected - backward).square().double().sum() / projected.square().double().sum()
    assert lost.item() == pytest.approx(0.035, abs=0.001)
    assert ((backward != 0).sum() / (projected != 0).sum()).item() == pytest.approx(0.8125, abs=0.001)
    assert (backward != 0).double().mean().item() == pytest.approx(0.406, abs=0.001)
    assert F.violations(backward, "2:4", 0).item() == 0


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("transposable mask on the soft weight", 0.036),
        ("backward mask on the hard weight", 0.074),
        ("second soft threshold, scaled by 1.09", 0.093),
        ("largest gradients", 0.132),
    ],
)
def test_squared_error_of_each_operand_of_grad_input(option, error):
    x = samples("gaussian", 1024, 1024)
    operand = F.soft_threshold(x, "2:4")
    if option.startswith("transposable"):
        pruned = operand * F.transposable_mask(operand, "2:4")
    elif option.startswith("second"):
        pruned = 1.09 * F.soft_threshold(operand, "2:4", dim=0)
        assert F.least_squares_scale(operand, pruned / 1.09).item() == pytest.approx(1.09, abs=0.01)
    elif option.startswith("backward"):
        operand = x * F.magnitude_mask(x, "2:4")
        pruned = operand * F.backward_mask(x, "2:4")
    else:
        operand, pruned = x, F.sdgp(x, "2:4", rescale=False)
    assert ((operand - pruned).square().sum() / operand.square().sum()).item() == pytest.approx(error, abs=0.002)
