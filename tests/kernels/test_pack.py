"""The pack kernels against ``nmsparse.functional``, bit for bit, in Triton's interpreter, and compiled: no GPU needed.

The interpreter cuts fp32 off to bf16 where a GPU rounds, so bf16 copies are compared on values that bf16 can hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as NF
from torch import Tensor

import nmsparse.functional as F
from nmsparse.kernels import packed_size
from nmsparse.kernels._layout import Major, compress, decompress

pytest.importorskip("triton", reason="Triton is not installed, so there is no kernel to check")
from triton_tools import compiled_for_hopper, interpreted

from nmsparse.kernels import _pack, _tile

LEGAL = [0x4, 0x8, 0x9, 0xC, 0xD, 0xE]
GUARD = 64
both_orders = pytest.mark.parametrize("columns_first", [True, False], ids=["columns first", "rows first"])
hard_and_soft = pytest.mark.parametrize("scale", [None, 1.375], ids=["hard", "soft"])


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret the kernels, their helpers, and what of Triton's library is written in Triton; undone after each test."""
    if "compiled" in request.fixturenames:
        yield
        return
    with interpreted(monkeypatch, _pack, _tile):
        yield


@pytest.fixture
def marked_memory() -> Iterator[None]:
    """Fresh memory is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, dtype=torch.float16).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_same_bytes(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(as_bytes(ours), as_bytes(theirs))


def nibbles(packed: Tensor) -> Tensor:
    """All nibbles of the metadata, in the order of memory."""
    metadata = packed[packed.numel() * 8 // 9 :].view(torch.uint8).long()
    return torch.stack([metadata & 15, metadata >> 4], 1).flatten()


def values(packed: Tensor) -> Tensor:
    return packed[: packed.numel() * 8 // 9]


def assert_well_formed(packed: Tensor) -> None:
    """Legal metadata everywhere, and no -0.0."""
    assert set(nibbles(packed).tolist()) <= set(LEGAL)
    zeros = values(packed)[values(packed) == 0]
    assert not zeros.signbit().any()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, largest: int = 8, seed: int = 0) -> Tensor:
    """Small integers, which every type holds: with many ties and some zeros."""
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


# ---- weights ----


def pack_weight(weight: Tensor, majors: str = "km", dtype: torch.dtype = torch.float16, **options: Any) -> dict[Major, Tensor]:
    """The kernel's copies, from buffers of NaN; fails where it writes past their ends or changes what it reads."""
    rows, columns = weight.shape
    size = packed_size(rows, columns)
    memory = {major: torch.full((2 * (size + 2 * GUARD),), 0xFF, dtype=torch.uint8).view(dtype) for major in majors}
    copies = {major: buffer[GUARD:-GUARD] for major, buffer in memory.items()}
    before = weight.clone()
    _pack.pack_weight(weight, copies.get("k"), copies.get("m"), **options)
    assert_same_bytes(weight, before)
    for buffer in memory.values():
        assert (as_bytes(buffer[:GUARD]) == 0xFF).all()
        assert (as_bytes(buffer[-GUARD:]) == 0xFF).all()
    for packed in copies.values():
        assert_well_formed(packed)
    return copies


def project(x: Tensor, dim: int, scale: Tensor | None = None) -> Tensor:
    if scale is not None:
        return F.soft_threshold(x, "2:4", dim) * scale
    return torch.where(F.magnitude_mask(x, "2:4", dim), x, 0)


def expected_weight(
    weight: Tensor, columns_first: bool, mask: Tensor | None = None, scale: Tensor | None = None
) -> dict[Major, Tensor]:
    """What the copies hold, in fp32: the first direction projects, the second keeps the two largest of that."""
    x = weight.float() if mask is None else torch.where(mask, weight.float(), 0)
    first, second = (-1, 0) if columns_first else (0, -1)
    once = project(x, first, scale)
    twice = project(once, second)
    return {"k": once, "m": twice} if columns_first else {"k": twice, "m": once}


def unpacked(copies: dict[Major, Tensor], shape: torch.Size) -> dict[Major, Tensor]:
    """The stored (rows, columns) matrices that packed copies stand for."""
    rows, columns = shape
    sizes: dict[Major, tuple[int, int]] = {"k": (rows, columns), "m": (columns, rows)}
    return {major: decompress(packed, *sizes[major], major) for major, packed in copies.items()}


