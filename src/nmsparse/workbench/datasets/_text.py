"""Long texts: enwik8 (M. Mahoney) and WikiText-2 (Merity et al., 2016), as bytes, as words, or by GPT-2's BPE."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from nmsparse.workbench.datasets._cache import cached
from nmsparse.workbench.datasets._files import Source, look_up, missing
from nmsparse.workbench.datasets._splits import Splits, Text, bytes_tensor, smallest_type
from nmsparse.workbench.datasets._tokenizers import BytePairTokenizer, gpt2_tokenizer

ENWIK8_BYTES = 100_000_000
ENWIK8_LOOKED_FOR = "enwik8/enwik8 or enwik8 (plain, .xz, .gz or .zip)"
UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
WIKITEXT_PLACES = ("wikitext2", "wikitext-2", "wikitext-2-raw", "wikitext-2-v1.zip", "wikitext-2-raw-v1.zip", "")
WIKITEXT_WORDS = ("wikitext2/{}.txt", "wiki.{}.tokens")
WIKITEXT_RAW = ("wikitext2/{}_raw.txt", "wiki.{}.raw")
WIKITEXT_LOOKED_FOR = (
    "wikitext2/train.txt and valid.txt (plain, .xz or .gz), or wiki.train.tokens and wiki.valid.tokens, or wiki.train.raw and "
    "wiki.valid.raw, in wikitext2/, wikitext-2/, wikitext-2-raw/ or in wikitext-2-v1.zip or wikitext-2-raw-v1.zip"
)


def enwik8(root: Path | None) -> Text:
    """The first 10^8 bytes of an English Wikipedia dump, a token a byte: 90 M for training, 5 M for validation."""
    train, valid = _enwik8_parts(_enwik8_source("enwik8", root))
    return Text(Splits(bytes_tensor(train), bytes_tensor(valid)), 256, is_characters=True)


def enwik8_bpe(root: Path | None) -> Text:
    """The same bytes by GPT-2's BPE, kept in the cache because it takes a minute."""
    source, tokenizer = _enwik8_source("enwik8-bpe", root), gpt2_tokenizer("enwik8-bpe", root)

    def build() -> dict[str, Tensor]:
        # a split may cut a character in two; the half is left out
        parts = [part.decode("utf-8", errors="ignore") for part in _enwik8_parts(source)]
        return {split: tokenizer.encode_long(text) for split, text in zip(("train", "valid"), parts, strict=True)}

    return _by_bpe("enwik8-bpe", [source], tokenizer, build)


def wikitext2(root: Path | None) -> Text:
    """Words as they are separated by spaces, one <eos> a line; the vocabulary is that of the training part."""
    sources = _wikitext_sources("wikitext2", root, WIKITEXT_WORDS)
    ids: dict[str, int] = {}
    train = [ids.setdefault(word, len(ids)) for word in _words(sources.train)]
    unknown = ids.setdefault(UNKNOWN, len(ids))
    valid = [ids.get(word, unknown) for word in _words(sources.valid)]
    kind = smallest_type(len(ids))
    return Text(Splits(torch.tensor(train, dtype=kind), torch.tensor(valid, dtype=kind)), len(ids), is_characters=False)


def wikitext2_bpe(root: Path | None) -> Text:
    """WikiText-2 by GPT-2's BPE: the raw text where it is there, else the text in which rare words read <unk>."""
    sources = _wikitext_sources("wikitext2-bpe", root, (*WIKITEXT_RAW, *WIKITEXT_WORDS))
    tokenizer = gpt2_tokenizer("wikitext2-bpe", root)

    def build() -> dict[str, Tensor]:
        return {"train": tokenizer.encode_long(sources.train.text()), "valid": tokenizer.encode_long(sources.valid.text())}

    return _by_bpe("wikitext2-bpe", [sources.train, sources.valid], tokenizer, build)


def text_bytes(train: str, valid: str) -> Text:
    """Any text, a token a byte of its UTF-8."""
    return Text(Splits(bytes_tensor(train.encode()), bytes_tensor(valid.encode())), 256, is_characters=True)


def _enwik8_source(task: str, root: Path | None) -> Source:
    found = look_up(root, ("enwik8", "enwik8/enwik8.zip", "", "enwik8.zip"), ["enwik8"])
    if found is None:
        raise missing(task, root, ENWIK8_LOOKED_FOR)
    return found[0]


def _enwik8_parts(source: Source) -> tuple[bytes, bytes]:
    """Training and validation bytes of the usual split, 90 : 5 : 5; the last part is the test set."""
    data = source.read()
    if len(data) != ENWIK8_BYTES:
        raise ValueError(f"{source.where} holds {len(data):,} bytes; enwik8 has {ENWIK8_BYTES:,}.")
    twentieth = ENWIK8_BYTES // 20
    return data[: 18 * twentieth], data[18 * twentieth : 19 * twentieth]


def _wikitext_sources(task: str, root: Path | None, forms: tuple[str, ...]) -> Splits[Source]:
    for form in forms:
        if found := look_up(root, WIKITEXT_PLACES, [form.format(split) for split in ("train", "valid")]):
            return Splits(*found)
    raise missing(task, root, WIKITEXT_LOOKED_FOR)


def _words(source: Source) -> Iterable[str]:
    for line in source.text().removesuffix("\n").split("\n"):
        yield from line.split()
        yield END_OF_LINE


def _by_bpe(name: str, sources: list[Source], tokenizer: BytePairTokenizer, build: Callable[[], dict[str, Tensor]]) -> Text:
    found = cached(name, sources, build, extra=tokenizer.digest)
    return Text(Splits(found["train"], found["valid"]), tokenizer.vocabulary, is_characters=False)
