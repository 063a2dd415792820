"""StepAdamW: torch's AdamW until a variance is frozen, and what a frozen step does."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import assert_identical

from nmsparse import StepAdamW

IMPLEMENTATIONS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}
OPTIONS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "short memory": {"betas": (0.8, 0.95), "eps": 1e-6},
}


def make_params(dtype: torch.dtype = torch.float32, shapes: Any = ((4, 8), (5,), (3, 2, 2))) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def one_parameter(value: float, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Parameter, StepAdamW]:
    p = nn.Parameter(torch.full((4,), value, dtype=dtype))
    return p, StepAdamW([p], **options)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


# ---- before freezing ----


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_before_freezing_it_is_adamw_bit_for_bit(implementation, options):
    ours, theirs = make_params(), make_params()
    optimizers = []
    for kind, params in ((StepAdamW, ours), (torch.optim.AdamW, theirs)):
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 3e-2, "weight_decay": 0.0}]
        optimizers.append(kind(groups, lr=1e-2, **options, **implementation))
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        for step in range(12):
            set_gradients(params, step)
            if step % 3 == 0:
                params[1].grad = None  # a parameter without gradient is left alone, its step count too
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
    assert_identical([p.detach() for p in ours], [p.detach() for p in theirs])
    state = optimizers[0].state_dict()["state"]
    for entries in state.values():  # there from the start, for checkpoints that load into what they find
        assert entries.pop("frozen_scale") == entries.pop("frozen_floor") == 0
    assert_identical(state, optimizers[1].state_dict()["state"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_before_freezing_bf16_parameters_follow_adamw_bit_for_bit(implementation):
    ours, theirs = make_params(torch.bfloat16), make_params(torch.bfloat16)
    train(StepAdamW(ours, **implementation), ours, range(8))
    train(torch.optim.AdamW(theirs, **implementation), theirs, range(8))
    assert_identical([p.detach() for p in ours], [p.detach() for p in theirs])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_parameters_that_are_not_frozen_follow_adamw_bit_for_bit(implementation):
    ours, theirs = make_params(), make_params()
    optimizer, reference = StepAdamW(ours, **implementation), torch.optim.AdamW(theirs, **implementation)
    train(optimizer, ours, range(4))
    optimizer.freeze_variance(ours[:1])
    train(optimizer, ours, range(4, 9))
    train(reference, theirs, range(9))
    assert_identical([p.detach() for p in ours[1:]], [p.detach() for p in theirs[1:]])
    assert not torch.equal(ours[0], theirs[0])


def test_a_closure_is_called_once_and_its_loss_returned():
    p, optimizer = one_parameter(1.0)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert calls == [True]


# ---- what can be frozen ----


def test_a_variance_that_was_never_estimated_cannot_be_frozen():
    params = make_params()
    optimizer = StepAdamW(params)
    with pytest.raises(RuntimeError, match=r"shape \(4, 8\) has no variance to freeze yet"):
        optimizer.freeze_variance(params)
    set_gradients(params[:1], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"shape \(5,\) has no variance"):
        optimizer.freeze_variance(params)
    assert not any(optimizer.is_frozen(p) for p in params), "a refused call must change nothing"


def test_a_parameter_of_another_optimizer_cannot_be_frozen():
    params = make_params()
    optimizer = StepAdamW(params[:2])
    train(optimizer, params, range(1))
    with pytest.raises(ValueError, match=r"shape \(3, 2, 2\) is not in this optimizer"):
        optimizer.freeze_variance(params)
    assert not optimizer.is_frozen(params[0])


def test_freezing_twice_keeps_the_first_variance():
    p, optimizer = one_parameter(0.0, betas=(0.9, 0.99))
    p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    optimizer.freeze_variance([p])
    frozen = copied(optimizer.state[p])
    for _ in range(5):
        optimizer.step()
    optimizer.freeze_variance([p])
    assert optimizer.state[p]["frozen_scale"] == frozen["frozen_scale"]
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], frozen["exp_avg_sq"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": "yes"}, "freeze is"),
        ({"max_update": 0.0}, "max_update must be positive"),
        ({"max_update": -1.0}, "max_update must be positive"),
        ({"max_update": math.nan}, "max_update must be positive"),
        ({"floor_quantile": 1.0}, "floor_quantile"),
        ({"floor_quantile": -0.1}, "floor_quantile"),
        ({"floor_quantile": math.nan}, "floor_quantile"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StepAdamW(make_params(), **options)


def test_each_parameter_group_keeps_its_own_options():
    first, second, late = make_params()
    optimizer = StepAdamW([{"params": [first], "freeze": "raw"}, {"params": [second]}], floor_quantile=0.25)
    optimizer.add_param_group({"params": [late], "max_update": 0.5})
    train(optimizer, [first, second, late], range(2))
    optimizer.freeze_variance([first, second, late])
    scales = [optimizer.state[p]["frozen_scale"] for p in (first, second, late)]
    assert scales[0] == 1.0
    assert scales[1] == scales[2] == pytest.approx(1 / (1 - 0.999**2))
    assert [group["max_update"] for group in optimizer.param_groups] == [None, None, 0.5]
    assert [group["floor_quantile"] for group in optimizer.param_groups] == [0.25] * 3
    train(optimizer, [first, second, late], range(2, 4))


# ---- the frozen step ----


@pytest.mark.parametrize("switch", [100, 300, 1000])
@pytest.mark.parametrize("freeze", ["raw", "corrected"])
def test_first_frozen_step_is_as_long_as_the_last_ordinary_one_unless_raw(freeze, switch):
    factors = {100: 3.24, 300: 1.96, 1000: 1.26}
    p, optimizer = one_parameter(0.0, lr=1e-3, weight_decay=0.0, freeze=freeze)
    p.grad = torch.full_like(p, 0.5)
    for _ in range(switch):
        before = p.detach().clone()
        optimizer.step()
    last_ordinary = p.detach() - before
    optimizer.freeze_variance([p])
    before = p.detach().clone()
    optimizer.step()
    ratio = ((p.detach() - before) / last_ordinary).mean().item()
    expected = factors[switch] if freeze == "raw" else 1.0
    assert ratio == pytest.approx(expected, abs=0.01 if freeze == "raw" else 5e-4)
    assert ratio == pytest.approx(1 / math.sqrt(1 - 0.999**switch) if freeze == "raw" else 1.0, rel=1e-6)


@pytest.mark.parametrize("eps_inside", [True, False])
@pytest.mark.parametrize("freeze", ["raw", "corrected"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_frozen_step_follows_the_formula(options, freeze, eps_inside):
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.05, **options}
    (p,) = make_params(torch.float64, shapes=[(4, 8)])
    optimizer = StepAdamW([p], freeze=freeze, eps_inside=eps_inside, **options)
    train(optimizer, [p], range(5))
    # a small last gradient: the running maximum of AMSGrad is then another tensor than the variance
    set_gradients([p], 5, scale=1e-3)
    optimizer.step()
    before, weight = copied(optimizer.state[p]), p.detach().clone()
    optimizer.freeze_variance([p])
    train(optimizer, [p], range(6, 7))

    beta1, beta2 = options["betas"]
    g = -p.grad if options.get("maximize") else p.grad
    m = beta1 * before["exp_avg"] + (1 - beta1) * g
    v = before["max_exp_avg_sq"] if options.get("amsgrad") else before["exp_avg_sq"]
    v = v / (1 - beta2**6) if freeze == "corrected" else v
    eps = options["eps"]
    denominator = (v + eps).sqrt() if eps_inside else v.sqrt() + eps
    expected = weight * (1 - 0.1 * options["weight_decay"]) - 0.1 * m / (1 - beta1**7) / denominator
    torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], m, rtol=1e-12, atol=1e-12)
    assert optimizer.state[p]["step"].item() == 7


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_frozen_variance_is_bit_constant_and_the_others_move(implementation, options):
    params = make_params()
    optimizer = StepAdamW(params, **options, **implementation)
    train(optimizer, params, range(5))
    optimizer.freeze_variance(params[:1])
    before = [copied(optimizer.state[p]) for p in params]
    assert [optimizer.is_frozen(p) for p in params] == [True, False, False]
    train(optimizer, params, range(5, 9))
    for key in ("exp_avg_sq", "max_exp_avg_sq") if options else ("exp_avg_sq",):
        assert torch.equal(optimizer.state[params[0]][key], before[0][key])
    for p, state in zip(params[1:], before[1:], strict=True):
        assert (optimizer.state[p]["exp_avg_sq"] != state["exp_avg_sq"]).all()
    assert [optimizer.state[p]["step"].item() for p in params] == [9, 9, 9]


def test_momentum_goes_on_over_the_switch_as_adamw_would_have_it():
    ours, theirs = make_params(), make_params()
    optimizer, reference = StepAdamW(ours), torch.optim.AdamW(theirs)
    train(optimizer, ours, range(4))
    optimizer.freeze_variance(ours)
    train(optimizer, ours, range(4, 8))
    train(reference, theirs, range(8))  # the same gradients, hence the same momentum
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])


def entry_without_history(**options: Any) -> tuple[nn.Parameter, StepAdamW]:
    """A parameter whose first entry saw no gradient before the variance was frozen."""
    p, optimizer = one_parameter(0.0, lr=0.1, weight_decay=0.0, **options)
    p.grad = torch.tensor([0.0, 1e-3, 1e-3, 1e-3], dtype=p.dtype)
    for _ in range(10):
        optimizer.step()
    optimizer.freeze_variance([p])
    assert optimizer.state[p]["exp_avg_sq"][0] == 0
    p.grad = torch.full_like(p, 1e-3)
    return p, optimizer


def largest_step(p: nn.Parameter, optimizer: StepAdamW, steps: int = 60) -> float:
    largest = 0.0
    for _ in range(steps):
        before = p.detach().clone()
        optimizer.step()
        largest = max(largest, (p.detach() - before)[0].abs().item())
    return largest


def test_eps_inside_bounds_the_step_of_an_entry_without_variance():
    bound = 0.1 * 1e-3 / 1e-4
    assert 0.9 * bound < largest_step(*entry_without_history()) <= bound


def test_eps_outside_lets_that_entry_run_away():
    assert largest_step(*entry_without_history(eps_inside=False)) > 1e3


@pytest.mark.parametrize("eps_inside", [True, False])
@pytest.mark.parametrize("gradient", [1e-3, -1e-3])
def test_max_update_bounds_every_step(eps_inside, gradient):
    p, optimizer = entry_without_history(eps_inside=eps_inside, max_update=2.0)
    p.grad.fill_(gradient)
    assert largest_step(p, optimizer) == pytest.approx(0.1 * 2.0)


def test_floor_quantile_raises_small_variances_to_that_quantile():
    p = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = StepAdamW([p], lr=1.0, weight_decay=0.0, betas=(0.0, 0.999), eps=0.0, floor_quantile=0.5)
    p.grad = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=p.dtype)
    optimizer.step()
    optimizer.freeze_variance([p])
    before = p.detach().clone()
    optimizer.step()
    # corrected variance 1, 4, 9, 16, 25: the median 9 is the floor, so the first two divide by 3
    expected = torch.tensor([1 / 3, 2 / 3, 1.0, 1.0, 1.0], dtype=p.dtype)
    torch.testing.assert_close(before - p.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("freeze", ["raw", "corrected"])
def test_floor_quantile_counts_in_units_of_the_frozen_variance(freeze):
    p, optimizer = one_parameter(0.0, freeze=freeze, floor_quantile=0.5)
    p.grad = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=p.dtype)
    optimizer.step()
    optimizer.freeze_variance([p])
    expected = 4.0 if freeze == "corrected" else 4e-3
    assert optimizer.state[p]["frozen_floor"] == pytest.approx(expected, rel=1e-6)


def test_floor_of_a_large_parameter_is_estimated_from_a_sample(monkeypatch):
    monkeypatch.setattr("nmsparse.optim.QUANTILE_SAMPLE", 100)
    p = nn.Parameter(torch.zeros(1000))
    optimizer = StepAdamW([p], floor_quantile=0.1)
    p.grad = torch.arange(1000.0)
    optimizer.step()
    optimizer.freeze_variance([p])
    assert math.sqrt(optimizer.state[p]["frozen_floor"]) == pytest.approx(100, rel=0.15)


# ---- implementations and dtypes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_frozen_steps_agree_bit_for_bit_between_implementations(options, dtype):
    results = []
    for implementation in IMPLEMENTATIONS.values():
        params = make_params(dtype)
        optimizer = StepAdamW(params, lr=1e-2, max_update=2.0, floor_quantile=0.2, **options)
        train(optimizer, params, range(4))  # alike up to here: the fused ordinary step rounds differently
        optimizer.freeze_variance(params)
        optimizer.param_groups[0].update({"foreach": None, "fused": None, **implementation})
        train(optimizer, params, range(4, 9))
        results.append(([p.detach() for p in params], [optimizer.state[p] for p in params]))
    for result in results[1:]:
        assert_identical(result, results[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_frozen_bf16_parameters_follow_fp32_ones_to_bf16_precision(implementation):
    narrow = make_params(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    for params in (narrow, wide):
        optimizer = StepAdamW(params, lr=1e-2, **implementation)
        train(optimizer, params, range(4))
        optimizer.freeze_variance(params)
        train(optimizer, params, range(4, 10))
    for p, q in zip(narrow, wide, strict=True):
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(p.detach().float(), q.detach(), rtol=2**-5, atol=2**-6)


def test_learning_rate_may_be_a_tensor():
    results = []
    for lr in (0.0625, torch.tensor(0.0625)):
        params = make_params()
        optimizer = StepAdamW(params, lr=lr, foreach=False)
        train(optimizer, params, range(3))
        optimizer.freeze_variance(params)
        train(optimizer, params, range(3, 6))
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_a_frozen_parameter_without_gradient_is_left_alone():
    params = make_params()
    optimizer = StepAdamW(params)
    train(optimizer, params, range(3))
    optimizer.freeze_variance(params)
    weight, state = params[0].detach().clone(), copied(optimizer.state[params[0]])
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], weight)
    assert_identical(optimizer.state[params[0]], state)


# ---- loss scaling ----


def scaled_step(optimizer: StepAdamW, params: list[nn.Parameter], step: int, scaler: torch.amp.GradScaler | None) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    loss = sum((torch.randn(p.shape, generator=generator) * p).sum() for p in params)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [True, False])
def test_loss_scaling_changes_no_bit_of_a_frozen_run(fused):
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12)):
        params = make_params()
        optimizer = StepAdamW(params, fused=fused, lr=1e-2)
        for step in range(8):
            if step == 4:
                optimizer.freeze_variance(params[:2])
            scaled_step(optimizer, params, step, scaler)
        results.append(([p.detach() for p in params], [optimizer.state[p] for p in params]))
    assert_identical(*results)


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_step_changes_nothing(fused):
    params = make_params()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = StepAdamW(params, fused=fused, lr=1e-2)
    for step in range(4):
        scaled_step(optimizer, params, step, scaler)
    optimizer.freeze_variance(params[:2])
    weights, states = [p.detach().clone() for p in params], [copied(optimizer.state[p]) for p in params]
    loss = sum(p.sum() for p in params) * torch.inf
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert_identical([p.detach() for p in params], weights)
    assert_identical([optimizer.state[p] for p in params], states)
    scaled_step(optimizer, params, 4, scaler)
    assert all((p != w).any() for p, w in zip(params, weights, strict=True))


def test_gradients_unscaled_by_hand_are_not_unscaled_again():
    results = []
    for by_hand in (True, False):
        params, scaler = make_params(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
        optimizer = StepAdamW(params, fused=True)
        for step in range(6):
            if step == 3:
                optimizer.freeze_variance(params)
            set_gradients(params, step, scale=2.0**12)
            scaler.scale(torch.zeros(()))
            if by_hand:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in params])
    assert_identical(*results)


# ---- checkpoints ----


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_resumed_optimizer_continues_bit_for_bit(stop, implementation, dtype):
    def run(params: list[nn.Parameter], optimizer: StepAdamW, steps: range) -> None:
        for step in steps:
            if step == 4:
                optimizer.freeze_variance(params[:2])
            train(optimizer, params, range(step, step + 1))

    options = {"amsgrad": True, "floor_quantile": 0.2, "max_update": 3.0, "freeze": "raw", **implementation}
    params = make_params(dtype)
    optimizer = StepAdamW(params, **options)
    run(params, optimizer, range(stop))
    weights, state = saved_and_loaded(([p.detach() for p in params], optimizer.state_dict()))
    run(params, optimizer, range(stop, 9))

    fresh = [nn.Parameter(weight) for weight in weights]
    resumed = StepAdamW(fresh, **implementation)
    resumed.load_state_dict(state)
    run(fresh, resumed, range(stop, 9))
    assert_identical([p.detach() for p in fresh], [p.detach() for p in params])
    assert_identical(resumed.state_dict(), optimizer.state_dict())


def test_an_adamw_checkpoint_can_be_continued_and_frozen():
    params = make_params()
    reference = torch.optim.AdamW(params, lr=3e-2)
    train(reference, params, range(4))
    optimizer = StepAdamW(params, freeze="raw", max_update=2.0)
    optimizer.load_state_dict(saved_and_loaded(reference.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 3e-2
    optimizer.freeze_variance(params)
    before = params[0].detach().clone()
    train(optimizer, params, range(4, 5))
    assert optimizer.param_groups[0]["max_update"] == 2.0
    assert optimizer.state[params[0]]["frozen_scale"] == 1.0
    assert (params[0] != before).all()
