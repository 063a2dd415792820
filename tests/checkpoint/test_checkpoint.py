"""Models on disk: round trips, stock keys, sizes, and files that nobody here wrote."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nmsparse as nm
from nmsparse.checkpoint import convert
from nmsparse.checkpoint._format import Layout, index_bits, pack_tensor, packed_sizes, unpack_tensor
from nmsparse.nn import sparse_modules
from nmsparse.recipes import _registry


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 8))
    return net.to(dtype)


def sparse(recipe: nm.Recipe | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    net = model(dtype)
    nm.sparsify_(net, recipe or nm.SSTE("2:4"))
    return net


def frozen(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in nm.freeze_(net).state_dict().items()}


# ---- the packed form ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("pattern", "dim"), [("2:4", 1), ("2:4", 0), ("1:4", 1), ("1:2", 0), ("4:8", 1), ("3:5", 1), ("1:16", 1)]
)
def test_packed_tensors_come_back_bit_for_bit(pattern: str, dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(80, 80).to(dtype)
    x[:8] = 0  # groups with nothing in them
    x = torch.where(nm.functional.magnitude_mask(x, pattern, dim), x, 0)
    layout = Layout.of(x, nm.Pattern(pattern), dim)
    values, indices = pack_tensor(x, layout)
    assert (values.numel(), indices.numel()) == packed_sizes(layout)
    back = unpack_tensor(values, indices, layout, "x")
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_two_of_four_in_16_bit_takes_nine_sixteenths() -> None:
    x = torch.where(nm.functional.magnitude_mask(torch.randn(64, 64), "2:4"), torch.randn(64, 64), 0).bfloat16()
    values, indices = pack_tensor(x, Layout.of(x, nm.Pattern("2:4"), 1))
    assert (2 * values.numel() + indices.numel()) / (2 * x.numel()) == 9 / 16
    assert [index_bits(nm.Pattern(p)) for p in ("1:2", "2:4", "1:5", "4:8", "8:16", "8:1024")] == [1, 2, 3, 3, 4, 10]


def test_zeros_that_fill_a_group_keep_their_sign_and_others_lose_it() -> None:
    x = torch.tensor([[5.0, -0.0, -0.0, -0.0]])
    layout = Layout.of(x, nm.Pattern("2:4"), 1)
    values, indices = pack_tensor(x, layout)
    assert torch.signbit(values).tolist() == [False, True]
    assert torch.signbit(unpack_tensor(values, indices, layout, "x")).tolist() == [[False, True, False, False]]


def test_groups_of_one_take_a_bit_each_which_is_zero() -> None:
    layout = Layout("1:1", 1, (1, 9), "float32")
    values, indices = pack_tensor(torch.arange(9.0)[None], layout)
    assert (values.numel(), indices.tolist()) == (9, [0, 0])
    assert torch.equal(unpack_tensor(values, indices, layout, "x"), torch.arange(9.0)[None])
    with pytest.raises(ValueError, match="x: an index lies outside its group of 1"):
        unpack_tensor(values, torch.tensor([1, 0], dtype=torch.uint8), layout, "x")


def test_positions_outside_a_group_are_refused() -> None:
    layout = Layout("3:5", 1, (1, 5), "float32")
    with pytest.raises(ValueError, match="x: an index lies outside its group of 5"):
        unpack_tensor(torch.ones(3), torch.tensor([255, 255], dtype=torch.uint8), layout, "x")
    with pytest.raises(ValueError, match="takes 3 values and 2 index bytes, the file has 4 and 2"):
        unpack_tensor(torch.ones(4), torch.zeros(2, dtype=torch.uint8), layout, "x")


# ---- save and load ----


@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize(
    "recipe", [nm.SSTE("2:4"), nm.STE("1:4"), nm.STEP("2:4"), nm.Trio("2:4"), nm.ASP("2:4")], ids=lambda r: r.name
)
def test_a_saved_model_comes_back_as_if_it_had_been_frozen(form: Any, recipe: nm.Recipe, tmp_path: Path) -> None:
    net = sparse(recipe)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    nm.save(net, tmp_path / "out", form)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())  # not changed
    expected = frozen(net)
    loaded = nm.load(model(), tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items())
    assert nm.verify(tmp_path / "out").ok


def test_dense_files_have_stock_keys_and_no_negative_zeros(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert list(stored) == sorted(model().state_dict())
    zeros = stored["0.weight"][stored["0.weight"] == 0]
    assert len(zeros) == 64 * 128 / 2
    assert not torch.signbit(zeros).any()


def test_a_frozen_model_is_packed_by_its_pattern(tmp_path: Path) -> None:
    net = nm.freeze_(sparse(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="no layer of this model is sparse"):
        nm.save(net, tmp_path / "no", "packed")
    assert not (tmp_path / "no").exists()
    nm.save(net, tmp_path / "out", "packed", pattern="2:4")
    assert set(json.loads((tmp_path / "out" / "sparsity.json").read_text())["tensors"]) == {"0.weight", "2.weight"}
    loaded = nm.load(model(torch.bfloat16), tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in net.state_dict().items())


def test_packing_a_model_without_zeros_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no layer of this model is sparse, so there is nothing to pack: sparsify it first"):
        nm.save(model(), tmp_path, "packed")
    with pytest.raises(ValueError, match="no linear layer or convolution of this model obeys 2:4, so there is nothing to pack"):
        nm.save(model(), tmp_path, "packed", pattern="2:4")


def test_convolutions_and_conv1d_are_packed_along_their_inputs(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(8, 4, 3), Conv1D(12, 16)

    net = Net()
    nm.sparsify_(net, nm.STE("2:4"), targets=["conv", "linear"])
    nm.save(net, tmp_path, "packed")
    tensors = json.loads((tmp_path / "sparsity.json").read_text())["tensors"]
    assert {name: entry["dim"] for name, entry in tensors.items()} == {"conv.weight": 1, "linear.weight": 0}
    expected, loaded = frozen(net), nm.load(Net(), tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert nm.verify(tmp_path).ok


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        net = nn.ModuleDict({"embed": nn.Embedding(16, 64), "up": nn.Linear(64, 64), "head": nn.Linear(64, 16, bias=False)})
        net["head"].weight = net["embed"].weight
        return net

    net = tied()
    nm.sparsify_(net, nm.STE("2:4"), targets=["up"])
    nm.save(net, tmp_path)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = nm.load(tied(), tmp_path)
    assert torch.equal(loaded["head"].weight, net["embed"].weight)


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_a_module_under_two_names_is_pruned_under_both(form: Any, tmp_path: Path) -> None:
    def shared() -> nn.Module:
        block = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        return nn.ModuleDict({"layers": nn.ModuleList([block] * 3), "head": nn.Linear(16, 4)})

    net = shared()
    nm.sparsify_(net, nm.STE("2:4"))
    nm.save(net, tmp_path, form)
    facts = json.loads((tmp_path / "sparsity.json").read_text())
    assert set(facts["tensors"]) == {"layers.0.0.weight", "layers.0.2.weight"}
    assert facts["shared"]["layers.2.0.weight"] == "layers.0.0.weight"
    assert nm.verify(tmp_path).ok
    expected, loaded = frozen(net), nm.load(shared(), tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_tied_sparse_weight_is_recorded_under_the_name_that_is_stored(tmp_path: Path) -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(16, 64), "head": nn.Linear(64, 16, bias=False)})
    net["head"].weight = net["embed"].weight
    with torch.no_grad():
        net["embed"].weight.mul_(nm.functional.magnitude_mask(net["embed"].weight, "2:4"))
    nm.save(net, tmp_path, "packed", pattern="2:4")
    assert [t.name for t in nm.verify(tmp_path).tensors] == ["embed.weight"]


# ---- layers that break their own pattern ----


@dataclass(frozen=True)
class Forgetful(nm.Recipe):
    """A user's recipe, not registered, that forgets to prune wide layers."""

    @property
    def sparse_products(self) -> tuple[str, ...]:
        return ("output",)

    def output_weight(self, weight: torch.Tensor, state: Any) -> torch.Tensor:
        return weight if weight.shape[0] == 128 else weight * nm.functional.magnitude_mask(weight, self.pattern)


