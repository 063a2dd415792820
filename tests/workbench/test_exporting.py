"""nmsparse export and verify on what a run leaves, and on folders of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

import nmsparse as nm
from nmsparse.cli import app
from nmsparse.workbench.training import DivergenceError, TrainConfig, train

TINY: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "limit": 16, "batch": 4, "steps": 1, "eval_batches": 1}


def nmsparse(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(TrainConfig.from_dict(TINY | {"recipe": "sr-ste", "length": 16}), folder)
    return folder


def test_packed_and_back_is_bit_exact(finished: Path, tmp_path: Path) -> None:
    packed = nmsparse("export", finished, tmp_path / "packed", "--format", "packed", "--json")
    assert packed.exit_code == 0, packed.output
    facts = json.loads(packed.stdout)
    assert facts["bytes_after"] < facts["bytes_before"]
    assert nmsparse("export", tmp_path / "packed", tmp_path / "dense").exit_code == 0
    before, after = load_file(finished / "model" / "model.safetensors"), load_file(tmp_path / "dense" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_and_its_exports_verify(finished: Path, tmp_path: Path) -> None:
    nmsparse("export", finished, tmp_path / "packed", "--format", "packed")
    for folder in (finished, finished / "model", tmp_path / "packed"):
        result = nmsparse("verify", folder)
        assert result.exit_code == 0, result.output
        assert "4 ok, 0 violated" in result.output
    assert nmsparse("verify", finished, "--pattern", "1:4").exit_code == 1


@pytest.mark.parametrize(
    ("task", "model"), [("shakespeare", "llama"), ("fashion-mini", "vit"), ("questions", "bert"), ("pig-latin", "marian")]
)
def test_each_kind_of_model_becomes_onnx(task: str, model: str, tmp_path: Path) -> None:
    train(TrainConfig.from_dict(TINY | {"task": task, "model": model, "recipe": "sr-ste"}), tmp_path / "run")
    result = nmsparse("export", tmp_path / "run", tmp_path / "a.onnx", "--format", "onnx", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["checked"]
    assert facts["difference"] < 1e-4
    assert facts["weights"]
    assert all(weight["pattern"] == "2:4" and weight["density"] == 0.5 for weight in facts["weights"])


def test_a_transformers_folder_becomes_onnx_without_its_run(finished: Path, tmp_path: Path) -> None:
    result = nmsparse("export", finished / "model", tmp_path / "onnx", "--format", "onnx")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "onnx" / "model.onnx").exists()
    assert "4 sparse weights" in result.output


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_that_transformers_wrote_becomes_onnx(tied: bool, tmp_path: Path) -> None:
    """Tied weights are stored once, and a ViT's names on disk are not those of its modules."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16))
    model: Any = gpt if tied else ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
    model.save_pretrained(tmp_path / "hf")
    result = nmsparse("export", tmp_path / "hf", tmp_path / "a.onnx", "--format", "onnx", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["checked"]
    assert facts["difference"] < 1e-4


def test_weights_that_a_folder_lacks_are_not_made_up(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)).save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    del kept["transformer.h.0.attn.c_attn.weight"]
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    result = nmsparse("export", tmp_path, tmp_path / "a.onnx", "--format", "onnx")
    assert result.exit_code == 2
    assert "lacks weights of a GPT2LMHeadModel, such as transformer.h.0.attn.c_attn.weight" in result.output
    assert not (tmp_path / "a.onnx").exists()


def test_a_folder_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    result = nmsparse("export", tmp_path, tmp_path / "a.onnx", "--format", "onnx")
    assert result.exit_code == 2
    assert "neither run.json nor config.json" in result.output
    again = nmsparse("export", tmp_path, tmp_path / "packed", "--format", "packed")
    assert again.exit_code == 2
    (tmp_path / "run.json").write_text("{}")
    unfinished = nmsparse("export", tmp_path, tmp_path / "dense")
    assert unfinished.exit_code == 2
    assert "has not finished" in unfinished.output


@pytest.mark.parametrize("named", ['["logging"]', '["AutoModel"]', "[3]", '"x"', '["GPT2LMHeadModel"], "n_embd": "wide"'])
def test_a_configuration_that_names_no_model_is_refused_in_words(named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", "architectures": {named}}}')
    result = nmsparse("export", tmp_path, tmp_path / "a.onnx", "--format", "onnx")
    assert result.exit_code == 2, result.output
    assert "config.json" in result.output


def test_a_run_with_one_validation_example_becomes_onnx(tmp_path: Path) -> None:
    train(TrainConfig.from_dict(TINY | {"limit": 1, "length": 16}), tmp_path / "run")
    result = nmsparse("export", tmp_path / "run", tmp_path / "a.onnx", "--format", "onnx")
    assert result.exit_code == 0, result.output


def test_a_run_that_kept_no_model_is_not_told_to_resume(tmp_path: Path) -> None:
    train(TrainConfig.from_dict(TINY | {"save": False, "length": 16}), tmp_path / "run")
    result = nmsparse("export", tmp_path / "run", tmp_path / "dense")
    assert result.exit_code == 2
    assert "kept no model" in result.output


@pytest.mark.parametrize("command", ["export", "verify"])
def test_a_run_that_diverged_is_said_to_have_diverged(command: str, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError):
        train(TrainConfig.from_dict(TINY | {"lr": 1e30, "clip": 0.0, "steps": 6, "length": 16}), tmp_path / "run")
    result = nmsparse(command, tmp_path / "run", *([tmp_path / "dense"] if command == "export" else []))
    assert result.exit_code == 2
    assert "diverged, and so has no model" in result.output


def test_a_frozen_model_of_others_is_packed_by_its_pattern(tmp_path: Path) -> None:
    weight = torch.randn(16, 32)
    save_file({"layer.weight": weight * nm.functional.magnitude_mask(weight, "2:4")}, tmp_path / "model.safetensors")
    result = nmsparse("export", tmp_path / "model.safetensors", tmp_path / "packed", "--format", "packed", "--pattern", "2:4")
    assert result.exit_code == 0, result.output
    assert "1 sparse tensors" in result.output
