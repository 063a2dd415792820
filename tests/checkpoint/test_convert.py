"""Checkpoints rewritten without a model: dense to packed and back, foreign files, shards, and input that lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.checkpoint import TensorFiles, convert


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 8))
    return net.to(dtype)


def sparse(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = model(dtype)
    nm.sparsify_(net, nm.STE("2:4"))
    return net


def pruned(*shape: int, pattern: str = "2:4", dim: int = -1) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return torch.where(nm.functional.magnitude_mask(x, pattern, dim), x, 0)


def weights(folder: Path) -> dict[str, Tensor]:
    with TensorFiles(folder) as files:
        return {name: files.tensor(name) for name in files.names}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return sorted(a) == sorted(b) and all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


# ---- there and back ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("before", "after"), [("dense", "packed"), ("packed", "dense"), ("dense", "dense"), ("packed", "packed")]
)
def test_a_converted_folder_equals_one_saved_in_that_format(before: Any, after: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    net = sparse(dtype)
    nm.save(net, tmp_path / "source", before)
    nm.save(net, tmp_path / "expected", after)
    done = convert(tmp_path / "source", tmp_path / "target", after)
    assert same_bits(weights(tmp_path / "target"), weights(tmp_path / "expected"))
    assert json.loads((tmp_path / "target/sparsity.json").read_text()) == json.loads(
        (tmp_path / "expected/sparsity.json").read_text()
    )
    assert done.sparse == {"0.weight": "2:4", "2.weight": "2:4"}
    assert (done.bytes_after < done.bytes_before) == (before == "dense" and after == "packed")
    assert nm.verify(tmp_path / "target").ok


def test_packed_weights_become_stock_keys_and_exact_zeros(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source", "packed")
    convert(tmp_path / "source", tmp_path / "target", "dense")
    stored = load_file(tmp_path / "target/model.safetensors")
    assert sorted(stored) == sorted(model().state_dict())
    zeros = stored["0.weight"][stored["0.weight"] == 0]
    assert len(zeros) == 64 * 128 / 2
    assert not torch.signbit(zeros).any()
    plain = model()
    plain.load_state_dict(stored)  # no nmsparse needed


def test_a_foreign_file_is_packed_by_its_pattern(tmp_path: Path) -> None:
    tensors = {
        "matrix.weight": pruned(16, 32),
        "conv.weight": pruned(8, 16, 3, 3, dim=1),
        "conv1d.weight": pruned(32, 24, dim=0),  # GPT-2 stores weights transposed
        "dense.weight": torch.randn(16, 16),
        "narrow.weight": torch.randn(16, 6),
        "bias": torch.zeros(16),
        "empty": torch.zeros(0, 16),
        "ids": torch.zeros(4, 4, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "any.safetensors")
    done = convert(tmp_path / "any.safetensors", tmp_path / "packed", "packed", "2:4")
    layouts = json.loads((tmp_path / "packed/sparsity.json").read_text())["tensors"]
    assert {name: entry["dim"] for name, entry in layouts.items()} == {"matrix.weight": 1, "conv.weight": 1, "conv1d.weight": 0}
    assert set(done.sparse) == set(layouts)
    assert nm.verify(tmp_path / "packed").ok
    convert(tmp_path / "packed", tmp_path / "again", "dense")
    assert same_bits(weights(tmp_path / "again"), tensors)


def test_a_pattern_adds_to_what_sparsity_json_names(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nm.sparsify_(net, nm.STE("2:4"), targets=["0"])
    with torch.no_grad():
        net[1].weight.copy_(pruned(64, 64, pattern="1:4"))
    nm.save(net, tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "one", "packed").sparse == {"0.weight": "2:4"}
    assert convert(tmp_path / "source", tmp_path / "two", "packed", "1:4").sparse == {"0.weight": "2:4", "1.weight": "1:4"}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        net = nn.ModuleDict({"embed": nn.Embedding(16, 64), "up": nn.Linear(64, 64), "head": nn.Linear(64, 16, bias=False)})
        net["head"].weight = net["embed"].weight
        return net

    net = tied()
    nm.sparsify_(net, nm.STE("2:4"), targets=["up"])
    nm.save(net, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target", "packed")
    loaded = nm.load(tied(), tmp_path / "target")
    assert torch.equal(loaded["head"].weight, net["embed"].weight)


def test_configuration_and_tokenizer_come_along_and_nothing_else_does(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    for name in ("config.json", "tokenizer.json", "optimizer.bin", "notes.txt"):
        (tmp_path / "source" / name).write_text(json.dumps({"name": name}))
    done = convert(tmp_path / "source", tmp_path / "target", "dense")
    assert done.copied == ["config.json", "tokenizer.json"]
    found = sorted(file.name for file in (tmp_path / "target").iterdir())
    assert found == ["config.json", "model.safetensors", "sparsity.json", "tokenizer.json"]
    assert (tmp_path / "target/config.json").read_bytes() == (tmp_path / "source/config.json").read_bytes()


def config_after(folder: Path, form: Any, config: Any) -> Any:
    """What becomes of a config.json."""
    (folder / "source/config.json").write_text(json.dumps(config))
    convert(folder / "source", folder / form, form)
    return json.loads((folder / form / "config.json").read_text())


def test_config_names_our_format_where_the_copy_is_packed_and_only_there(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    packed = config_after(tmp_path, "packed", {"model_type": "bert"})
    assert packed["model_type"] == "bert"
    ours = packed["quantization_config"]
    assert ours == {**ours, "quant_method": "nmsparse", "version": 1}
    assert ours["tensors"] == json.loads((tmp_path / "packed/sparsity.json").read_text())["tensors"]
    assert config_after(tmp_path, "dense", packed) == {"model_type": "bert"}


@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize("config", [{"quantization_config": {"quant_method": "fp8"}}, [1]], ids=str)
def test_a_config_that_names_another_format_or_is_none_stays_as_it_is(config: Any, form: Any, tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    assert config_after(tmp_path, form, config) == config


def test_a_config_that_cannot_be_read_stops_before_anything_is_written(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    (tmp_path / "source/config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        convert(tmp_path / "source", tmp_path / "out", "packed")
    assert not (tmp_path / "out").exists()


# ---- shards ----


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_sharded_folders_are_read_and_written(form: Any, tmp_path: Path) -> None:
    net = sparse()
    nm.save(net, tmp_path / "source", "packed" if form == "dense" else "dense", shard_bytes=10_000)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    convert(tmp_path / "source", tmp_path / "parts", form, shard_bytes=9_000)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    convert(tmp_path / "source", tmp_path / "whole", form)
    nm.save(net, tmp_path / "expected", form)
    assert same_bits(weights(tmp_path / "parts"), weights(tmp_path / "expected"))
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "expected"))


def test_only_one_shard_is_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({f"{i}.weight": pruned(64, 64) for i in range(6)}, tmp_path / "source.safetensors")
    events: list[str] = []
    read, write = TensorFiles.dense, save_file

    def reading(files: TensorFiles, name: str) -> Tensor:
        events.append("read")
        return read(files, name)

    def writing(*args: Any) -> None:
        events.append("write")
        write(*args)

    monkeypatch.setattr(TensorFiles, "dense", reading)
    monkeypatch.setattr("nmsparse.checkpoint._save.save_file", writing)
    convert(tmp_path / "source.safetensors", tmp_path / "target", "dense", shard_bytes=2 * 64 * 64 * 4)
    # a shard is full when the first tensor of the next one is there
    assert events == ["read"] * 3 + ["write"] + ["read"] * 2 + ["write"] + ["read", "write"]


def test_a_failed_conversion_leaves_the_target_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nm.save(sparse(), tmp_path / "source")
    nm.save(sparse(torch.bfloat16), tmp_path / "target")
    before = {file.name: file.read_bytes() for file in (tmp_path / "target").iterdir()}
    calls: list[int] = []

    def fails_late(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("disk full")
        save_file(*args)

    monkeypatch.setattr("nmsparse.checkpoint._save.save_file", fails_late)
    with pytest.raises(OSError, match="disk full"):
        convert(tmp_path / "source", tmp_path / "target", "packed", shard_bytes=10_000)
    assert {file.name: file.read_bytes() for file in (tmp_path / "target").iterdir()} == before


# ---- what is refused ----


def test_a_source_that_says_nothing_needs_a_pattern_that_fits(tmp_path: Path) -> None:
    save_file({"x": pruned(16, 16)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r'does not say which of its tensors are sparse: give their pattern, such as "2:4"'):
        convert(tmp_path / "x.safetensors", tmp_path / "out", "packed")
    with pytest.raises(ValueError, match=r"no tensor of .* obeys 1:4, so there is nothing to pack"):
        convert(tmp_path / "x.safetensors", tmp_path / "out", "packed", "1:4")
    assert not (tmp_path / "out").exists()


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    wrong: Any = "zip"
    with pytest.raises(ValueError, match='format is "dense" or "packed", got \'zip\''):
        convert(tmp_path / "source", tmp_path / "out", wrong)
    with pytest.raises(ValueError, match="shard_bytes counts bytes from 1"):
        convert(tmp_path / "source", tmp_path / "out", "packed", shard_bytes=0)
    with pytest.raises(ValueError, match="is a file; what is written is a folder"):
        convert(tmp_path / "source", tmp_path / "source/model.safetensors", "packed")
    for source in ("source", "source/model.safetensors"):
        with pytest.raises(ValueError, match="is where the source lies"):
            convert(tmp_path / source, tmp_path / "source", "packed", "2:4")
    with pytest.raises(ValueError, match=r"does not exist: give a .safetensors file"):
        convert(tmp_path / "nothing", tmp_path / "out", "packed")


def test_half_of_a_packed_folder_is_refused(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source", "packed")
    with pytest.raises(ValueError, match=r"is half of a packed tensor, but no sparsity.json describes '0.weight'"):
        convert(tmp_path / "source/model.safetensors", tmp_path / "out", "dense")
    stored = load_file(tmp_path / "source/model.safetensors")
    save_file({**stored, "0.weight": torch.zeros(128, 64)}, tmp_path / "source/model.safetensors")
    with pytest.raises(ValueError, match=r"'0.weight' is stored both whole and packed"):
        convert(tmp_path / "source", tmp_path / "out", "dense")
    del stored["0.weight.nm_indices"]
    save_file(stored, tmp_path / "source/model.safetensors")
    with pytest.raises(ValueError, match=r"0.weight has values but no indices"):
        convert(tmp_path / "source", tmp_path / "out", "dense")
    assert not (tmp_path / "out").exists()


def test_a_claim_that_the_weights_break_is_refused(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    stored = load_file(tmp_path / "source/model.safetensors")
    stored["0.weight"][3, :4] = 1.0
    save_file(stored, tmp_path / "source/model.safetensors")
    with pytest.raises(ValueError, match=r"1 groups of 0.weight have more non-zeros than the 2:4 that sparsity.json claims"):
        convert(tmp_path / "source", tmp_path / "out", "packed")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [128, 64, 4], "dim": 2},
        {"shape": [2731, 3]},
        {"shape": [0, 2**62]},
        {"shape": [0, 2**40, 2**40]},
        {"shape": [2**31, 2**31]},
        {"shape": [64, 32]},
        {"dim": True},
        {"dtype": "bfloat16"},
        {"dtype": "complex64"},
        {"pattern": "1:4"},
        {"pattern": "1:0"},
    ],
    ids=str,
)
def test_a_sparsity_file_that_lies_gets_one_clear_sentence(lie: dict[str, Any], form: Any, tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source", form)
    facts = json.loads((tmp_path / "source/sparsity.json").read_text())
    facts["tensors"]["0.weight"].update(lie)
    (tmp_path / "source/sparsity.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"0.weight") as caught:
        convert(tmp_path / "source", tmp_path / "out", "packed")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_that_the_weights_lack_and_broken_files_are_refused(tmp_path: Path) -> None:
    nm.save(sparse(), tmp_path / "source")
    facts = json.loads((tmp_path / "source/sparsity.json").read_text())
    facts["tensors"]["9.weight"] = facts["tensors"]["0.weight"]
    (tmp_path / "source/sparsity.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"sparsity.json names '9.weight', which the weights do not hold"):
        convert(tmp_path / "source", tmp_path / "out", "packed")
    file = tmp_path / "source/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        convert(tmp_path / "source", tmp_path / "out", "packed")
    (tmp_path / "source/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret"}}))
    with pytest.raises(ValueError, match="is no plain file name beside it; it is not followed"):
        convert(tmp_path / "source", tmp_path / "out", "packed")


@pytest.mark.parametrize("lie", [{"shape": [128, 64, 4], "dim": 2}, {"dim": True}, {"shape": [2731, 3]}], ids=str)
def test_verify_and_load_refuse_the_same_lies(lie: dict[str, Any], tmp_path: Path) -> None:
    for form in ("dense", "packed"):
        nm.save(sparse(), tmp_path, "dense" if form == "dense" else "packed")
        facts = json.loads((tmp_path / "sparsity.json").read_text())
        facts["tensors"]["0.weight"].update(lie)
        (tmp_path / "sparsity.json").write_text(json.dumps(facts))
        with pytest.raises(ValueError, match=r"0.weight"):
            nm.verify(tmp_path)
        with pytest.raises(ValueError, match=r"0.weight"):
            nm.load(model(), tmp_path)
