"""What ships inside the package: tiny Shakespeare, a part of Fashion-MNIST, and two toy tasks made of Shakespeare's words."""

from __future__ import annotations

import hashlib
import lzma
import re
from importlib.resources import files
from itertools import takewhile
from typing import TypeVar

import torch

from nmsparse.workbench.datasets._splits import Images, Pair, Sentence, Splits, Text, bytes_tensor

T = TypeVar("T")
FASHION_TRAIN, FASHION_VALID, FASHION_SIDE = 5_000, 1_000, 28
FEWEST_WORDS, MOST_WORDS = 3, 32


def shakespeare() -> Text:
    """Tiny Shakespeare by characters: 1,115,394 of them, 65 different ones; the last tenth is for validation."""
    characters = bytes_tensor(_shakespeare().encode("ascii"))
    used = torch.unique(characters)
    ids = torch.empty(256, dtype=torch.uint8)
    ids[used.long()] = torch.arange(len(used), dtype=torch.uint8)
    tokens = ids[characters.long()]
    cut = len(tokens) * 9 // 10
    return Text(Splits(tokens[:cut].clone(), tokens[cut:].clone()), len(used), is_characters=True)


def fashion_mini() -> Splits[Images]:
    """Fashion-MNIST's first 500 training and first 100 test images of each of the 10 classes."""
    data = bytes_tensor(lzma.decompress(_bytes("fashion-mini.xz")))
    counts = (FASHION_TRAIN, FASHION_VALID)
    pixels = FASHION_SIDE * FASHION_SIDE
    train_labels, valid_labels, train, valid = data.split([*counts, *(count * pixels for count in counts)])
    shape = (-1, 1, FASHION_SIDE, FASHION_SIDE)
    return Splits(Images(train.view(shape), train_labels), Images(valid.view(shape), valid_labels))


def questions() -> Splits[list[Sentence]]:
    """A toy task: sentences of Shakespeare without their last mark; was it a question (1) or a statement (0)?

    All questions of 3 to 32 words, and as many statements. The last tenth of the (shuffled) sentences is for validation.
    """
    found: dict[str, int] = {}
    for speech in _speeches():
        for body, mark in re.findall(r"([^.?!]+)([.?!])", speech):
            words = re.findall(r"[a-z]+(?:'[a-z]+)*", body.lower())
            if FEWEST_WORDS <= len(words) <= MOST_WORDS and mark != "!":
                found.setdefault(" ".join(words), int(mark == "?"))
    asked = [sentence for sentence in _shuffled(found) if found[sentence]]
    stated = [sentence for sentence in _shuffled(found) if not found[sentence]][: len(asked)]
    # in the order by which statements were chosen, the last ones would all be questions
    mixed = _shuffled([*asked, *stated], salt="mixed")
    return _last_tenth([Sentence(sentence, None, found[sentence]) for sentence in mixed])


def pig_latin() -> Splits[list[Pair]]:
    """A toy task: each word of Shakespeare's and its form in Pig Latin, the last tenth of the (shuffled) words for validation."""
    words = set(re.findall(r"[a-z]+", _shakespeare().lower()))
    return _last_tenth([Pair(word, to_pig_latin(word)) for word in _shuffled(words)])


def to_pig_latin(word: str) -> str:
    """The consonants before the first vowel go to the end, and "ay" follows: string -> ingstray, apple -> appleay."""
    start = "".join(takewhile(lambda letter: letter not in "aeiou", word))
    return word[len(start) :] + start + "ay"


def _speeches() -> list[str]:
    """What is said, without the names of who says it: blocks of the form "NAME:", then lines."""
    blocks = (block.partition(":\n") for block in _shakespeare().split("\n\n"))
    return [speech for _, _, speech in blocks if speech]


def _shakespeare() -> str:
    return lzma.decompress(_bytes("tinyshakespeare.txt.xz")).decode("ascii")


def _bytes(name: str) -> bytes:
    return files("nmsparse.workbench").joinpath("data", name).read_bytes()


def _shuffled(words: dict[str, int] | set[str] | list[str], salt: str = "") -> list[str]:
    """An order without meaning that every version of Python agrees on; another one for another salt."""
    return sorted(words, key=lambda word: hashlib.sha256((salt + word).encode()).digest())


def _last_tenth(examples: list[T]) -> Splits[list[T]]:
    cut = len(examples) * 9 // 10
    return Splits(examples[:cut], examples[cut:])
