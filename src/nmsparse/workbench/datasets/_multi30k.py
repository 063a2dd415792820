"""Multi30k (Elliott et al., 2016): captions of images and their translations, one a line, one file for each language."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from nmsparse.workbench.datasets._cache import cached
from nmsparse.workbench.datasets._files import Source, look_up, missing
from nmsparse.workbench.datasets._splits import Pair, Splits, bytes_tensor
from nmsparse.workbench.datasets._tokenizers import BytePairTokenizer, byte_pairs_from_json, train_byte_pairs

BPE_ENTRIES = 8_000
FOLDERS = ("multi30k", "multi30k/data/task1/raw", "multi30k-dataset/data/task1/raw", "")
ARCHIVES = {"train": "training.tar.gz", "val": "validation.tar.gz"}


def multi30k(root: Path | None, languages: str) -> tuple[Splits[list[Pair]], BytePairTokenizer]:
    """29,000 training and 1,014 validation pairs of "de-en", "en-fr" and so on, and one BPE for both languages."""
    if not re.fullmatch(r"[a-z]{2}-[a-z]{2}", languages):
        raise ValueError(f"multi30k:{languages} does not name two languages; write multi30k:de-en, multi30k:en-fr, ...")
    names = languages.split("-")
    train, valid = (_sources(root, split, names) for split in ("train", "val"))
    pairs = Splits(_pairs(train), _pairs(valid))
    return pairs, joint_tokenizer(f"multi30k-{languages}", train, pairs.train)


def joint_tokenizer(name: str, sources: list[Source], pairs: list[Pair]) -> BytePairTokenizer:
    """A BPE trained on both sides of the pairs, kept in the cache."""

    def build() -> dict[str, Tensor]:
        tokenizer = train_byte_pairs([text for pair in pairs for text in pair], BPE_ENTRIES)
        return {"tokenizer": bytes_tensor(tokenizer.to_json().encode())}

    saved = cached(f"{name}-bpe", sources, build, extra=str(BPE_ENTRIES))["tokenizer"]
    return byte_pairs_from_json(bytes(saved.tolist()).decode())


def _sources(root: Path | None, split: str, languages: list[str]) -> list[Source]:
    archives = [f"{folder}/{ARCHIVES[split]}".lstrip("/") for folder in FOLDERS]
    if found := look_up(root, [*FOLDERS, *archives], [f"{split}.{language}" for language in languages]):
        return found
    wanted = ", ".join(f"{split}.{language}" for split in ARCHIVES for language in languages)
    raise missing("multi30k", root, f"{wanted} (plain, .xz or .gz) in multi30k/, or training.tar.gz and validation.tar.gz there")


def _pairs(sources: list[Source]) -> list[Pair]:
    source, target = (file.text().rstrip("\n").split("\n") for file in sources)
    if len(source) != len(target):
        raise ValueError(
            f"{sources[0].where} has {len(source):,} lines and {sources[1].where} has {len(target):,}: "
            "line n of one should translate line n of the other, so one of them is incomplete."
        )
    return [Pair(*pair) for pair in zip(source, target, strict=True)]
