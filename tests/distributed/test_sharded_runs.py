"""What sharding could break besides the numbers of the registry: shard borders, random numbers, whole-tensor sums, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks
from test_registry_sharded import Case, Layers, backward, batches, check_equal, results, start, train_alone, whole
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import STEPS, make_optimizer

import nmsparse as nm
from nmsparse.functional import _channels, soft_threshold_scale, transposable_mask, violations


def converted(recipe: nm.Recipe, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Layers, nm.Run]:
    torch.manual_seed(seed)
    model = Layers().to(dtype)
    return model, nm.sparsify_(model, recipe)


# ---- shard borders ----


def find_tiles(rank: int, world: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    model, run = converted(nm.FST("2:4", refresh=1, dense_tail=0.0))
    fully_shard(model)
    optimizer = make_optimizer(run.recipe, model)
    run.attach(optimizer)
    backward(model, batches(world, 0)[rank], 1)
    optimizer.step()
    layers = {name: model.get_submodule(name) for name in run.layers}
    return {
        name: (run._layers[name].state["mask"], whole(layer.weight), layer.weight.to_local().shape[0])
        for name, layer in layers.items()
    }


def test_transposable_tiles_across_shard_borders_are_those_of_the_whole_weight(four_ranks: Ranks) -> None:
    for found in four_ranks.run(find_tiles):
        assert {rows % 4 for _, _, rows in found.values()} == {1}, "borders lie inside tiles"
        for mask, weight, _ in found.values():
            assert torch.equal(mask, transposable_mask(weight, "2:4"))
            assert int(violations(mask, "2:4")) == int(violations(mask, "2:4", dim=0)) == 0


def test_layer_with_rows_that_tiles_do_not_fit_is_skipped_with_the_reason() -> None:
    _, run = converted(nm.FST("2:4"))
    assert "out_features = 6 is not a multiple of 4" in run.skipped["odd"]


class Conv1D(nn.Module):
    """Stands in for transformers' layer of this name, which is recognised by it: the weight is stored (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


class Mixed(nn.Module):
    """A convolution, and a layer whose groups run along the sharded dim: 12 inputs over 2 ranks cut the second group in two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 12, 3, padding=1)
        self.mix = Conv1D(8, 12)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.conv(x.view(-1, 4, 2, 2)).mean((2, 3))))


def train_mixed(rank: int, world: int, case: Case, is_sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Mixed().double()
    recipe = nm.recipe(case[0], "2:4", **case[1])
    run = nm.sparsify_(model, recipe, ["conv", "mix"])
    if is_sharded:
        fully_shard(model)
    optimizer = make_optimizer(recipe, model)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    parts = dist.get_world_size() if is_sharded else world
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = [batches(parts, step)[rank]] if is_sharded else batches(parts, step)
        for batch in mine:
            backward(model, batch, len(mine))
        optimizer.step()
    return results(model, run)


@pytest.mark.parametrize("case", [("sr-ste", {"decay": 0.1}), ("fst", {"refresh": 3, "decay": 0.1}), ("asp", {"start": 2})])
def test_convolutions_and_transposed_layers_are_sharded_right(case: Case, two_ranks: Ranks) -> None:
    found = two_ranks.run(train_mixed, case, True)
    check_equal(found, train_mixed(0, 2, case, False))


def train_hybrid(rank: int, world: int, case: Case) -> dict[str, Any]:
    model, run = converted(nm.recipe(case[0], "2:4", **case[1]))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(run.recipe, model)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, batches(world, step)[rank], 1)
        optimizer.step()
    return results(model, run)


def test_hybrid_sharding_counts_no_replica_twice(four_ranks: Ranks) -> None:
    case: Case = ("bi-mask", {"refresh": 3, "candidates": 4, "decay": 0.1})
    check_equal(four_ranks.run(train_hybrid, case), train_alone(case, 4))


# ---- what is taken from the weights ----


def scales_after_wrapping(rank: int, world: int, wrapper: str, name: str) -> dict[str, tuple[float, torch.Tensor]]:
    model, run = converted(nm.recipe(name, "2:4"), torch.float32, seed=rank)  # ranks that forgot to agree on a seed
    wrapped: nn.Module = model
    if wrapper == "fsdp":
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)  # takes the weights of rank 0
    run.attach(make_optimizer(run.recipe, wrapped), total_steps=STEPS)
    layers = {name: model.get_submodule(name) for name in run.layers}
    return {name: (float(run._layers[name].state["scale"]), whole(layer.weight)) for name, layer in layers.items()}


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", ["s-ste", "trio"])
def test_scale_is_of_the_whole_weight_that_the_ranks_share(wrapper: str, name: str, two_ranks: Ranks) -> None:
    first, second = two_ranks.run(scales_after_wrapping, wrapper, name)
    assert first.keys() == second.keys()
    for layer, (scale, weight) in first.items():
        assert torch.equal(weight, second[layer][1])
        assert scale == second[layer][0] == pytest.approx(float(soft_threshold_scale(weight, "2:4")), rel=1e-6)


def switch_of(rank: int, world: int, threshold: float) -> Any:
    """The variance of the first layer's last rows settles late: the rank that holds them would switch after the other."""
    model, run = converted(nm.STEP("2:4", latest=1.0, switch_eps=threshold))
    if world > 1:
        fully_shard(model.embed)
    optimizer = nm.StepAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.8))
    run.attach(optimizer, total_steps=40)
    x = batches(1, 0)[0][0]
    for step in range(40):
        optimizer.zero_grad()
        late = torch.cat([torch.full((10,), 0.5**step), torch.full((10,), 0.8**step)]).double()
        (model.embed(x) * late).square().mean().backward()
        optimizer.step()
    return run.stats()["total"].get("switched_at")


