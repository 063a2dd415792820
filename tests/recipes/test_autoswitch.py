"""AutoSwitch: the statistics, the window, the decision; alone, without a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmsparse.recipes._autoswitch import STATISTICS, AutoSwitch, window_length


def draw(seed: int, shape: tuple[int, ...] = (4, 8)) -> tuple[Tensor, Tensor]:
    """A gradient and a variance before it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)


def value(statistic: str, *moments: tuple[Tensor, Tensor, float]) -> float:
    return float(AutoSwitch(statistic, 1e-8, 10).sample(moments))


def settled(rule: AutoSwitch, samples: list[float]) -> list[bool]:
    """The decision after each sample."""
    memory: dict[str, Any] = {}
    decisions = []
    for sample in samples:
        rule.record(memory, torch.tensor(sample))
        decisions.append(rule.has_settled(memory))
    return decisions


# ---- the window ----


@pytest.mark.parametrize(("beta2", "window"), [(0.999, 1000), (0.95, 20), (0.99, 100), (0.9, 10), (0.5, 2), (0.0, 1)])
def test_window_is_the_memory_of_the_variance(beta2, window):
    assert window_length(beta2) == window


@pytest.mark.parametrize("window", [1, 2, 20, 1000])
@pytest.mark.parametrize("statistic", ["arithmetic", "geometric", "relative"])
def test_nothing_settles_before_the_window_is_full(statistic, window):
    decisions = settled(AutoSwitch(statistic, 1e-8, window), [0.0] * (window + 3))
    assert decisions == [False] * (window - 1) + [True] * 4


def test_weights_without_a_gradient_count_as_unchanged():
    """Experts that no token reached: the mean runs over them too."""
    grad, variance = draw(0)
    full = value("arithmetic", (grad, variance, 0.9))
    with_idle = AutoSwitch("arithmetic", 1e-8, 10).sample([(grad, variance, 0.9), *3 * [(variance, variance, 1.0)]])
    assert float(with_idle) == pytest.approx(full / 4)


def test_staleness_needs_two_variances_one_window_apart():
    assert settled(AutoSwitch("staleness", 1e-8, 5), [1.0] * 8) == [False] * 5 + [True] * 3


def test_the_mean_runs_over_the_last_window_only():
    decisions = settled(AutoSwitch("arithmetic", 1.0, 3), [100.0, 0.5, 0.5, 0.5, 100.0, 0.0, 0.0, 0.0])
    assert decisions == [False, False, False, True, False, False, False, True]


def test_a_small_part_of_the_window_does_not_settle_a_large_mean():
    assert settled(AutoSwitch("arithmetic", 1.0, 4), [9.0, 0.0, 0.0, 0.0, 0.0]) == [False, False, False, False, True]


def test_a_mean_at_the_threshold_has_not_settled():
    assert settled(AutoSwitch("arithmetic", 1.0, 2), [1.0, 1.0, 0.75]) == [False, False, True]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_infinite_samples_never_settle(statistic, bad):
    assert not any(settled(AutoSwitch(statistic, 1e-8, 3), [bad] * 12))


def test_relative_change_looks_at_the_newest_sample():
    assert settled(AutoSwitch("relative", 1e-8, 2), [0.0, 0.0, 0.5, 0.49, 0.51]) == [False, True, False, True, False]


def test_staleness_compares_the_newest_sample_with_the_one_a_window_before():
    rule = AutoSwitch("staleness", 1e-8, 2)
    assert settled(rule, [1.0, 50.0, 1.05, 51.0, 1.1]) == [False, False, False, True, False]
    assert settled(rule, [0.97, 0.0, 1.0]) == [False, False, True]


def test_memory_holds_only_tensors_and_plain_numbers_and_does_not_grow():
    rule, memory = AutoSwitch("arithmetic", 1e-8, 20), {}
    for _ in range(100):
        rule.record(memory, torch.tensor(1.0))
    assert memory["count"] == 100
    assert memory["samples"].shape == (21,)
    assert memory["samples"].dtype == torch.float32


