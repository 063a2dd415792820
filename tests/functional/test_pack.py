import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nmsparse.functional as F
from nmsparse import Pattern

from .oracles import FLOATS, patterns, samples


def same_bits(a, b):
    """Equal bit for bit, where any NaN is as good as another."""
    words = [torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*words)


# pack and unpack


def test_values_and_positions_of_each_group():
    x = torch.tensor([[0.0, 5.0, 0.0, -7.0, 1.0, 0.0, 2.0, 0.0]])
    values, indices = F.pack(x, "2:4")
    assert values.tolist() == [[5, -7, 1, 2]]
    assert indices.tolist() == [[1, 3, 0, 2]]
    assert indices.dtype == torch.uint8


def test_free_slots_take_the_lowest_free_positions():
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0], [9.0, 0.0, 0.0, 0.0]])
    values, indices = F.pack(x, "2:4")
    assert indices.tolist() == [[0, 1], [0, 3], [0, 1]]
    assert values.tolist() == [[0, 0], [0, 9], [9, 0]]


def test_keeping_all_packs_all():
    x = samples("gaussian", 2, 8)
    values, indices = F.pack(x, "4:4")
    assert torch.equal(values, x)
    assert indices.tolist() == [[0, 1, 2, 3] * 2] * 2


@given(st.data(), patterns(largest=64), st.sampled_from(FLOATS))
def test_unpacking_returns_the_same_bits(data, pattern, dtype):
    rows, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(rows, groups * pattern.m, generator=generator).to(dtype)
    x[torch.rand(x.shape, generator=generator) < 0.1] = math.nan
    x[torch.rand(x.shape, generator=generator) < 0.1] = -math.inf
    x[torch.rand(x.shape, generator=generator) < 0.3] = 0
    x = torch.where(F.magnitude_mask(x, pattern), x, 0)
    values, indices = F.pack(x, pattern)
    assert values.shape == indices.shape == (rows, groups * pattern.n)
    assert same_bits(F.unpack(values, indices, pattern), x)
    places = indices.view(rows, groups, pattern.n).long()
    assert (places.diff(dim=-1) > 0).all()


def test_leading_dims_and_layouts_are_kept():
    x = samples("gaussian", 3, 8, 2)
    x = torch.where(F.magnitude_mask(x, "2:4", 1), x, 0).movedim(1, 2)
    assert not x.is_contiguous()
    values, indices = F.pack(x, "2:4")
    assert values.shape == (3, 2, 4)
    assert torch.equal(F.unpack(values, indices, "2:4"), x)


def test_one_row_packs():
    values, indices = F.pack(torch.tensor([0.0, 3.0]), "1:2")
    assert (values.tolist(), indices.tolist()) == ([3], [1])
    assert F.unpack(values, indices, "1:2").tolist() == [0, 3]


@pytest.mark.parametrize(("m", "dtype"), [(256, torch.uint8), (257, torch.int16), (1024, torch.int16)])
def test_positions_fit_their_dtype(m, dtype):
    x = torch.zeros(1, m)
    x[0, -1] = 1.0
    values, indices = F.pack(x, Pattern(1, m))
    assert indices.dtype == dtype
    assert indices.item() == m - 1
    assert torch.equal(F.unpack(values, indices, Pattern(1, m)), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_whole_numbers_pack_too(dtype):
    x = torch.tensor([[0, 5, 0, 7]], dtype=dtype)
    assert torch.equal(F.unpack(*F.pack(x, "2:4"), "2:4"), x)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_an_empty_tensor_packs_to_nothing(shape):
    x = torch.empty(shape)
    assert torch.equal(F.unpack(*F.pack(x, "2:4"), "2:4"), x)


def test_a_negative_zero_counts_as_zero():
    x = torch.tensor([1.0, -0.0, 2.0, 0.0])
    assert F.pack(x, "2:4")[0].tolist() == [1, 2]


def test_packing_a_dense_tensor_is_refused():
    x = torch.ones(2, 8)
    x[0, :4] = 0
    with pytest.raises(ValueError, match=r'3 groups of this \(2, 8\) tensor have more than 2 non-zeros, so packing it as "2:4"'):
        F.pack(x, "2:4")


def test_packing_a_single_number_is_refused():
    with pytest.raises(ValueError, match="pack needs at least one dim to group, got a 0-d tensor"):
        F.pack(torch.tensor(1.0), "1:1")


def test_values_and_indices_must_have_one_shape():
    with pytest.raises(ValueError, match=r"values \(1, 4\) and indices \(1, 2\) must have one shape"):
        F.unpack(torch.ones(1, 4), torch.zeros(1, 2, dtype=torch.uint8), "2:4")


@pytest.mark.parametrize("shape", [(1, 3), ()])
def test_values_must_hold_whole_groups(shape):
    with pytest.raises(ValueError, match='is not a multiple of 2, so it does not hold groups of "2:4"'):
        F.unpack(torch.ones(shape), torch.zeros(shape, dtype=torch.uint8), "2:4")


@pytest.mark.parametrize("index", [4, 255])
def test_positions_outside_their_group_are_refused(index):
    with pytest.raises(ValueError, match='an index lies outside its group of 4; these indices were not packed as "2:4"'):
        F.unpack(torch.ones(1, 2), torch.tensor([[0, index]], dtype=torch.uint8), "2:4")


def test_negative_positions_are_refused():
    with pytest.raises(ValueError, match="an index lies outside its group of 4"):
        F.unpack(torch.ones(1, 2), torch.tensor([[-1, 0]]), "2:4")


# masks as bits


def test_the_first_entry_is_the_lowest_bit():
    mask = torch.tensor([True, False, False, False, False, False, False, True, False, True])
    assert F.pack_bits(mask).tolist() == [0b10000001, 0b10]


@given(st.lists(st.integers(0, 5), min_size=0, max_size=3), st.integers(0, 2**31))
def test_bits_return_the_same_mask(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = F.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.shape == (-(-mask.numel() // 8),)
    back = F.unpack_bits(bits, mask.shape)
    assert back.dtype == torch.bool
    assert torch.equal(back, mask)


def test_a_strided_mask_is_read_in_its_own_order():
    mask = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(F.unpack_bits(F.pack_bits(mask.t()), mask.t().shape), mask.t())


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_that_do_not_hold_the_shape_are_refused(count):
    with pytest.raises(ValueError, match=rf"{count} bytes do not hold a mask of shape \(3, 5\)"):
        F.unpack_bits(torch.zeros(count, dtype=torch.uint8), torch.Size((3, 5)))
