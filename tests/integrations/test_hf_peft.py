"""LoRA on a frozen sparse model, and what merging does to zeros."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_toys import make_arguments, make_examples, make_model
from peft import LoraConfig, get_peft_model
from torch import nn
from toys import same
from transformers import Trainer

import nmsparse as nm
from nmsparse.functional import magnitude_mask, violations
from nmsparse.integrations.transformers import SparsityCallback, merge_keeping_zeros
from nmsparse.nn import effective_weight

SUFFIXES = ["q_proj", "v_proj", "down_proj"]


def frozen_base(kind: str = "llama") -> Any:
    model = make_model(kind)
    nm.sparsify_(model, nm.STE("2:4"))
    return nm.freeze_(model)


def with_lora(model: Any, suffixes: list[str] | None = None, **options: Any) -> Any:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules=suffixes or SUFFIXES, **options))


def disturb(model: Any) -> Any:
    """Every trainable weight away from where it started, as training would have it."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def train(model: Any, folder: Path, kind: str = "llama") -> None:
    Trainer(model, make_arguments(folder), train_dataset=make_examples(kind)).train()


@pytest.mark.parametrize(("kind", "suffixes"), [("llama", SUFFIXES), ("gpt2", ["c_attn", "c_fc"])])
def test_base_weights_keep_their_zeros_through_training(tmp_path: Path, kind: str, suffixes: list[str]) -> None:
    base = frozen_base(kind)
    before = copy.deepcopy(base)
    model = with_lora(base, suffixes, fan_in_fan_out=kind == "gpt2")
    adapters = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    train(model, tmp_path, kind)
    trained = dict(model.named_parameters())
    assert all(not torch.equal(adapters[name], trained[name]) for name in adapters)
    assert same(model.unload(), before)


def test_merging_destroys_zeros(tmp_path: Path) -> None:
    model = with_lora(frozen_base())
    train(model, tmp_path)
    merged = model.merge_and_unload()
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert int(violations(weight, "2:4")) > 0