def assert_packs(weight: Tensor, majors: str = "km", dtype: torch.dtype = torch.float16, **options: Any) -> dict[Major, Tensor]:
    """The copies stand for what functional computes; where nothing is shrunk, every byte is that of the layout."""
    copies = pack_weight(weight, majors, dtype, **options)
    wanted = expected_weight(weight, options["columns_first"], options.get("mask"), options.get("scale"))
    for major, found in unpacked(copies, weight.shape).items():
        projected = wanted[major].to(dtype) + 0.0
        assert_same_bytes(found, projected)
        is_first = (major == "k") == options["columns_first"]
        if options.get("scale") is None or not is_first:
            assert_same_bytes(copies[major], compress(projected, major))
    return copies


def scale_of(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value)


@pytest.mark.parametrize(("shape", "tile"), [((64, 64), None), ((64, 192), (128, 1)), ((128, 128), None)], ids=str)
@both_orders
@hard_and_soft
def test_both_copies_equal_functional(shape, tile, columns_first, scale):
    assert_packs(randn(*shape), columns_first=columns_first, scale=scale_of(scale), tile=tile)


@both_orders
@hard_and_soft
def test_a_mask_acts_before_anything_else(columns_first, scale):
    weight = randn(64, 128, seed=1)
    mask = torch.rand(64, 128, generator=torch.Generator().manual_seed(2)) < 0.6
    weight[~mask] *= 100  # what is masked would win everywhere
    assert_packs(weight, columns_first=columns_first, scale=scale_of(scale), mask=mask)


def test_a_mask_may_have_other_strides_than_its_weight():
    # a Conv1D stores its weight (I, O), and its state holds the mask as (O, I)
    mask = torch.rand(128, 64, generator=torch.Generator().manual_seed(36)) < 0.6
    assert_packs(randn(64, 128, seed=37), columns_first=False, mask=mask.t())


@pytest.mark.parametrize("shape", [(64, 32), (64, 96), (128, 160)], ids=str)
@both_orders
@hard_and_soft
def test_a_k_major_copy_alone_needs_no_more_than_its_own_atoms(shape, columns_first, scale):
    assert_packs(randn(*shape, seed=3), "k", columns_first=columns_first, scale=scale_of(scale))


@pytest.mark.parametrize("shape", [(32, 64), (96, 64), (32, 320)], ids=str)
@both_orders
@hard_and_soft
def test_an_m_major_copy_alone_needs_no_more_than_its_own_atoms(shape, columns_first, scale):
    assert_packs(randn(*shape, seed=4), "m", columns_first=columns_first, scale=scale_of(scale))


@both_orders
@hard_and_soft
def test_one_copy_has_the_bytes_that_it_has_beside_the_other(columns_first, scale):
    weight = randn(64, 64, seed=5)
    options = {"columns_first": columns_first, "scale": scale_of(scale)}
    together = pack_weight(weight, **options)
    for major in ("k", "m"):
        assert_same_bytes(pack_weight(weight, major, **options)[major], together[major])


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("majors", "width"), [("k", 96), ("m", 192), ("km", 64)])
def test_every_source_type_is_read_and_computed_in_fp32(source, majors, width):
    weight = randn(64, width, seed=6).to(source)
    assert_packs(weight, majors, columns_first=majors != "m")
    assert_packs(weight, majors, columns_first=majors == "m", scale=torch.tensor(0.75))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@hard_and_soft
def test_bf16_copies_equal_functional(source, scale):
    weight = integers(64, 64, largest=60, seed=7).to(source)
    assert_packs(weight, dtype=torch.bfloat16, columns_first=True, scale=None if scale is None else torch.tensor(0.5))


def test_values_are_rounded_once_and_to_nearest():
    weight = torch.full((64, 64), 1 + 2.0**-11 + 2.0**-20)  # just above the middle of two fp16 numbers
    packed = assert_packs(weight, "k", columns_first=True)["k"]
    assert values(packed).unique().tolist() == [1 + 2.0**-10]


@both_orders
def test_the_width_of_a_tile_changes_nothing(columns_first):
    weight = randn(64, 192, seed=8)
    reference = pack_weight(weight, columns_first=columns_first, tile=(256, 1))
    for columns in (64, 128):
        for major, packed in pack_weight(weight, columns_first=columns_first, tile=(columns, 1)).items():
            assert_same_bytes(packed, reference[major])