def test_automatic_switch_is_decided_for_all_ranks_together(two_ranks: Ranks) -> None:
    alone = switch_of(0, 1, 1e-7)
    assert 5 < alone < 40, "the statistic decides, not a limit"
    assert two_ranks.run(switch_of, 1e-7) == [alone, alone]


# ---- random numbers ----


def train_in_parts(rank: int, world: int, case: Case, parts: int) -> dict[str, torch.Tensor]:
    """All the micro-batches of an update, dealt out to the ranks in turn."""
    model, optimizer, run = start(case, "fsdp" if world > 1 else None)
    for step in range(4):
        optimizer.zero_grad()
        mine = batches(parts, step)[rank::world]
        for batch in mine:
            backward(model, batch, len(mine))
        optimizer.step()
    return results(model, run)["weights"]


@pytest.mark.parametrize("case", [("s-ste", {}), ("sdgp", {"selector": "mvue", "mvue": True})])
def test_draws_belong_to_micro_batches_and_not_to_ranks(case: Case, two_ranks: Ranks, four_ranks: Ranks) -> None:
    alone = train_in_parts(0, 1, case, 4)
    for pool in (two_ranks, four_ranks):
        for name, weight in pool.run(train_in_parts, case, 4)[0].items():
            torch.testing.assert_close(weight, alone[name], rtol=1e-12, atol=1e-12)


def counters(rank: int, world: int, restart: bool) -> list[int]:
    """In the middle of an update, saved on rank 0 and loaded on all."""
    model, _, run = start(("s-ste", {}), "fsdp")
    backward(model, batches(world, 0)[rank], 1)
    if restart:
        shared = [run.state_dict()]
        dist.broadcast_object_list(shared)
        _, _, run = start(("s-ste", {}), "fsdp")
        run.load_state_dict(shared[0])
    return [int(handle.state["counter"]) for handle in run._layers.values()]


def test_every_rank_goes_on_with_its_own_draws_after_loading_what_rank_zero_saved(two_ranks: Ranks) -> None:
    before, after = two_ranks.run(counters, False), two_ranks.run(counters, True)
    assert before == after
    assert all(a != b for a, b in zip(*before, strict=True))


# ---- activation checkpointing ----


def train_checkpointed(rank: int, world: int, case: Case) -> dict[str, Any]:
    model, run = converted(nm.recipe(case[0], "2:4", **case[1]))
    apply_activation_checkpointing(model, check_fn=lambda module: module in (model.up, model.down))
    fully_shard(model)
    optimizer = make_optimizer(run.recipe, model)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, batches(world, step)[rank], 1)
        optimizer.step()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", [("s-ste", {}), ("fst", {"refresh": 3, "decay": 0.1})])
