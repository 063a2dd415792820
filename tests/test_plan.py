"""Plans: what is chosen from given times, what is saved, and what a run makes of it. No GPU: the times are made up."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import assert_follows_its_times

import nmsparse as nm
from nmsparse.kernels import Choice, Product, _dispatch

plan_module = importlib.import_module("nmsparse.plan")


class Times:
    """Stands for the engine: milliseconds of dense and sparse products by their (m, n, k), and of packing."""

    def __init__(self) -> None:
        self.products: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.default: tuple[float, float] | None = (1.0, 0.6)
        self.pack_ms = 0.05
        self.asked: list[Product] = []

    def time_products(self, products: Any, device: torch.device) -> dict[Product, Choice | None]:
        found: dict[Product, Choice | None] = {}
        for product in products:
            self.asked.append(product)
            pair = self.products.get(product[:3], self.default)
            found[product] = None if pair is None else Choice(1, 1, pair[1], pair[0], 1e-3)
        return found


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    made = Times()
    monkeypatch.setattr(_dispatch, "TABLE", [_dispatch.REFERENCE])
    monkeypatch.setattr(plan_module, "time_products", made.time_products)
    monkeypatch.setattr(plan_module, "device_milliseconds", lambda call, at_least: made.pack_ms)
    return made


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 8))


def reasons(plan: nm.Plan, layer: str = "0") -> dict[str, str | None]:
    return {product: times.reason for product, times in plan.layers[layer].products.items()}


def test_products_that_are_faster_with_packing_run_sparse(times: Times) -> None:
    plan = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    assert set(plan.layers) == {"0", "2"}
    assert reasons(plan) == {"output": None, "grad_input": None, "grad_weight": None}
    # three products of 1 ms and a cast, against three of 0.6 ms, packing G, and the weight twice (the second copy is free here)
    assert plan.layers["0"].dense_ms == pytest.approx(3.05)
    assert plan.layers["0"].planned_ms == pytest.approx(1.8 + 0.05 + 0.05)
    assert plan.speedup() == pytest.approx(3.05 / 1.9, rel=1e-3)
    assert plan.speedup(step_ms=12.2) == pytest.approx(12.2 / (12.2 - 6.1 + 3.8), rel=1e-3)


def test_a_product_whose_packing_costs_more_than_it_saves_stays_dense(times: Times) -> None:
    times.pack_ms = 0.5  # saved: 0.4 per product
    plan = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    assert reasons(plan)["grad_weight"] == "measured: the dense product is as fast"
    assert reasons(plan)["output"] is None  # one packing serves two products, and spares two projections
    slow = nm.plan(model(), nm.STE("2:4"), tokens=256)
    assert slow.layers["0"].products["output"].sparse_ms == 0.6


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_times_a_plan_follows_them(seed: int, times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(seed)
    for sizes in itertools.product((64, 128), (64, 128, 256), (64, 128, 256)):
        times.products[sizes] = (numbers.uniform(0.8, 1.2), numbers.uniform(0.4, 1.2))
    monkeypatch.setattr(plan_module, "device_milliseconds", lambda call, at_least: numbers.uniform(0.0, 0.3))
    plan = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    for layer in plan.layers.values():
        assert_follows_its_times(layer)


def test_packing_of_the_weight_is_shared_by_micro_batches(times: Times) -> None:
    times.pack_ms, times.default = 0.5, (1.0, 0.9)
    one = nm.plan(model(), nm.STE("2:4"), tokens=256)
    many = nm.plan(model(), nm.STE("2:4"), tokens=256, micro_batches=16)
    assert many.layers["0"].planned_ms < 16 * one.layers["0"].planned_ms


def test_gains_within_the_noise_do_not_count(times: Times) -> None:
    times.default, times.pack_ms = (1.0, 0.9999), 0.0
    plan = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    assert all(reasons(plan).values())
    assert plan.speedup() == pytest.approx(1.0)


def test_all_three_products_count_even_where_the_recipe_keeps_one_dense(times: Times) -> None:
    plan = nm.plan(model(), nm.SSTE("2:4"), tokens=256)
    assert reasons(plan) == {"output": None, "grad_input": "s-ste keeps it dense", "grad_weight": None}
    assert plan.layers["0"].dense_ms == pytest.approx(3.05)


def test_sdgp_packs_the_gradient_for_both_products(times: Times) -> None:
    nm.plan(model(), nm.SDGP("2:4", mvue=True), tokens=100)
    assert Product(128, 64, 128, False, False, False, torch.bfloat16) in times.asked  # tokens padded to 128, packed K-major
    assert Product(128, 64, 128, True, False, False, torch.bfloat16) in times.asked


def test_a_product_that_no_algorithm_computes_stays_dense(times: Times) -> None:
    times.default = None
    plan = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    assert set(reasons(plan).values()) == {"no algorithm of the library computes it"}


def test_without_support_every_layer_says_why() -> None:
    plan = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    assert set(reasons(plan).values()) == {"sparse tensor cores need a CUDA GPU"}
    assert plan.speedup() == 1.0
    assert "dense: sparse tensor cores need a CUDA GPU" in str(plan)


def test_layers_that_do_not_fit_say_so(times: Times) -> None:
    layers = nn.Linear(62, 64), nn.Linear(48, 64), nn.Linear(48, 48), nn.Linear(64, 8)
    plan = nm.plan(nn.Sequential(*layers), nm.Trio("2:4"), tokens=64)
    assert "in_features = 62 is not a multiple of 4" in str(reasons(plan, "0")["output"])
    assert "the hardware's layout needs multiples of 64 x 32" in str(reasons(plan, "1")["output"])
    assert reasons(plan, "1")["grad_weight"] is None  # there tokens are what is packed
    assert all("the hardware's layout" in str(reason) for reason in reasons(plan, "2").values())


def test_pointwise_convolutions_are_planned_and_lazy_layers_left_out(times: Times) -> None:
    layers = nn.Conv2d(64, 128, 1), nn.Conv2d(128, 64, 3), nn.LazyLinear(64), nn.Linear(64, 64)
    plan = nm.plan(nn.Sequential(*layers), nm.STE("2:4"), tokens=64, targets="all")
    assert set(plan.layers) == {"0", "3"}
    assert reasons(plan)["output"] is None
    assert set(plan.skipped) == {"1", "2"}


def test_conv1d_and_linear_of_one_size_are_measured_apart(times: Times) -> None:
    from transformers.pytorch_utils import Conv1D

    nm.plan(nn.Sequential(nn.Linear(64, 128), Conv1D(128, 64), nn.Linear(128, 8)), nm.STE("2:4"), tokens=64)
    assert {product.m_major for product in times.asked if product[:3] == (128, 64, 64)} == {False, True}


def test_a_saved_plan_comes_back_equal_and_is_obeyed(times: Times, tmp_path: Path) -> None:
    times.products[(128, 64, 256)] = (1.0, 2.0)  # grad_weight of the first layer
    made = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    made.save(tmp_path / "plan.json")
    loaded = nm.Plan.load(tmp_path / "plan.json")
    assert loaded == made
    net = model()
    run = nm.sparsify_(net, nm.Trio("2:4"), plan=loaded)
    run.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    assert run.products["0"] == {
        "output": "sparse",
        "grad_input": "sparse",
        "grad_weight": "measured: the dense product is as fast",
    }
    assert run.products["2"]["grad_weight"] == "sparse"


def test_a_backward_product_that_stays_dense_sees_the_whole_gradient(times: Times) -> None:
    times.products[(128, 64, 256)] = (1.0, 2.0)
    net, dense = model(), model()
    dense.load_state_dict(net.state_dict())
    run = nm.sparsify_(net, nm.SSTE("2:4"), plan=nm.plan(net, nm.SSTE("2:4"), tokens=256))
    run.attach(torch.optim.SGD(net.parameters(), lr=0.0))
    x = torch.randn(40, 64)
    net[0](x).sum().backward()
    dense[0](x).sum().backward()
    # the gradient of a sum is all ones: MVUE would have left half of them, twice as large
    torch.testing.assert_close(net[0].weight.grad, dense[0].weight.grad)


def test_a_plan_for_another_recipe_or_model_is_refused_or_ignored_with_a_reason(times: Times) -> None:
    made = nm.plan(model(), nm.Trio("2:4"), tokens=256)
    net = model()
    with pytest.raises(ValueError, match=r"this plan is for .*trio"):
        nm.sparsify_(net, nm.STE("2:4"), plan=made)
    assert type(net[0]) is nn.Linear
    other = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    run = nm.sparsify_(other, nm.Trio("2:4"), plan=made)
    run.attach(torch.optim.SGD(other.parameters(), lr=0.1))
    assert run.products["0"]["output"] == "the plan knows this layer as 128 x 64"
    assert run.products["3"]["output"] == "the plan does not know this layer"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "layers": {"a": {}}}'])
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not a plan of this nmsparse"):
        nm.Plan.load(file)


@pytest.mark.parametrize(("tokens", "micro_batches"), [(0, 1), (-1, 1), (64, 0)])
def test_counts_below_one_are_refused(tokens: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match="count from 1"):
        nm.plan(model(), nm.STE("2:4"), tokens, micro_batches=micro_batches)


def test_table_groups_equal_layers_and_json_holds_everything(times: Times) -> None:
    made = nm.plan(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8)), nm.Trio("2:4"), tokens=256)
    assert "0 and 2 more" in str(made)
    assert set(json.loads(made.to_json())["layers"]) == {"0", "1", "2"}


def test_a_path_in_place_of_a_plan_is_refused() -> None:
    with pytest.raises(TypeError, match=r"plan is what nmsparse.plan\(...\) returns or nmsparse.Plan.load"):
        nm.sparsify_(model(), nm.STE("2:4"), plan="plan.json")