# ---- the statistics ----


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_arithmetic_statistic_equals_the_difference_of_two_copies(beta2):
    p = torch.nn.Parameter(torch.zeros(16, 32))
    optimizer = torch.optim.AdamW([p], betas=(0.9, beta2))
    generator = torch.Generator().manual_seed(0)
    before = torch.zeros_like(p)
    for _ in range(30):
        p.grad = torch.randn(p.shape, generator=generator)
        found = value("arithmetic", (p.grad, before, beta2))
        optimizer.step()
        after = optimizer.state[p]["exp_avg_sq"].clone()
        expected = (after.double() - before.double()).abs().mean().item()
        rounding = 2**-23 * (after.mean() + before.mean()).item()
        assert abs(found - expected) <= 2 * rounding + 1e-6 * expected
        before = after


@settings(deadline=None, max_examples=40)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 1000))
def test_a_loss_times_a_power_of_two_multiplies_the_statistic_by_its_square_exactly(exponent, seed):
    gradient, variance = draw(seed)
    c = 2.0**exponent
    plain = value("arithmetic", (gradient, variance, 0.999))
    assert value("arithmetic", (gradient * c, variance * c * c, 0.999)) == plain * c * c


@pytest.mark.parametrize("statistic", ["geometric", "relative"])
def test_how_the_other_statistics_scale_with_the_loss(statistic):
    gradient, variance = draw(0)
    factor = 64.0 if statistic == "geometric" else 1.0
    scaled = value(statistic, (gradient * 8, variance * 64, 0.999))
    assert scaled == pytest.approx(factor * value(statistic, (gradient, variance, 0.999)), rel=1e-6)


def test_geometric_statistic_leaves_out_entries_that_did_not_change():
    gradient = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    variance = torch.tensor([[0.0, 0.0, 9.0, 0.0]])  # changes 0.1, 0.4, none and none at beta2 = 0.9
    assert value("geometric", (gradient, variance, 0.9)) == pytest.approx(0.2, rel=1e-6)


def test_geometric_statistic_is_zero_only_when_nothing_changed():
    assert value("geometric", (torch.zeros(1, 4), torch.zeros(1, 4), 0.9)) == 0


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_geometric_statistic_is_at_most_the_arithmetic_one(seed):
    moments = (*draw(seed), 0.999)
    assert 0 < value("geometric", moments) <= value("arithmetic", moments)


def test_statistics_of_a_case_one_can_compute_by_hand():
    gradient, variance = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 4.0]])  # v becomes 3.5, 2 at beta2 = 0.5
    moments = (gradient, variance, 0.5)
    assert value("arithmetic", moments) == pytest.approx((0.5 + 2.0) / 2)
    assert value("geometric", moments) == pytest.approx(math.sqrt(0.5 * 2.0))
    assert value("relative", moments) == pytest.approx((5 - math.hypot(3.5, 2)) / 5)
    assert value("staleness", moments) == pytest.approx(5.5)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_entry_counts_once_whatever_layer_it_is_in(statistic):
    gradient, variance = draw(3, (12, 8))
    apart = [(gradient[:2], variance[:2], 0.999), (gradient[2:], variance[2:], 0.999)]
    assert value(statistic, *apart) == pytest.approx(value(statistic, (gradient, variance, 0.999)), rel=1e-6)


def test_each_layer_may_have_its_own_beta2():
    one = torch.ones(1, 4)
    assert value("arithmetic", (one, 0 * one, 0.9), (one, 0 * one, 0.5)) == pytest.approx((0.1 + 0.5) / 2)


def test_changes_of_1e_minus_8_survive_a_million_entries():
    gradient = torch.full((1024, 1024), 1e-4)
    gradient[0, 0] = 100.0  # 1e4 beside a million times 1e-8
    expected = 1e-3 * (1e4 + (2**20 - 1) * 1e-8) / 2**20
    assert value("arithmetic", (gradient, torch.zeros_like(gradient), 0.999)) == pytest.approx(expected, rel=1e-6)
    small = torch.full((1024, 1024), 1e-4)
    assert value("arithmetic", (small, torch.zeros_like(small), 0.999)) == pytest.approx(1e-11, rel=1e-6)
