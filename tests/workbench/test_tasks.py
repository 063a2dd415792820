"""Tasks: windows, padding, augmentation, metrics against values worked out otherwise, and the registry."""

from __future__ import annotations

import json
import math
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from nmsparse.workbench.datasets import Images, LetterTokenizer, Pair, Sentence, Splits, Text, WordTokenizer
from nmsparse.workbench.tasks import Facts, Task, load_task, tasks
from nmsparse.workbench.tasks._images import ImageTask, random_crop, random_flip
from nmsparse.workbench.tasks._language import LanguageTask
from nmsparse.workbench.tasks._ragged import Ragged
from nmsparse.workbench.tasks._sentences import ClassificationTask, ScoreTask
from nmsparse.workbench.tasks._translation import TranslationTask

EMBEDDED = [info.name for info in tasks() if info.is_embedded]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NMSPARSE_DATA", raising=False)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def totals(task: Task, *batches: tuple[Output, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over batches, as a training loop adds them up."""
    added: dict[str, Tensor] = {}
    for output, batch in batches:
        for name, value in task.measure(output, batch).items():
            assert value.dtype in (torch.float64, torch.int64)
            added[name] = added[name] + value if name in added else value
    return added


# ---- the registry ----


def test_every_embedded_task_works_without_a_folder() -> None:
    kinds = set()
    for name in EMBEDDED:
        task = load_task(name, limit=8)
        batch = task.train.__getitems__([0, 3, 7])
        assert len(task.train) == len(task.valid) == 8
        assert all(len(tensor) == 3 for tensor in batch.values())
        assert task.name == name
        assert task.tokens(batch) > 0
        kinds.add(task.facts.kind)
    assert kinds == {"language", "images", "sentences", "translation"}


def test_listing_has_the_facts_that_users_choose_by() -> None:
    assert [info.name for info in tasks("*-mini")] == ["fashion-mini"]
    for info in tasks():
        assert info.summary
        assert info.licence
    assert len(tasks()) == 16


def test_examples_go_through_a_data_loader() -> None:
    task = load_task("shakespeare", length=16, limit=10)
    loader = DataLoader(task.train, batch_size=4, collate_fn=lambda batch: batch)
    assert [len(batch["input_ids"]) for batch in loader] == [4, 4, 2]


@pytest.mark.parametrize("info", [info for info in tasks() if not info.is_embedded], ids=lambda info: info.name)
def test_missing_folder_says_what_to_pass_and_what_is_looked_for(
    info: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmsparse.workbench.datasets._fashion.DEBIAN", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"none was given: pass --data-dir .* NMSPARSE_DATA.*Looked for there: \S+"):
        load_task(info.name)
    with pytest.raises(ValueError, match=rf"{info.name}: the data folder .* does not exist"):
        load_task(info.name, tmp_path / "absent")
    monkeypatch.setenv("NMSPARSE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{info.name} was not found in {re.escape(str(tmp_path))}\. Looked for: \S+"):
        load_task(info.name)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("shakespear", {}, "no task named 'shakespear'. Did you mean 'shakespeare'"),
        ("shakespeare:x", {}, "no task named 'shakespeare:x'"),
        ("hf:", {}, "no task named 'hf:'"),
        ("shakespeare", {"limit": 0}, "limit = 0 makes no sense"),
        ("shakespeare", {"length": -1}, "length = -1 makes no sense"),
        ("shakespeare", {"length": 1}, "length = 1 does not fit; windows have 2 .. 111,540 tokens"),
        ("shakespeare", {"length": 10**6}, "length = 1000000 does not fit"),
        ("fashion-mini", {"length": 8}, "fashion-mini is a task of images, which have no length"),
        ("questions", {"length": 3}, "length = 3 is too short"),
        ("pig-latin", {"length": 1}, "length = 1 is too short"),
    ],
)
def test_wrong_requests_get_one_sentence(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        load_task(name, **options)


# ---- language ----


def test_windows_do_not_overlap_and_labels_are_the_inputs() -> None:
    tokens = torch.arange(11, dtype=torch.uint8)
    task = LanguageTask("test", Text(Splits(tokens, tokens), 11, is_characters=True), 4, None)
    assert len(task.train) == 2
    batch = task.train.__getitems__([1, 0])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert task.tokens(batch) == 8
    assert task.facts == Facts("language", vocabulary=11, length=4)


def language_output(logits: Tensor, labels: Tensor) -> Output:
    return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


@pytest.mark.parametrize("is_characters", [True, False])
def test_language_loss_is_the_mean_over_predicted_tokens_of_all_batches(is_characters: bool) -> None:
    tokens = torch.randint(0, 7, (60,), generator=generator())
    task = LanguageTask("test", Text(Splits(tokens, tokens), 7, is_characters), 6, None)
    batches = [task.valid.__getitems__(indices) for indices in ([0, 1, 2], [3])]  # of different sizes
    logits = [torch.randn(len(batch["labels"]), 6, 7, generator=generator(1)) for batch in batches]
    outputs = [language_output(each, batch["labels"]) for each, batch in zip(logits, batches, strict=True)]
    metrics = task.summarize(totals(task, *zip(outputs, batches, strict=True)))
    together, labels = torch.cat(logits), torch.cat([batch["labels"] for batch in batches])
    expected = float(language_output(together, labels).loss)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
    assert ("bits_per_character" in metrics) == is_characters
    if is_characters:
        assert metrics["bits_per_character"] == pytest.approx(expected / math.log(2), rel=1e-6)
    assert (task.headline, task.higher_is_better, task.unit) == ("loss", False, "tokens")


def test_diverged_loss_has_an_infinite_perplexity() -> None:
    task = load_task("shakespeare", limit=1)
    batch = task.valid.__getitems__([0])
    metrics = task.summarize(totals(task, (Output(torch.tensor(1000.0), torch.zeros(1)), batch)))
    assert metrics["perplexity"] == math.inf


# ---- images ----


def image_task(**options: Any) -> ImageTask:
    pixels = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=generator())
    labels = torch.arange(20, dtype=torch.uint8) % 4
    return ImageTask("test", Splits(Images(pixels, labels), Images(pixels[:6], labels[:6])), 4, None, **options)


