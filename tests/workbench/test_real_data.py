"""The real data sets, where somebody has them: sizes and splits as their authors give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nmsparse.workbench import datasets
from nmsparse.workbench.tasks import load_task


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = os.environ.get("NMSPARSE_DATA")
    if not folder:
        pytest.skip("set NMSPARSE_DATA to the folder with the data sets")
    monkeypatch.setenv("NMSPARSE_CACHE", str(tmp_path))
    return Path(folder)


def test_cifar10_has_its_known_size_and_mean(root: Path) -> None:
    found = datasets.cifar10(root)
    assert found.train.pixels.shape == (50_000, 3, 32, 32)
    assert found.valid.pixels.shape == (10_000, 3, 32, 32)
    assert torch.bincount(found.train.labels).tolist() == [5_000] * 10
    mean = torch.stack([channel.double().mean() / 255 for channel in found.train.pixels.unbind(1)])
    assert torch.allclose(mean, torch.tensor([0.4914, 0.4822, 0.4465]).double(), atol=5e-5)
    assert found.train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile


def test_enwik8_has_its_usual_split(root: Path) -> None:
    text = datasets.enwik8(root)
    assert (len(text.splits.train), len(text.splits.valid)) == (90_000_000, 5_000_000)
    assert bytes(text.splits.train[:10].tolist()) == b"<mediawiki"


def test_wikitext2_has_its_known_tokens(root: Path) -> None:
    text = datasets.wikitext2(root)
    assert (len(text.splits.train), len(text.splits.valid), text.vocabulary) == (2_088_628, 217_646, 33_278)


def test_gpt2_tokens_are_gpt2s(root: Path) -> None:
    task = load_task("wikitext2-bpe", root, length=4, limit=1)
    assert task.facts.vocabulary == 50_257
    assert task.train.__getitems__([0])["input_ids"].tolist() == [[220, 198, 796, 569]]  # " ", "\n", " =", " V"


@pytest.mark.parametrize("languages", ["de-en", "en-fr"])
def test_multi30k_has_its_known_pairs(root: Path, languages: str) -> None:
    pairs, tokenizer = datasets.multi30k(root, languages)
    assert (len(pairs.train), len(pairs.valid), tokenizer.vocabulary) == (29_000, 1_014, 8_000)


@pytest.mark.parametrize(
    ("name", "train", "valid"),
    [("sst2", 67_349, 872), ("mrpc", 3_668, 408), ("cola", 8_551, 1_043), ("rte", 2_490, 277), ("stsb", 5_749, 1_500)],
)
def test_glue_has_its_known_sizes(root: Path, name: str, train: int, valid: int) -> None:
    found = datasets.glue(name, root)
    assert (len(found.train), len(found.valid)) == (train, valid)
    assert load_task(name, root, limit=4).facts.vocabulary == 30_522
