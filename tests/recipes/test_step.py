"""STEP: a dense phase that is AdamW, a switch, and masks learned under the frozen variance."""

from __future__ import annotations

import copy
import io
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import assert_identical

import nmsparse as nm
from nmsparse.functional import magnitude_mask
from nmsparse.recipes._autoswitch import STATISTICS, AutoSwitch

STEPS = 12
SPARSE = ("0.weight", "2.weight")
IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def make_model(seed: int = 0) -> nn.Sequential:
    """Two sparse layers and a dense head."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))


def make_run(
    recipe: nm.Recipe, total_steps: int | None = STEPS, seed: int = 0, **options: Any
) -> tuple[nn.Sequential, nm.StepAdamW, nm.Run]:
    model = make_model(seed)
    run = nm.sparsify_(model, recipe)
    optimizer = nm.StepAdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})
    run.attach(optimizer, total_steps)
    return model, optimizer, run


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    """The loss of the batch that belongs to this step."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    return (model(x) - target).square().mean() * scale


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scaler: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def switched_at(run: nm.Run) -> int | None:
    return run.stats()["total"].get("switched_at")


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Copies of the optimizer's state, by parameter name."""
    return {
        name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }


# ---- what is refused before training starts ----


class FactoredAdam(torch.optim.Optimizer):
    """Keeps row and column sums of the variance only, as Adafactor and 8-bit optimizers keep less than all of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("must be refused before the first step")


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adafactor, torch.optim.RMSprop, FactoredAdam]
)
def test_optimizers_that_cannot_freeze_a_variance_are_refused_at_attach(kind):
    model = make_model()
    run = nm.sparsify_(model, nm.STEP("2:4"))
    optimizer = kind(model.parameters())
    with pytest.raises(TypeError, match=rf"step needs .*freeze_variance.*{kind.__name__} lacks.*StepAdamW"):
        run.attach(optimizer, total_steps=10)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_muon_is_refused_at_attach():
    model = make_model()
    run = nm.sparsify_(model, nm.STEP("2:4"))
    with pytest.raises(TypeError, match="Muon lacks"):
        run.attach(torch.optim.Muon([model[0].weight, model[2].weight]), total_steps=10)


@pytest.mark.parametrize("switch", [0, 0.0, -1, -0.5, 1.5, math.nan])
def test_a_switch_without_a_dense_phase_is_refused(switch):
    with pytest.raises(ValueError, match="leaves no dense phase"):
        nm.STEP("2:4", switch=switch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switch": "soon"}, "switch is"),
        ({"statistic": "median"}, "statistic is one of arithmetic, geometric, relative, staleness"),
        ({"earliest": 0.6, "latest": 0.5}, "in this order"),
        ({"earliest": -0.1}, "in this order"),
        ({"latest": 1.1}, "in this order"),
        ({"decay": -1.0}, "decay"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nm.STEP("2:4", **options)


@pytest.mark.parametrize("switch", ["auto", 0.5, 1.0])
def test_shares_of_the_run_need_its_length(switch):
    with pytest.raises(ValueError, match="total_steps"):
        make_run(nm.STEP("2:4", switch=switch), total_steps=None)


def test_a_fixed_number_of_updates_does_not_need_the_length_of_the_run():
    model, optimizer, run = make_run(nm.STEP("2:4", switch=3), total_steps=None)
    train(model, optimizer, range(4))
    assert switched_at(run) == 3


def test_layers_spread_over_two_optimizers_are_refused():
    model = make_model()
    run = nm.sparsify_(model, nm.STEP("2:4"))
    with pytest.raises(ValueError, match="one switch for all sparse layers"):
        run.attach(nm.StepAdamW(model[0].parameters()), total_steps=10)


# ---- phase 1 ----


@pytest.mark.parametrize("switch", [STEPS, 1.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_switch_at_the_end_of_the_run_is_dense_adamw_bit_for_bit(implementation, switch):
    model, optimizer, run = make_run(nm.STEP("2:4", switch=switch, decay=0.1), **implementation)
    dense = make_model()
    reference = torch.optim.AdamW(dense.parameters(), lr=1e-2, weight_decay=0.1, **implementation)
    train(model, optimizer, range(STEPS - 1))
    assert switched_at(run) is None
    train(model, optimizer, range(STEPS - 1, STEPS))
    train(dense, reference, range(STEPS))
    assert_identical(model.state_dict(), dense.state_dict())
    assert switched_at(run) == STEPS


def test_training_is_dense_before_the_switch_and_sparse_after_it():
    model, optimizer, run = make_run(nm.STEP("2:4", switch=3))
    densities = []
    for step in range(5):
        densities.append(run.stats()["total"]["density"])
        train(model, optimizer, range(step, step + 1))
    assert densities == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert [layer["sparse"] for layer in run.stats()["layers"].values()] == [1.0, 1.0]


def test_evaluation_obeys_the_pattern_in_both_phases():
    model, optimizer, _ = make_run(nm.STEP("2:4", switch=3))
    for step in range(5):
        model.eval()
        kept = (nm.effective_weight(model[0]).reshape(16, 2, 4) != 0).sum(-1)
        assert (kept == 2).all()
        model.train()
        train(model, optimizer, range(step, step + 1))


# ---- when it switches ----


@pytest.mark.parametrize(("switch", "expected"), [(1, 1), (5, 5), (0.5, 6), (0.3, 4), (1e-6, 1), (1.0, 12), (100, None)])
def test_a_fixed_switch_comes_after_that_many_updates(switch, expected):
    model, optimizer, run = make_run(nm.STEP("2:4", switch=switch))
    train(model, optimizer, range(STEPS))
    assert switched_at(run) == expected
    assert [optimizer.is_frozen(p) for p in model.parameters()] == [expected is not None, False] * 2 + [False] * 2


def always(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(AutoSwitch, "sample", lambda *_: torch.tensor(value))


def test_a_variance_that_never_changes_switches_right_after_the_earliest_step(monkeypatch):
    always(monkeypatch, 0.0)
    model, optimizer, run = make_run(nm.STEP("2:4", earliest=0.25), 20, betas=(0.9, 0.5))
    train(model, optimizer, range(8))
    assert switched_at(run) == 6  # T_min = 5


def test_a_variance_that_never_settles_switches_right_after_the_latest_step_and_says_so(monkeypatch, caplog):
    always(monkeypatch, math.inf)
    model, optimizer, run = make_run(nm.STEP("2:4", latest=0.5), 20, betas=(0.9, 0.5))
    with caplog.at_level(logging.WARNING, "nmsparse"):
        train(model, optimizer, range(14))
    assert switched_at(run) == 11  # T_max = 10
    assert [record.getMessage() for record in caplog.records] == [
        "step: AutoSwitch did not settle by update 11 (latest = 0.5) and switches now; consider a fixed switch."
    ]


def test_the_latest_step_is_counted_exactly(monkeypatch):
    """0.29 * 100 is below 29 in floating point."""
    always(monkeypatch, math.inf)
    model, optimizer, run = make_run(nm.STEP("2:4", latest=0.29), 100)
    train(model, optimizer, range(29))
    assert switched_at(run) is None
    train(model, optimizer, range(29, 30))
    assert switched_at(run) == 30


@pytest.mark.parametrize(("beta2", "window"), [(0.5, 2), (0.9, 10), (0.95, 20)])
def test_no_automatic_switch_before_the_window_is_full(monkeypatch, beta2, window):
    always(monkeypatch, 0.0)
    model, optimizer, run = make_run(nm.STEP("2:4", earliest=0.0, latest=1.0), 40, betas=(0.9, beta2))
    train(model, optimizer, range(window - 1))
    assert switched_at(run) is None
    train(model, optimizer, range(window - 1, window))
    assert switched_at(run) == window


def test_the_latest_step_does_not_wait_for_a_full_window(monkeypatch):
    always(monkeypatch, 0.0)
    model, optimizer, run = make_run(nm.STEP("2:4"), 8, betas=(0.9, 0.999))
    train(model, optimizer, range(6))
    assert switched_at(run) == 5


def test_zero_gradients_settle_for_real():
    model, optimizer, run = make_run(nm.STEP("2:4", earliest=0.25), 20, betas=(0.9, 0.5))
    for _ in range(8):
        optimizer.zero_grad()
        (model(torch.zeros(4, 8)).sum() * 0).backward()
        optimizer.step()
    assert switched_at(run) == 6
    assert run.stats()["total"]["variance_change"] == 0


@pytest.mark.parametrize("statistic", STATISTICS)
def test_each_statistic_finds_a_settled_variance_and_not_an_unsettled_one(statistic):
    def switch_of(fading: float) -> int | None:
        recipe = nm.STEP("2:4", statistic=statistic, switch_eps=1e-4, earliest=0.0, latest=1.0)
        model, optimizer, run = make_run(recipe, 40, betas=(0.9, 0.5))
        for step in range(20):
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.full_like(p, fading**step)
            optimizer.step()
        return switched_at(run)

    assert switch_of(3.0) is None, "gradients that grow: the variance moves all the time"
    settled = switch_of(1.0)
    assert settled is not None, "constant gradients: v goes to g^2"
    assert settled >= 2, "not before the window is full"


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_the_threshold_is_adams_eps_unless_given(monkeypatch, eps):
    always(monkeypatch, 1e-4)
    for switch_eps, threshold in ((None, eps), (1e-3, 1e-3), (1e-5, 1e-5)):
        recipe = nm.STEP("2:4", switch_eps=switch_eps, earliest=0.0, latest=1.0)
        model, optimizer, run = make_run(recipe, 20, betas=(0.9, 0.5), eps=eps)
        train(model, optimizer, range(4))
        assert switched_at(run) == (2 if threshold > 1e-4 else None)


def test_recorded_samples_equal_the_change_of_the_variance():
    model, optimizer, run = make_run(nm.STEP("2:4", latest=1.0), 100)
    before = [torch.zeros_like(dict(model.named_parameters())[name]) for name in SPARSE]
    for step in range(8):
        train(model, optimizer, range(step, step + 1))
        after = [states(model, optimizer)[name]["exp_avg_sq"] for name in SPARSE]
        change = torch.cat([(a.double() - b.double()).abs().flatten() for a, b in zip(after, before, strict=True)]).mean()
        assert run.stats()["total"]["variance_change"] == pytest.approx(change.item(), rel=1e-3)
        before = after


def test_samples_of_convolutions_pair_each_gradient_with_its_own_variance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    run = nm.sparsify_(model, nm.STEP("2:4", latest=1.0), targets=["0"])
    optimizer = nm.StepAdamW(model.parameters())
    run.attach(optimizer, 100)
    before = torch.zeros_like(model[0].weight)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 8, 4, 4)).square().mean().backward()
        optimizer.step()
        after = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
        change = (after.double() - before.double()).abs().mean().item()
        assert run.stats()["total"]["variance_change"] == pytest.approx(change, rel=1e-3)
        before = after


def test_an_update_without_gradients_gives_no_sample():
    model, optimizer, run = make_run(nm.STEP("2:4"), 20, betas=(0.9, 0.5))
    train(model, optimizer, range(1))
    sampled = run.state_dict()["optimizers"][0]["memory"]["count"]
    optimizer.zero_grad()
    model[4].bias.grad = torch.ones(4)
    optimizer.step()
    assert run.step == 2
    assert run.state_dict()["optimizers"][0]["memory"]["count"] == sampled == 1


def test_a_layer_without_variance_at_the_switch_freezes_as_soon_as_it_has_one():
    model, optimizer, run = make_run(nm.STEP("2:4", switch=1))
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    model[2].weight.grad = None
    optimizer.step()
    assert switched_at(run) == 1
    assert optimizer.is_frozen(model[0].weight)
    assert not optimizer.is_frozen(model[2].weight)
    train(model, optimizer, range(1, 2))
    assert optimizer.is_frozen(model[2].weight)


# ---- phase 2 ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_after_the_switch_only_sparse_weights_keep_their_variance(implementation):
    model, optimizer, _ = make_run(nm.STEP("2:4", switch=4), **implementation)
    train(model, optimizer, range(4))
    before = states(model, optimizer)
    train(model, optimizer, range(4, 9))
    for name, state in states(model, optimizer).items():
        assert torch.equal(state["exp_avg_sq"], before[name]["exp_avg_sq"]) == (name in SPARSE)
        assert state["step"] == 9


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_momentum_is_carried_over_the_switch(implementation):
    model, optimizer, _ = make_run(nm.STEP("2:4", switch=4), **implementation)
    train(model, optimizer, range(4))
    before = states(model, optimizer)
    train(model, optimizer, range(4, 5))
    for name, p in model.named_parameters():
        expected = before[name]["exp_avg"].lerp(p.grad, 0.1)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_phase_two_is_ste_or_sr_ste_under_the_frozen_variance(decay):
    model, optimizer, _ = make_run(nm.STEP("2:4", switch=4, decay=decay))
    train(model, optimizer, range(STEPS))

    other = make_model()
    reference = nm.StepAdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    train(other, reference, range(4))
    run = nm.sparsify_(other, nm.SRSTE("2:4", decay=decay) if decay else nm.STE("2:4"))
    run.attach(reference)
    reference.freeze_variance([other[0].weight, other[2].weight])
    train(other, reference, range(4, STEPS))
    assert_identical(model.state_dict(), other.state_dict())
    assert_identical(states(model, optimizer), states(other, reference))


def test_pruned_weights_receive_gradient_and_move():
    model, optimizer, _ = make_run(nm.STEP("2:4", switch=4), weight_decay=0.0)
    train(model, optimizer, range(4))
    pruned = ~magnitude_mask(model[0].weight.detach(), nm.Pattern("2:4"))
    before = model[0].weight.detach().clone()
    train(model, optimizer, range(4, 5))
    assert (model[0].weight.grad[pruned] != 0).all()
    assert (model[0].weight.detach()[pruned] != before[pruned]).all()


def test_masks_go_on_changing_after_the_switch():
    model, optimizer, _ = make_run(nm.STEP("2:4", switch=4), 60, lr=3e-2)
    train(model, optimizer, range(4))
    before = nm.effective_weight(model[0]) != 0
    train(model, optimizer, range(4, 40))
    assert ((nm.effective_weight(model[0]) != 0) != before).any()


def test_one_switch_serves_sparse_weights_in_several_parameter_groups():
    model = make_model()
    run = nm.sparsify_(model, nm.STEP("2:4", switch=3))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": [*model[2].parameters(), *model[4].parameters()]}]
    optimizer = nm.StepAdamW(groups, lr=1e-2)
    run.attach(optimizer, STEPS)
    train(model, optimizer, range(6))
    assert switched_at(run) == 3
    assert optimizer.is_frozen(model[0].weight)
    assert optimizer.is_frozen(model[2].weight)


def test_it_learns_through_the_switch():
    model, optimizer, run = make_run(nm.STEP("2:4", switch=40), 200, weight_decay=0.0)
    first, last = loss_of(model, 0).item(), 0.0
    for _ in range(150):
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        last = loss.item()
    assert switched_at(run) == 40
    assert last < 0.5 * first


# ---- loss scaling ----


@pytest.mark.parametrize("switch", [4, "auto"])
@pytest.mark.parametrize("fused", [True, False])
def test_loss_scaling_changes_no_bit_of_the_run(fused, switch):
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        recipe = nm.STEP("2:4", switch=switch, switch_eps=1e-3, decay=0.1)
        model, optimizer, run = make_run(recipe, betas=(0.9, 0.5), fused=fused)
        train(model, optimizer, range(STEPS), scaler)
        assert switched_at(run) is not None
        results.append((model.state_dict(), states(model, optimizer), run.state_dict()))
    assert_identical(*results)


@pytest.mark.parametrize("stop", [2, 6], ids=["before the switch", "after the switch"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_step_moves_nothing_and_gives_no_sample(fused, stop):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    recipe = nm.STEP("2:4", earliest=0.25, switch_eps=1e9, decay=0.1)
    model, optimizer, run = make_run(recipe, betas=(0.9, 0.5), fused=fused)
    train(model, optimizer, range(stop), scaler)
    assert switched_at(run) == (4 if stop > 4 else None)
    before = copy.deepcopy([model.state_dict(), states(model, optimizer), run.state_dict()])
    optimizer.zero_grad()
    scaler.scale(loss_of(model, stop, scale=math.inf)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_identical([model.state_dict(), states(model, optimizer), run.state_dict()], before)
    train(model, optimizer, range(stop, STEPS), scaler)
    assert switched_at(run) == 4


# ---- resuming ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("stop", [5, 6, 7], ids=["T0-1", "T0", "T0+1"])
@pytest.mark.parametrize(
    "recipe",
    [
        nm.STEP("2:4", switch=6, decay=0.1),
        nm.STEP("2:4", switch_eps=1e9, earliest=5 / 12),
        nm.STEP("2:4", statistic="staleness", earliest=0.0, latest=5 / 12),
    ],
    ids=["fixed", "settled", "latest"],
)
def test_resumed_run_equals_uninterrupted_run(recipe, stop, implementation):
    options = {"betas": (0.9, 0.8), "floor_quantile": 0.1, **implementation}
    model, optimizer, run = make_run(recipe, **options)
    train(model, optimizer, range(stop))
    assert switched_at(run) == (6 if stop >= 6 else None)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}, buffer)
    train(model, optimizer, range(stop, STEPS))
    assert switched_at(run) == 6

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh, its_optimizer, its_run = make_run(recipe, seed=99, **options)
    fresh.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    its_run.load_state_dict(saved["run"])
    train(fresh, its_optimizer, range(stop, STEPS))
    assert_identical(fresh.state_dict(), model.state_dict())
    assert_identical(its_optimizer.state_dict(), optimizer.state_dict())
    assert_identical(its_run.state_dict(), run.state_dict())


def test_a_new_clock_begins_with_a_dense_phase() -> None:
    """Its variance must not be estimated under the masks of the phase before."""
    model, optimizer, run = make_run(nm.STEP("2:4", switch=3))
    train(model, optimizer, range(5))
    assert run.stats()["total"]["density"] == pytest.approx(0.5)
    run.detach(optimizer)
    again = nm.StepAdamW(model.parameters(), lr=1e-2)
    run.attach(again, STEPS)
    model.train()
    assert torch.equal(nm.effective_weight(model[0]), model[0].weight)
    train(model, again, range(2))
    assert not any(again.is_frozen(p) for p in model.parameters())
    train(model, again, range(2, 4))
    assert nm.functional.violations(nm.effective_weight(model[0]), "2:4") == 0
    assert again.is_frozen(model[0].weight)


def test_a_new_clock_on_a_frozen_variance_is_told() -> None:
    """Its dense phase would not be Adam's; a run that goes on may have the optimizer that it had."""
    whole, its_optimizer, _ = make_run(nm.STEP("2:4", switch=3))
    train(whole, its_optimizer, range(STEPS))
    model, optimizer, run = make_run(nm.STEP("2:4", switch=3))
    train(model, optimizer, range(5))
    saved, before = copy.deepcopy([run.state_dict(), model.state_dict()])
    run.detach(optimizer)
    run.attach(optimizer, STEPS)
    with pytest.raises(RuntimeError, match=r"^0: step begins with a dense phase.* has frozen.* call run\.load_state_dict"):
        train(model, optimizer, range(5, 6))
    assert_identical(model.state_dict(), before)
    run.load_state_dict(saved)
    train(model, optimizer, range(5, STEPS))
    assert_identical(model.state_dict(), whole.state_dict())