def test_a_layer_that_breaks_its_own_pattern_is_recorded_and_found(tmp_path: Path) -> None:
    nm.save(sparse(Forgetful("1:8")), tmp_path)
    report = nm.verify(tmp_path)
    assert {t.name: t.status for t in report.tensors} == {"0.weight": "violated", "2.weight": "ok"}
    assert not report.ok


def test_a_layer_that_breaks_its_own_pattern_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0.weight: 2048 groups of its final weight have more non-zeros than 2:4 keeps"):
        nm.save(sparse(Forgetful("2:4")), tmp_path / "out", "packed")
    assert not (tmp_path / "out").exists()


def test_a_run_counts_the_groups_that_its_recipe_forgot(tmp_path: Path) -> None:
    from nmsparse.workbench.training import TrainConfig, train

    nm.register_recipe("forgetful", paper="-")(Forgetful)
    tiny: dict[str, Any] = {"steps": 1, "width": 32, "layers": 1, "heads": 2, "batch": 4, "eval_batches": 1}
    try:
        for save in (True, False):
            result = train(TrainConfig(recipe="forgetful", save=save, **tiny), tmp_path / str(save)).result
            assert result is not None
            assert result["violations"] == 128 * 32 // 4
    finally:
        _registry._RECIPES.pop("forgetful")
        Forgetful.name = ""


