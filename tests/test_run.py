"""The run: attaching, statistics, state, random numbers, and what goes wrong with a clear sentence."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import STEPS, assert_identical, make_data, make_net, start, train

import nmsparse as nm
from nmsparse._stats import numbers
from nmsparse._tensor_cores import tell_emulated
from nmsparse.recipes import Clock
from nmsparse.run import run_of


def test_attaching_twice_is_refused() -> None:
    model, optimizer, run = start("ste", {})
    with pytest.raises(RuntimeError, match="attached already"):
        run.attach(optimizer)
    assert model is not None


def test_optimizer_of_another_model_is_refused() -> None:
    run = nm.sparsify_(make_net(), nm.STE("2:4"))
    with pytest.raises(ValueError, match="updates none of the run's 5 sparse layers"):
        run.attach(torch.optim.SGD(make_net().parameters(), lr=0.1))


def test_something_that_is_no_optimizer_is_refused() -> None:
    run = nm.sparsify_(make_net(), nm.STE("2:4"))
    with pytest.raises(TypeError, match="torch optimizer, got str"):
        run.attach("adam")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"), [({"total_steps": 0}, "at least 1"), ({"stats_every": -1}, "0 to switch measuring off")]
)
def test_senseless_attach_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STE("2:4"))
    with pytest.raises(ValueError, match=message):
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_missing_number_of_updates_is_asked_for_where_it_can_be_given() -> None:
    model = make_net()
    with pytest.raises(ValueError, match=r"mask-decay plans over the whole run: .*run\.attach\(optimizer, total_steps=\.\.\.\)"):
        nm.sparsify_(model, nm.MaskDecay("2:4")).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="or to the integration that calls it"):  # a recipe that did not say that it plans
        _ = Clock(0, None).total


def test_several_optimizers_each_drive_their_own_layers() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4", decay=0.1))
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.AdamW([*model.embed.parameters(), *model.head.parameters()])
    run.attach(first)
    run.attach(second)
    x, y = make_data()
    for _ in range(3):
        (model(x) - y).square().mean().backward()
        first.step()
        second.step()
        model.zero_grad()
    assert [a.step for a in run._clocks] == [3, 3]


def test_one_layer_cannot_follow_two_optimizers() -> None:
    model, _, run = start("ste", {})
    with pytest.raises(ValueError, match="two attached optimizers"):
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_stats_report_density_flips_and_schedule() -> None:
    model, optimizer, run = start("mask-decay", {})
    assert run.stats()["total"]["flip_rate"] is None
    train(model, optimizer, 12, make_data())
    stats = run.stats()
    assert stats["step"] == 12
    assert stats["total"]["density"] == 0.5
    assert 0 < stats["total"]["flip_rate"] < 0.5
    layer = stats["layers"]["blocks.0.up"]
    assert layer["mask_changes"] == round(layer["flip_rate"] * layer["entries"])
    assert layer["keep"] == 0.0
    assert sum(item["entries"] for item in stats["layers"].values()) == stats["total"]["entries"]


def test_stats_tell_the_decay_where_there_is_one() -> None:
    _, _, run = start("sr-ste", {"decay": 0.1})
    assert run.stats()["layers"]["embed"]["decay"] == 0.1
    assert "decay" not in start("ste", {})[2].stats()["layers"]["embed"]


def test_state_of_another_recipe_is_refused_and_nothing_changes() -> None:
    model, optimizer, run = start("fst", {"refresh": 2})
    train(model, optimizer, 3, make_data())
    saved = run.state_dict()
    _, _, other = start("fst", {"refresh": 3})
    with pytest.raises(ValueError, match="build the same recipe"):
        other.load_state_dict(saved)
    _, _, fewer = start("fst", {"refresh": 2}, blocks=1)
    with pytest.raises(ValueError, match="differ in their sparse layers"):
        fewer.load_state_dict(saved)
    unattached = nm.sparsify_(make_net(), nm.FST("2:4", refresh=2))
    with pytest.raises(ValueError, match="attach them before load_state_dict"):
        unattached.load_state_dict(saved)
    saved["version"] = 99
    with pytest.raises(ValueError, match="version 99"):
        run.load_state_dict(saved)


def test_saved_masks_are_packed_to_bits() -> None:
    _, _, run = start("fst", {})
    for name, state in run.state_dict()["layers"].items():
        assert state["mask"].dtype == torch.uint8
        assert state["mask"].numel() * 8 == run._layers[name].weight.numel()


def test_random_streams_differ_between_layers_steps_micro_batches_and_seeds() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    run = nm.sparsify_(layer, nm.SSTE("2:4"), targets="all", seed=3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    run.attach(optimizer)
    streams = {int(handle.state["stream"]) for handle in run._layers.values()}
    assert len(streams) == 2
    counters = []
    for _ in range(3):
        for _ in range(2):
            layer(torch.randn(4, 8)).sum().backward()
            counters.append(int(run._layers["0"].state["counter"]))
        optimizer.step()
    assert len(set(counters)) == 6
    other = nm.sparsify_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nm.SSTE("2:4"), targets="all", seed=4)
    assert not streams & {int(handle.state["stream"]) for handle in other._layers.values()}


def test_evaluation_draws_no_random_numbers() -> None:
    model, _, run = start("s-ste", {})
    before = int(run._layers["embed"].state["counter"])
    model.eval()
    model(make_data()[0])
    model.train()
    with torch.no_grad():
        model(make_data()[0])
    assert int(run._layers["embed"].state["counter"]) == before


def test_backward_after_another_forward_keeps_its_own_draws() -> None:
    """Two forward passes, then their backward passes: each uses the counter of its own forward."""
    grads = []
    for interleave in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, bias=False)
        nm.sparsify_(layer, nm.SSTE("2:4"))
        x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
        weights = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(2))
        if interleave:
            losses = [(layer(x[i]) * weights[i]).sum() for i in range(2)]
            for loss in losses:
                loss.backward()
        else:
            for i in range(2):
                (layer(x[i]) * weights[i]).sum().backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)


def test_repr_tells_what_the_run_is() -> None:
    _, _, run = start("s-ste", {})
    assert repr(run) == "Run(s-ste 2:4, 5 sparse layers, 1 skipped, step 0)"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sr-ste", "trio"])
def test_inductor_compiles_the_whole_model(name: str) -> None:
    data = make_data()
    eager, optimizer, _ = start(name, {})
    expected = train(eager, optimizer, 4, data)
    torch._dynamo.reset()
    compiled, optimizer, _ = start(name, {})
    losses = train(torch.compile(compiled, fullgraph=True), optimizer, 4, data)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_detached_optimizer_makes_room_for_another() -> None:
    model, optimizer, run = start("sr-ste", {"decay": 0.1})
    train(model, optimizer, 2, make_data())
    run.detach(optimizer)
    train_free = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(train_free)
    train(model, train_free, 3, make_data())
    optimizer.step()
    assert run.step == 3
    with pytest.raises(RuntimeError, match="not attached"):
        run.detach(optimizer)


def test_two_optimizers_keep_their_own_settings() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STE("2:4"))
    run.attach(torch.optim.SGD(model.blocks.parameters(), lr=0.1), stats_every=0, check_finite=False)
    run.attach(torch.optim.SGD(model.embed.parameters(), lr=0.1))
    assert [(a.stats_every, a.check_finite) for a in run._clocks] == [(0, False), (10, None)]


def with_optimizers(*parts: str) -> tuple[nn.Module, nm.Run, dict[str, torch.optim.Optimizer]]:
    """A network with an optimizer for each of these parts, attached in this order."""
    model = make_net()
    run = nm.sparsify_(model, nm.MaskDecay("2:4"))
    optimizers = {part: torch.optim.SGD(model.get_submodule(part).parameters(), lr=0.1) for part in parts}
    for optimizer in optimizers.values():
        run.attach(optimizer, total_steps=12)
    return model, run, optimizers


def saved_after_different_numbers_of_updates() -> dict[str, Any]:
    """Of the blocks after three updates, and of the embedding, attached second, after one."""
    model, run, optimizers = with_optimizers("blocks", "embed")
    train(model, optimizers["blocks"], 3, make_data())
    train(model, optimizers["embed"], 1, make_data())
    return run.state_dict()


def steps_of(run: nm.Run) -> dict[str, int]:
    return {clock.layer_names[0]: clock.step for clock in run._clocks}


def test_optimizers_attached_in_another_order_get_their_own_clocks_back() -> None:
    _, run, _ = with_optimizers("embed", "blocks")
    run.load_state_dict(saved_after_different_numbers_of_updates())
    assert steps_of(run) == {"embed": 1, "blocks.0.down": 3}


def test_state_that_does_not_name_the_layers_of_its_clocks_is_loaded_in_order() -> None:
    """As written before clocks named them."""
    saved = saved_after_different_numbers_of_updates()
    for clock in saved["optimizers"]:
        del clock["layers"]
    _, run, _ = with_optimizers("blocks", "embed")
    run.load_state_dict(saved)
    assert steps_of(run) == {"embed": 1, "blocks.0.down": 3}


def test_state_of_optimizers_over_other_layers_is_refused_and_nothing_changes() -> None:
    _, run, _ = with_optimizers("blocks.0", "embed")
    with pytest.raises(ValueError, match=r"updated 4 sparse layers, .*differs by blocks\.1\.down, blocks\.1\.up\)"):
        run.load_state_dict(saved_after_different_numbers_of_updates())
    assert steps_of(run) == {"embed": 0, "blocks.0.down": 0}


def test_resuming_with_another_seed_or_length_is_refused() -> None:
    model, optimizer, run = start("mask-decay", {})
    train(model, optimizer, 3, make_data())
    saved = run.state_dict()
    _, _, longer = start("mask-decay", {}, total_steps=40)
    with pytest.raises(ValueError, match="planned 12 updates, this one 40"):
        longer.load_state_dict(saved)
    other = make_net()
    reseeded = nm.sparsify_(other, nm.MaskDecay("2:4"), seed=1)
    reseeded.attach(torch.optim.SGD(other.parameters(), lr=0.1), total_steps=12)
    with pytest.raises(ValueError, match="used seed 0, this one 1"):
        reseeded.load_state_dict(saved)


def test_each_rank_draws_its_own_numbers_after_loading_a_file_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {}
    for rank in (0, 1):
        monkeypatch.setattr("nmsparse._micro_batches.rank", lambda rank=rank: rank)
        model, optimizer, run = start("s-ste", {})
        train(model, optimizer, 3, make_data())
        model(make_data()[0])  # one micro-batch into the next update
        counters[rank] = int(run._layers["embed"].state["counter"])
        if rank == 0:
            saved = run.state_dict()
    _, _, resumed = start("s-ste", {})
    resumed.load_state_dict(saved)
    assert counters[0] != counters[1] == int(resumed._layers["embed"].state["counter"])


def test_saved_state_does_not_change_as_training_goes_on() -> None:
    model, optimizer, run = start("step", {})
    train(model, optimizer, 2, make_data())
    saved = run.state_dict()
    before = saved["optimizers"][0]["memory"]["samples"].clone()
    train(model, optimizer, 2, make_data())
    assert torch.equal(saved["optimizers"][0]["memory"]["samples"], before)


# ---- what a run leaves behind for evaluation ----


def test_layers_can_be_restored_without_an_optimizer() -> None:
    model, optimizer, run = start("asp", {"start": 2})
    train(model, optimizer, 4, make_data())
    nm.sparsify_(fresh := make_net(seed=1), run.recipe)
    fresh_run = run_of(fresh)
    assert fresh_run is not None
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():  # as if the mask were not the largest any more
        next(iter(run._layers.values())).state["mask"].logical_not_()
    fresh_run.load_layers(run.state_dict())
    assert fresh_run.step == 0
    assert torch.equal(nm.effective_weight(fresh.embed), nm.effective_weight(model.embed))
    with pytest.raises(ValueError, match="the saved run used"):
        nm.sparsify_(make_net(), nm.STE("2:4")).load_layers(run.state_dict())


# ---- logging ----


def test_programs_that_configure_no_logging_see_warnings() -> None:
    """A NullHandler, as libraries often have, would hide that all products run emulated."""
    assert not logging.getLogger("nmsparse").handlers


def test_first_rank_alone_tells_that_products_are_emulated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for rank, lines in ((1, 0), (0, 1)):
        tell_emulated.cache_clear()
        monkeypatch.setattr("nmsparse._tensor_cores.rank", lambda rank=rank: rank)
        start("ste", {})
        assert caplog.text.count("all products run emulated") == lines


def test_numbers_of_layers_are_read_together_and_stay_in_their_places() -> None:
    rows = {"a": {"x": torch.tensor(0.1), "y": None, "z": 0.1}, "b": {"x": torch.tensor(3), "y": torch.tensor(True)}, "c": {}}
    found = numbers(rows)
    assert found == {"a": {"x": float(torch.tensor(0.1)), "y": None, "z": 0.1}, "b": {"x": 3.0, "y": 1.0}, "c": {}}


@pytest.mark.parametrize("name", ["fst", "asp", "s-ste", "structure-decay"])
def test_a_copy_of_the_model_takes_the_masks_and_phases_of_today(name: str) -> None:
    """An average of the weights begins as a copy; masks that a recipe keeps do not follow by themselves."""
    model, optimizer, run = start(name, {"start": 3} if name == "asp" else {})
    averaged = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, count: new)
    train(model, optimizer, STEPS - 1, make_data())
    averaged.update_parameters(model)
    run.copy_state_to(averaged.module)
    x = make_data()[0]
    with torch.no_grad():  # no clock follows a copy, so it does not train
        for mode in (True, False):
            assert torch.equal(averaged.module.train(mode)(x), model.train(mode)(x))


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_copy_made_while_training_does_not_train_without_its_recipe(is_pickled: bool) -> None:
    model, optimizer, _ = start("sr-ste", {})
    train(model, optimizer, 2, make_data())
    twin = pickle.loads(pickle.dumps(model)) if is_pickled else copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="was sparsified with sr-ste, whose schedule or decay runs on the optimizer"):
        twin(make_data()[0])
    train(model, optimizer, 1, make_data())


# ---- weights that are loaded late ----

FROM_WEIGHTS = [("asp", {}), ("s-ste", {}), ("fst", {}), ("trio", {}), ("bi-mask", {})]


def other_weights() -> dict[str, torch.Tensor]:
    return make_net(seed=5).state_dict()


@pytest.mark.parametrize(("name", "options"), FROM_WEIGHTS, ids=[name for name, _ in FROM_WEIGHTS])
def test_weights_loaded_after_attach_are_those_that_a_run_starts_with(name: str, options: dict[str, Any]) -> None:
    losses = []
    for is_late in (False, True):
        model = make_net()
        recipe = nm.recipe(name, "2:4", **options)
        if not is_late:
            model.load_state_dict(other_weights())
        run = nm.sparsify_(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.attach(optimizer, total_steps=STEPS)
        if is_late:
            model.load_state_dict(other_weights())
        losses.append(train(model, optimizer, 4, make_data()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("name", "options"), FROM_WEIGHTS, ids=[name for name, _ in FROM_WEIGHTS])
def test_weights_loaded_after_sparsify_are_evaluated_with_masks_of_their_own(name: str, options: dict[str, Any]) -> None:
    first, second = make_net(), make_net()
    first.load_state_dict(other_weights())
    for model in (first, second):
        nm.sparsify_(model, nm.recipe(name, "2:4", **options))
    second.load_state_dict(other_weights())
    x = make_data()[0]
    with torch.no_grad():
        assert torch.equal(first.eval()(x), second.eval()(x))


@pytest.mark.parametrize(("name", "options"), FROM_WEIGHTS[:-1], ids=[name for name, _ in FROM_WEIGHTS[:-1]])
def test_weights_loaded_late_are_frozen_with_masks_of_their_own(name: str, options: dict[str, Any]) -> None:
    """No forward pass comes between."""
    frozen = []
    for is_late in (False, True):
        model = make_net()
        if not is_late:
            model.load_state_dict(other_weights())
        run = nm.sparsify_(model, nm.recipe(name, "2:4", **options))
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1), total_steps=STEPS)
        if is_late:
            model.load_state_dict(other_weights())
        frozen.append(nm.freeze_(model).state_dict())
    assert_identical(*frozen)


def test_weights_loaded_late_into_a_compiled_model_count() -> None:
    torch._dynamo.reset()
    losses = []
    for is_compiled in (False, True):
        model, optimizer, _ = start("asp", {})
        model.load_state_dict(other_weights())
        losses.append(train(torch.compile(model, backend="eager") if is_compiled else model, optimizer, 3, make_data()))
    assert losses[0] == losses[1]


def test_an_order_that_was_searched_on_earlier_weights_is_not_trained_with() -> None:
    torch._dynamo.reset()
    model, optimizer, run = start("bi-mask", {})
    model.load_state_dict(other_weights())
    with pytest.raises(RuntimeError, match=r"embed: weights were loaded after run\.attach, and a model that is compiled"):
        train(torch.compile(model, backend="eager"), optimizer, 1, make_data())
    run.follow_loaded()
    train(model, optimizer, 1, make_data())


@pytest.mark.parametrize("name", ["s-ste", "fst"])
def test_a_copy_keeps_the_scales_and_masks_that_it_was_given(name: str) -> None:
    model, optimizer, run = start(name, {})
    average = copy.deepcopy(model)
    train(model, optimizer, 4, make_data())
    run.copy_state_to(average)
    average.load_state_dict(model.state_dict())
    x = make_data()[0]
    with torch.no_grad():
        assert torch.equal(average.eval()(x), model.eval()(x))


def test_a_frozen_copy_may_be_called_in_training_mode() -> None:
    """A teacher, which is an average of the student."""
    model, optimizer, _ = start("sr-ste", {})
    teacher = copy.deepcopy(model).requires_grad_(False)
    assert teacher.train()(make_data()[0]).isfinite().all()
    train(model, optimizer, 1, make_data())


def test_weights_loaded_while_a_run_goes_on_keep_its_masks() -> None:
    model, optimizer, run = start("asp", {})
    train(model, optimizer, 2, make_data())
    before = run._layers["embed"].state["mask"].clone()
    model.load_state_dict(other_weights())
    train(model, optimizer, 1, make_data())
    assert torch.equal(run._layers["embed"].state["mask"], before)


@pytest.mark.parametrize(
    ("name", "options"), [("asp", {"permute": True}), ("structure-decay", {"shape": "geometric"}), ("bi-mask", {}), ("fst", {})]
)
def test_another_default_device_is_the_users_own(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Tensors that belong to none of the model's are made where they are used."""
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            model, (x, y) = make_net(), make_data()
        run = nm.sparsify_(model, nm.recipe(name, "2:4", **options))
        assert not any("cannot trace" in why for why in run.skipped.values())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(optimizer, total_steps=4)
        train(model, optimizer, 3, (x, y))
        run.load_state_dict(run.state_dict())
        assert run.stats()["total"]["density"] is not None
        if name != "fst":  # ends dense
            nm.save(model, tmp_path, format="packed")
            nm.load(model, tmp_path)
    finally:
        torch.set_default_device(None)