def test_layers_without_a_gradient_make_the_change_of_the_variance_smaller() -> None:
    """AutoSwitch takes the mean over all sparse weights, those of an idle expert as well."""
    found = []
    for is_idle in (False, True):
        model, optimizer, run = make_run(nm.STEP("2:4"), total_steps=100)
        loss_of(model, 0).backward()
        if is_idle:
            model[2].weight.grad = None
        optimizer.step()
        found.append(run.stats()["total"]["variance_change"] * (8 * 16 + 16 * 8))
        grads = [model[i].weight.grad for i in (0, 2) if model[i].weight.grad is not None]
        assert found[-1] == pytest.approx(sum(0.001 * float(grad.square().sum()) for grad in grads), rel=1e-4)
    assert found[1] < found[0]


@pytest.mark.parametrize("statistic", ["relative", "staleness"])
def test_the_variance_of_idle_layers_counts_in_every_norm(statistic: str) -> None:
    """Left out of one sample and not of the next, it would look like a change."""

    def variances() -> Tensor:
        return torch.cat([optimizer.state[model[i].weight]["exp_avg_sq"].flatten().clone() for i in (0, 2)])

    model, optimizer, run = make_run(nm.STEP("2:4", statistic=statistic), total_steps=100, betas=(0.9, 0.5))
    train(model, optimizer, range(3))
    before = variances()
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    model[2].weight.grad = None
    optimizer.step()
    after = variances()
    expected = after.sum() if statistic == "staleness" else (after.norm() - before.norm()).abs() / before.norm()
    assert run.stats()["total"]["switch_statistic"] == pytest.approx(float(expected), rel=1e-4)
