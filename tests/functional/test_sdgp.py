import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F

from .oracles import FLOATS, cases, finite, patterns, samples, tied


def test_the_largest_gradients_stay_as_they_are_without_rescaling():
    grad = torch.tensor([[4.0, -3.0, 2.0, 1.0]])
    assert F.sdgp(grad, "2:4", rescale=False).tolist() == [[4, -3, 0, 0]]


def test_rescaling_restores_the_sum_of_magnitudes_of_each_token():
    grad = torch.tensor([[4.0, -4.0, 1.0, 3.0], [8.0, 0.0, 0.0, 0.0]])
    assert F.sdgp(grad, "2:4").tolist() == [[6, -6, 0, 0], [8, 0, 0, 0]]


def test_the_norm_is_taken_over_all_groups_of_a_token():
    # 8 + 8 + 0 + 0 and 2 + 2 + 2 + 2: 24 before, 20 after
    grad = torch.tensor([[8.0, 8.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]])
    assert torch.allclose(F.sdgp(grad, "2:4"), torch.tensor([[8.0, 8.0, 0, 0, 2.0, 2.0, 0, 0]]) * 1.2)


@given(cases(patterns(largest=16), st.one_of(tied(), finite()), torch.float64))
def test_every_token_keeps_its_sum_of_magnitudes(case):
    pattern, grad, dim = case
    out = F.sdgp(grad, pattern, dim)
    assert torch.allclose(out.abs().sum(dim), grad.abs().sum(dim), rtol=1e-12)
    assert F.violations(out, pattern, dim).item() == 0
    kept = F.sdgp(grad, pattern, dim, rescale=False)
    assert torch.equal(kept, torch.where(F.magnitude_mask(grad, pattern, dim), grad, 0))
    assert (out.abs() >= kept.abs() * (1 - 1e-12)).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sum_survives_in_every_dtype(dtype):
    grad = samples("gaussian", 64, 256).to(dtype)
    out = F.sdgp(grad, "2:4")
    assert out.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    assert torch.allclose(out.double().abs().sum(1), grad.double().abs().sum(1), rtol=tolerance)


def test_a_convolution_keeps_the_norm_of_each_sample_and_channel():
    grad = samples("gaussian", 2, 8, 6, 6)
    out = F.sdgp(grad, "2:4", 1, over=(2, 3))
    assert F.violations(out, "2:4", 1).item() == 0
    assert torch.allclose(out.abs().sum((2, 3)), grad.abs().sum((2, 3)), rtol=1e-5)


def test_a_channel_that_is_dropped_everywhere_stays_zero():
    grad = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1).expand(1, 4, 2, 2)
    assert F.sdgp(grad, "2:4", 1, over=(2, 3)).sum((0, 2, 3)).tolist() == [0, 0, 12, 16]


def test_one_pixel_layout_is_as_good_as_another():
    grad = samples("gaussian", 2, 8, 4, 4)
    expected = F.sdgp(grad, "2:4", 1, over=(2, 3))
    strided = torch.empty(2, 16, 4, 8)[:, ::2, :, ::2]
    strided.copy_(grad)
    for layout in (
        grad.contiguous(memory_format=torch.channels_last),
        strided,
        grad.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert torch.allclose(F.sdgp(layout, "2:4", 1, over=(2, 3)), expected)
        assert torch.equal(F.sdgp(layout, "2:4", 1, rescale=False), F.sdgp(grad, "2:4", 1, rescale=False))


@given(st.integers(0, 2**31), st.integers(-16, 16), st.booleans())
def test_scaling_the_gradient_scales_the_result(seed, exponent, rescale):
    grad = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
    factor = 2.0**exponent
    assert torch.equal(F.sdgp(grad * factor, "2:4", rescale=rescale), F.sdgp(grad, "2:4", rescale=rescale) * factor)


def test_a_token_does_not_depend_on_its_batch():
    grad = samples("gaussian", 8, 16)
    assert torch.equal(F.sdgp(grad, "2:4")[2:5], F.sdgp(grad[2:5], "2:4"))


def test_zero_gradients_stay_zero():
    assert torch.equal(F.sdgp(torch.zeros(3, 8), "2:4"), torch.zeros(3, 8))


def test_keeping_all_changes_nothing():
    grad = samples("gaussian", 3, 8)
    assert torch.equal(F.sdgp(grad, "4:4"), grad)
    assert torch.equal(F.sdgp(grad, "4:4", rescale=False), grad)


def test_gradients_that_already_fit_are_unchanged():
    grad = torch.tensor([[0.1, 0.0, 0.0, 0.7, 0.0, 0.3, 0.0, 0.0]])
    assert torch.equal(F.sdgp(grad, "2:4"), grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_breaks_its_own_token_only(bad):
    grad = samples("gaussian", 3, 8)
    grad[1, 2] = bad
    out = F.sdgp(grad, "2:4")
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    plain = F.sdgp(grad, "2:4", rescale=False)
    assert torch.equal(plain.isfinite(), grad.isfinite())


def test_empty_gradients_stay_empty():
    assert F.sdgp(torch.empty(0, 8), "2:4").shape == (0, 8)
    assert F.sdgp(torch.empty(3, 0), "2:4").shape == (3, 0)


def test_shares_and_factor_of_a_gaussian():
    grad = samples("gaussian", 256, 4096).double()
    plain, rescaled = F.sdgp(grad, "2:4", rescale=False), F.sdgp(grad, "2:4")
    energy = grad.square().sum()
    assert (plain.abs().sum() / grad.abs().sum()).item() == pytest.approx(0.745, abs=0.002)
    assert (plain.square().sum() / energy).item() == pytest.approx(0.868, abs=0.002)
    factor = rescaled.abs().amax(1) / plain.abs().amax(1)
    assert (factor >= 1).all()
    assert factor.mean().item() == pytest.approx(1.343, abs=0.01)
    assert ((rescaled - grad).square().sum() / energy).item() == pytest.approx(0.234, abs=0.002)
