"""Packing all weights by one launch: when a graph is captured, replayed, and made anew. The graph is a stand-in: no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nmsparse as nm
from nmsparse import _tensor_cores
from nmsparse._tensor_cores import PackingGraph, Rule


class Graph:
    """Does at every replay what it did when it was captured."""

    captured = 0

    def __init__(self, handles: Any) -> None:
        Graph.captured += 1
        self.handles, self.replayed = list(handles), 0

    def replay(self) -> None:
        self.replayed += 1
        for handle in self.handles:
            handle.layer.refresh(handle.parameter)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, reference_engine: None) -> None:
    Graph.captured = 0
    monkeypatch.setattr(PackingGraph, "_is_kernel", staticmethod(lambda handle: bool(handle.layer.sparse.copies)))
    monkeypatch.setattr(PackingGraph, "_capture", staticmethod(Graph))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def make(recipe: nm.Recipe, total: int = 12) -> tuple[nn.Module, torch.optim.Optimizer, nm.Run]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 8))
    run = nm.sparsify_(model, recipe)
    kind = nm.StepAdamW if nm.recipe_info(recipe).needs else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    run.attach(optimizer, total_steps=total)
    return model, optimizer, run


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.bfloat16) -> None:
    with torch.autocast("cpu", dtype):
        loss = model(torch.randn(32, 64)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def is_current(run: nm.Run) -> bool:
    """Every packed copy is what packing the weight now would give."""
    for handle in run._layers.values():
        sparse = handle.layer.sparse
        before = {name: copy.clone() for name, copy in sparse.copies.items()}
        handle.layer.refresh(handle.parameter)
        if not all(torch.equal(copy.view(torch.uint8), sparse.copies[n].view(torch.uint8)) for n, copy in before.items()):
            return False
    return True


@pytest.mark.usefixtures("graphs")
def test_one_graph_serves_all_later_steps() -> None:
    model, optimizer, run = make(nm.Trio("2:4"))
    for _ in range(6):
        step(model, optimizer)
        assert is_current(run)
    assert Graph.captured == 1
    (graph,) = run._tensor_cores._graphs.values()
    assert graph.graph.replayed >= 4


@pytest.mark.usefixtures("graphs")
def test_a_weight_that_moves_in_memory_makes_a_new_graph() -> None:
    model, optimizer, run = make(nm.Trio("2:4"))
    for _ in range(4):
        step(model, optimizer)
    model[0].weight.data = model[0].weight.data.clone()
    for _ in range(3):
        step(model, optimizer)
        assert is_current(run)
    assert Graph.captured == 2


@pytest.mark.usefixtures("graphs")
def test_a_phase_of_the_recipe_makes_a_new_graph_or_none() -> None:
    model, optimizer, run = make(nm.FST("2:4", dense_tail=0.5, refresh=2))
    for _ in range(5):
        step(model, optimizer)
        assert is_current(run)
    assert Graph.captured == 1
    (graph,) = run._tensor_cores._graphs.values()
    replayed = graph.graph.replayed
    for _ in range(5):
        step(model, optimizer)
    assert run.products["0"]["output"] == "fst is in a dense phase"
    assert graph.graph.replayed <= replayed + 1  # nothing is packed in the dense tail


@pytest.mark.usefixtures("graphs")
def test_two_optimizers_have_a_graph_each() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 8))
    run = nm.sparsify_(model, nm.Trio("2:4"))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    for optimizer in optimizers:
        run.attach(optimizer)
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(32, 64)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert is_current(run)
    assert Graph.captured == 2


def test_the_default_rule_asks_for_more_inputs_where_a_gradient_is_packed() -> None:
    trio, sdgp = Rule(nm.Trio("2:4")), Rule(nm.SDGP("2:4"))
    assert trio.unprofitable("x", "output", 1024, 1024) is None
    assert "fewer than 1024 features" in str(trio.unprofitable("x", "output", 4096, 768))
    assert "pays from 2048 inputs" in str(trio.unprofitable("x", "grad_weight", 4096, 1024))
    assert trio.unprofitable("x", "grad_input", 4096, 1024) is None
    assert "pays from 2048 inputs" in str(sdgp.unprofitable("x", "grad_input", 4096, 1024))


def test_emulation_is_told_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    _tensor_cores.tell_emulated.cache_clear()
    for _ in range(3):
        make(nm.STE("2:4"))
    told = [record for record in caplog.records if "all products run emulated" in record.message]
    assert len(told) == 1
    assert "sparse tensor cores need a CUDA GPU" in told[0].message


@pytest.mark.usefixtures("graphs")
def test_a_graph_is_made_anew_when_the_type_of_the_products_changes() -> None:
    model, optimizer, run = make(nm.Trio("2:4"))
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        for _ in range(4):
            step(model, optimizer, dtype)
        assert {copy.dtype for handle in run._layers.values() for copy in handle.layer.sparse.copies.values()} == {dtype}
        assert is_current(run)
