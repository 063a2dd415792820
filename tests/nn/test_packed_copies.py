"""The packed copies of weights: when they are made, kept, made again, and for which weight. On the CPU, by the reference."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_toys import STEPS, Case, Net, copies_of, data, make, train
from torch import Tensor, nn
from toys import assert_identical, case_id, make_optimizer

import nmsparse as nm

pytestmark = pytest.mark.usefixtures("reference_engine")


def test_micro_batches_share_one_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, run = make(nm.Trio("2:4"))
    calls = []
    pack = type(run._layers["up"].layer.sparse).pack
    monkeypatch.setattr(type(run._layers["up"].layer.sparse), "pack", lambda self, *a: (calls.append(1), pack(self, *a)))
    x, y = data()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - y).square().mean()
        loss.backward()
    assert not calls
    optimizer.step()
    assert len(calls) == len(run.layers)


def test_buffers_keep_their_address() -> None:
    model, optimizer, run = make(nm.Trio("2:4"))
    before = {name: c.data_ptr() for name, c in run._layers["up"].layer.sparse.copies.items()}
    train(model, optimizer, 3)
    assert {name: c.data_ptr() for name, c in run._layers["up"].layer.sparse.copies.items()} == before


def test_loading_weights_packs_them_again() -> None:
    recipe = nm.Trio("2:4", forward="hard")  # keeps nothing of the weights that it started with
    model, _, _ = make(recipe)
    torch.manual_seed(3)
    other = Net().state_dict()
    model.load_state_dict(other)
    fresh, _, _ = make(recipe)
    with torch.no_grad():
        for name, p in fresh.named_parameters():
            p.copy_(other[name])
    x, _ = data()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), fresh(x))  # the second is found stale, in eager mode, and packed again


def test_weight_changed_by_hand_is_told_before_the_next_update() -> None:
    model, optimizer, run = make(nm.STE("2:4"))
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        (model(x).float() - y).square().mean().backward()
    with torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"up: its weight was changed by hand"):
        optimizer.step()
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    run.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_resumed_run_equals_the_uninterrupted_one() -> None:
    recipe = nm.Trio("2:4")
    whole = train(*make(recipe)[:2], STEPS)
    model, optimizer, run = make(recipe)
    first = train(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))
    model, optimizer, run = make(recipe)
    train(model, optimizer, 2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    run.load_state_dict(saved[2])
    assert first + train(model, optimizer, STEPS - 5) == whole


def test_a_copy_of_a_model_trains_on_its_own_weights() -> None:
    """Nobody would pack the weights of a copy: it is emulated."""
    model, _, _ = make(nm.STE("2:4"))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    before, after = (_loss_and_step(twin, optimizer) for _ in range(2))
    assert after < before
    assert model.up._nmsparse.sparse is not None


def _loss_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_model_that_moves_after_attach_is_examined_again() -> None:
    model, optimizer, run = make(nm.STE("2:4"))
    for handle in run._layers.values():  # as if it had been attached elsewhere
        handle.layer.sparse.device = torch.device("meta")
        handle.layer.sparse.reasons = {"output": "there was no GPU"}
    model.to("cpu")
    train(model, optimizer, 1)
    assert run.products["up"]["output"] == "sparse"


@pytest.fixture
def swapped_parameters() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_weights_may_be_swapped_in_place(swapped_parameters: None) -> None:
    """torch refuses to where anybody holds a reference to them."""
    model, _, run = make(nm.STE("2:4"))
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    model.double()
    assert model.up.weight.dtype == torch.float64
    assert run.products["up"]["output"] == "sparse"


def test_attach_that_fails_while_it_packs_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net()
    run = nm.sparsify_(model, nm.Trio("2:4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kind, packed = importlib.import_module("nmsparse.nn._sparse").SparseProducts, []
    pack = kind.pack

    def out_of_memory(self: Any, *args: Any) -> None:
        pack(self, *args)
        packed.append(self)
        if len(packed) == 2:
            raise torch.OutOfMemoryError("no room for the third")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "pack", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.attach(optimizer, total_steps=STEPS)
    assert run.optimizers == []
    assert all(handle.layer.sparse is None for handle in run._layers.values())
    with pytest.raises(RuntimeError, match="was sparsified with trio"):
        model(data()[0])
    run.attach(optimizer, total_steps=STEPS)
    train(model, optimizer, 1)
    assert run.step == 1


# ---- memory: some layers make their backward copy in the backward pass ----


def bytes_per_weight(run: nm.Run) -> float:
    held = sum(c.numel() * c.element_size() for handle in run._layers.values() for c in handle.layer.sparse.copies.values())
    return held / sum(handle.parameter.numel() for handle in run._layers.values())


@pytest.mark.parametrize("case", [("trio", {}), ("fst", {"dense_tail": 0.0}), ("trio", {"forward": "hard"})], ids=case_id)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_copy_made_late_changes_no_bit(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.pytorch_utils import Conv1D

    results = []
    for spares in (True, False):
        monkeypatch.setattr("nmsparse._tensor_cores.SPARES_MEMORY", spares)
        torch.manual_seed(0)
        sizes = (64, 128), (128, 64), (64, 64)
        layers = [nn.Linear(i, o) if kind == "linear" else Conv1D(o, i) for i, o in sizes]
        model = nn.Sequential(layers[0], nn.GELU(), *layers[1:], nn.Linear(64, 8))
        recipe = nm.recipe(case[0], "2:4", **case[1])
        run = nm.sparsify_(model, recipe, targets=["0", "2", "3"])
        optimizer = make_optimizer(recipe, model)
        run.attach(optimizer, total_steps=STEPS)
        assert any(how == {"output"} for how in copies_of(run).values()) is spares
        results.append((train(model, optimizer, 6), [p.detach() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("widths", [(64, 64, 64, 64, 64, 64, 64, 64), (64, 128, 64, 192, 64, 128, 256, 64), (256, 64)])
def test_packed_copies_take_no_more_than_the_16_bit_weights_of_dense_training(widths: tuple[int, ...]) -> None:
    sizes = [(a, b) for a, b in zip((64, *widths[:-1]), widths, strict=True)]
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes), nn.Linear(widths[-1], 8))
    run = nm.sparsify_(model, nm.Trio("2:4"))
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert 1.125 <= bytes_per_weight(run) <= 2
    largest = max(a * b for a, b in sizes)
    total = sum(a * b for a, b in sizes)
    assert bytes_per_weight(run) > 2 - 1.125 * largest / total, "no more layers than needed"


def test_a_mask_that_is_kept_counts_too() -> None:
    """It takes a byte per weight, which leaves no room for a second copy beside it."""
    _, _, run = make(nm.FST("2:4", dense_tail=0.0))
    assert all(how == {"output"} for how in copies_of(run).values())
    assert bytes_per_weight(run) == 1.125


def test_a_single_copy_is_always_kept() -> None:
    for recipe in (nm.SSTE("2:4"), nm.BiMask("2:4"), nm.SDGP("2:4"), nm.Trio("2:4", forward="double-soft")):
        _, _, run = make(recipe)
        assert not any(handle.layer.sparse.packs_late for handle in run._layers.values())


def perturbed(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: value.detach() + torch.randn_like(value) for name, value in model.named_parameters()}


def gradients(recipe: nm.Recipe, with_teacher: bool) -> dict[str, Tensor]:
    """Of a student, between whose forward and backward pass a teacher with other weights may run in the same modules."""
    model, _, _ = make(recipe)
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - y).square().mean()
        if with_teacher:
            with torch.no_grad():
                torch.func.functional_call(model, perturbed(model), (x,))
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["trio", "fst"])
def test_a_backward_pass_uses_the_weight_of_its_own_forward_pass(name: str) -> None:
    recipe = nm.recipe(name, "2:4", mvue=False)
    alone, beside = gradients(recipe, False), gradients(recipe, True)
    for key, expected in alone.items():
        torch.testing.assert_close(beside[key], expected, rtol=0, atol=0)


def test_a_recipe_that_cannot_pack_again_in_the_backward_pass_says_so() -> None:
    with pytest.raises(RuntimeError, match="met another weight than the one packed last"):
        gradients(nm.BiMask("2:4"), True)


def test_saved_tensors_may_lie_elsewhere_until_the_backward_pass() -> None:
    """``torch.autograd.graph.save_on_cpu`` brings them back to the GPU at another address, the weight with them."""
    found = []
    for is_offloaded in (False, True):
        model, _, run = make(nm.BiMask("2:4"))
        assert run.products["up"]["grad_input"] == "sparse"
        x, y = data()
        keep = torch.Tensor.clone if is_offloaded else torch.Tensor.detach
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            loss = (model(x).float() - y).square().mean()
        loss.backward()
        found.append({key: parameter.grad for key, parameter in model.named_parameters()})
    assert_identical(*found)


def test_another_weight_at_the_same_address_is_noticed() -> None:
    """Temporary weights are freed and made again where they were, with a version of 0."""
    model, _, run = make(nm.STE("2:4"))
    layer, x = model.up, torch.randn(8, 64)
    memory = layer.weight.detach().clone()
    for seed in range(2):
        torch.manual_seed(seed)
        memory.data.copy_(torch.randn_like(memory))
        weight = memory.data
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.func.functional_call(layer, {"weight": weight}, (x,))
        assert run.products["up"]["output"] == "sparse"
        expected = F.linear(x, weight * nm.functional.magnitude_mask(weight, "2:4"), layer.bias)
        torch.testing.assert_close(found.float(), expected, rtol=5e-2, atol=0.2)


# ---- weights that are sharded between passes ----


IN_PASSES = [(case, kind) for case in (("trio", {}), ("ste", {})) for kind in ("linear", "conv1d", "conv2d")]
IN_PASSES += [(case, kind) for case in (("fst", {"dense_tail": 0.0}), ("sdgp", {"mvue": True})) for kind in ("linear", "conv1d")]


@pytest.mark.parametrize(("case", "kind"), IN_PASSES, ids=lambda part: part if isinstance(part, str) else case_id(part))
def test_packing_in_each_pass_changes_no_bit(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.pytorch_utils import Conv1D

    make_layer = {"linear": nn.Linear, "conv1d": lambda i, o: Conv1D(o, i), "conv2d": lambda i, o: nn.Conv2d(i, o, 1)}[kind]
    results = []
    for is_sharded in (True, False):
        monkeypatch.setattr("nmsparse._tensor_cores.is_sharded", lambda _, answer=is_sharded: answer)
        torch.manual_seed(0)
        model = nn.Sequential(make_layer(64, 128), nn.GELU(), make_layer(128, 64))
        model = model.to(memory_format=torch.channels_last) if kind == "conv2d" else model
        recipe = nm.recipe(case[0], "2:4", **case[1])
        run = nm.sparsify_(model, recipe, targets=["0", "2"])
        optimizer = make_optimizer(recipe, model)
        run.attach(optimizer, total_steps=STEPS)
        assert set(run.products["0"].values()) == {"sparse"}
        x = torch.randn(2, 64, 5, 7, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
        losses = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x if kind == "conv2d" else x.permute(0, 2, 3, 1)).float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert any(copies_of(run).values()) is (not is_sharded and case[0] != "sdgp")
        results.append((losses, [p.detach() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