def test_merge_keeping_zeros_obeys_the_pattern_and_keeps_the_rest(tmp_path: Path) -> None:
    base = frozen_base()
    zeros = {name: parameter == 0 for name, parameter in base.named_parameters()}
    model = with_lora(base)
    train(model, tmp_path)
    dense = copy.deepcopy(model).merge_and_unload()
    merged = merge_keeping_zeros(model)
    assert type(merged) is type(dense)
    for (name, sparse), whole in zip(merged.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(sparse, whole.masked_fill(zeros[name], 0)), name
    assert int(violations(merged.model.layers[0].mlp.down_proj.weight, "2:4")) == 0


def test_merge_takes_peft_models_only() -> None:
    with pytest.raises(TypeError, match="PEFT model"):
        merge_keeping_zeros(frozen_base())


def test_merge_refuses_what_is_merged_already_and_leaves_it_alone() -> None:
    model = disturb(with_lora(frozen_base()))
    model.merge_adapter()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: adapter default is merged .* base and the adapter anew"):
        merge_keeping_zeros(model)
    assert same(model, before)


def test_merge_refuses_a_base_that_is_not_frozen() -> None:
    model = make_model("llama")
    nm.sparsify_(model, nm.STE("2:4"))
    adapted = disturb(with_lora(model))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: is still being trained sparse.*nm\.freeze_"):
        merge_keeping_zeros(adapted)
    merged = merge_keeping_zeros(nm.freeze_(adapted))  # the remedy that it names
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    assert int(violations(weight, "2:4")) == 0


@pytest.mark.parametrize("whole", ["o_proj", "mlp"])
def test_merge_keeps_zeros_of_modules_trained_whole(whole: str) -> None:
    base = frozen_base()
    zeros = {name: parameter == 0 for name, parameter in base.named_parameters()}
    model = disturb(with_lora(base, ["q_proj"], modules_to_save=[whole]))
    dense = copy.deepcopy(model).merge_and_unload()
    merged = merge_keeping_zeros(model)
    for (name, sparse), trained in zip(merged.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(sparse, trained.masked_fill(zeros[name], 0)), name


def test_merge_leaves_what_has_no_pattern_as_it_was_trained() -> None:
    """Zeros that are where training starts and no pattern: a new head, rows of an embedding."""
    base = frozen_base()
    base.lm_head.weight.data.zero_()
    base.model.embed_tokens.weight.data[0] = 0
    model = disturb(with_lora(base, ["q_proj"], modules_to_save=["lm_head", "embed_tokens"]))
    dense = copy.deepcopy(model).merge_and_unload()
    merged = merge_keeping_zeros(model)
    assert same(merged.lm_head, dense.lm_head)
    assert same(merged.model.embed_tokens, dense.model.embed_tokens)


def test_merge_leaves_trained_biases_alone() -> None:
    model = disturb(with_lora(frozen_base("gpt2"), ["c_attn"], fan_in_fan_out=True, bias="all"))
    layer = model.get_base_model().transformer.h[0].attn.c_attn.base_layer
    layer.bias.data[0] = 0
    trained = layer.bias.detach().clone()
    assert torch.equal(merge_keeping_zeros(model).transformer.h[0].attn.c_attn.bias, trained)


def test_merge_beside_tokens_trained_alone() -> None:
    model = disturb(with_lora(frozen_base(), ["q_proj"], trainable_token_indices=[1, 2]))
    dense = copy.deepcopy(model).merge_and_unload()
    merged = merge_keeping_zeros(model)
    assert torch.equal(merged.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert int(violations(merged.model.layers[0].self_attn.q_proj.weight, "2:4")) == 0


@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["gate_up_proj", "down_proj"]])
def test_merge_keeps_zeros_of_expert_parameters(parameters: list[str]) -> None:
    """They are dense after ``sparsify_``, but may have been pruned elsewhere."""
    base = frozen_base("mixtral")
    experts = base.model.layers[0].mlp.experts
    for name in parameters:
        weight = getattr(experts, name)
        weight.data *= magnitude_mask(weight, "2:4")
    zeros = {name: parameter == 0 for name, parameter in base.named_parameters()}
    model = disturb(with_lora(base, ["q_proj"], target_parameters=[f"mlp.experts.{name}" for name in parameters]))
    dense = copy.deepcopy(model).merge_and_unload()
    merged = merge_keeping_zeros(model)
    for (name, sparse), whole in zip(merged.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(sparse, whole.masked_fill(zeros[name], 0)), name
    for name in parameters:
        assert int(violations(getattr(merged.model.layers[0].mlp.experts, name), "2:4")) == 0


def test_merge_refuses_a_quantized_base() -> None:
    model = with_lora(frozen_base(), ["q_proj"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(128, 1, dtype=torch.uint8), requires_grad=False)  # as bitsandbytes holds 4 bit
    with pytest.raises(ValueError, match=r"self_attn\.q_proj\.weight: is quantized \(torch\.uint8\)"):
        merge_keeping_zeros(model)


def test_adapter_on_a_sparse_layer_sees_the_pruned_weight() -> None:
    """Adapters may also sit on layers that are still sparse modules: the product is that of the pruned weight."""
    model = make_model("llama")
    nm.sparsify_(model, nm.STE("2:4"))
    adapted = with_lora(model).eval()
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), x @ effective_weight(layer.base_layer).T)


def test_adapters_are_left_out_of_a_sweep_and_frozen_bases_say_why(tmp_path: Path) -> None:
    model = with_lora(make_model("llama"))
    with pytest.raises(ValueError, match=r"no layer .* can be made sparse .*part of a PEFT adapter"):
        SparsityCallback(nm.SRSTE("2:4"))._convert(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    assert not any("lora_" in name for name in run.layers)
    assert any(name.endswith("q_proj.base_layer") for name in run.layers)
    reasons = [why for name, why in run.skipped.items() if "lora_A" in name]
    assert len(reasons) == len(SUFFIXES)
    assert all("PEFT adapter" in why for why in reasons)
