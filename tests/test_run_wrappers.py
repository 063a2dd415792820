"""Wrappers, and models that go behind the run's back: what would be silently wrong is an error or a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import make_data, make_net, start, train

import nmsparse as nm
from nmsparse.nn import Layer


def test_layer_that_no_attached_optimizer_updates_is_named_at_the_first_forward() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    run.attach(torch.optim.SGD(model.blocks.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"embed .* no attached optimizer updates it"):
        model(make_data()[0])


def test_attach_is_demanded_of_layers_that_are_called_directly() -> None:
    model = make_net()
    nm.sparsify_(model, nm.SRSTE("2:4"))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up was sparsified with sr-ste"):
        model.blocks[0](torch.randn(2, 32))


def flatten_masters(optimizer: torch.optim.Optimizer) -> None:
    """What DeepSpeed's ZeRO-1 and ZeRO-2 make of an optimizer that they are given."""
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))]


@pytest.mark.parametrize(("name", "words"), [("sr-ste", "or call reshard"), ("ste", "ste also trains without run.attach")])
def test_flat_copies_in_the_optimizer_are_told_at_the_first_update(name: str, words: str) -> None:
    model, optimizer, run = start(name, {})
    flatten_masters(optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"embed\.weight was among .* this AdamW .*DeepSpeed ZeRO-1.*fully_shard.*{words}"):
        train(model, optimizer, 1, make_data())
    assert run.step == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_flat_copies_are_told_by_attach() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    optimizer = torch.optim.AdamW(model.parameters())
    flatten_masters(optimizer)
    with pytest.raises(ValueError, match=r"updates none of the run's 5 sparse layers.*wrapper.*DeepSpeed's ZeRO.*FSDP2"):
        run.attach(optimizer)


@pytest.mark.parametrize("attaches_first", [True, False])
def test_flattened_weights_are_told(attaches_first: bool) -> None:
    """FSDP1 with use_orig_params=True: the parameters stay, and their data become pieces of a flat one."""
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attaches_first:
        run.attach(optimizer)
    for parameter in model.parameters():
        parameter.data = parameter.data.flatten()[: parameter.numel() // 2]
        parameter.grad = torch.zeros_like(parameter)
    words = r"embed\.weight was \(32, 16\) at conversion and is \(256,\) now.*FSDP1.*ZeRO-3.*fully_shard"
    with pytest.raises(ValueError, match=words):
        optimizer.step() if attaches_first else run.attach(optimizer)


def test_layer_that_joins_the_optimizer_after_attach_is_told() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STE("2:4"))
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    run.attach(optimizer)
    optimizer.add_param_group({"params": [*model.embed.parameters()]})
    with pytest.raises(RuntimeError, match=r"this SGD updates embed \(1 sparse layers in all\) without a clock"):
        train(model, optimizer, 1, make_data())


class Bypassing(nn.Module):
    """Reads the weights of two layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.first.weight, self.first.bias).relu()
        return self.head(self.third(nn.functional.linear(x, self.second.weight).relu()))


def test_layers_that_are_never_called_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "was_traced", False)  # other tests of this process compile
    model = Bypassing()
    run = nm.sparsify_(model, nm.STE("2:4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(optimizer)
    with pytest.warns(UserWarning, match=r"^first, second: the weight got a gradient, but .*never called.*exclude="):
        train(model, optimizer, 1, make_data())
    train(model, optimizer, 1, make_data())  # a second warning would be an error


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler, which looks
def test_layers_that_share_compiled_code_count_as_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one model, and those of the next, which may find everything compiled."""
    monkeypatch.setattr(Layer, "was_traced", False)
    torch._dynamo.reset()
    for _ in range(2):
        model, optimizer, run = start("ste", {})
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        train(model, optimizer, 2, make_data())  # a warning would be an error
        assert run.step == 2
    assert Layer.was_traced


def test_layers_tied_after_their_conversion_are_refused() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(ValueError, match=r"^blocks\.0\.up and blocks\.1\.up share one weight, .*tied after sparsify_"):
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_weight_tied_to_an_embedding_after_its_conversion_is_refused() -> None:
    """``freeze_`` would prune the embedding."""
    model = nn.ModuleDict({"tokens": nn.Embedding(32, 16), "up": nn.Linear(16, 32, bias=False), "head": nn.Linear(32, 4)})
    run = nm.sparsify_(model, nm.STE("2:4"))
    model["tokens"].weight = model["up"].weight
    with pytest.raises(ValueError, match=r"^up and tokens share one weight, \(32, 16\), tied after sparsify_.*before sparsify_"):
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.optimizers == []


def test_threads_of_data_parallel_are_refused() -> None:
    model, _, _ = start("ste", {})
    with pytest.raises(RuntimeError, match="torchrun"):
        model.embed._replicate_for_data_parallel()
