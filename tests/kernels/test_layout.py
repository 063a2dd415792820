"""The packed layout in plain torch against oracles in plain Python: addresses bit by bit, positions group by group."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nmsparse.kernels import misfit, packed_size
from nmsparse.kernels._layout import Major, compress, decompress

LEGAL = [0x4, 0x8, 0x9, 0xC, 0xD, 0xE]
SIZES = [(64, 32), (64, 64), (64, 160), (128, 32), (128, 128), (192, 96), (192, 160)]
every_size = pytest.mark.parametrize(("m", "k"), SIZES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
both_majors = pytest.mark.parametrize("major", ["k", "m"])


def sparse_matrix(m: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A logical m x k matrix with two non-zeros in every group of four, and their (m, k/4, 2) ascending positions."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(m, k // 4, 4, generator=generator).argsort(2)[..., :2].sort(2).values
    values = torch.rand(m, k // 4, 2, generator=generator) + 0.5
    values *= torch.randint(2, values.shape, generator=generator) * 2 - 1
    return torch.zeros(m, k // 4, 4).scatter_(2, positions, values).flatten(1).to(dtype), positions


def stored_as(dense: Tensor, major: Major) -> Tensor:
    return dense if major == "k" else dense.t().contiguous()


def parts(packed: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Values, and bytes of metadata."""
    return packed[: m * k // 2], packed[m * k // 2 :].view(torch.uint8)


def nibble_address(r: int, g: int, k: int) -> int:
    """Where the nibble of row r and group g lies, from the interleaving of their bits: low nibbles have even addresses."""
    order = [("r", 3), ("g", 2), ("g", 0), ("g", 1), ("r", 0), ("r", 1), ("r", 2), ("r", 4), ("r", 5)]
    inside = sum(((r if name == "r" else g) >> bit & 1) << place for place, (name, bit) in enumerate(order))
    atom = (r >> 6) * (k // 32) + (g >> 3)  # all further bits of g, then all further bits of r
    return inside + atom * (1 << len(order))


def nibbles_of(packed: Tensor, m: int, k: int) -> list[list[int]]:
    """The nibble of every group, found with the oracle's addresses."""
    metadata = parts(packed, m, k)[1].tolist()
    halves = [half for byte in metadata for half in (byte & 15, byte >> 4)]
    return [[halves[nibble_address(r, g, k)] for g in range(k // 4)] for r in range(m)]


def packed_group(group: list[float]) -> tuple[list[float], int]:
    """Values and nibble of one group, at the far end of a matrix of zeros."""
    dense = torch.zeros(64, 32, dtype=torch.float16)
    dense[-1, -4:] = torch.tensor(group)
    packed = compress(dense, "k")
    return parts(packed, 64, 32)[0][-2:].tolist(), nibbles_of(packed, 64, 32)[-1][-1]


# ---- round trips ----


@every_size
@every_dtype
@both_majors
def test_a_matrix_comes_back_from_its_packed_form(m, k, dtype, major):
    stored = stored_as(sparse_matrix(m, k, dtype)[0], major)
    packed = compress(stored, major)
    assert packed.dtype == dtype
    assert packed.shape == (packed_size(m, k),)
    back = decompress(packed, m, k, major)
    assert back.is_contiguous()
    assert back.dtype == dtype
    assert torch.equal(back, stored)


@every_dtype
@both_majors
def test_a_packed_form_comes_back_from_its_matrix(dtype, major):
    m, k = 128, 96
    generator = torch.Generator().manual_seed(1)
    values = (torch.rand(m * k // 2, generator=generator) + 1).to(dtype)  # no zeros: their places could not be known
    legal = torch.tensor(LEGAL)[torch.randint(6, (2, m * k // 8), generator=generator)]
    metadata = (legal[0] | legal[1] << 4).to(torch.uint8)
    packed = torch.cat([values.view(torch.uint8), metadata]).view(dtype)
    again = compress(decompress(packed, m, k, major), major)
    assert torch.equal(again.view(torch.uint8), packed.view(torch.uint8))


def test_a_matrix_may_be_given_as_a_transposed_view():
    dense, _ = sparse_matrix(64, 64)
    view = dense.t().contiguous().t()
    assert not view.is_contiguous()
    assert torch.equal(compress(view, "k"), compress(dense, "k"))
    assert torch.equal(compress(dense.t(), "m"), compress(dense.t().contiguous(), "m"))


def test_both_majors_share_their_metadata_and_transpose_their_values():
    dense, _ = sparse_matrix(128, 96)
    k_values, k_metadata = parts(compress(dense, "k"), 128, 96)
    m_values, m_metadata = parts(compress(dense.t().contiguous(), "m"), 128, 96)
    assert torch.equal(k_metadata, m_metadata)
    assert torch.equal(m_values.view(48, 128).t(), k_values.view(128, 48))


# ---- addresses ----


@pytest.mark.parametrize(
    ("r", "g", "byte", "is_high"),
    [
        (0, 0, 0, False),
        (8, 0, 0, True),
        (0, 4, 1, False),
        (0, 1, 2, False),
        (0, 3, 6, False),
        (1, 0, 8, False),
        (7, 0, 56, False),
        (16, 0, 64, False),
        (24, 5, 67, True),
        (63, 7, 255, True),
        (0, 8, 256, False),
        (0, 23, 512 + 7, False),
        (64, 0, 8 * 96, False),
        (127, 23, 16 * 96 - 1, True),
    ],
)
def test_one_group_changes_one_nibble_at_the_documented_byte(r, g, byte, is_high):
    m, k = 128, 96
    dense = torch.zeros(m, k, dtype=torch.bfloat16)
    background = parts(compress(dense, "k"), m, k)[1]
    dense[r, 4 * g + 2 : 4 * g + 4] = 1  # nibble 0xE in place of the 0x4 of a group of zeros
    metadata = parts(compress(dense, "k"), m, k)[1]
    assert background.eq(0x44).all()
    assert (metadata != background).nonzero().flatten().tolist() == [byte]
    assert metadata[byte] == (0xE4 if is_high else 0x4E)
    assert nibble_address(r, g, k) == 2 * byte + is_high


@every_size
@both_majors
def test_every_nibble_is_where_the_interleaved_bits_say(m, k, major):
    dense, positions = sparse_matrix(m, k, seed=2)
    expected = (positions[..., 0] | positions[..., 1] << 2).tolist()
    assert nibbles_of(compress(stored_as(dense, major), major), m, k) == expected


@pytest.mark.parametrize(("m", "k"), [(64, 32), (192, 160)])
def test_addresses_fill_the_metadata_without_a_gap(m, k):
    addresses = {nibble_address(r, g, k) for r in range(m) for g in range(k // 4)}
    assert addresses == set(range(m * k // 4))
    assert 2 * parts(compress(torch.zeros(m, k, dtype=torch.float16), "k"), m, k)[1].numel() == m * k // 4


@pytest.mark.parametrize(("m", "k"), [(64, 32), (128, 96)])
def test_values_are_where_the_majors_say(m, k):
    dense, positions = sparse_matrix(m, k, seed=3)
    k_major, m_major = compress(dense, "k").tolist(), compress(dense.t().contiguous(), "m").tolist()
    rows, places = dense.tolist(), positions.tolist()
    for r in range(m):
        for g in range(k // 4):
            for s in range(2):
                value = rows[r][4 * g + places[r][g][s]]
                assert k_major[r * (k // 2) + 2 * g + s] == value
                assert m_major[(2 * g + s) * m + r] == value


# ---- size ----


@every_size
def test_a_packed_operand_takes_nine_sixteenths(m, k):
    assert 16 * packed_size(m, k) == 9 * m * k
    assert compress(torch.zeros(m, k, dtype=torch.bfloat16), "k").numel() == packed_size(m, k)


@every_size
def test_multiples_of_an_atom_fit(m, k):
    assert misfit(m, k) is None


@pytest.mark.parametrize(("m", "k"), [(63, 32), (32, 32), (96, 64), (64, 16), (64, 48), (64, 33), (0, 32), (64, 0), (0, 0)])
@both_majors
def test_other_sizes_are_refused_with_the_sizes_named(m, k, major):
    message = f"needs multiples of 64 x 32, and this operand is {m} x {k}"
    why = misfit(m, k)
    assert why is not None
    assert why.endswith(message)
    with pytest.raises(ValueError, match=message + r"\.$"):
        compress(stored_as(torch.zeros(m, k, dtype=torch.float16), major), major)


# ---- what is kept ----


@every_dtype
@both_majors
def test_only_legal_nibbles_are_written_whatever_the_matrix(dtype, major):
    m, k = 128, 128
    generator = torch.Generator().manual_seed(4)
    for matrix in (
        torch.randn(m, k, generator=generator),  # dense
        torch.randint(-1, 2, (m, k), generator=generator).float(),  # zeros and ties
        torch.where(torch.rand(m, k, generator=generator) < 0.1, 1.0, -0.0),
        torch.full((m, k), math.nan),
        torch.full((m, k), -math.inf),
    ):
        packed = compress(stored_as(matrix.to(dtype), major), major)
        metadata = parts(packed, m, k)[1].long()
        assert set((metadata & 15).tolist()) | set((metadata >> 4).tolist()) <= set(LEGAL)


def test_every_legal_nibble_occurs():
    metadata = parts(compress(sparse_matrix(128, 128)[0], "k"), 128, 128)[1].long()
    assert (metadata & 15).unique().tolist() == LEGAL
    assert (metadata >> 4).unique().tolist() == LEGAL


@pytest.mark.parametrize(
    ("group", "values", "nibble"),
    [
        ([1, 2, 0, 0], [1, 2], 0x4),
        ([1, 0, 2, 0], [1, 2], 0x8),
        ([0, 1, 2, 0], [1, 2], 0x9),
        ([1, 0, 0, 2], [1, 2], 0xC),
        ([0, 1, 0, 2], [1, 2], 0xD),
        ([0, 0, 1, 2], [1, 2], 0xE),
        ([0, -3, 1, 2], [-3, 2], 0xD),
        ([4, 3, -2, 1], [4, 3], 0x4),
    ],
)
def test_the_two_largest_magnitudes_are_kept_in_order_of_position(group, values, nibble):
    assert packed_group(group) == (values, nibble)


@pytest.mark.parametrize(
    ("group", "values", "nibble"),
    [
        ([0, 0, 0, 0], [0, 0], 0x4),
        ([5, 0, 0, 0], [5, 0], 0x4),
        ([0, 5, 0, 0], [0, 5], 0x4),
        ([0, 0, 5, 0], [0, 5], 0x8),
        ([0, 0, 0, 5], [0, 5], 0xC),
    ],
)
def test_groups_with_fewer_than_two_non_zeros_keep_the_lowest_zeros(group, values, nibble):
    assert packed_group(group) == (values, nibble)


@pytest.mark.parametrize(
    ("group", "values", "nibble"),
    [
        ([1, 1, 1, 1], [1, 1], 0x4),
        ([-1, 1, -1, 1], [-1, 1], 0x4),
        ([1, 2, 2, 2], [2, 2], 0x9),
        ([1, 1, 3, 1], [1, 3], 0x8),
        ([1, 1, 1, 3], [1, 3], 0xC),
        ([1, -2, 1, 2], [-2, 2], 0xD),
        ([0, 0, 2, -2], [2, -2], 0xE),
    ],
)
def test_ties_keep_the_lower_position(group, values, nibble):
    assert packed_group(group) == (values, nibble)


def test_nan_outranks_infinity_and_is_kept():
    values, nibble = packed_group([math.inf, 1, -math.inf, math.nan])
    assert nibble == 0xC
    assert values[0] == math.inf
    assert math.isnan(values[1])


def test_given_positions_decide_over_magnitudes():
    dense = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)).half()
    _, positions = sparse_matrix(64, 32, seed=6)
    packed = compress(dense, "k", positions)
    kept = torch.zeros(64, 8, 4, dtype=torch.bool).scatter_(2, positions, True).flatten(1)
    assert torch.equal(decompress(packed, 64, 32, "k"), torch.where(kept, dense, 0))
    m_major = compress(dense.t().contiguous(), "m", positions)
    assert torch.equal(decompress(m_major, 64, 32, "m"), torch.where(kept, dense, 0).t())


@every_dtype
@both_majors
def test_no_negative_zero_is_written(dtype, major):
    dense = sparse_matrix(64, 64, dtype)[0]
    dense[:, :32] = -0.0
    dense[:, 32:] = torch.where(dense[:, 32:] > 0, dense[:, 32:], -0.0)
    values = parts(compress(stored_as(dense, major), major), 64, 64)[0]
    assert (values == 0).sum() > 64 * 16
    assert not values.signbit().any()
    assert torch.equal(decompress(compress(stored_as(dense, major), major), 64, 64, major), stored_as(dense, major))
