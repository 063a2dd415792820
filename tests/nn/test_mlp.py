"""The fused MLP against its own layers, called one after the other: on the CPU, with the layout multiplied in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.kernels import ACTIVATIONS, activate, activation_backward
from nmsparse.nn import _mlp, fused_mlp

pytestmark = pytest.mark.usefixtures("reference_engine")
WIDTH = 64


class RoundedOnce(torch.autograd.Function):
    """The activation with gradients that are computed in fp32 and rounded once, as the fused backward pass does: a sample may
    turn out otherwise where a gradient differs in its last bit."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, factor: Tensor | None, activation: str) -> Tensor:  # pyrefly: ignore
        ctx.activation = activation
        ctx.save_for_backward(inner, factor)
        hidden = activate(inner, activation)
        return hidden if factor is None else hidden * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        inner, factor = ctx.saved_tensors
        flat = [None if x is None else x.flatten(0, -2) for x in (grad, inner, factor)]
        keys = [torch.zeros((), dtype=torch.int32)] * 4
        found = activation_backward(*flat, keys, ctx.activation, False)
        return found[0].view(inner.shape), None if factor is None else found[1].view(inner.shape), None


class Mlp(nn.Module):
    def __init__(self, kind: str, gated: bool, activation: str, bias: bool = True) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        def layer(inputs: int, outputs: int) -> nn.Module:
            return nn.Linear(inputs, outputs, bias=bias) if kind == "linear" else Conv1D(outputs, inputs)

        self.up, self.down = layer(WIDTH, 2 * WIDTH), layer(2 * WIDTH, WIDTH)
        self.gate = layer(WIDTH, 2 * WIDTH) if gated else None
        self.activation, self.fused = activation, True

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return fused_mlp(x, up=self.up, down=self.down, gate=self.gate, activation=self.activation)
        if self.gate is None:
            return self.down(RoundedOnce.apply(self.up(x), None, self.activation))
        return self.down(RoundedOnce.apply(self.gate(x), self.up(x), self.activation))


def make(recipe: nm.Recipe, kind: str = "linear", gated: bool = True, activation: str = "silu", **options: Any) -> Mlp:
    torch.manual_seed(0)
    model = Mlp(kind, gated, activation, **options)
    run = nm.sparsify_(model, recipe, targets=[name for name, _ in model.named_children()])
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1), total_steps=10)
    return model


def inputs(tokens: int = 70) -> Tensor:
    return torch.randn(2, tokens // 2, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(model: Any, module: Mlp, tokens: int = 70) -> list[Tensor]:
    """The output, and all gradients."""
    x = inputs(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        y = model.forward(x)  # not through the run's hook, which would draw other numbers each time
    module.zero_grad()
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach().float(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_near(found: list[Tensor], wanted: list[Tensor], tolerance: float = 5e-3) -> None:
    """What is computed again (the hidden tensor) is rounded once, and twice in the forward pass."""
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape
        assert float((one - two).norm() / two.norm()) < tolerance


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the fused backward pass."""
    seen: list[str] = []
    real = _mlp.activation_backward
    monkeypatch.setattr(_mlp, "activation_backward", lambda *a: (seen.append(a[4]), real(*a))[1])
    return seen


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_it_computes_what_the_layers_compute(activation: str, gated: bool, kind: str, fusions: list[str]) -> None:
    model = make(nm.Trio("2:4"), kind, gated, activation)
    fused = results(model, model)
    assert fusions == [activation]
    model.fused = False
    composed = results(model, model)
    assert fusions == [activation]
    assert torch.equal(fused[0], composed[0])
    assert_near(fused, composed)
    sampled = [name.startswith(("up", "gate")) and name.endswith("weight") for name, _ in model.named_parameters()]
    for one, two, is_sampled in zip(fused[2:], composed[2:], sampled, strict=True):
        assert not is_sampled or torch.equal(one, two), "the same draws of the same gradients"


@pytest.mark.parametrize("recipe", [nm.SSTE("2:4"), nm.FST("2:4", dense_tail=0.0), nm.Trio("2:4", forward="hard")], ids=str)
def test_every_recipe_that_samples_tokens_is_fused(recipe: nm.Recipe, fusions: list[str]) -> None:
    model = make(recipe, bias=False)
    fused = results(model, model)
    assert fusions
    model.fused = False
    assert_near(fused, results(model, model))


@pytest.mark.parametrize("recipe", [nm.STE("2:4"), nm.SDGP("2:4", mvue=True), nm.SSTE("2:4", mvue="approximate")], ids=str)
def test_other_recipes_call_their_layers(recipe: nm.Recipe, fusions: list[str]) -> None:
    model = make(recipe)
    found = results(model, model)
    assert not fusions
    by_layers = SimpleNamespace(forward=lambda x: model.down(F.silu(model.gate(x)) * model.up(x)))
    assert all(torch.equal(a, b) for a, b in zip(found, results(by_layers, model), strict=True))


def test_dense_layers_evaluation_and_hooks_are_left_alone(fusions: list[str]) -> None:
    torch.manual_seed(0)
    dense = Mlp("linear", True, "silu")
    results(dense, dense)
    model = make(nm.Trio("2:4"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(inputs())
    results(model.eval(), model)
    model.train()
    seen = []
    handle = model.gate.register_forward_hook(lambda *_: seen.append(1))
    results(model, model)
    assert seen
    assert not fusions
    handle.remove()
    results(model, model)
    assert fusions


def test_of_the_wide_tensors_only_the_pre_activations_are_kept() -> None:
    model = make(nm.Trio("2:4"), bias=False)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim > 1 and tensor.shape[-1] == 2 * WIDTH and tensor.dtype == torch.bfloat16:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(inputs())
    assert list(kept.values()) == [70 * 2 * WIDTH] * 2
    model.fused = False
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(inputs())
    assert list(kept.values()) == [70 * 2 * WIDTH] * 3


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_the_compiled_graph_is_whole(gated: bool) -> None:
    torch._dynamo.reset()
    model = make(nm.Trio("2:4"), gated=gated)
    eager = results(model, model)
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_near(results(SimpleNamespace(forward=compiled), model), eager, 1e-3)


def test_frozen_layers_and_inputs_without_gradient(fusions: list[str]) -> None:
    model = make(nm.Trio("2:4"))
    model.down.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs().detach()).float().sum().backward()
    assert fusions
    assert model.down.weight.grad is None
    assert model.gate.weight.grad is not None
    model.gate.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs()).float().sum().backward()
    assert len(fusions) == 1, "nothing to pack: the layers are called"


def test_an_unknown_activation_is_refused() -> None:
    model = make(nm.Trio("2:4"), activation="tanh")
    with pytest.raises(ValueError, match="activation is one of silu, gelu, gelu_tanh, relu_squared, got 'tanh'"):
        model(inputs())
