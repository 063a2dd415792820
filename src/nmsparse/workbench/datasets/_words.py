"""The simplest tokenizers, for the toy tasks: a word, or a letter, is a token."""

from __future__ import annotations

from collections import Counter

from nmsparse.workbench.datasets._splits import Sentence


class WordTokenizer:
    """Words that occur at least twice in the training sentences; all others are one unknown word."""

    padding, unknown, begin, end = range(4)
    FEWEST = 2

    def __init__(self, sentences: list[Sentence]) -> None:
        counts = Counter(word for sentence in sentences for word in sentence.first.split())
        known = sorted(word for word, count in counts.items() if count >= self.FEWEST)
        self._ids = {word: index for index, word in enumerate(known, start=4)}
        self.vocabulary = 4 + len(known)

    def encode(self, sentences: list[Sentence], length: int) -> list[tuple[list[int], int]]:
        """For each example its ids, cut to fit, and the position where a second sentence would start: after the end."""
        words = [sentence.first.split()[: length - 2] for sentence in sentences]
        ids = [[self.begin, *(self._ids.get(word, self.unknown) for word in line), self.end] for line in words]
        return [(line, len(line)) for line in ids]


class LetterTokenizer:
    """The letters a to z."""

    padding, begin, end = range(3)
    vocabulary = 3 + 26

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [[3 + ord(letter) - ord("a") for letter in text] for text in texts]
