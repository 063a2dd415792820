"""Tasks by name: one record of facts for each, and how it is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from nmsparse.workbench import datasets
from nmsparse.workbench.datasets import Images, Splits, Text
from nmsparse.workbench.tasks._facts import Kind
from nmsparse.workbench.tasks._images import ImageTask
from nmsparse.workbench.tasks._language import LanguageTask
from nmsparse.workbench.tasks._sentences import ClassificationTask, ScoreTask, SentenceTokenizer
from nmsparse.workbench.tasks._task import Task
from nmsparse.workbench.tasks._translation import TranslationTask

HUB = "hf:"
BYTES_LENGTH, BPE_LENGTH, SENTENCE_LENGTH, PAIR_LENGTH = 512, 256, 64, 128


@dataclass(frozen=True)
class TaskInfo:
    """Facts about a task that users choose by."""

    name: str
    kind: Kind
    summary: str
    is_embedded: bool
    """Whether its data ships with the package; others are read from a folder."""
    licence: str
    """Of the data."""


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    name: str
    """The whole name."""
    option: str
    """What follows the first colon of the name."""
    root: Path | None
    length: int | None
    limit: int | None
    vocabulary: Path | None


Builder = Callable[[Request], Task]


def _language(read: Callable[[Path | None], Text], length: int) -> Builder:
    return lambda request: LanguageTask(request.name, read(request.root), request.length or length, request.limit)


def _images(read: Callable[[Path | None], Splits[Images]], margin: int, is_flipped: bool) -> Builder:
    return lambda request: ImageTask(request.name, read(request.root), 10, request.limit, margin, is_flipped)


def _classification(length: int, headline: str = "accuracy", also: tuple[str, ...] = ()) -> Builder:
    def build(request: Request) -> Task:
        sentences = datasets.glue(request.name, request.root)
        return ClassificationTask(
            request.name, sentences, _bert(request), request.length or length, request.limit, headline=headline, also=also
        )

    return build


def _stsb(request: Request) -> Task:
    sentences = datasets.glue(request.name, request.root)
    return ScoreTask(request.name, sentences, _bert(request), request.length or PAIR_LENGTH, request.limit)


def _bert(request: Request) -> SentenceTokenizer:
    return datasets.bert_tokenizer(request.name, request.root, request.vocabulary)


def _questions(request: Request) -> Task:
    sentences = datasets.questions()
    tokenizer = datasets.WordTokenizer(sentences.train)
    return ClassificationTask(request.name, sentences, tokenizer, request.length or 40, request.limit)


def _pig_latin(request: Request) -> Task:
    return TranslationTask(request.name, datasets.pig_latin(), datasets.LetterTokenizer(), request.length or 24, request.limit)


def _multi30k(request: Request) -> Task:
    pairs, tokenizer = datasets.multi30k(request.root, request.option or "de-en")
    return TranslationTask(request.name, pairs, tokenizer, request.length or SENTENCE_LENGTH, request.limit)


def _hub(request: Request) -> Task:
    """Which kind of task it is depends on what the data set turns out to hold."""
    name, length, limit = request.name, request.length, request.limit
    data = datasets.hub(request.option)
    if data.text:
        return LanguageTask(name, data.text, length or BYTES_LENGTH, limit)
    if data.images:
        _refuse_length(request)
        return ImageTask(name, data.images, int(data.images.train.labels.max()) + 1, limit)
    if data.pairs:
        tokenizer = datasets.train_byte_pairs([text for pair in data.pairs.train for text in pair], datasets.BPE_ENTRIES)
        return TranslationTask(name, data.pairs, tokenizer, length or SENTENCE_LENGTH, limit)
    assert data.sentences
    labels = [sentence.label for sentence in data.sentences.train]
    if isinstance(labels[0], float):
        return ScoreTask(name, data.sentences, _bert(request), length or PAIR_LENGTH, limit)
    return ClassificationTask(name, data.sentences, _bert(request), length or PAIR_LENGTH, limit, int(max(labels)) + 1)


WIKIPEDIA = "CC BY-SA"
RESEARCH = "research use; see the task's own terms"
ROWS: list[tuple[TaskInfo, Builder]] = [
    (
        TaskInfo("shakespeare", "language", "tiny Shakespeare by characters", True, "public domain"),
        _language(lambda _: datasets.shakespeare(), 64),
    ),
    (
        TaskInfo("fashion-mini", "images", "6,000 images of Fashion-MNIST, 28 x 28 grey, 10 classes", True, "MIT"),
        _images(lambda _: datasets.fashion_mini(), 0, False),
    ),
    (
        TaskInfo("questions", "sentences", "toy: was this sentence of Shakespeare's a question?", True, "public domain"),
        _questions,
    ),
    (
        TaskInfo("pig-latin", "translation", "toy: words of Shakespeare's into Pig Latin, by letters", True, "public domain"),
        _pig_latin,
    ),
    (
        TaskInfo("fashion-mnist", "images", "70,000 images of clothes, 28 x 28 grey, 10 classes", False, "MIT"),
        _images(datasets.fashion_mnist, 2, True),
    ),
    (
        TaskInfo(
            "cifar10", "images", "60,000 images, 32 x 32 in colour, 10 classes", False, "research use, cite Krizhevsky 2009"
        ),
        _images(datasets.cifar10, 4, True),
    ),
    (
        TaskInfo("enwik8", "language", "10^8 bytes of Wikipedia, by bytes", False, WIKIPEDIA),
        _language(datasets.enwik8, BYTES_LENGTH),
    ),
    (
        TaskInfo("enwik8-bpe", "language", "10^8 bytes of Wikipedia by GPT-2's BPE", False, WIKIPEDIA),
        _language(datasets.enwik8_bpe, BPE_LENGTH),
    ),
    (
        TaskInfo("wikitext2", "language", "WikiText-2 by words, 33,278 of them", False, WIKIPEDIA),
        _language(datasets.wikitext2, 128),
    ),
    (
        TaskInfo("wikitext2-bpe", "language", "WikiText-2 by GPT-2's BPE", False, WIKIPEDIA),
        _language(datasets.wikitext2_bpe, BPE_LENGTH),
    ),
    (
        TaskInfo("multi30k", "translation", "captions, German to English; multi30k:en-fr and so on", False, "CC BY-NC-SA"),
        _multi30k,
    ),
    (
        TaskInfo("sst2", "sentences", "GLUE SST-2: is this review friendly?", False, RESEARCH),
        _classification(SENTENCE_LENGTH),
    ),
    (
        TaskInfo("mrpc", "sentences", "GLUE MRPC: do two sentences say the same?", False, RESEARCH),
        _classification(PAIR_LENGTH, also=("f1",)),
    ),
    (
        TaskInfo("cola", "sentences", "GLUE CoLA: is this sentence good English?", False, RESEARCH),
        _classification(SENTENCE_LENGTH, "matthews", also=("accuracy",)),
    ),
    (
        TaskInfo("rte", "sentences", "GLUE RTE: does the second sentence follow from the first?", False, RESEARCH),
        _classification(256),
    ),
    (TaskInfo("stsb", "sentences", "GLUE STS-B: how similar are two sentences, 0 to 5?", False, RESEARCH), _stsb),
]
BUILDERS: dict[str, tuple[TaskInfo, Builder]] = {info.name: (info, build) for info, build in ROWS}


def tasks(pattern: str = "*") -> list[TaskInfo]:
    """All tasks whose name matches a glob, those that work without any folder first."""
    return [info for info, _ in ROWS if fnmatch(info.name, pattern)]


def load_task(
    name: str,
    data_dir: str | Path | None = None,
    *,
    length: int | None = None,
    limit: int | None = None,
    vocabulary: str | Path | None = None,
) -> Task:
    """A task by name, with its data read; ``tasks()`` lists the names.

    ``data_dir`` is the folder with the data sets; without it, the environment variable NMSPARSE_DATA names it. Embedded tasks
    need none. ``multi30k:en-fr`` chooses other languages, and ``hf:name`` or ``hf:name:configuration`` is a data set of the
    Hugging Face Hub. ``length`` is the most tokens in a sequence, ``limit`` keeps only the first examples of each split.
    ``vocabulary`` is the WordPiece vocabulary of a pretrained encoder (vocab.txt, tokenizer.json, or a folder with one) for
    tasks of sentences. Validation uses the data set's validation or development part, or, where it has none, its test part
    (images). Test parts are read in no other case.
    """
    for option, value in (("length", length), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{option} = {value} makes no sense; it is at least 1.")
    base, _, option = name.partition(":")
    folder = data_dir or os.environ.get("NMSPARSE_DATA") or None
    request = Request(
        name, option, Path(folder) if folder else None, length, limit, Path(vocabulary) if vocabulary is not None else None
    )
    if name.startswith(HUB) and option:
        return _hub(request)
    if base not in BUILDERS or (option and base != "multi30k"):
        close = get_close_matches(base, BUILDERS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no task named {name!r}.{hint} There are: {', '.join(BUILDERS)}, and hf:<name>.")
    info, build = BUILDERS[base]
    if info.kind == "images":
        _refuse_length(request)
    return build(request)


def _refuse_length(request: Request) -> None:
    if request.length is not None:
        raise ValueError(f"{request.name} is a task of images, which have no length; leave length away.")