def test_images_are_normalised_by_the_training_set() -> None:
    task = image_task()
    batch = task.train.__getitems__(list(range(20)))
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"].mean((0, 2, 3)).abs().max() < 1e-5
    assert (batch["pixel_values"].std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    assert batch["labels"].tolist() == [0, 1, 2, 3] * 5
    assert task.facts == Facts("images", classes=4, channels=3, side=8)
    assert (task.tokens(batch), task.unit) == (20, "images")


def test_limit_does_not_change_the_normalisation() -> None:
    whole, part = load_task("fashion-mini"), load_task("fashion-mini", limit=5)
    assert torch.equal(whole.train.__getitems__([4])["pixel_values"], part.train.__getitems__([4])["pixel_values"])


def test_channel_without_variation_stays_finite() -> None:
    images = Images(torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
    batch = ImageTask("test", Splits(images, images), 1, None).train.__getitems__([0])
    assert batch["pixel_values"].tolist() == torch.zeros(1, 1, 8, 8).tolist()


def test_crop_shifts_each_image_and_fills_with_black() -> None:
    images = torch.randn(40, 2, 6, 6, generator=generator())
    fill = torch.tensor([-3.0, -4.0])
    cropped = random_crop(images, 2, fill, generator(1))
    shifts = torch.randint(5, (2, 40), generator=generator(1))
    padded = torch.cat([F.pad(images[:, c], [2] * 4, value=float(fill[c])).unsqueeze(1) for c in range(2)], dim=1)
    expected = [padded[i, :, top : top + 6, left : left + 6] for i, (top, left) in enumerate(shifts.T.tolist())]
    assert torch.equal(cropped, torch.stack(expected))
    assert len({tuple(shift) for shift in shifts.T.tolist()}) > 10


def test_flip_mirrors_about_half_of_the_images() -> None:
    images = torch.randn(200, 1, 4, 4, generator=generator())
    flipped = random_flip(images, generator(1))
    is_same = (flipped == images).flatten(1).all(1)
    is_mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert bool((is_same ^ is_mirrored).all())
    assert 70 < int(is_mirrored.sum()) < 130


def test_augmentation_draws_only_from_its_generator() -> None:
    task = image_task(margin=2, is_flipped=True)
    batch = task.train.__getitems__(list(range(20)))
    before = batch["pixel_values"].clone()
    torch.manual_seed(1)
    first = task.augment(batch, generator(5))["pixel_values"]
    torch.manual_seed(2)
    again = task.augment(batch, generator(5))["pixel_values"]
    other = task.augment(batch, generator(6))["pixel_values"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(batch["pixel_values"], before)
    assert first.shape == before.shape
    assert first.is_contiguous()


def test_black_borders_are_black_after_normalisation() -> None:
    task = image_task(margin=8)  # the image may leave the frame altogether
    batch = task.train.__getitems__(list(range(20)))
    augmented = task.augment(batch, generator())["pixel_values"]
    black = task._black.view(1, 3, 1, 1)
    assert bool((augmented == black).flatten(1).any(1).float().mean() > 0.5)
    assert bool((augmented >= black).all())


@pytest.mark.parametrize("name", ["fashion-mini", "shakespeare"])
def test_tasks_without_augmentation_return_the_batch(name: str) -> None:
    task = load_task(name, limit=3)
    batch = task.train.__getitems__([0, 1])
    augmented = task.augment(batch, generator())
    assert all(torch.equal(augmented[key], value) for key, value in batch.items())


def test_image_accuracy_counts_over_batches() -> None:
    task = image_task()
    logits = torch.eye(4)[[0, 1, 0, 0, 0, 0]] * 3
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    parts = [slice(0, 4), slice(4, 6)]
    pairs = [(Output(F.cross_entropy(logits[p], labels[p]), logits[p]), {"labels": labels[p]}) for p in parts]
    metrics = task.summarize(totals(task, *pairs))
    assert metrics["accuracy"] == pytest.approx(3 / 6)
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)
    assert (task.headline, task.higher_is_better) == ("accuracy", True)


# ---- sentences ----


def test_ragged_rows_are_padded_to_a_multiple_but_not_beyond_the_longest_allowed() -> None:
    rows = Ragged([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13]], 300)
    ids, mask = rows.padded(torch.tensor([1, 0]), fill=99, longest=32)
    assert ids.tolist() == [[4] + [99] * 7, [1, 2, 3] + [99] * 5]
    assert mask.sum(1).tolist() == [1, 3]
    assert ids.dtype == torch.int64
    assert rows.padded(torch.tensor([2]), fill=0, longest=32)[0].shape == (1, 16)
    assert rows.padded(torch.tensor([2]), fill=0, longest=9)[0].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13]]


