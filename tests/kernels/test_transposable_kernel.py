"""The Triton search of transposable masks against the plain-torch one, in Triton's interpreter: no GPU needed."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nmsparse.functional as F

pytest.importorskip("triton", reason="Triton is not installed, so there is no kernel to check")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from nmsparse.kernels import _transposable

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TILE = 32 * _transposable.WARPS
"""Blocks of one program."""
Kernel = Callable[[Tensor], Tensor]


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    """The mask of a matrix, interpreted; TRITON_INTERPRET would have to be set before anything imports Triton."""
    for name in ("_kernel", "_pair_sums"):
        function = getattr(_transposable, name)
        if not isinstance(function, InterpretedFunction):
            monkeypatch.setattr(_transposable, name, InterpretedFunction(function.fn))

    def mask(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.bool)
        out.view(torch.uint8).fill_(7)  # neither true nor false: what the kernel forgets shows
        _transposable.transposable_mask_kernel(x, out)
        assert (out.view(torch.uint8) <= 1).all()
        return out

    return mask


def to_blocks(x: Tensor) -> Tensor:
    """(blocks, 4, 4) of a matrix."""
    return x.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1)


def from_blocks(blocks: Tensor, width: int) -> Tensor:
    """A matrix with ``width`` blocks side by side."""
    return blocks.unflatten(0, (-1, width)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(kernel: Kernel, x: Tensor) -> None:
    assert torch.equal(kernel(x), F.transposable_mask(x, "2:4"))


# any matrix


@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
@pytest.mark.parametrize(
    "shape",
    [(4, 4), (8, 12), (36, 52), (4, 4 * TILE), (4 * TILE, 4), (4, 4 * TILE + 4), (4 * TILE - 4, 4), (60, 260), (128, 128)],
    ids=str,
)
def test_kernel_equals_plain_torch_at_any_size(kernel, shape, dtype):
    assert_equal(kernel, normal(*shape).to(dtype))


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)], ids=str)
def test_an_empty_matrix_has_an_empty_mask(kernel, shape):
    assert kernel(torch.empty(shape)).shape == shape


def test_kernel_writes_its_mask_and_nothing_beside_it(kernel):
    x = normal(20, 28)
    buffer = torch.full((64 + x.numel() + 64,), 7, dtype=torch.uint8)
    out = buffer[64:-64].view(torch.bool).view(x.shape)
    _transposable.transposable_mask_kernel(x, out)
    assert torch.equal(out, F.transposable_mask(x, "2:4"))
    assert (buffer[:64] == 7).all()
    assert (buffer[-64:] == 7).all()


def test_kernel_leaves_its_source_alone(kernel):
    x = normal(16, 16)
    before = x.clone()
    kernel(x)
    assert torch.equal(x, before)


# which pattern


def test_each_of_the_ninety_patterns_is_found(kernel):
    patterns = torch.tensor(F.block_patterns(2, 4), dtype=torch.float32).view(90, 4, 4)
    signs = normal(90, 4, 4).sign()
    found = kernel(from_blocks(patterns * signs, 9))
    assert torch.equal(to_blocks(found), patterns.bool())


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_ties_go_to_the_first_pattern(kernel, levels, dtype):
    x = (normal(64, 96, seed=levels).abs() * levels / 2).round().clamp(max=levels) * normal(64, 96, seed=9).sign()
    assert_equal(kernel, x.to(dtype))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, math.nan, math.inf, -math.inf])
def test_equal_entries_keep_the_first_pattern(kernel, value):
    first = torch.tensor(F.block_patterns(2, 4)[0]).bool().view(4, 4)
    assert torch.equal(kernel(torch.full((8, 12), value)), first.repeat(2, 3))


# which numbers


@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
@pytest.mark.parametrize("share", [0.03, 0.2, 0.6])
def test_nan_and_infinities_outweigh_everything_else(kernel, share, dtype):
    x, kind = normal(64, 96), torch.rand(64, 96, generator=torch.Generator().manual_seed(1))
    x[kind < share] = math.nan
    x[kind < share * 2 / 3] = math.inf
    x[kind < share / 3] = -math.inf
    assert_equal(kernel, x.to(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_nan_or_infinity_outweighs_a_block_of_the_largest_numbers(kernel, value):
    """By so much that nothing else counts: the first pattern that keeps it wins."""
    x = torch.rand(16, 4, 4, generator=torch.Generator().manual_seed(0)) * torch.finfo(torch.float32).max
    x.view(16, 16).fill_diagonal_(value)
    mask = kernel(from_blocks(x, 4))
    first = [next(pattern for pattern in F.block_patterns(2, 4) if pattern[entry]) for entry in range(16)]
    assert torch.equal(to_blocks(mask).flatten(1), torch.tensor(first).bool())


def test_a_negative_nan_counts_as_any_nan(kernel):
    x = normal(32, 32)
    x.view(torch.int32)[normal(32, 32, seed=1) > 1] = -1
    assert x.isnan().any()
    assert_equal(kernel, x)


@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_the_largest_numbers_do_not_overflow(kernel, dtype):
    share = normal(32, 64).abs().clamp(max=4) / 4
    assert_equal(kernel, (share.double() * torch.finfo(dtype).max).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=KINDS.get)  # the interpreter mistakes those of bf16
def test_subnormal_numbers_are_told_apart(kernel, dtype):
    tiny = torch.finfo(dtype).tiny
    x = (normal(32, 64).abs().clamp(max=4).double() / 4 * tiny).to(dtype)
    assert ((x > 0) & (x < tiny)).any()
    assert_equal(kernel, x)


def test_scores_that_float32_cannot_tell_apart_are_told_apart(kernel):
    """Odd numbers of 24 bits: float32 rounds every sum of two, float64 no sum of eight."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randint(0, 8, (128, 64), generator=generator) * 2 + 2**24 - 15).float()
    table = torch.tensor(F.block_patterns(2, 4), dtype=torch.float32)
    rounded = table.bool()[(to_blocks(x).flatten(1) @ table.t()).argmax(1)].view(-1, 4, 4)
    mask = kernel(x)
    assert not torch.equal(to_blocks(mask), rounded)
    assert torch.equal(mask, F.transposable_mask(x, "2:4"))