@both_orders
def test_more_rows_than_a_grid_takes_side_by_side_change_nothing(columns_first, monkeypatch):
    """Pixels of a large batch: beyond 65,535 tiles of rows they take the first axis of the grid."""
    weight, grad = randn(128, 192, seed=8), randn(128, 192, seed=9).bfloat16()
    packed, sampled = pack_weight(weight, columns_first=columns_first), pack_gradient(grad)
    assert _tile.tile_grid(3, 65535) == ((3, 65535), 1)
    monkeypatch.setattr(_tile, "SECOND_AXIS", 1)
    assert _tile.tile_grid(3, 4) == ((4, 3), 0)
    for major, other in pack_weight(weight, columns_first=columns_first).items():
        assert_same_bytes(packed[major], other)
    for one, two in zip(sampled, pack_gradient(grad), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@both_orders
@hard_and_soft
@pytest.mark.parametrize("largest", [1, 3])
def test_ties_and_zeros_equal_functional(columns_first, scale, largest):
    assert_packs(integers(64, 64, largest=largest, seed=9), columns_first=columns_first, scale=scale_of(scale))


@both_orders
@hard_and_soft
@pytest.mark.parametrize("constant", [-0.0, -1.5])
def test_a_constant_matrix_keeps_the_lower_positions(columns_first, scale, constant):
    copies = assert_packs(torch.full((64, 64), constant), columns_first=columns_first, scale=scale_of(scale))
    first: Major = "k" if columns_first else "m"
    assert set(nibbles(copies[first]).tolist()) == {0x4}
    if scale is not None:
        assert not values(copies[first]).any(), "what equals its threshold is shrunk to nothing"


@both_orders
@hard_and_soft
def test_no_negative_zero_is_written(columns_first, scale):
    weight = integers(64, 64, largest=2, seed=10)
    weight[weight == 0] = -0.0
    weight[32:] = -0.0
    mask = torch.rand(64, 64, generator=torch.Generator().manual_seed(11)) < 0.8
    assert_packs(weight, columns_first=columns_first, scale=scale_of(scale), mask=mask)  # looks at every zero


@pytest.mark.parametrize(
    ("group", "nibble", "kept"),
    [
        ([5, 4, 2, 1], 0x4, [3, 2]),
        ([1, 5, 2, 4], 0xD, [3, 2]),
        ([5, 2, 2, 1], 0x4, [3, 0]),
        ([2, 5, 2, 1], 0x4, [0, 3]),
        ([2, 2, 5, 1], 0x8, [0, 3]),
        ([2, 2, 1, -5], 0xC, [0, -3]),
        ([2, 2, 2, 2], 0x4, [0, 0]),
        ([0, 0, 0, 5], 0xC, [0, 5]),
        ([0, 0, 5, 4], 0xE, [5, 4]),
    ],
    ids=str,
)
def test_soft_groups_with_fewer_than_two_survivors_are_filled_from_the_front(group, nibble, kept):
    weight = torch.tensor(group, dtype=torch.float32).repeat(64, 16)
    along_columns = pack_weight(weight, "k", columns_first=True, scale=torch.tensor(1.0))["k"]
    assert nibbles(along_columns).unique().tolist() == [nibble]
    assert values(along_columns).view(-1, 2).unique(dim=0).tolist() == [kept]
    along_rows = pack_weight(weight.t().contiguous(), "m", columns_first=False, scale=torch.tensor(1.0))["m"]
    assert nibbles(along_rows).unique().tolist() == [nibble]
    assert values(along_rows).view(-1, 2, 64)[0, :, 0].tolist() == kept


@both_orders
def test_nan_and_infinity_are_kept_by_a_hard_selection(columns_first):
    weight = randn(64, 64, seed=12)
    weight[3, 5], weight[3, 6], weight[40, 60], weight[41, 61] = math.nan, math.inf, -math.inf, math.nan
    wanted = expected_weight(weight, columns_first)
    assert all(w.isnan().any() for w in wanted.values())
    for major, found in unpacked(pack_weight(weight, columns_first=columns_first), weight.shape).items():
        torch.testing.assert_close(found, wanted[major].half(), rtol=0, atol=0, equal_nan=True)


@both_orders
@pytest.mark.parametrize("broken", [1, 2, 4], ids=["one", "two", "all"])
def test_nan_stays_visible_in_its_group_under_a_soft_threshold(columns_first, broken):
    weight = randn(64, 64, seed=13)
    first: Major = "k" if columns_first else "m"
    options = {"columns_first": columns_first, "scale": torch.tensor(1.0)}
    clean = unpacked(pack_weight(weight, first, **options), weight.shape)[first]
    group = (9, slice(20, 24)) if columns_first else (slice(20, 24), 9)
    weight[group][:broken] = math.nan
    found = unpacked(pack_weight(weight, first, **options), weight.shape)[first]
    assert found[group].isnan().any()
    found[group] = clean[group]
    assert torch.equal(found, clean)


def test_the_scale_multiplies_only_what_is_soft():
    weight = randn(64, 64, seed=14)
    for scale in (0.0, 1.0, 2.0):
        found = unpacked(pack_weight(weight, columns_first=True, scale=torch.tensor(scale)), weight.shape)
        assert torch.equal(found["k"], (F.soft_threshold(weight, "2:4") * scale).half())
    assert found["k"].abs().sum() > 0


def test_no_copy_at_all_is_refused():
    with pytest.raises(AssertionError, match="at least one copy"):
        _pack.pack_weight(randn(64, 64), None, None, columns_first=True)


# ---- gradients ----

STREAM, COUNTER = 1234567, -89


def word(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def pack_gradient(
    grad: Tensor, copies: str = "tc", stream: int = STREAM, counter: int = COUNTER, **options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel's copies along (t)okens and (c)hannels; fails where it changes what it reads."""
    before = grad.clone()
    wanted = {"along_tokens": "t" in copies, "along_channels": "c" in copies}
    along_tokens, along_channels, sums = _pack.pack_gradient(grad, word(stream), word(counter), **wanted, **options)
    assert_same_bytes(grad, before)
    for packed, is_wanted in ((along_tokens, "t" in copies), (along_channels, "c" in copies), (sums, "c" in copies)):
        assert (packed is not None) == is_wanted
    for packed in (along_tokens, along_channels):
        if packed is not None:
            assert packed.shape == (packed_size(_pack.padded(grad.shape[0]), grad.shape[1]),)
            assert packed.dtype == grad.dtype
            assert_well_formed(packed)
    return along_tokens, along_channels, sums


def fill_up(grad: Tensor) -> Tensor:
    """With the tokens of zeros that the layout needs."""
    return NF.pad(grad, (0, 0, 0, -grad.shape[0] % 64))


def expected_sample(grad: Tensor, stream: int = STREAM, counter: int = COUNTER) -> Tensor:
    full = fill_up(grad)
    uniform = F.counter_uniform_grid(full.shape[0] // 4, full.shape[1], word(stream), word(counter))
    return F.mvue(full, "2:4", 0, uniform=uniform)


def sample(grad: Tensor, stream: int = STREAM, counter: int = COUNTER, **options: Any) -> Tensor:
    """The kernel's sample along tokens, unpacked."""
    packed, _, _ = pack_gradient(grad, "t", stream, counter, **options)
    assert packed is not None
    return decompress(packed, grad.shape[1], _pack.padded(grad.shape[0]), "m")


def pruned(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's copy along channels, the same unpacked, and the sums."""
    _, packed, sums = pack_gradient(grad, "c")
    assert packed is not None
    assert sums is not None
    return packed, decompress(packed, _pack.padded(grad.shape[0]), grad.shape[1], "k"), sums


from_marked_memory = pytest.mark.usefixtures("marked_memory")


@from_marked_memory
@pytest.mark.parametrize("tokens", [1, 3, 64, 70, 96, 128])
def test_samples_equal_functional_at_any_number_of_tokens(tokens):
    grad = randn(tokens, 64, seed=20).half()
    assert_same_bytes(sample(grad), expected_sample(grad))


@from_marked_memory
@pytest.mark.parametrize("channels", [128, 192, 320])
def test_samples_equal_functional_at_any_number_of_channels(channels):
    grad = randn(64, channels, seed=21).half()
    assert_same_bytes(sample(grad), expected_sample(grad))


@from_marked_memory
@pytest.mark.parametrize(("stream", "counter"), [(0, 0), (-1, 2**31 - 1), (-(2**31), -1), (F.hash_integers(3, 4), 10**6)])
def test_samples_equal_functional_for_every_key(stream, counter):
    grad = randn(64, 64, seed=22).half()
    assert_same_bytes(sample(grad, stream, counter), expected_sample(grad, stream, counter))


@from_marked_memory
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_samples_of_ties_and_zeros_equal_functional(dtype):
    grad = integers(64, 64, largest=4, seed=23).to(dtype)  # also in halves: what bf16 holds
    assert_same_bytes(sample(grad), expected_sample(grad))


@from_marked_memory
def test_samples_of_spread_magnitudes_equal_functional():
    grad = (randn(64, 64, seed=24) * torch.exp2(10 * randn(64, 64, seed=25)).clamp(2.0**-14, 2.0**10)).half()
    assert_same_bytes(sample(grad), expected_sample(grad))


@from_marked_memory
def test_every_set_of_zeros_in_a_group_gives_legal_metadata_and_no_new_entry():
    grad = randn(64, 64, seed=26).half()
    for subset in range(16):  # one of the 16 groups along tokens for each set of entries
        for entry in range(4):
            if not subset >> entry & 1:
                grad[4 * subset + entry] = 0.0 if subset % 2 else -0.0
    found = sample(grad)  # looks at the metadata
    assert_same_bytes(found, expected_sample(grad) + 0.0)
    assert not found[grad == 0].any()
    few = (grad.view(16, 4, 64) != 0).sum(1) <= 2
    assert few.sum() == 64 * 11
    unchanged = (found == grad).view(16, 4, 64).all(1)
    assert unchanged[few].all()


@from_marked_memory
def test_the_same_key_draws_the_same_sample_and_another_one_another():
    grad = randn(64, 64, seed=27).half()
    first = sample(grad)
    assert torch.equal(sample(grad), first)
    assert not torch.equal(sample(grad, counter=COUNTER + 1), first)
    assert not torch.equal(sample(grad, stream=STREAM + 1), first)


@from_marked_memory
@pytest.mark.parametrize("columns", [64, 128])
def test_the_width_of_a_tile_changes_no_byte_of_a_gradient(columns):
    grad = randn(50, 192, seed=28).half()
    reference, tiled = pack_gradient(grad, tile=(256, 1)), pack_gradient(grad, tile=(columns, 1))
    for one, other in zip(reference[:2], tiled[:2], strict=True):
        assert_same_bytes(one, other)
    torch.testing.assert_close(reference[2], tiled[2], rtol=1e-6, atol=0)


@from_marked_memory
@pytest.mark.parametrize("tokens", [70, 128])
def test_two_copies_of_one_call_equal_those_of_two_calls(tokens):
    grad = randn(tokens, 64, seed=29).half()
    along_tokens, along_channels, sums = pack_gradient(grad)
    assert_same_bytes(along_tokens, pack_gradient(grad, "t")[0])
    _, alone, alone_sums = pack_gradient(grad, "c")
    assert_same_bytes(along_channels, alone)
    torch.testing.assert_close(sums, alone_sums, rtol=1e-6, atol=0)  # tiles differ in width, and so does the order of sums


@from_marked_memory
@pytest.mark.parametrize("tokens", [1, 3, 70, 96, 128])
def test_the_largest_channels_equal_functional_and_every_byte_the_layout(tokens):
    grad = randn(tokens, 96, seed=30).half()
    kept = project(fill_up(grad), -1)
    packed, found, sums = pruned(grad)
    assert_same_bytes(found, kept)
    assert_same_bytes(packed, compress(kept, "k"))
    assert sums.shape == (2, tokens)
    assert sums.dtype == torch.float32
    expected = torch.stack([grad.float().abs().sum(1), kept[:tokens].float().abs().sum(1)])
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)


@from_marked_memory
@pytest.mark.parametrize("channels", [32, 64, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_largest_channels_of_ties_and_zeros_equal_functional(channels, dtype):
    grad = integers(64, channels, largest=3, seed=31).to(dtype)
    grad[grad == 0] = -0.0
    kept = project(grad, -1) + 0.0
    packed, found, sums = pruned(grad)
    assert_same_bytes(found, kept)
    assert_same_bytes(packed, compress(kept, "k"))
    assert torch.equal(sums, torch.stack([grad.float().abs().sum(1), kept.float().abs().sum(1)])), "integers add up exactly"


@from_marked_memory
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_becomes_nan_and_no_other(value):
    grad = randn(64, 64, seed=32).half()
    clean = sample(grad)
    is_broken = torch.zeros(16, 64, dtype=torch.bool)
    for subset in range(1, 16):  # each set of entries, in a group of its own
        column = 4 * subset + 1
        is_broken[subset, column] = True
        for entry in range(4):
            if subset >> entry & 1:
                grad[4 * subset + entry, column] = value
    found = sample(grad).view(16, 4, 64)
    assert torch.equal(found.isnan().sum(1), torch.where(is_broken, 2, 0))
    found = torch.where(is_broken[:, None], torch.where(found.isnan(), 0, found), found)
    expected = torch.where(is_broken[:, None], 0, clean.view(16, 4, 64))
    assert torch.equal(found, expected)


@from_marked_memory
def test_a_sum_that_overflows_becomes_nan():
    grad = randn(64, 64, seed=33).to(torch.bfloat16)
    grad[8:12, 5] = 3e38
    found = sample(grad)
    assert found[8:12, 5].isnan().sum() == 2
    assert found.isnan().sum() == 2


@from_marked_memory
def test_nan_and_infinity_are_kept_along_channels_and_seen_in_the_sums():
    grad = randn(64, 64, seed=34).half()
    grad[3, 5], grad[9, 60], grad[9, 61] = math.nan, math.inf, -math.inf
    _, found, sums = pruned(grad)
    torch.testing.assert_close(found, project(grad, -1), rtol=0, atol=0, equal_nan=True)
    assert sums[:, 3].isnan().all()
    assert sums[:, 9].isinf().all()
    assert sums.isfinite().sum() == 2 * 62


def test_samples_are_unbiased_and_kept_with_the_least_variance_probabilities():
    groups = torch.tensor(
        [
            [1, 1, 1, 1],
            [4, 3, 2, 1],
            [0.25, -0.5, 8, 0.25],  # one dominates: always kept
            [-2, 0, 1, 1],  # on the edge of dominating
            [0, 3, 0, -5],  # two: kept as they are
            [0.5, 0.75, -1, 1.25],
            [6, -0.25, 0.25, 6],
            [0, 1, 2, 1.5],
        ]
    )
    grad = groups.t().repeat(16, 32).half()  # 512 draws of every group in each call
    counters = 24
    total, kept = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    for counter in range(counters):
        drawn = sample(grad, counter=counter, tile=(256, 1)).double().view(16, 4, 32, 8)
        total += drawn.sum((0, 2))
        kept += (drawn != 0).sum((0, 2))
    count = counters * 16 * 32
    p = F.mvue_probabilities(groups, "2:4").t().double()
    exact = groups.t().double()
    error = (exact.square() * (1 - p) / p.clamp(min=1e-9) / count).sqrt()
    assert ((total / count - exact).abs() <= 4 * error).all()
    assert ((kept / count - p).abs() <= 4 * (p * (1 - p) / count).sqrt()).all()
    is_certain = (p == 1) | (p == 0)
    assert is_certain.sum() == 8
    assert torch.equal(total[is_certain] / count, exact[is_certain])


def test_without_a_sample_no_key_is_needed():
    grad = randn(64, 32, seed=35).half()
    nothing, packed, _ = _pack.pack_gradient(grad, None, None, along_tokens=False, along_channels=True)
    assert nothing is None
    assert_same_bytes(packed, compress(project(grad, -1), "k"))


def test_tokens_are_padded_to_whole_atoms():
    assert [_pack.padded(tokens) for tokens in (0, 1, 63, 64, 65, 128, 129)] == [0, 64, 64, 64, 128, 128, 192]


# ---- what the interpreter does not see: whether a kernel compiles ----


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], Any]:
    """Compile a kernel for Hopper with the arguments that a call launches it with."""
    return lambda name, call: compiled_for_hopper(monkeypatch, _pack, name, call)


@both_orders
@hard_and_soft
@pytest.mark.parametrize("majors", ["k", "m", "km"])
def test_every_kind_of_weight_kernel_compiles(compiled, majors, columns_first, scale):
    weight, mask = torch.zeros(64, 64), torch.ones(64, 64, dtype=torch.bool)
    copies = [torch.empty(packed_size(64, 64), dtype=torch.bfloat16) if major in majors else None for major in "km"]
    options = {"columns_first": columns_first, "mask": mask, "scale": scale_of(scale)}
    built = compiled("_weight_kernel", lambda: _pack.pack_weight(weight, *copies, **options))
    assert built.asm["cubin"]


@pytest.mark.parametrize("copies", ["t", "c", "tc"])
@pytest.mark.parametrize("tokens", [64, 70])
def test_every_kind_of_gradient_kernel_compiles(compiled, copies, tokens):
    wanted = {"along_tokens": "t" in copies, "along_channels": "c" in copies}
    grad = torch.zeros(tokens, 64, dtype=torch.bfloat16)
    tile = (64, 1) if copies == "tc" else None  # without a tile they come from two launches
    built = compiled("_gradient_kernel", lambda: _pack.pack_gradient(grad, word(0), word(0), **wanted, tile=tile))
    assert built.asm["cubin"]
