"""The step clock: decay terms, closures, broken gradients, measuring: all that happens around an update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from toys import make_data, make_net, same, start, train

import nmsparse as nm
from nmsparse.functional import magnitude_mask


def decayed(
    accumulate: int = 1, scale: float | None = None, clip: float | None = None, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after one SGD step of learning rate 1 whose data gradient is zero."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False)
    run = nm.sparsify_(layer, nm.SRSTE("2:4", decay=2e-4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused)
    run.attach(optimizer)
    before = layer.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for _ in range(accumulate):
        scaler.scale(layer(torch.zeros(4, 16)).sum() / accumulate).backward()
    if clip is not None:
        if not fused:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), clip)
    scaler.step(optimizer)
    return before, layer.weight.detach()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 4},
        {"scale": 65536.0},
        {"clip": 1e-9},
        {"scale": 65536.0, "accumulate": 4, "clip": 1e-9},
        {"scale": 1024.0, "fused": True},
    ],
    ids=str,
)
def test_decay_is_unchanged_by_accumulation_scaling_and_clipping(options: dict[str, Any]) -> None:
    before, after = decayed(**options)
    kept = magnitude_mask(before, "2:4")
    assert torch.equal(after[kept], before[kept])
    torch.testing.assert_close(after[~kept], before[~kept] * (1 - 2e-4), rtol=1.2e-7, atol=0)  # one ulp


def test_decay_on_the_weight_is_decoupled_from_the_gradient() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False)
    run = nm.sparsify_(layer, nm.SRSTE("2:4", decay=0.1, decay_on="weight"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    run.attach(optimizer)
    before = layer.weight.detach().clone()
    layer(torch.zeros(4, 16)).sum().backward()
    optimizer.step()
    expected = torch.where(magnitude_mask(before, "2:4"), before, before * 0.95)
    torch.testing.assert_close(layer.weight.detach(), expected)


def test_decay_survives_sixteen_bit_gradients() -> None:
    layer = nn.Linear(16, 8, bias=False).bfloat16()
    run = nm.sparsify_(layer, nm.SRSTE("2:4", decay=0.5))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    run.attach(optimizer)
    before = layer.weight.detach().clone()
    layer(torch.zeros(4, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    kept = magnitude_mask(before, "2:4")
    assert torch.equal(layer.weight[kept], before[kept])
    torch.testing.assert_close(layer.weight[~kept], before[~kept] * 0.5)


def test_layer_without_a_gradient_is_left_alone() -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    run = nm.sparsify_(model, nm.SRSTE("2:4"), targets="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.attach(optimizer)
    before = model["unused"].weight.detach().clone()
    model["used"](torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(model["unused"].weight, before)
    assert run.step == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_gradient_stops_before_the_update_and_is_named(value: float) -> None:
    model, optimizer, run = start("sr-ste", {})
    x, y = make_data()
    (model(x) - y).square().mean().backward()
    model.blocks[1].up.weight.grad[0, 0] = value
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"blocks\.1\.up: its gradient holds NaN or Inf at update 0"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert run.step == 0
    optimizer.zero_grad()
    train(model, optimizer, 1, (x, y))  # and training can go on
    assert run.step == 1


class Recorded:
    """Stands for an event on a GPU."""

    def synchronize(self) -> None:
        pass


def test_a_checkpoint_that_is_loaded_takes_a_late_verdict_back() -> None:
    """On a GPU the gradients of an update are judged one update later, which then need not be part of the run any more."""
    model, optimizer, run = start("sr-ste", {})
    train(model, optimizer, 1, make_data())
    saved = run.state_dict()
    run._clocks[0]._finite.pending = (["embed"], torch.tensor([True]), Recorded())
    run.load_state_dict(saved)
    train(model, optimizer, 1, make_data())
    assert run.step == 2


def test_finite_check_can_be_switched_off() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STE("2:4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(optimizer, check_finite=False)
    model.embed.weight.grad = torch.full_like(model.embed.weight, math.nan)
    optimizer.step()
    assert run.step == 1


def test_large_sixteen_bit_gradients_are_not_mistaken_for_overflow() -> None:
    layer = nn.Linear(256, 256, bias=False).half()
    run = nm.sparsify_(layer, nm.STE("2:4"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    run.attach(optimizer)
    layer.weight.grad = torch.full_like(layer.weight, 60000.0)  # its 2-norm is beyond fp16
    optimizer.step()
    assert run.step == 1


def test_closure_computes_the_gradients_that_the_recipe_then_changes() -> None:
    """Lightning hands every optimizer a closure."""
    results = []
    for uses_closure in (False, True):
        model, optimizer, run = start("sr-ste", {"decay": 0.1})
        x, y = make_data()

        def backward(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, x=x, y=y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            if uses_closure:
                assert optimizer.step(backward) > 0
            else:
                backward()
                optimizer.step()
        assert run.step == 4
        results.append(model)
    assert same(*results)


def test_closure_that_is_called_several_times_is_refused() -> None:
    model = make_net()
    optimizer = torch.optim.LBFGS(model.parameters())
    nm.sparsify_(model, nm.SRSTE("2:4", decay=0.1)).attach(optimizer)
    with pytest.raises(ValueError, match="LBFGS calls its closure more than once"):
        optimizer.step(lambda: model(make_data()[0]).sum())


def test_steps_after_densify_leave_the_clock_alone() -> None:
    model, optimizer, run = start("sr-ste", {"decay": 0.1})
    train(model, optimizer, 2, make_data())
    nm.densify_(model)
    train(model, optimizer, 2, make_data())
    assert run.step == 2


def test_flip_rate_counts_what_one_update_changed() -> None:
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[4.0, 3.0, 2.0, 1.0]]))
    run = nm.sparsify_(layer, nm.STE("2:4"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    run.attach(optimizer, stats_every=1)
    layer.weight.grad = torch.tensor([[0.0, 2.0, 0.0, 0.0]])  # 3 -> 1: positions 1 and 2 change places
    optimizer.step()
    assert run.stats()["layers"][""]["flip_rate"] == 0.5
    assert run.stats()["total"]["mask_changes"] == 2


def test_measuring_can_be_switched_off() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STE("2:4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(optimizer, stats_every=0)
    train(model, optimizer, 2, make_data())
    assert run.stats()["total"]["flip_rate"] is None


class OwnRate(torch.optim.SGD):
    """As transformers' Adafactor, which finds its own learning rate and keeps None."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)


