"""Packed checkpoints through from_pretrained."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_toys import BERT, make_examples, make_model
from safetensors.torch import load_file, save_file
from toys import same

import nmsparse as nm
from nmsparse.checkpoint import convert, unpack_tensor
from nmsparse.functional import violations
from nmsparse.integrations.transformers import _quantizer, save_packed

CLASSES = {
    "bert": "AutoModelForSequenceClassification",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "mixtral": "AutoModelForCausalLM",
    "gpt_oss": "AutoModelForCausalLM",
}


def frozen(kind: str, pattern: str = "2:4") -> Any:
    model = make_model(kind)
    nm.sparsify_(model, nm.STE(pattern))
    return nm.freeze_(model).eval()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 4_000], ids=["one-file", "shards"])
def test_packed_model_loads_bit_for_bit(tmp_path: Path, kind: str, shard_bytes: int) -> None:
    model = frozen(kind)
    save_packed(model, tmp_path, pattern="2:4", shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() is (shard_bytes > 4_000)
    auto = getattr(transformers, CLASSES[kind])
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert same(loaded, model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    example = {key: value[None] for key, value in make_examples(kind)[0].items()}
    torch.testing.assert_close(loaded(**example).logits, model(**example).logits, rtol=0, atol=0)


def test_sparse_model_in_training_is_saved_as_it_would_be_frozen(tmp_path: Path) -> None:
    model = make_model("llama")
    nm.sparsify_(model, nm.SRSTE("1:4"))
    save_packed(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(loaded, nm.freeze_(model))


def test_loaded_model_is_an_ordinary_one(tmp_path: Path) -> None:
    save_packed(frozen("bert"), tmp_path / "packed", pattern="2:4")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed")
    assert not getattr(loaded, "is_quantized", False)
    assert not hasattr(loaded.config, "quantization_config")
    assert not hasattr(loaded, "hf_quantizer")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    loaded.save_pretrained(tmp_path / "dense")
    assert same(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense"), loaded)
    nm.sparsify_(loaded, nm.SRSTE("2:4"))


def test_base_model_loads_from_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    model = frozen("bert")
    save_packed(model, tmp_path, pattern="2:4")
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert same(base, model.bert)


def test_model_with_a_head_loads_from_a_base_checkpoint(tmp_path: Path) -> None:
    model = frozen("bert")
    save_packed(model.bert, tmp_path, pattern="2:4")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same(loaded.bert, model.bert)


def test_dtype_is_the_callers_choice(tmp_path: Path) -> None:
    model = frozen("t5")
    save_packed(model, tmp_path, pattern="2:4")
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).dtype == torch.float32
    half = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16)
    layer = half.encoder.block[0].layer
    assert layer[0].SelfAttention.q.weight.dtype == torch.float16
    assert layer[1].DenseReluDense.wo.weight.dtype == torch.float32  # which T5 keeps, for its range
    assert int(violations(layer[0].SelfAttention.q.weight, "2:4")) == 0


def test_bfloat16_checkpoint_takes_nine_sixteenths_and_loads_as_bfloat16(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    nm.sparsify_(model, nm.STE("2:4"))
    nm.freeze_(model)
    save_packed(model, tmp_path, pattern="2:4")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    packed = stored[f"{name}.nm_values"].nbytes + stored[f"{name}.nm_indices"].nbytes
    assert packed == model.get_parameter(name).nbytes * 9 // 16
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert same(loaded, model)


def test_folder_is_an_nmsparse_checkpoint_too(tmp_path: Path) -> None:
    model = frozen("gpt2")
    save_packed(model, tmp_path, pattern="2:4")
    assert nm.verify(tmp_path).ok
    other = make_model("gpt2", seed=1)
    assert same(nm.load(other, tmp_path), model)


def test_config_says_how_each_tensor_is_packed(tmp_path: Path) -> None:
    save_packed(frozen("gpt2"), tmp_path, pattern="2:4")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    packed = config["quantization_config"]
    assert packed["quant_method"] == "nmsparse"
    layout = packed["tensors"]["transformer.h.0.mlp.c_fc.weight"]
    assert layout == {"pattern": "2:4", "dim": 0, "shape": [16, 64], "dtype": "float32"}
    assert (tmp_path / "generation_config.json").exists()


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    model = make_model("bert")
    nm.sparsify_(model, nm.STE("2:4"))
    before = model.config.to_dict()
    save_packed(model, tmp_path)
    assert model.config.to_dict() == before


def test_compiled_model_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    model = frozen("bert")
    save_packed(torch.compile(model), tmp_path, pattern="2:4")  # pyrefly: ignore[bad-argument-type]
    assert same(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exports_load_as_what_was_exported(tmp_path: Path, kind: str) -> None:
    """A dense folder written packed, and that one dense again, without the model."""
    model = frozen(kind)
    model.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "packed", "packed", "2:4")
    convert(tmp_path / "packed", tmp_path / "dense", "dense")
    assert len(load_file(tmp_path / "packed/model.safetensors")) > len(load_file(tmp_path / "plain/model.safetensors"))
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    for folder in ("packed", "dense"):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert same(loaded, model)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]


def test_only_transformers_models_have_a_config_to_save(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a transformers model"):
        save_packed(torch.nn.Linear(4, 4), tmp_path, pattern="2:4")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def test_unknown_version_is_refused(tmp_path: Path) -> None:
    save_packed(frozen("bert"), tmp_path, pattern="2:4")
    change_config(tmp_path, version=2)
    with pytest.raises(ValueError, match="reads version 1"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"pattern": "2:4", "dim": 1, "shape": [32, 32], "dtype": "float32"}, "is packed with shape"),
        ({"pattern": "2:8", "dim": 1, "shape": [32, 16], "dtype": "float32"}, "takes 128 values"),
        ({"pattern": "2:4", "dim": 7, "shape": [32, 16], "dtype": "float32"}, "makes no sense"),
    ],
)
def test_layout_that_does_not_fit_is_refused(
    tmp_path: Path, damage: dict[str, Any], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_packed(frozen("bert"), tmp_path, pattern="2:4")
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    config = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, tensors={**config["quantization_config"]["tensors"], name: damage})
    with pytest.raises(RuntimeError, match="conversion of the weights"):  # transformers reports all errors, then raises one
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert complaint in caplog.text


def test_missing_half_of_a_weight_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_packed(frozen("bert"), tmp_path, pattern="2:4")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.encoder.layer.0.intermediate.dense.weight.nm_indices"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert "the files hold only" in caplog.text


def live_bytes() -> int:
    """Of all tensors that this process can reach."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and not item.is_meta:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


def test_dense_weights_are_never_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While weights are unpacked one after the other, those to come are on the meta device or packed."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**{**BERT, **sizes}))
    nm.sparsify_(model, nm.STE("2:4"))
    save_packed(model, tmp_path)
    del model
    gc.collect()
    before, seen = live_bytes(), []

    def watched(*args: Any) -> torch.Tensor:
        seen.append(live_bytes() - before)
        return unpack_tensor(*args)

    monkeypatch.setattr(_quantizer, "unpack_tensor", watched)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    dense = sum(parameter.nbytes for parameter in loaded.parameters())
    packed = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert len(seen) == 4 * 6 + 1
    assert dense / 2 < max(seen) <= dense + packed
