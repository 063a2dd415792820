"""Optimizers of other packages: any torch optimizer carries the clock, and a recipe that needs its own says so."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from others import OTHERS
from torch import Tensor
from toys import make_data, make_net, train

import nmsparse as nm
from nmsparse.functional import magnitude_mask

Maker = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OTHERS))


def package(name: str) -> Any:
    """bitsandbytes and torchao warn of what they do not find at import, which is none of our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"needs {name.split('.')[0]}: pip install {name.split('.')[0]}")


def schedule_free(parameters: Any) -> Any:
    optimizer = package("schedulefree").AdamWScheduleFree(parameters, lr=1e-2)
    optimizer.train()
    return optimizer


def bitsandbytes_8bit(parameters: Any) -> Any:
    return package("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-2)


def torchao_8bit(parameters: Any) -> Any:
    return package("torchao.optim").AdamW8bit(parameters, lr=1e-2)


FOREIGN: list[Maker] = [schedule_free, bitsandbytes_8bit, torchao_8bit]


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_sr_ste_trains_under_a_foreign_optimizer(make: Maker) -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4", decay=0.1))
    optimizer = make(model.parameters())
    run.attach(optimizer, total_steps=20)
    losses = train(model, optimizer, 20, make_data())
    assert losses[-1] < 0.6 * losses[0]
    assert run.step == 20
    assert run.stats()["total"]["density"] == 0.5


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_step_says_that_its_variance_cannot_be_frozen_there(make: Maker) -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STEP("2:4"))
    optimizer = make(model.parameters())
    kind = type(optimizer).__name__
    with pytest.raises(TypeError, match=rf"step needs an optimizer with freeze_variance\(\), which {kind} lacks: .*StepAdamW"):
        run.attach(optimizer, total_steps=4)


MUON_LR = 0.02


def train_under_muon(steps: int, **options: Any) -> tuple[nm.Run, dict[str, Tensor], list[float]]:
    """Muon takes matrices only; what else there is gets AdamW, as is usual."""
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4", **options))
    sparse = {id(parameter) for parameter in run.parameters()}
    muon = torch.optim.Muon(run.parameters(), lr=MUON_LR, weight_decay=0.0)
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in sparse], lr=3e-3)
    run.attach(muon, total_steps=steps)
    losses = []
    for _ in range(steps):
        losses += train(model, muon, 1, make_data())
        rest.step()
        rest.zero_grad()
    return run, {name: model.get_submodule(name).weight.detach() for name in run.layers}, losses


def test_sr_ste_trains_under_muon_with_its_decay_on_the_weight() -> None:
    run, weights, losses = train_under_muon(20, decay=5.0, decay_on="weight")
    assert losses[-1] < 0.6 * losses[0]
    assert run.step == 20
    assert run.stats()["total"]["density"] == 0.5
    _, without, _ = train_under_muon(20, decay=0.0)
    for name in weights:
        assert pruned_share(weights[name]) < 0.9 * pruned_share(without[name]), "the decay pulls pruned weights to zero"


def pruned_share(weight: Tensor) -> float:
    pruned = ~magnitude_mask(weight, "2:4")
    return float((weight * pruned).abs().sum() / weight.abs().sum())


def test_decay_on_the_weight_has_its_strength_whatever_muon_makes_of_gradients() -> None:
    _, undecayed, _ = train_under_muon(1, decay=0.0)
    _, on_weight, _ = train_under_muon(1, decay=0.5, decay_on="weight")
    for name, weight in undecayed.items():
        expected = torch.where(magnitude_mask(weight, "2:4"), weight, weight * (1 - MUON_LR * 0.5))
        torch.testing.assert_close(on_weight[name], expected)


def test_schedule_free_model_is_frozen_where_its_weights_are_averaged() -> None:
    """Training sees the weights at another point than evaluation: ``optimizer.eval()`` moves them, and the mask is of there."""
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    optimizer = schedule_free(model.parameters())
    run.attach(optimizer, total_steps=20)
    train(model, optimizer, 20, make_data())
    trained_at = {name: model.get_submodule(name).weight.detach().clone() for name in run.layers}
    optimizer.eval()
    averaged = {name: model.get_submodule(name).weight.detach().clone() for name in run.layers}
    seen = copy.deepcopy(model).eval()(make_data()[0])

    nm.freeze_(model)
    torch.testing.assert_close(model(make_data()[0]), seen)
    for name, weight in averaged.items():
        mask = magnitude_mask(weight, "2:4")
        assert torch.equal(model.get_submodule(name).weight, weight * mask)
    assert any(
        not torch.equal(magnitude_mask(trained_at[name], "2:4"), magnitude_mask(averaged[name], "2:4")) for name in averaged
    )