class PairWords(WordTokenizer):
    """Words of two sentences, in BERT's arrangement."""

    def encode(self, sentences: list[Sentence], length: int) -> list[tuple[list[int], int]]:
        return [([2, 7, 3, *([8] * len((second or "").split())), 3], 3) for _, second, _ in sentences]


def test_sentence_batches_mark_padding_and_the_second_sentence() -> None:
    sentences = [Sentence("a", "b c", 1), Sentence("a", "b", 0)]
    task = ClassificationTask("test", Splits(sentences, sentences), PairWords(sentences), 6, None)
    batch = task.train.__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[2, 7, 3, 8, 8, 3], [2, 7, 3, 8, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 1, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["labels"].dtype == torch.int64
    assert task.facts.classes == 2


def test_words_that_occur_once_are_unknown() -> None:
    sentences = [Sentence("to be or not to be", None, 0), Sentence("be quick", None, 1)]
    tokenizer = WordTokenizer(sentences)
    assert tokenizer.vocabulary == 6
    assert tokenizer.encode([Sentence("to be quick", None, 0)], 10) == [([2, 5, 4, 1, 3], 5)]
    assert tokenizer.encode([Sentence("to be quick", None, 0)], 4) == [([2, 5, 4, 3], 4)]


def binary_outputs(predicted: Tensor, labels: Tensor) -> list[tuple[Output, dict[str, Tensor]]]:
    logits = F.one_hot(predicted, 2).float()
    cuts = [slice(0, 5), slice(5, None)]
    return [(Output(F.cross_entropy(logits[c], labels[c]), logits[c]), {"labels": labels[c]}) for c in cuts]


def matthews(a: Tensor, b: Tensor) -> float:
    """Matthews' correlation of two binary variables is their Pearson correlation."""
    return float(stats.pearsonr(a.double().numpy(), b.double().numpy()).statistic)


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_f1_and_matthews_agree_with_their_definitions(seed: int) -> None:
    sentences = [Sentence("a b", None, 0)]
    options = {"headline": "matthews", "also": ("accuracy", "f1")}
    task = ClassificationTask("test", Splits(sentences, sentences), WordTokenizer(sentences), 8, None, **options)
    labels = torch.randint(0, 2, (40,), generator=generator(seed))
    predicted = torch.where(torch.rand(40, generator=generator(seed + 10)) < 0.7, labels, 1 - labels)
    metrics = task.summarize(totals(task, *binary_outputs(predicted, labels)))
    hits = int(((predicted == 1) & (labels == 1)).sum())
    precision, recall = hits / int(predicted.sum()), hits / int(labels.sum())
    assert metrics["accuracy"] == pytest.approx(float((predicted == labels).double().mean()))
    assert metrics["f1"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert metrics["matthews"] == pytest.approx(matthews(predicted, labels))
    assert list(metrics)[:2] == ["loss", "matthews"]


def test_constant_predictions_have_no_correlation() -> None:
    sentences = [Sentence("a b", None, 0)]
    tokenizer = WordTokenizer(sentences)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    options = {"headline": "matthews", "also": ("f1",)}
    task = ClassificationTask("test", Splits(sentences, sentences), tokenizer, 8, None, **options)
    metrics = task.summarize(totals(task, *binary_outputs(torch.zeros(6, dtype=torch.long), labels)))
    assert metrics["matthews"] == metrics["f1"] == 0.0
    scores = ScoreTask("test", Splits(sentences, sentences), tokenizer, 8, None)
    constant = Output(torch.tensor(1.0), torch.full((6, 1), 0.1))
    assert scores.summarize(totals(scores, (constant, {"labels": labels.float()})))["pearson"] == 0.0


def test_pearson_from_sums_agrees_with_scipy() -> None:
    sentences = [Sentence("a b", None, 2.5)]
    task = ScoreTask("test", Splits(sentences, sentences), WordTokenizer(sentences), 8, None)
    scores = torch.rand(50, generator=generator()) * 5
    predicted = scores + torch.randn(50, generator=generator(1)) + 100  # far from zero: sums must keep their digits
    cuts = [slice(0, 17), slice(17, 50)]
    pairs = [(Output(F.mse_loss(predicted[c], scores[c]), predicted[c, None]), {"labels": scores[c]}) for c in cuts]
    metrics = task.summarize(totals(task, *pairs))
    expected = stats.pearsonr(predicted.double().numpy(), scores.double().numpy()).statistic
    assert metrics["pearson"] == pytest.approx(float(expected), rel=1e-9)
    assert metrics["loss"] == pytest.approx(float(F.mse_loss(predicted, scores)), rel=1e-6)
    batch = task.train.__getitems__([0])
    assert batch["labels"].dtype == torch.float32
    assert (task.facts.classes, task.headline) == (1, "pearson")


# ---- GLUE and Multi30k by name ----


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """One small folder with all sentence tasks and a translation."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
    write(tmp_path / "tokenizers/bert-base-uncased/vocab.txt", "\n".join(pieces) + "\n")
    rows = {
        "SST-2": "sentence\tlabel\na b\t1\nc\t0\n",
        "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\ta b\tb a\n0\t1\t2\ta\tc\n",
        "RTE": "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\tc\td\tnot_entailment\n",
        "CoLA": "x\t1\t\ta b\nx\t0\t*\tb\n",
        "STS-B": "index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.5\n1\ta\ta\t5\n",
    }
    for folder, content in rows.items():
        for name in ("train", "dev"):
            write(tmp_path / "glue" / folder / f"{name}.tsv", content)
    for name in ("train", "val"):
        write(tmp_path / "multi30k" / f"{name}.de", "Ein Hund.\nDie Katze.\n")
        write(tmp_path / "multi30k" / f"{name}.en", "A dog.\nThe cat is here.\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "classes", "headline", "metrics"),
    [
        ("sst2", 2, "accuracy", {"loss", "accuracy"}),
        ("mrpc", 2, "accuracy", {"loss", "accuracy", "f1"}),
        ("rte", 2, "accuracy", {"loss", "accuracy"}),
        ("cola", 2, "matthews", {"loss", "accuracy", "matthews"}),
        ("stsb", 1, "pearson", {"loss", "pearson"}),
    ],
)
def test_glue_tasks_have_their_metrics(data: Path, name: str, classes: int, headline: str, metrics: set[str]) -> None:
    task = load_task(name, data)
    batch = task.train.__getitems__([0, 1])
    logits = torch.randn(2, classes, generator=generator())
    found = task.summarize(totals(task, (Output(torch.tensor(0.5), logits), batch)))
    assert (task.facts.classes, task.headline, task.higher_is_better) == (classes, headline, True)
    assert set(found) == metrics
    assert found["loss"] == pytest.approx(0.5)
    assert (task.facts.padding, task.facts.begin, task.facts.end, task.facts.vocabulary) == (0, 2, 3, 8)
    assert batch["input_ids"][0, 0] == 2


def test_pairs_of_a_glue_task_are_marked(data: Path) -> None:
    batch = load_task("mrpc", str(data), limit=1).train.__getitems__([0])
    assert batch["input_ids"].tolist() == [[2, 4, 5, 3, 5, 4, 3, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 0]]


def test_given_vocabulary_replaces_the_folders(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine/vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "b", "a", "z"]) + "\n")
    task = load_task("sst2", data, vocabulary=tmp_path / "mine")
    assert task.facts.vocabulary == 7
    assert task.train.__getitems__([0])["input_ids"][0, :4].tolist() == [2, 5, 4, 3]


def test_multi30k_option_chooses_the_direction(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMSPARSE_DATA", str(data))
    forward, backward = load_task("multi30k"), load_task("multi30k:en-de")
    source = forward.train.__getitems__([0])["input_ids"][0]
    target = backward.train.__getitems__([0])["labels"][0]
    assert (int(source[source > 0][-1]), int(target[target > 0][-1])) == (2, 2)  # both end with the end
    assert backward.name == "multi30k:en-de"
    assert json.dumps(forward.facts.__dict__) == json.dumps(load_task("multi30k:de-en").facts.__dict__)


# ---- translation ----


def test_translation_pads_targets_with_ignored_labels() -> None:
    pairs = [Pair("ab", "bcd"), Pair("a", "zzzzzzzzzzzz")]
    task = TranslationTask("test", Splits(pairs, pairs), LetterTokenizer(), 8, None)
    batch = task.train.__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[3, 4, 2, 0, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 2]
    assert batch["labels"].tolist() == [[4, 5, 6, 2, -100, -100, -100, -100], [28] * 7 + [2]]
    assert task.tokens(batch) == 32
    assert task.facts == Facts("translation", vocabulary=29, length=8, padding=0, begin=1, end=2)


def test_translation_metrics_leave_padding_out() -> None:
    pairs = [Pair("ab", "b"), Pair("a", "bcdef")]
    task = TranslationTask("test", Splits(pairs, pairs), LetterTokenizer(), 8, None)
    found = []
    for indices in ([0], [1]):
        batch = task.train.__getitems__(indices)
        logits = F.one_hot(batch["labels"].clamp_min(0), 29).float() * 4
        logits[:, 0] = F.one_hot(torch.tensor(0), 29).float()  # the first token is wrong
        found.append((Output(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), logits), batch))
    metrics = task.summarize(totals(task, *found))
    assert metrics["accuracy"] == pytest.approx(6 / 8)
    losses = [F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") for output, batch in found]
    assert metrics["loss"] == pytest.approx(float(sum(losses)) / 8, rel=1e-6)


# ---- the Hugging Face Hub ----


def offer(monkeypatch: pytest.MonkeyPatch, **columns: list[Any]) -> None:
    rows = types.SimpleNamespace(column_names=list(columns))
    split = type("Rows", (), {"column_names": rows.column_names, "__getitem__": lambda self, name: columns[name]})()
    module = types.ModuleType("datasets")
    module.load_dataset = lambda *_: {"train": split, "validation": split}
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_data_becomes_the_task_that_its_columns_tell(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, text=["to be or not to be"] * 4)
    language = load_task("hf:some/text", length=8)
    assert (language.name, language.facts.kind, language.facts.vocabulary) == ("hf:some/text", "language", 256)
    offer(monkeypatch, sentence=["a", "b", "c"], label=[0, 2, 1])
    assert load_task("hf:three:classes", data).facts.classes == 3
    offer(monkeypatch, sentence1=["a"], sentence2=["b"], label=[2.5])
    assert load_task("hf:scores", data).headline == "pearson"
    offer(monkeypatch, translation=[{"de": "ein Hund", "en": "a dog"}])
    assert load_task("hf:pairs").facts.kind == "translation"


def test_hub_images_become_an_image_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    offer(monkeypatch, image=[Image.new("L", (4, 4), 9), Image.new("L", (4, 4), 200)], label=[0, 1])
    task = load_task("hf:pictures")
    assert task.facts == Facts("images", classes=2, channels=1, side=4)
    with pytest.raises(ValueError, match="hf:pictures is a task of images"):
        load_task("hf:pictures", length=4)