def test_optimizer_without_a_learning_rate_is_followed() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    optimizer = OwnRate(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    run.attach(optimizer)
    train(model, optimizer, 2, make_data())
    assert run.step == 2


def test_decay_on_weights_demands_a_learning_rate() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4", decay_on="weight"))
    optimizer = OwnRate(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match=r'decay_on="weight" shrinks weights by lr .* OwnRate has no "lr"'):
        run.attach(optimizer)
    assert run.optimizers == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_decay_on_weights_leaves_layers_without_a_gradient_alone(kind: type[torch.optim.Optimizer]) -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4", decay=0.5, decay_on="weight"))
    optimizer = kind(model.parameters(), lr=0.1)
    run.attach(optimizer)
    train(model, optimizer, 2, make_data())
    frozen = model.blocks[0].up
    frozen.requires_grad_(False)
    before = frozen.weight.detach().clone()
    train(model, optimizer, 3, make_data())
    assert torch.equal(frozen.weight, before)


def test_decay_on_weights_is_rounded_once() -> None:
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    run = nm.sparsify_(layer, nm.SRSTE("2:4", decay=0.03, decay_on="weight"), targets=[""])
    run.attach(torch.optim.SGD(layer.parameters(), lr=0.1))
    before, mask = layer.weight.detach().clone(), magnitude_mask(layer.weight.detach().float(), "2:4")
    layer.weight.grad = torch.zeros_like(layer.weight)
    run.optimizers[0].step()
    expected = torch.where(mask, before.float(), before.float() * (1 - 0.1 * 0.03)).bfloat16()
    assert torch.equal(layer.weight, expected)


def test_decay_on_weights_refuses_optimizers_that_make_them_from_other_points() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4", decay_on="weight"))
    with pytest.raises(ValueError, match=r'AdamWScheduleFree makes them anew from two other points: use decay_on="grad"'):
        run.attach(schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1))


def test_a_first_update_below_an_output_of_zeros_counts() -> None:
    """Its gradients are zeros but for the output's, and a warm-up begins at a learning rate of 0."""
    model = make_net()
    nn.init.zeros_(model.head.weight)
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    run.attach(optimizer)
    train(model, optimizer, 1, make_data())
    assert run.step == 1


def test_sparse_gradients_of_an_embedding_are_no_hindrance_at_a_learning_rate_of_zero() -> None:
    model = nn.Sequential(nn.Embedding(8, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 4))
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.attach(optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert run.step == 1
