"""Weights that travel pruned and packed: equal to plain FSDP2, in 9/16 of the bytes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_registry_sharded import Layers, batches, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from toys import CASES, assert_identical, case_id, make_optimizer

import nmsparse as nm
from nmsparse.functional import magnitude_mask
from nmsparse.integrations.fsdp import PackedShard, compressed_all_gather

Case = tuple[str, dict[str, Any]]
BF16 = torch.bfloat16


def make_layers(case: Case, pattern: str = "2:4", dtype: torch.dtype = torch.float32) -> tuple[Layers, nm.Run]:
    torch.manual_seed(0)
    model = Layers().to(dtype)
    return model, nm.sparsify_(model, nm.recipe(case[0], pattern, **case[1]))


STEPS = 5


def attached(model: nn.Module, run: nm.Run) -> torch.optim.Optimizer:
    optimizer = make_optimizer(run.recipe, model)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    return optimizer


def update(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, world: int, dtype: torch.dtype, steps: range, micro_batches: int = 1
) -> None:
    """Gradients travel once per update."""
    for step in steps:
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batches(world * micro_batches, step, dtype)[rank::world]):
            model.set_requires_gradient_sync(index == micro_batches - 1)
            (model(x).float() - y.float()).square().mean().backward()
        optimizer.step()


def train(model: nn.Module, run: nm.Run, rank: int, world: int, dtype: torch.dtype, micro_batches: int = 1) -> dict[str, Any]:
    update(model, attached(model, run), rank, world, dtype, range(STEPS), micro_batches)
    parameters = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    found: dict[str, Any] = {
        "weights": {name: whole(p) for name, p in parameters.items()},
        "gradients": {name: whole(p.grad) for name, p in parameters.items()},
        "flip_rate": run.stats()["total"]["flip_rate"],
        "types": {name: type(p._local_tensor) for name, p in parameters.items()},
    }
    model.eval()
    with torch.no_grad():  # afterwards the root's parameters are whole, and others than before
        return {**found, "output": model(batches(1, 0, dtype)[0][0])}


def train_both(rank: int, world: int, case: Case, pattern: str, dtype: torch.dtype, reshard: bool) -> tuple[Any, Any]:
    found = []
    for is_packed in (False, True):
        model, run = make_layers(case, pattern, dtype)
        if is_packed:
            assert compressed_all_gather(model) == {}
        fully_shard(model.embed, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        found.append(train(model, run, rank, world, dtype))
    return found[0], found[1]


def check_same(plain: dict[str, Any], packed: dict[str, Any]) -> None:
    assert packed["types"]["up.weight"] is PackedShard
    assert packed["types"]["up.bias"] is not PackedShard
    for key in ("weights", "gradients"):
        for name, expected in plain[key].items():
            assert torch.equal(packed[key][name], expected), f"{key} of {name}"
    assert torch.equal(packed["output"], plain["output"])
    assert packed["flip_rate"] == plain["flip_rate"]


PACKED: list[Case] = [
    ("ste", {}),
    ("sr-ste", {"decay": 0.1}),
    ("s-ste", {}),
    ("bi-mask", {"refresh": 3, "candidates": 4, "decay": 0.1}),
    ("trio", {}),
    ("trio", {"forward": "hard", "decay": 0.1}),
]


@pytest.mark.parametrize("case", PACKED, ids=case_id)
def test_packed_training_equals_plain_sharding_bit_for_bit(case: Case, two_ranks: Ranks) -> None:
    for plain, packed in two_ranks.run(train_both, case, "2:4", torch.float32, True):
        check_same(plain, packed)


@pytest.mark.parametrize(
    ("pattern", "dtype", "reshard"),
    [("2:4", BF16, True), ("1:4", torch.float32, False), ("2:4", torch.float64, True)],
)
def test_packing_pads_shards_of_unequal_length(pattern: str, dtype: torch.dtype, reshard: bool, four_ranks: Ranks) -> None:
    """Four ranks hold 2, 2, 2 and no rows of the layer with 6."""
    for plain, packed in four_ranks.run(train_both, ("sr-ste", {"decay": 0.1}), pattern, dtype, reshard):
        check_same(plain, packed)


@pytest.mark.parametrize("pattern", ["1:2", "3:4", "2:10", "1:20"])
def test_any_pattern_travels(pattern: str, two_ranks: Ranks) -> None:
    for plain, packed in two_ranks.run(train_wide, pattern):
        assert torch.equal(plain, packed)


def train_wide(rank: int, world: int, pattern: str) -> tuple[Tensor, Tensor]:
    outputs = []
    for is_packed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(20, 7, 3, bias=False), nn.Flatten(), nn.Linear(7, 4))
        nm.sparsify_(model, nm.STE(pattern), ["0"])
        if is_packed:
            compressed_all_gather(model)
        fully_shard(model)
        outputs.append(model(torch.ones(2, 20, 3, 3)).detach())
    return outputs[0], outputs[1]


# ---- in company ----


def train_in_company(rank: int, world: int, case: Case, company: str) -> tuple[Any, Any]:
    """Plain FSDP2 by itself, and packed together with something else that is there when weights are gathered."""
    with warnings.catch_warnings():
        # what dynamo itself does while tracing; on the ranks warnings are errors, without the exceptions of pyproject.toml
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*torch.autograd.function.Function.* should not be instantiated")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        micro_batches = 3 if company == "accumulation without sync" else 1
        plain, packed = make_layers(case), make_layers(case)
        keep_company(packed[0], company)
        for model, _ in (plain, packed):
            for layer in (model.embed, model.up):
                fully_shard(layer)
            fully_shard(model)
        assert isinstance(packed[0].up, CheckpointWrapper) == company.startswith("checkpointing")
        found = [train(model, run, rank, world, torch.float32, micro_batches) for model, run in (plain, packed)]
        assert (torch._dynamo.utils.counters["frames"]["ok"] > 0) == (company == "compile")
        return found[0], found[1]


def keep_company(model: Layers, company: str) -> None:
    """In both orders where there are two."""
    if company == "checkpointing before":
        apply_activation_checkpointing(model, check_fn=lambda layer: layer in (model.up, model.down))
    compressed_all_gather(model)
    if company == "checkpointing after":
        apply_activation_checkpointing(model, check_fn=lambda layer: layer in (model.up, model.down))
    if company == "compile":
        for layer in (model.up, model.down):
            layer.compile(backend="aot_eager")  # all of the tracing, and no C++ compiler


@pytest.mark.parametrize(
    ("company", "case"),
    [
        ("checkpointing before", ("sr-ste", {"decay": 0.1})),
        ("checkpointing after", ("sr-ste", {"decay": 0.1})),
        ("checkpointing after", ("trio", {})),  # whose second pass draws the random numbers again
        ("accumulation without sync", ("trio", {})),
        ("compile", ("sr-ste", {"decay": 0.1})),
    ],
)
def test_packed_training_in_company_equals_plain_sharding(company: str, case: Case, two_ranks: Ranks) -> None:
    for plain, packed in two_ranks.run(train_in_company, case, company):
        check_same(plain, packed)


CUT = 3
"""Updates before a checkpoint."""


def save(rank: int, world: int, is_packed: bool, folder: str) -> dict[str, Tensor]:
    model, run = make_sharded(is_packed)
    optimizer = attached(model, run)
    update(model, optimizer, rank, world, torch.float32, range(CUT))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "run": run}, checkpoint_id=folder)
    update(model, optimizer, rank, world, torch.float32, range(CUT, STEPS))
    return {name: whole(p) for name, p in model.named_parameters()}


def load_and_go_on(rank: int, world: int, is_packed: bool, folder: str) -> tuple[dict[str, Tensor], bool]:
    model, run = make_sharded(is_packed)
    optimizer = attached(model, run)
    update(model, optimizer, rank, world, torch.float32, range(1))  # a different past that loading must erase
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "run": run}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert run.step == CUT
    update(model, optimizer, rank, world, torch.float32, range(CUT, STEPS))
    is_still_packed = isinstance(model.up.weight._local_tensor, PackedShard)
    return {name: whole(p) for name, p in model.named_parameters()}, is_still_packed


def make_sharded(is_packed: bool) -> tuple[Layers, nm.Run]:
    model, run = make_layers(("sr-ste", {"decay": 0.1}))
    if is_packed:
        compressed_all_gather(model)
    return fully_shard(model), run


@pytest.mark.parametrize(("was_packed", "is_packed"), [(True, False), (False, True), (True, True)])
def test_checkpoint_does_not_know_whether_weights_travel_packed(
    was_packed: bool, is_packed: bool, two_ranks: Ranks, tmp_path: Path
) -> None:
    expected = two_ranks.run(save, was_packed, str(tmp_path))[0]
    for found, is_still_packed in two_ranks.run(load_and_go_on, is_packed, str(tmp_path)):
        assert is_still_packed == is_packed
        assert_identical(found, expected)


# ---- bytes ----


class CountingAllGather(DefaultAllGather):
    """FSDP2's own collective, and the bytes that are handed to it."""

    bytes = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.bytes += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def gathered_bytes(rank: int, world: int, is_packed: bool, dtype: torch.dtype, policy: torch.dtype | None) -> int:
    """What this rank hands to all-gathers in one forward and backward pass, counted at the collective itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).to(dtype)
    run = nm.sparsify_(model, nm.SRSTE("2:4"), ["0", "2"])
    if is_packed:
        compressed_all_gather(model, policy)
    settings: dict[str, Any] = {} if policy is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=policy)}
    for layer in (model[0], model[2]):
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    gather = CountingAllGather()
    for layer in (model[0], model[2]):
        layer.set_custom_all_gather(gather)
    model(torch.randn(8, 64, dtype=dtype)).float().sum().backward()
    return gather.bytes


def test_nine_sixteenths_of_the_bytes_travel_in_sixteen_bit(two_ranks: Ranks) -> None:
    shard = 2 * 64 * 128 * 2 // 2  # two weights in bf16, shared by two ranks
    assert two_ranks.run(gathered_bytes, False, BF16, None) == [2 * shard] * 2, "once in each pass"
    assert two_ranks.run(gathered_bytes, True, BF16, None) == [2 * shard * 9 // 16] * 2
    assert two_ranks.run(gathered_bytes, True, torch.float32, BF16) == [2 * shard * 9 // 16] * 2
    assert two_ranks.run(gathered_bytes, True, torch.float32, None) == [2 * 2 * shard * 17 // 32] * 2


# ---- precision, layouts, copies ----


def mixed_forward(rank: int, world: int) -> tuple[Tensor, Tensor]:
    model, _ = make_layers(("ste", {}))
    compressed_all_gather(model, BF16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    master = whole(model.up.weight)
    model.unshard()
    seen = model.up.weight.detach().clone()
    model.reshard()
    return master, seen


def test_masks_come_from_the_master_weights_before_rounding(two_ranks: Ranks) -> None:
    master, seen = two_ranks.run(mixed_forward)[0]
    assert seen.dtype == BF16
    assert torch.equal(seen, torch.where(magnitude_mask(master, "2:4"), master, 0).to(BF16))


def train_hybrid(rank: int, world: int) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for is_packed in (False, True):
        model, run = make_layers(("sr-ste", {"decay": 0.1}))
        if is_packed:
            compressed_all_gather(model)
        fully_shard(model, mesh=mesh)
        found.append(train(model, run, rank, world, torch.float32))
    return found[0], found[1]


def test_packed_weights_travel_in_hybrid_sharding(four_ranks: Ranks) -> None:
    for plain, packed in four_ranks.run(train_hybrid):
        check_same(plain, packed)


def train_alone(rank: int, world: int) -> tuple[Any, Any]:
    """Each rank holds all rows: FSDP2 then copies nothing but the first tensor that a weight would send."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    found = []
    for is_packed in (False, True):
        model, run = make_layers(("sr-ste", {"decay": 0.1}))
        if is_packed:
            compressed_all_gather(model)
        fully_shard(model, mesh=mesh)
        found.append(train(model, run, 0, 1, torch.float32))
    return found[0], found[1]