@pytest.mark.parametrize(("dtype", "binades"), [(torch.float32, 26), (torch.bfloat16, 42), (torch.float16, 29)], ids=str)
def test_kernel_equals_plain_torch_as_far_as_scores_are_exact(kernel, dtype, binades):
    """Mantissas of all ones, from the lowest to the highest exponent of the range."""
    ones = 2 - torch.finfo(dtype).eps
    exponent = torch.randint(0, binades + 1, (128, 128), generator=torch.Generator().manual_seed(0)) - binades // 2
    assert_equal(kernel, (ones * torch.exp2(exponent.float())).to(dtype))


@pytest.mark.parametrize("binades", [40, 80, 250])
def test_a_wider_range_costs_no_more_than_the_rounding_of_scores(kernel, binades):
    exponent = torch.rand(64, 128, generator=torch.Generator().manual_seed(0)) * binades - binades / 2
    x = torch.exp2(exponent)
    mask = to_blocks(kernel(x))
    assert (mask.sum(1) == 2).all()
    assert (mask.sum(2) == 2).all()
    best = to_blocks(F.transposable_mask(x, "2:4"))
    magnitude = to_blocks(x).double()
    torch.testing.assert_close((magnitude * mask).sum((1, 2)), (magnitude * best).sum((1, 2)), rtol=1e-15, atol=0)


# compiled


@pytest.mark.parametrize("kind", KINDS.values())
def test_kernel_compiles_for_hopper_with_everything_in_registers(kind, tmp_path):
    """No spills, and no shared memory: a thread has its block to itself."""
    signature = {"x_ptr": f"*{kind}", "out_ptr": "*i32", "count": "i32", "width": "i32", "BLOCKS": "constexpr"}
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(2)}
    source = ASTSource(_transposable._kernel, signature, {(4,): TILE}, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": _transposable.WARPS})
    binary: Path = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage
    assert "LOCAL:0" in usage
    assert compiled.metadata.shared == 0
