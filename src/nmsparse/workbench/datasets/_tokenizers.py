"""Tokenizers of the `tokenizers` package: GPT-2's BPE and BERT's WordPiece from their files, and a BPE trained here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmsparse.workbench.datasets._files import missing
from nmsparse.workbench.datasets._splits import Sentence
from nmsparse.workbench.extras import package

PIECE = 1 << 16
"""Characters of a long text that are tokenised at once; one huge string would take a hundred times its size in memory."""
SAFE_CUT = re.compile(r"(?<=\S)(?=[ \n]\S)")
"""GPT-2's pre-tokeniser always splits before a single space or line break between two words: cutting there changes no token."""
SPECIAL = ("[PAD]", "[BEGIN]", "[END]")


class BytePairTokenizer:
    """A byte-level BPE: any text has tokens, and no token is unknown."""

    padding, begin, end = range(len(SPECIAL))

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary: int = tokenizer.get_vocab_size()

    @property
    def digest(self) -> str:
        """What tells this tokenizer from others, for cache keys."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_long(self, text: str) -> Tensor:
        """Token ids of a text of any length, as int32; the same as if it were tokenised as a whole."""
        parts = [torch.empty(0, dtype=torch.int32)]
        pieces = list(_pieces(text))
        for start in range(0, len(pieces), 64):
            parts += [torch.tensor(ids, dtype=torch.int32) for ids in self.encode(pieces[start : start + 64])]
        return torch.cat(parts)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        cut = SAFE_CUT.search(text, start + PIECE)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def gpt2_tokenizer(task: str, root: Path | None) -> BytePairTokenizer:
    """GPT-2's own tokens (50,257), from tokenizers/gpt2/ in the data folder."""
    folder = root / "tokenizers" / "gpt2" if root is not None else Path()
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if root is None or not (vocabulary.is_file() and merges.is_file()):
        raise missing(task, root, "GPT-2's tokenizer as tokenizers/gpt2/vocab.json and merges.txt")
    tokenizers = package("tokenizers")
    try:
        model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"{vocabulary} and {merges} cannot be read as a BPE ({error}).") from error
    return BytePairTokenizer(_byte_level(model))


def train_byte_pairs(texts: list[str], size: int) -> BytePairTokenizer:
    """A BPE of at most ``size`` entries, with ids 0, 1 and 2 for padding, begin and end; the same for the same texts."""
    tokenizers = package("tokenizers")
    tokenizer = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BytePairTokenizer(tokenizer)


def byte_pairs_from_json(text: str) -> BytePairTokenizer:
    """The tokenizer that ``to_json`` described."""
    return BytePairTokenizer(package("tokenizers").Tokenizer.from_str(text))


def _byte_level(model: Any) -> Any:
    tokenizers = package("tokenizers")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


class WordPieceTokenizer:
    """BERT's: ``[CLS] first [SEP]``, or ``[CLS] first [SEP] second [SEP]``."""

    def __init__(self, tokenizer: Any, where: Path) -> None:
        self._tokenizer = tokenizer
        self.vocabulary: int = tokenizer.get_vocab_size()
        ids = [tokenizer.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]")]
        if None in ids:
            raise ValueError(f"{where} has no [PAD], [CLS] and [SEP]: it is no vocabulary of BERT's kind.")
        self.padding, self.begin, self.end = ids

    def encode(self, sentences: list[Sentence], length: int) -> list[tuple[list[int], int]]:
        """For each example its ids, the longer sentence cut until they fit, and the position where the second one starts."""
        self._tokenizer.enable_truncation(length)
        inputs = [(first, second) if second is not None else first for first, second, _ in sentences]
        return [(encoding.ids, _second_start(encoding.type_ids)) for encoding in self._tokenizer.encode_batch(inputs)]


def _second_start(type_ids: list[int]) -> int:
    return type_ids.index(1) if 1 in type_ids else len(type_ids)


def bert_tokenizer(task: str, root: Path | None, vocabulary: Path | None) -> WordPieceTokenizer:
    """WordPiece from a given vocab.txt, tokenizer.json or folder with one, else from tokenizers/bert*/ in the data folder."""
    if vocabulary is not None:
        candidates = [vocabulary]
    else:
        candidates = sorted((root / "tokenizers").glob("bert*")) if root is not None else []
    for candidate in candidates:
        for file in (candidate / "tokenizer.json", candidate / "vocab.txt") if candidate.is_dir() else (candidate,):
            if file.is_file():
                return WordPieceTokenizer(_word_pieces(file), file)
    if vocabulary is not None:
        raise ValueError(f"{task}: {vocabulary} is no vocab.txt or tokenizer.json, nor a folder with one.")
    raise missing(task, root, "BERT's tokenizer as tokenizers/bert-base-uncased/vocab.txt or tokenizer.json")


def _word_pieces(file: Path) -> Any:
    tokenizers = package("tokenizers")
    try:
        if file.suffix == ".json":
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            return tokenizer
        return tokenizers.BertWordPieceTokenizer(str(file), lowercase=_is_lowercase(file.parent))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"{file} cannot be read as a tokenizer ({error}).") from error


def _is_lowercase(folder: Path) -> bool:
    """As the model's tokenizer_config.json says; without one, as most BERTs are."""
    settings = folder / "tokenizer_config.json"
    return not settings.is_file() or bool(json.loads(settings.read_text(encoding="utf-8")).get("do_lower_case", True))