def test_one_rank_that_holds_everything_trains_as_without(two_ranks: Ranks) -> None:
    for plain, packed in two_ranks.run(train_alone):
        check_same(plain, packed)


def test_prepared_model_is_the_same_model_before_it_is_sharded() -> None:
    model, _ = make_layers(("ste", {}))
    x, _ = batches(1, 0, torch.float32)[0]
    expected, keys = model(x), list(model.state_dict())
    compressed_all_gather(model)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert isinstance(twin.up.weight, PackedShard)
    assert isinstance(twin.up.weight, nn.Parameter)
    assert twin.up.weight.data_ptr() != model.up.weight.data_ptr()
    assert type(model.up.weight * 1) is Tensor
    assert model.double().up.weight.dtype == torch.float64


def test_part_of_a_prepared_model_can_become_dense() -> None:
    model, _ = make_layers(("ste", {}))
    compressed_all_gather(model)
    x, _ = batches(1, 0, torch.float32)[0]
    nm.densify_(model.embed)
    expected = copy.deepcopy(model)
    nm.densify_(expected)
    assert type(model.embed) is nn.Linear
    assert not torch.equal(model(x), expected(x))
    nm.densify_(model)
    assert torch.equal(model(x), expected(x))


def test_packed_parameters_are_plain_tensors_on_disk(tmp_path: Path) -> None:
    model, _ = make_layers(("ste", {}))
    compressed_all_gather(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(type(tensor) is Tensor for tensor in loaded.values())
    assert torch.equal(loaded["up.weight"], model.up.weight)


# ---- what is refused ----


REFUSED = [case for case in CASES if nm.recipe(case[0], "2:4", **case[1]).name not in {name for name, _ in PACKED}]
REFUSED.append(("trio", {"forward": "double-soft"}))


@pytest.mark.parametrize("case", REFUSED, ids=case_id)
def test_recipes_that_need_more_than_n_of_m_are_refused_with_the_reason(case: Case) -> None:
    model, _ = make_layers(case)
    with pytest.raises(ValueError, match=rf"^{case[0]} cannot travel packed: .*plain fully_shard"):
        compressed_all_gather(model)
    assert not any(isinstance(p, PackedShard) for p in model.parameters())


def test_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer of this model is sparse"):
        compressed_all_gather(Layers())


def test_preparing_twice_is_refused() -> None:
    model, _ = make_layers(("ste", {}))
    compressed_all_gather(model)
    with pytest.raises(ValueError, match=r"embed\.weight travels packed already"):
        compressed_all_gather(model)


class Conv1D(nn.Module):
    """Stands in for transformers' layer of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.bias = nn.Parameter(torch.zeros(4))


Conv1D.__module__ = "transformers.pytorch_utils"


def test_layers_with_inputs_along_the_sharded_dim_stay_as_they_are_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Conv1D())
    nm.sparsify_(model, nm.STE("2:4"), ["0", "1"])
    assert "can cut through groups" in compressed_all_gather(model)["1"]
    assert not isinstance(model[1].weight, PackedShard)
    only = nn.Sequential(Conv1D())
    nm.sparsify_(only, nm.STE("2:4"), ["0"])
    with pytest.raises(ValueError, match="no sparse layer of this model can travel packed: 0: it stores"):
        compressed_all_gather(only)


def misuse(rank: int, world: int, what: str) -> str:
    model, _ = make_layers(("ste", {}))
    if what == "late":
        fully_shard(model)
        with pytest.raises(ValueError, match="before fully_shard") as caught:
            compressed_all_gather(model)
        return str(caught.value)
    compressed_all_gather(model)
    if what == "dtype":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        with pytest.raises(TypeError) as error:
            model(batches(world, 0, torch.float32)[0][0])
        return str(error.value)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.up, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    with pytest.raises((NotImplementedError, AssertionError)):  # torch 2.13 counts what was gathered
        model(batches(world, 0, torch.float32)[0][0]).sum().backward()
    return "refused by FSDP2"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("late", "embed.weight is sharded already: call compressed_all_gather before fully_shard"),
        ("dtype", "pass compressed_all_gather(model, dtype=torch.bfloat16)"),
        ("integer", "refused by FSDP2"),
    ],
)
def test_misuse_is_told_on_all_ranks(what: str, words: str, four_ranks: Ranks) -> None:
    assert all(words in message for message in four_ranks.run(misuse, what))