@pytest.mark.parametrize("recipe", [nm.FST("2:4"), nm.FST("2:4", dense_tail=0), nm.SDGP("2:4"), nm.ASP("2:4")], ids=str)
def test_what_a_recipe_does_not_promise_is_no_violation(recipe: nm.Recipe, tmp_path: Path) -> None:
    net = sparse(recipe)
    for _, module in sparse_modules(net):
        if "tail" in module._nmsparse.state:
            module._nmsparse.state["tail"].fill_(float(getattr(recipe, "dense_tail", 0) > 0))
    nm.save(net, tmp_path)
    assert nm.verify(tmp_path).ok
    recorded = set(json.loads((tmp_path / "sparsity.json").read_text())["tensors"])
    ends_dense = recipe.name == "sdgp" or recipe == nm.FST("2:4")
    assert ("0.weight" in recorded) is not ends_dense


# ---- wrapped models ----


@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize("whole", [True, False], ids=["model", "submodule"])
def test_compiled_models_are_saved_and_loaded_under_their_own_names(form: Any, whole: bool, tmp_path: Path) -> None:
    def compiled(net: nn.Module) -> nn.Module:
        if whole:
            return torch.compile(net)
        return nn.ModuleDict({"inner": torch.compile(net)})

    net = sparse()
    nm.save(compiled(net), tmp_path, form)
    plain = model() if whole else nn.ModuleDict({"inner": model()})
    expected = frozen(net)
    for fresh in (plain, compiled(model())):
        loaded = list(nm.load(fresh, tmp_path).state_dict().values())
        assert all(torch.equal(a, b) for a, b in zip(loaded, expected.values(), strict=True))


def test_a_wrapper_of_ddp_leaves_no_trace_in_the_names(tmp_path: Path) -> None:
    net = sparse()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        nm.save(nn.parallel.DistributedDataParallel(net), tmp_path)
        loaded = nm.load(nn.parallel.DistributedDataParallel(model()), tmp_path).module.state_dict()
    finally:
        torch.distributed.destroy_process_group()
    assert list(load_file(tmp_path / "model.safetensors")) == sorted(model().state_dict())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in frozen(net).items())


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_large_models_are_sharded_with_an_index_and_saved_again_in_one_file(form: Any, tmp_path: Path) -> None:
    net = sparse()
    nm.save(net, tmp_path, form, shard_bytes=10_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert nm.verify(tmp_path).ok
    expected = frozen(sparse())
    loaded = nm.load(model(), tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    nm.save(net, tmp_path, form)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "sparsity.json"]
    assert nm.verify(tmp_path).ok


def test_a_checkpoint_that_does_not_fit_loads_nothing(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path)
    other = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=r"does not fit this 3-tensor model: it has 3.bias, 3.weight, 4.bias, 4.weight besides"):
        nm.load(other, tmp_path)
    wide = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 8))
    with pytest.raises(ValueError, match=r"0.weight has shape \(128, 64\), the model's is \(128, 32\)"):
        nm.load(wide, tmp_path)
    assert torch.equal(other[0].weight, before)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nm.save(sparse(), tmp_path)
    old = (tmp_path / "model.safetensors").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("nmsparse.checkpoint._save.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        nm.save(sparse(nm.STE("2:4")), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == old
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "sparsity.json"]


