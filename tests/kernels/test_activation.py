"""The kernel of an activation's backward pass: gradients against autograd, packed copies against the pack kernel, bit for bit.

In Triton's interpreter, which cuts fp32 off to bf16 where a GPU rounds; so gradients are fp16 here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nmsparse.kernels import ACTIVATIONS, activate, activation_backward, packed_size, padded
from nmsparse.kernels._layout import decompress

pytest.importorskip("triton", reason="Triton is not installed, so there is no kernel to check")
from triton_tools import compiled_for_hopper, interpreted

from nmsparse.kernels import _activation, _pack, _tile

by_name = pytest.mark.parametrize("activation", ACTIVATIONS)
gated_or_not = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
KEYS = [torch.tensor(word, dtype=torch.int32) for word in (1234567, -89, 42, 7)]


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "compiles" in request.node.name:
        yield
        return
    with interpreted(monkeypatch, _activation, _pack, _tile):
        yield


def operands(tokens: int, channels: int, gated: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    grad, inner, factor = (torch.randn(tokens, channels, generator=generator).half() for _ in range(3))
    inner[0, :4] = torch.tensor([30.0, -30.0, 0.0, -0.0])  # far out, and on the edge of a ReLU
    return grad, inner, factor if gated else None


def expected(grad: Tensor, inner: Tensor, factor: Tensor | None, activation: str) -> tuple[list[Tensor], Tensor]:
    """By autograd, in float64."""
    leaves = [x.double().requires_grad_() for x in (inner, factor) if x is not None]
    hidden = activate(leaves[0], activation)
    hidden = hidden * leaves[1] if len(leaves) == 2 else hidden
    return list(torch.autograd.grad(hidden, leaves, grad.double())), hidden.detach()


@by_name
@gated_or_not
@pytest.mark.parametrize(("tokens", "channels"), [(64, 64), (70, 192)], ids=str)
def test_gradients_equal_autograd_and_copies_equal_the_pack_kernel(activation, gated, tokens, channels):
    grad, inner, factor = operands(tokens, channels, gated)
    before = [x.clone() for x in (grad, inner)]
    grads, packed, hidden = _activation.activation_backward(
        grad, inner, factor, KEYS[: 4 if gated else 2], activation, want_hidden=True
    )
    assert torch.equal(grad, before[0])
    assert torch.equal(inner, before[1])
    wanted, wanted_hidden = expected(grad, inner, factor, activation)
    assert len(grads) == len(packed) == len(wanted)
    assert hidden is not None
    for got, exact in zip([*grads, hidden], [*wanted, wanted_hidden], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-6)  # one rounding to fp16
    for number, (got, copy) in enumerate(zip(grads, packed, strict=True)):
        alone, _, _ = _pack.pack_gradient(got, *KEYS[2 * number : 2 * number + 2], along_tokens=True, along_channels=False)
        assert alone is not None
        assert copy.shape == (packed_size(channels, padded(tokens)),)
        assert torch.equal(copy.view(torch.uint8), alone.view(torch.uint8))


@gated_or_not
def test_the_width_of_a_tile_and_an_unwanted_hidden_change_nothing(gated):
    grad, inner, factor = operands(70, 192, gated)
    keys = KEYS[: 4 if gated else 2]
    reference = _activation.activation_backward(grad, inner, factor, keys, "silu", want_hidden=True, tile=(64, 1))
    other = _activation.activation_backward(grad, inner, factor, keys, "silu", want_hidden=False, tile=(128, 2))
    assert other[2] is None
    for one, two in zip([*reference[0], *reference[1]], [*other[0], *other[1]], strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@by_name
@gated_or_not
@pytest.mark.parametrize("tokens", [64, 70])
def test_the_operator_without_a_kernel_says_the_same(activation, gated, tokens):
    grad, inner, factor = operands(tokens, 64, gated)
    keys = KEYS[: 4 if gated else 2]
    plain = activation_backward(grad, inner, factor, keys, activation, True)
    grads, _, hidden = _activation.activation_backward(grad, inner, factor, keys, activation, want_hidden=True)
    for one, two in zip([*plain[: len(grads)], plain[-1]], [*grads, hidden], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)
    for number, got in enumerate(plain[: len(grads)]):
        alone, _, _ = _pack.pack_gradient(got, *keys[2 * number : 2 * number + 2], along_tokens=True, along_channels=False)
        assert alone is not None
        sizes = 64, padded(tokens), "m"  # a slot without an entry may lie elsewhere in its group
        assert torch.equal(decompress(plain[len(grads) + number], *sizes), decompress(alone, *sizes))


@gated_or_not
def test_the_operator_passes_opcheck_and_takes_empty_batches(gated):
    for tokens in (70, 0):
        shape = (tokens, 64)
        grad, inner, factor = (torch.randn(shape).bfloat16() for _ in range(3))
        keys = KEYS[: 4 if gated else 2]
        torch.library.opcheck(activation_backward, (grad, inner, factor if gated else None, keys, "silu", True))


@by_name
@gated_or_not
@pytest.mark.parametrize("want_hidden", [True, False])
def test_every_kind_of_kernel_compiles(activation, gated, want_hidden, monkeypatch):
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    keys = KEYS[: 4 if gated else 2]

    def call() -> None:
        _activation.activation_backward(x, x, x if gated else None, keys, activation, want_hidden=want_hidden)

    assert compiled_for_hopper(monkeypatch, _activation, "_activation_kernel", call).asm["cubin"]