def test_activation_checkpointing_of_a_sharded_model_changes_nothing(case: Case, two_ranks: Ranks) -> None:
    alone = train_alone(case, 2)["weights"]
    for name, weight in two_ranks.run(train_checkpointed, case)[0].items():
        expected = alone[name.replace("_checkpoint_wrapped_module.", "")]
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


# ---- ends and errors ----


def freeze_sharded(rank: int, world: int) -> tuple[list[str], dict[str, int], bool, bool]:
    model, optimizer, run = start(("sr-ste", {"decay": 0.1}), "fsdp")
    backward(model, batches(world, 0)[rank], 1)
    optimizer.step()
    before = {name: whole(model.get_submodule(name).weight) for name in run.layers}
    model.eval()
    output = model(batches(world, 0)[0][0])  # leaves the root's parameters whole, until it is resharded
    nm.freeze_(model)
    frozen = {name: model.get_submodule(name).weight.full_tensor() for name in run.layers}
    is_masked = all(torch.equal(frozen[name], torch.where(frozen[name] != 0, before[name], 0)) for name in before)
    is_same = torch.equal(model(batches(world, 0)[0][0]), output)
    kinds = [type(model.embed).__name__, type(model.down).__name__]
    return kinds, {name: int(violations(weight, "2:4")) for name, weight in frozen.items()}, is_masked, is_same


def test_freezing_a_sharded_model_leaves_a_plain_sharded_model(two_ranks: Ranks) -> None:
    for kinds, broken, is_masked, is_same in two_ranks.run(freeze_sharded):
        assert kinds == ["FSDPLinear", "Linear"]
        assert not any(broken.values())
        assert is_masked
        assert is_same


def densify_permuted(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    model = Layers()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = nm.sparsify_(model, nm.ASP("2:4", permute=True))
    assert run._hook.permuted.moves, "channels have moved"
    fully_shard(model)
    nm.densify_(model)
    return all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())


def test_undoing_a_channel_permutation_of_a_sharded_model_is_exact(two_ranks: Ranks) -> None:
    assert two_ranks.run(densify_permuted) == [True, True]


def search_out_of_time(rank: int, world: int) -> tuple[bool, list[torch.Tensor]]:
    """Rank 1 is slow: its time is over after a few looks at the clock."""
    torch.manual_seed(0)
    model = Layers().double()
    (x, _), looks = batches(1, 0)[0], itertools.count()
    before = model(x)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_channels, "monotonic", lambda: 0.0 if next(looks) < 2 else 1e9)
        run = nm.sparsify_(model, nm.ASP("2:4", permute=True))
    fully_shard(model)
    together = Layers().double()
    together.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
    return torch.allclose(together(x), before), [order for _, _, order in run._hook.permuted.moves]


def test_all_ranks_take_one_order_of_channels(two_ranks: Ranks) -> None:
    (is_same, orders), (_, others) = two_ranks.run(search_out_of_time)
    assert is_same
    assert orders
    assert all(torch.equal(a, b) for a, b in zip(orders, others, strict=True))


def freeze_replicated(rank: int, world: int) -> tuple[list[str], bool]:
    model, run = converted(nm.STE("2:4"))
    mesh = init_device_mesh("cpu", (world,))
    replicate(model.embed, mesh=mesh)
    replicate(model, mesh=mesh)
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    x, _ = batches(1, 0)[0]
    output = model(x)
    nm.freeze_(model)
    model(x).sum().backward()
    return [type(model.embed).__name__, type(model.down).__name__], torch.equal(model(x), output)


def test_freezing_a_replicated_model_leaves_a_plain_replicated_model(two_ranks: Ranks) -> None:
    for kinds, is_same in two_ranks.run(freeze_replicated):
        assert kinds == ["ReplicateLinear", "Linear"]
        assert is_same


def stats_of_one(rank: int, world: int) -> float | None:
    model, optimizer, run = start(("trio", {"forward": "double-soft"}), "fsdp")
    backward(model, batches(world, 0)[rank], 1)
    optimizer.step()
    if rank:
        return None
    assert run.stats()["total"]["density"] is None, "rows alone do not tell"
    return run.stats()["total"]["flip_rate"]


def test_one_rank_may_ask_for_statistics_alone(two_ranks: Ranks) -> None:
    assert two_ranks.run(stats_of_one)[0] is not None