def test_a_bad_position_in_the_last_tensor_loads_nothing(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(15, 10), nn.Linear(10, 5))

    source = net()
    nm.sparsify_(source, nm.STE("3:5"), targets="all")
    nm.save(source, tmp_path, "packed")
    stored = load_file(tmp_path / "model.safetensors")
    stored["1.weight.nm_indices"][-1] = 255
    save_file(stored, tmp_path / "model.safetensors")
    other = net()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"1.weight: an index lies outside its group of 5"):
        nm.load(other, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_a_checkpoint_that_does_not_fit_leaves_packed_layers_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[nn.Module] = []
    monkeypatch.setattr("nmsparse.checkpoint._load.unpack_all_", unpacked.append)
    nm.save(sparse(), tmp_path)
    other = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="does not fit this 2-tensor model"):
        nm.load(other, tmp_path)
    assert not unpacked


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path)
    with torch.device("meta"):
        empty = model()
    for call in (lambda: nm.load(empty, tmp_path), lambda: nm.save(empty, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"0.weight is on the meta device, so it has no values to save and no memory"):
            call()


def test_tied_weights_that_a_foreign_file_holds_once_are_loaded(tmp_path: Path) -> None:
    def net() -> nn.Module:
        built = nn.ModuleDict({"embed": nn.Embedding(16, 64), "head": nn.Linear(64, 16, bias=False)})
        built["head"].weight = built["embed"].weight
        return built

    weight = torch.randn(16, 64)
    for name in ("embed.weight", "head.weight"):
        save_file({name: weight}, tmp_path / "model.safetensors")
        assert torch.equal(nm.load(net(), tmp_path)["head"].weight, weight)
    untied = nn.ModuleDict({"embed": nn.Embedding(16, 64), "head": nn.Linear(64, 16, bias=False)})
    with pytest.raises(ValueError, match=r"it lacks embed.weight"):
        nm.load(untied, tmp_path)


def test_weights_that_overlap_are_named(tmp_path: Path) -> None:
    net = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    memory = torch.randn(6, 4)
    net[0].weight, net[1].weight = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    with pytest.raises(ValueError, match=r"0.weight and 1.weight overlap in memory without being one tensor"):
        nm.save(net, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    net[1].weight = nn.Parameter(torch.randn(8, 4)[4:])  # a part of larger memory, which nobody else holds
    nm.save(net, tmp_path / "out")


def test_state_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None: ...

    net = nn.Sequential(Counted(4, 4))
    for call in (lambda: nm.save(net, tmp_path / "out"), lambda: nm.load(net, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"0._extra_state is a dict, and safetensors hold tensors only"):
            call()
        nm.save(model(), tmp_path / "out")


# ---- kills ----


def killed(code: str, folder: Path) -> int:
    """Save into a folder in a process that dies there; its id."""
    start = "import os, pathlib, sys, torch, nmsparse as nm\nfolder, real = pathlib.Path(sys.argv[1]), os.replace"
    net = "net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])"
    process = subprocess.Popen([sys.executable, "-c", "\n".join([start, net, code]), str(folder)])
    assert process.wait() == 9
    return process.pid


def test_what_a_killed_save_left_behind_goes_away_at_the_next(tmp_path: Path) -> None:
    pid = killed("os.replace = lambda *_: os._exit(9)\nnm.save(net, folder, shard_bytes=20_000)", tmp_path)
    assert f".model.safetensors.0.{pid}.tmp" in os.listdir(tmp_path)
    others = [f".model.safetensors.0.{os.getppid()}.tmp", ".mine.tmp", "notes.1.tmp"]
    for name in others:
        (tmp_path / name).write_text("")
    (tmp_path / f".sparsity.json.{pid}.tmp").write_text("")
    nm.save(sparse(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "model.safetensors", "sparsity.json"])


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_a_save_killed_between_its_files_is_an_error_and_no_mixture(form: Any, tmp_path: Path) -> None:
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    nm.sparsify_(net, nm.STE("2:4"))
    nm.save(net, tmp_path, form, shard_bytes=20_000)
    die = "os.replace = lambda a, b: os._exit(9) if '-00002-' in str(b) else real(a, b)"
    killed(f'{die}\nnm.sparsify_(net, nm.STE("2:4"))\nnm.save(net, folder, "{form}", shard_bytes=20_000)', tmp_path)
    for read in (lambda: nm.load(net, tmp_path), lambda: nm.verify(tmp_path)):
        with pytest.raises(ValueError, match=r"model.safetensors.index.json, which says where each tensor is, is missing"):
            read()
    nm.save(net, tmp_path, form, shard_bytes=20_000)
    assert nm.verify(tmp_path).ok


# ---- verify ----


def test_a_broken_group_is_found_and_counted(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["0.weight"][3, :4] = 1.0
    stored["0.weight"][9, 60:] = 1.0
    save_file(stored, tmp_path / "model.safetensors")
    report = nm.verify(tmp_path)
    assert not report.ok
    assert {t.name: (t.violations, t.status) for t in report.tensors} == {"0.weight": (2, "violated"), "2.weight": (0, "ok")}


def test_foreign_files_are_judged_by_what_they_look_like(tmp_path: Path) -> None:
    good = torch.where(nm.functional.magnitude_mask(torch.randn(64, 64), "2:4"), torch.randn(64, 64), 0)
    bad = good.clone()
    bad[0, :4] = 1
    tensors = {"good": good, "bad": bad, "dense": torch.randn(64, 64), "bias": torch.randn(64), "odd": torch.randn(6, 6)}
    tensors["ids"] = torch.zeros(4, 4, dtype=torch.int64)
    save_file(tensors, tmp_path / "any.safetensors")
    report = nm.verify(tmp_path / "any.safetensors")
    assert {t.name: t.status for t in report.tensors} == {"good": "ok", "bad": "violated", "dense": "dense"}
    assert set(report.skipped) == {"bias", "odd", "ids"}
    assert nm.verify(tmp_path / "any.safetensors", "1:4").tensors[1].status in ("dense", "violated")


def test_weights_that_are_stored_transposed_are_judged_along_their_own_groups(tmp_path: Path) -> None:
    """GPT-2's layers and some experts store (in, out)."""
    x, experts = torch.randn(64, 64), torch.randn(3, 16, 24)
    broken = x * nm.functional.magnitude_mask(x, "2:4", 0)
    broken[:4, 7] = 1
    tensors = {"conv1d": x * nm.functional.magnitude_mask(x, "2:4", 0), "broken": broken}
    tensors["experts"] = experts * nm.functional.magnitude_mask(experts, "2:4", 1)
    tensors["tall"] = x[:, :6] * nm.functional.magnitude_mask(x[:, :6], "2:4", 0)
    save_file(tensors, tmp_path / "any.safetensors")
    found = {t.name: (t.dim, t.violations, t.status) for t in nm.verify(tmp_path / "any.safetensors").tensors}
    expected = {"conv1d": (0, 0, "ok"), "broken": (0, 1, "violated"), "experts": (1, 0, "ok"), "tall": (0, 0, "ok")}
    assert found == expected


def test_packed_weights_without_their_description_are_no_yes(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path, "packed")
    with pytest.raises(ValueError, match=r"is half of a packed tensor, but no sparsity.json describes '0.weight'"):
        nm.verify(tmp_path / "model.safetensors")
    (tmp_path / "sparsity.json").unlink()
    for read in (lambda: nm.verify(tmp_path), lambda: nm.load(model(), tmp_path)):
        with pytest.raises(ValueError, match=r"is half of a packed tensor, but no sparsity.json describes '0.weight'"):
            read()


def test_a_file_with_nothing_to_check_is_no_yes(tmp_path: Path) -> None:
    save_file({"bias": torch.ones(4), "odd": torch.randn(5, 6)}, tmp_path / "any.safetensors")
    with pytest.raises(ValueError, match=r"holds no tensor that could be 2:4, so nothing was checked \(bias: F32 of shape"):
        nm.verify(tmp_path / "any.safetensors")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_weights_in_fp8_are_checked_and_loaded_and_refused_for_packing(dtype: torch.dtype, tmp_path: Path) -> None:
    net = nm.freeze_(sparse()).to(dtype)
    nm.save(net, tmp_path / "ours", pattern="2:4")
    assert nm.verify(tmp_path / "ours").ok
    assert torch.equal(nm.load(model(), tmp_path / "ours")[0].weight, net[0].weight.float())
    save_file({"good": net[0].weight.detach(), "bad": torch.ones(8, 8).to(dtype)}, tmp_path / "any.safetensors")
    report = nm.verify(tmp_path / "any.safetensors")
    assert {t.name: t.status for t in report.tensors} == {"good": "ok", "bad": "dense"}
    with pytest.raises(ValueError, match=r"0.weight is float8_\w+, which cannot be packed"):
        nm.save(net, tmp_path / "packed", "packed", pattern="2:4")
    with pytest.raises(ValueError, match=r"0.weight is float8_\w+, which cannot be packed"):
        convert(tmp_path / "ours", tmp_path / "packed", "packed")
    assert not (tmp_path / "packed").exists()
    convert(tmp_path / "ours", tmp_path / "copy", "dense")
    assert (tmp_path / "copy/model.safetensors").read_bytes() == (tmp_path / "ours/model.safetensors").read_bytes()


def test_sharded_folders_are_read_through_their_index(tmp_path: Path) -> None:
    good = torch.where(nm.functional.magnitude_mask(torch.randn(64, 64), "2:4"), torch.randn(64, 64), 0)
    save_file({"a": good}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.randn(64, 64)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {t.name: t.status for t in nm.verify(tmp_path).tensors} == {"a": "ok", "b": "dense"}


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmsparse.checkpoint._verify.PIECE", 100)
    x = torch.where(nm.functional.magnitude_mask(torch.randn(33, 64), "2:4"), torch.randn(33, 64), 0)
    x[32, :4] = 1
    save_file({"x": x}, tmp_path / "x.safetensors")
    (found,) = nm.verify(tmp_path / "x.safetensors").tensors
    assert (found.groups, found.violations) == (33 * 16, 1)


# ---- hostile input ----


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


HUGE = b'{"x":{"dtype":"F32","shape":[1000000,1000000],"data_offsets":[0,4000000000000]}}'
ONE = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
FILES = {
    "empty": b"",
    "short": b"abc",
    "no header": header(b"", 2**40),
    "not json": header(b"{not json"),
    "huge tensor": header(HUGE) + b"\0" * 64,
    "wrong offsets": header(b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}') + b"\0" * 8,
    "overlap": header(
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    + b"\0" * 4,
    "unknown dtype": header(b'{"x":{"dtype":"Q7","shape":[1],"data_offsets":[0,4]}}') + b"\0" * 4,
}


@pytest.mark.parametrize("kind", FILES)
def test_malformed_files_get_one_clear_sentence(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(FILES[kind])
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable safetensors file"):
        nm.verify(file)
    result = subprocess.run([sys.executable, "-m", "nmsparse", "verify", str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        nm.load(model(), tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b"])
def test_an_index_may_not_point_outside_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="is no plain file name beside it; it is not followed"):
        nm.verify(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"cannot be read as JSON|has no weight_map"):
        nm.verify(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"pattern": "2:4", "dim": 5, "shape": [4, 4], "dtype": "float32"},
        {"pattern": "9:4", "dim": 1, "shape": [4, 4], "dtype": "float32"},
        {"pattern": "2:4", "dim": 1, "shape": [4, -4], "dtype": "float32"},
        {"pattern": "2:4", "dim": 1, "shape": [4, 4], "dtype": "system"},
        {"pattern": "2:4", "dim": 1, "shape": "44", "dtype": "float32"},
    ],
    ids=str,
)
def test_a_sparsity_file_that_makes_no_sense_is_refused(entry: Any, tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path, "packed")
    facts = json.loads((tmp_path / "sparsity.json").read_text())
    facts["tensors"]["0.weight"] = entry
    (tmp_path / "sparsity.json").write_text(json.dumps(facts))
    for read in (lambda: nm.verify(tmp_path), lambda: nm.load(model(), tmp_path)):
        with pytest.raises(ValueError, match=r"the entry of '0.weight' makes no sense"):
            read()


def test_sizes_that_lie_are_found(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path, "packed")
    facts = json.loads((tmp_path / "sparsity.json").read_text())
    facts["tensors"]["0.weight"]["shape"] = [2**40, 2**20]
    (tmp_path / "sparsity.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"0.weight: a 2:4 tensor of shape .* takes"):
        nm.verify(tmp_path)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist: give a .safetensors file"):
        nm.verify(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"holds no .safetensors file"):
        nm.verify(tmp_path)


# ---- the command ----


def test_the_command_exits_with_1_on_a_violation_and_prints_json(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path)
    command = [sys.executable, "-m", "nmsparse", "verify", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "2 ok, 0 violated, 0 dense" in result.stdout
    stored = load_file(tmp_path / "model.safetensors")
    stored["0.weight"][3, :4] = 1.0
    save_file(stored, tmp_path / "model.safetensors")
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert json.loads(result.stdout)["ok"] is False
