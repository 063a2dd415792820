"""Models by name: each trains on what its kind of task feeds it, converts, and refuses what does not fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.workbench.models import build_model, load_pretrained, model_info, models
from nmsparse.workbench.tasks import Facts

FACTS = {
    "language": Facts("language", vocabulary=29, length=12),
    "images": Facts("images", classes=10, channels=3, side=32),
    "sentences": Facts("sentences", vocabulary=31, length=12, classes=3, padding=0, begin=1, end=2),
    "regression": Facts("sentences", vocabulary=31, length=12, classes=1, padding=0, begin=1, end=2),
    "translation": Facts("translation", vocabulary=31, length=12, padding=0, begin=1, end=2),
}
SMALLER: dict[str, Any] = {"width": 32, "layers": 1, "heads": 2}
CASES = [(info.name, kind) for info in models() for kind, facts in FACTS.items() if facts.kind in info.kinds]


def sizes(name: str) -> dict[str, Any]:
    """Sizes below the defaults, for tests."""
    return {"width": 8} if set(model_info(name).defaults) == {"width"} else SMALLER


def build(name: str, facts: Facts, **changes: Any) -> Any:
    torch.manual_seed(0)
    return build_model(name, facts, **{**sizes(name), **changes})


def batch(facts: Facts, size: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, max(facts.vocabulary, 4), (size, max(facts.length, 1)), generator=generator)
    if facts.kind == "language":
        return {"input_ids": tokens, "labels": tokens}
    classes = torch.arange(size) % max(facts.classes, 1)
    if facts.kind == "images":
        pixels = torch.randn(size, facts.channels, facts.side, facts.side, generator=generator)
        return {"pixel_values": pixels, "labels": classes}
    labels = torch.rand(size, generator=generator) if facts.classes == 1 else classes
    tokens[0, -3:] = facts.padding
    mask = (tokens != facts.padding).long()
    if facts.kind == "sentences":
        return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens), "labels": labels}
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---- they run ----


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_model_learns_one_batch_of_its_kind(name: str, kind: str) -> None:
    facts = FACTS[kind]
    model, examples = build(name, facts), batch(facts)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(16):
        outputs = model(**examples)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    width = facts.classes or facts.vocabulary
    assert outputs.logits.shape == ((4, facts.length, width) if facts.kind in ("language", "translation") else (4, width))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize("name", [info.name for info in models()])
def test_training_reaches_every_parameter(name: str) -> None:
    facts = next(facts for facts in FACTS.values() if facts.kind in model_info(name).kinds)
    model = build(name, facts)
    model(**batch(facts)).loss.backward()
    unreached = [key for key, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert unreached == []


def test_the_same_seed_builds_the_same_model() -> None:
    one, other = build("vit", FACTS["images"]), build("vit", FACTS["images"])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_there_is_no_dropout_unless_asked_for(name: str, kind: str) -> None:
    facts = FACTS[kind]
    if "dropout" in model_info(name).defaults:
        noisy = build(name, facts, dropout=0.5).train()
        assert not torch.equal(noisy(**batch(facts)).logits, noisy(**batch(facts)).logits)
    model = build(name, facts).train()
    assert torch.equal(model(**batch(facts)).logits, model(**batch(facts)).logits)


@pytest.mark.parametrize(("side", "patch"), [(28, 4), (32, 4), (64, 8), (224, 16), (14, 2), (7, 1)])
def test_patches_fit_the_image(side: int, patch: int) -> None:
    facts = Facts("images", classes=2, channels=1, side=side)
    assert build("vit", facts).config.patch_size == patch


def test_sizes_are_taken_and_defaults_are_multiples_of_16() -> None:
    assert all(info.defaults["width"] % 16 == 0 for info in models())
    config = build("gpt2", FACTS["language"], width=48, layers=3, heads=6).config
    assert (config.n_embd, config.n_layer, config.n_head, config.vocab_size) == (48, 3, 6, 29)
    assert parameters(build("resnet32", FACTS["images"], width=4)) < parameters(build("resnet32", FACTS["images"], width=8))


# ---- the CIFAR ResNets ----


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_173_962), ("resnet32", 464_154)])
def test_cifar_resnets_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert parameters(build_model(name, FACTS["images"])) == count


def test_shortcuts_of_resnet32_copy_pixels_and_pad_channels() -> None:
    model = build("resnet32", FACTS["images"])
    shortcut = model.stages[1][0].shortcut
    x = torch.randn(2, 8, 6, 6)
    expected = torch.zeros(2, 16, 3, 3)
    expected[:, 4:12] = x[:, :, ::2, ::2]
    assert torch.equal(shortcut(x), expected)
    assert parameters(shortcut) == 0


def test_resnets_have_as_many_layers_as_their_name_says() -> None:
    for name, layers in (("resnet18", 18), ("resnet32", 32)):
        model = build(name, FACTS["images"])
        weighted = [
            m for m in model.modules() if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1))
        ]
        assert len(weighted) == layers


def test_convolutions_keep_the_size_of_activations_at_the_start() -> None:
    torch.manual_seed(0)
    weight = build_model("resnet18", FACTS["images"]).stages[2][1].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)


# ---- they convert ----


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_layers_are_found_and_the_output_head_stays_dense(name: str, kind: str) -> None:
    info, model = model_info(name), build(name, FACTS[kind])
    run = nm.sparsify_(model, nm.SRSTE("2:4"), targets=info.targets, exclude=list(info.exclude) or None)
    sparse = {key: m for key, m in model.named_modules() if isinstance(m, nm.nn.SparseMixin)}
    assert len(sparse) >= 4
    assert not any(key.split(".")[0] in ("lm_head", "classifier") for key in sparse)
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1), total_steps=4)
    model(**batch(FACTS[kind])).loss.backward()
    assert all(module.weight.grad is not None for module in sparse.values())


# ---- what does not fit ----


@pytest.mark.parametrize(
    ("name", "kind", "fitting"),
    [
        ("vit", "language", "gpt2, llama"),
        ("gpt2", "images", "vit, deit, resnet, resnet18, resnet32"),
        ("bert", "translation", "marian, t5"),
    ],
)
def test_a_model_of_another_kind_is_refused_and_those_that_fit_are_named(name: str, kind: str, fitting: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is a model for .*; models for {kind} are: {fitting}\."):
        build_model(name, FACTS[kind])


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"there is no model named 'gtp2'\. Did you mean 'gpt2'\? There are: gpt2, llama"):
        build_model("gtp2", FACTS["language"])


@pytest.mark.parametrize(
    ("name", "kind", "given", "message"),
    [
        ("gpt2", "language", {"width": 30, "heads": 4}, "gpt2: width 30 is not a multiple of 4 heads"),
        ("gpt2", "language", {"width": 0}, "width counts from 1, got 0"),
        ("gpt2", "language", {"layers": 1.5}, "layers counts from 1, got 1.5"),
        ("gpt2", "language", {"dropout": 1.0}, "dropout is a share from 0 to below 1, got 1.0"),
        ("llama", "language", {"width": 12, "heads": 4}, "width / heads must be even, got 12 / 4 = 3"),
        ("resnet18", "images", {"layers": 4}, "resnet18 has no layers to choose; its sizes are: width"),
        ("resnet32", "images", {"heads": 4}, "resnet32 has no heads to choose; its sizes are: width"),
        ("resnet", "images", {"dropout": 0.1}, "resnet has no dropout to choose; its sizes are: width"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(name: str, kind: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, FACTS[kind], **given)


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("gpt2", Facts("language", length=8), "a model for language needs vocabulary of at least 1, the task says 0"),
        ("vit", Facts("images", classes=1, channels=3, side=8), "needs classes of at least 2, the task says 1"),
        ("bert", Facts("sentences", 9, 8, 2, padding=9), "the padding token 9 is not among the task's 9 tokens"),
    ],
)
def test_facts_that_make_no_sense_are_refused(name: str, facts: Facts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, facts)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "nmsparse\[workbench\]"'):
        build_model("gpt2", FACTS["language"])
    assert isinstance(build("resnet32", FACTS["images"]), nn.Module)  # ours need no transformers


# ---- from a folder ----


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "language"), ("vit", "images"), ("bert", "sentences"), ("bert", "regression"), ("t5", "translation")],
)
def test_a_saved_model_comes_back_for_fine_tuning(name: str, kind: str, tmp_path: Path) -> None:
    facts = FACTS[kind]
    model = build(name, facts).eval()
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, facts).eval()
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(loaded(**batch(facts)).logits, model(**batch(facts)).logits)


def test_a_head_for_other_classes_is_made_anew(tmp_path: Path) -> None:
    model = build("bert", FACTS["sentences"])
    model.save_pretrained(tmp_path)
    loaded: Any = load_pretrained(tmp_path, FACTS["regression"])
    assert loaded.classifier.weight.shape == (1, 32)
    assert torch.equal(loaded.bert.pooler.dense.weight, model.bert.pooler.dense.weight)
    assert loaded(**batch(FACTS["regression"])).loss.isfinite()


def test_checkpoint_in_16_bit_trains_in_32(tmp_path: Path) -> None:
    build("bert", FACTS["sentences"]).half().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_pretrained(tmp_path, FACTS["sentences"]).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "kind", "facts", "message"),
    [
        ("gpt2", "language", Facts("language", 30, 12), "the task has 30 tokens, the model 29"),
        ("gpt2", "language", Facts("language", 29, 13), "the task's sequences have 13 tokens, the model takes 12"),
        ("bert", "sentences", FACTS["language"], "is a BertForSequenceClassification, which does not predict the next token"),
        ("vit", "images", Facts("images", classes=10, channels=3, side=28), "images are 28 pixels wide, the model's 32"),
        ("vit", "images", Facts("images", classes=10, channels=1, side=32), "images have 1 channels, the model's 3"),
        ("gpt2", "language", FACTS["images"], "cannot be read as a model for images"),
    ],
)
def test_a_saved_model_that_cannot_take_the_task_is_refused(
    name: str, kind: str, facts: Facts, message: str, tmp_path: Path
) -> None:
    build(name, FACTS[kind]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path, facts)


def test_folders_without_a_configuration_and_packed_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json; give a folder that save_pretrained"):
        load_pretrained(tmp_path, FACTS["language"])
    model = build("llama", FACTS["language"])
    model.config.save_pretrained(tmp_path)
    nm.sparsify_(model, nm.STE("2:4"))
    nm.save(model, tmp_path, "packed")
    with pytest.raises(ValueError, match=r"holds packed weights, which transformers does not read; write it as dense first"):
        load_pretrained(tmp_path, FACTS["language"])
    nm.save(model, tmp_path, "dense")
    loaded: Any = load_pretrained(tmp_path, FACTS["language"])
    assert nm.functional.violations(loaded.model.layers[0].mlp.up_proj.weight, "2:4") == 0