def break_one_rank(rank: int, world: int) -> str:
    model, optimizer, run = start(("sr-ste", {}), "fsdp")
    backward(model, batches(world, 0)[rank], 1)
    if rank:
        model.down.weight.grad.to_local()[0, 0] = torch.nan
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    assert run.step == 0
    return str(caught.value)


def test_all_ranks_stop_at_a_gradient_that_is_broken_on_one(two_ranks: Ranks) -> None:
    for message in two_ranks.run(break_one_rank):
        assert message.startswith("down: its gradient holds NaN or Inf at update 0")


def convert_wrapped(rank: int, world: int, wrapper: str) -> str:
    model: nn.Module = Layers()
    if wrapper == "part":
        model.up = DistributedDataParallel(model.up)
    elif wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "replicate":
        replicate(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        fully_shard(model)
    if wrapper in ("used", "replicate"):  # which leaves whole weights behind
        model(batches(world, 0, torch.float32)[rank][0])
        assert {type(parameter.data) for parameter in model.parameters()} == {torch.Tensor}
    with pytest.raises(ValueError, match="sparsify_") as caught:
        nm.sparsify_(model, nm.STE("2:4"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("fsdp", "embed.weight is sharded (DTensor) already: call sparsify_ before fully_shard"),
        ("used", "the model is sharded (DTensor) already: call sparsify_ before fully_shard"),
        ("replicate", "the model is sharded (DTensor) already"),
        ("ddp", "the model is wrapped by DistributedDataParallel already: call sparsify_ on the plain model first"),
        ("part", "up is wrapped by DistributedDataParallel already"),
    ],
)
def test_converting_after_wrapping_says_what_to_do(wrapper: str, words: str, two_ranks: Ranks) -> None:
    assert all(words in message for message in two_ranks.run(convert_wrapped, wrapper))


def accelerate_used(rank: int, world: int) -> dict[str, str]:
    model = nn.Sequential(fully_shard(nn.Linear(64, 64), reshard_after_forward=False), nn.Linear(64, 64))
    fully_shard(model)(torch.randn(4, 64))
    assert {type(parameter.data) for parameter in model.parameters()} == {torch.Tensor}
    with pytest.warns(UserWarning, match="left the model as it is"):
        return nm.accelerate_(model).layers


def test_sharded_weights_are_not_packed_while_they_are_whole(two_ranks: Ranks) -> None:
    why = "its weight is computed, sharded or on the meta device"
    assert two_ranks.run(accelerate_used) == [{"0": why, "1": why}] * 2


def save_sharded(rank: int, world: int, folder: str) -> str:
    model, _, _ = start(("ste", {}), "fsdp")
    with pytest.raises(ValueError, match="sharded over ranks") as caught:
        nm.save(model, folder)
    return str(caught.value)


def test_saving_a_sharded_model_says_how_to_gather_it(two_ranks: Ranks, tmp_path: Any) -> None:
    assert all("full_state_dict=True" in message for message in two_ranks.run(save_sharded, str(tmp_path)))


def fail_on_one(rank: int, world: int) -> None:
    if rank:
        raise RuntimeError("this rank fails")
    dist.barrier()


def test_failure_of_one_rank_is_reported_and_not_waited_for() -> None:
    pool = Ranks(2)
    with pytest.raises(RankError, match="this rank fails"):
        pool.run(fail_on_one)


# ---- weights that are loaded late ----


def losses_after_loading(rank: int, world: int, name: str, is_late: bool) -> list[float]:
    model, run = converted(nm.recipe(name, "2:4"), torch.float32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = make_optimizer(run.recipe, model)
    if is_late:
        run.attach(optimizer, total_steps=STEPS)
    generator = torch.Generator().manual_seed(3)
    weights = {key: torch.randn(value.shape, generator=generator) for key, value in model.state_dict().items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    if not is_late:
        run.attach(optimizer, total_steps=STEPS)
    losses = []
    for step in range(3):
        x, y = batches(world, step, torch.float32)[rank]
        loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["s-ste", "fst", "asp", "bi-mask"])
def test_weights_loaded_after_attach_are_looked_at_before_they_are_rounded(name: str, two_ranks: Ranks) -> None:
    """FSDP2 gathers and casts them in a hook of its own before the forward pass."""
    assert two_ranks.run(losses_after_loading, name, True) == two_ranks.run(losses_after_loading, name, False)
