import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F

from .oracles import FLOATS, finite, samples

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2])
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
HALF_STEP = {E4M3: 2**-4, E5M2: 2**-3}
"""Largest relative rounding error of a normal number."""
HALF_SMALLEST = {E4M3: 2**-10, E5M2: 2**-17}
"""Half of the smallest subnormal."""


@DTYPES
def test_the_largest_magnitude_becomes_the_largest_number(dtype):
    quantised, scale = F.quantize_fp8(torch.tensor([0.5, -2.0, 1.0]), dtype)
    assert quantised.dtype == dtype
    assert scale.dtype == torch.float32
    assert scale.item() == LIMIT[dtype] / 2
    assert quantised.float().tolist() == [LIMIT[dtype] / 4, -LIMIT[dtype], LIMIT[dtype] / 2]


@DTYPES
def test_zeros_are_scaled_by_one(dtype):
    quantised, scale = F.quantize_fp8(torch.zeros(3, 4), dtype)
    assert scale.item() == 1.0
    assert torch.equal(quantised.float(), torch.zeros(3, 4))


@DTYPES
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_is_scaled_by_one(dtype, shape):
    quantised, scale = F.quantize_fp8(torch.empty(shape), dtype)
    assert quantised.shape == shape
    assert scale.item() == 1.0


@DTYPES
def test_magnitudes_too_small_to_scale_become_zero(dtype):
    quantised, scale = F.quantize_fp8(torch.full((4,), 1e-40), dtype)
    assert scale.item() == 1.0
    assert torch.equal(quantised.float(), torch.zeros(4))


@DTYPES
@given(values=st.lists(finite(), min_size=1, max_size=32))
def test_the_error_is_half_a_step_of_the_format(dtype, values):
    x = torch.tensor(values)
    quantised, scale = F.quantize_fp8(x, dtype)
    assert quantised.float().isfinite().all()
    back = quantised.double() / scale.double()
    bound = torch.maximum(x.double().abs() * HALF_STEP[dtype], HALF_SMALLEST[dtype] / scale.double()) * (1 + 1e-6)
    assert ((back - x.double()).abs() <= bound).all()


@DTYPES
@pytest.mark.parametrize("source", FLOATS)
def test_every_source_dtype_is_read(dtype, source):
    x = samples("gaussian", 8, 8).to(source)
    quantised, scale = F.quantize_fp8(x, dtype)
    expected, expected_scale = F.quantize_fp8(x.float(), dtype)
    assert torch.equal(quantised.float(), expected.float())
    assert torch.equal(scale, expected_scale)


@DTYPES
def test_a_nan_stays_visible(dtype):
    x = samples("gaussian", 4, 4)
    x[1, 2] = math.nan
    quantised, _ = F.quantize_fp8(x, dtype)
    assert torch.equal(quantised.float().isnan(), x.isnan())


@DTYPES
def test_an_infinity_becomes_nan_and_not_the_largest_number(dtype):
    x = samples("gaussian", 4, 4)
    x[1, 2] = math.inf
    quantised, _ = F.quantize_fp8(x, dtype)
    assert quantised.float()[1, 2].isnan()


# products


@DTYPES
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_that_the_format_holds_multiply_exactly(dtype, source):
    a = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=source)
    b = torch.tensor([[4.0, 1.0], [2.0, -0.25]], dtype=source)
    out = F.matmul_fp8(a, b, dtype)
    assert out.dtype == source
    # 448 and 57344 are 7 times a power of two: the scale of 4 is exact, and so is every operand
    assert out.tolist() == [[0.0, 1.5], [10.0, -0.5]]


@DTYPES
def test_products_equal_those_of_the_quantised_operands(dtype):
    a, b = samples("gaussian", 24, 40), samples("laplace", 40, 8)
    (qa, sa), (qb, sb) = F.quantize_fp8(a, dtype), F.quantize_fp8(b, dtype)
    expected = (qa.double() / sa.double()) @ (qb.double() / sb.double())
    assert torch.allclose(F.matmul_fp8(a, b, dtype).double(), expected, rtol=1e-5, atol=1e-4)


@DTYPES
@pytest.mark.parametrize(("source", "rounding"), [(torch.float32, 1e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_the_error_of_a_product_is_bounded_by_two_roundings(dtype, source, rounding):
    generator = torch.Generator().manual_seed(0)
    # magnitudes within one factor of two: no operand falls among the subnormals
    a, b = ((0.5 + 0.5 * torch.rand(32, 32, generator=generator)).to(source) for _ in range(2))
    signs = torch.where(torch.rand(32, 32, generator=generator) < 0.5, -1.0, 1.0).to(source)
    exact = (a * signs).double() @ b.double()
    error = (F.matmul_fp8(a * signs, b, dtype).double() - exact).abs()
    magnitude = a.double() @ b.double()
    assert (error <= magnitude * ((1 + HALF_STEP[dtype]) ** 2 - 1 + rounding)).all()
    # roundings are independent, so they add up to much less
    assert (error.square().mean().sqrt() / magnitude.mean()).item() < HALF_STEP[dtype] / 4


@DTYPES
@pytest.mark.parametrize("zero", ["first", "second", "both"])
def test_a_zero_operand_gives_finite_zeros(dtype, zero):
    a, b = samples("gaussian", 4, 8), samples("gaussian", 8, 4)
    a, b = a * (zero == "second"), b * (zero == "first")
    assert torch.equal(F.matmul_fp8(a, b, dtype), torch.zeros(4, 4))


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_operand_shows_in_the_product(dtype, bad):
    a = samples("gaussian", 4, 8)
    a[2, 3] = bad
    out = F.matmul_fp8(a, samples("gaussian", 8, 4), dtype)
    assert out[2].isnan().all()


@DTYPES
@pytest.mark.parametrize("exponent", [-56, -20, 40])
def test_scaling_the_operands_scales_the_product(dtype, exponent):
    a, b = samples("gaussian", 16, 16, seed=1), samples("gaussian", 16, 16, seed=2)
    factor = 2.0**exponent
    assert torch.equal(F.matmul_fp8(a * factor, b * factor, dtype), F.matmul_fp8(a, b, dtype) * factor * factor)


@DTYPES
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_long_sums_of_large_numbers_do_not_overflow_on_the_way(dtype, source):
    ones = torch.ones(2, 4096, dtype=source)
    assert torch.equal(F.matmul_fp8(ones, ones.t(), dtype), torch.full((2, 2), 4096.0, dtype=source))


@DTYPES
def test_an_empty_product_is_empty_or_zero(dtype):
    assert F.matmul_fp8(torch.empty(0, 4), torch.ones(4, 3), dtype).shape == (0, 3)
    assert torch.equal(F.matmul_fp8(torch.empty(2, 0), torch.empty(0, 3), dtype), torch.zeros(2, 3))
