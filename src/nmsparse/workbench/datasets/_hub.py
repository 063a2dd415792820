"""Data sets of the Hugging Face Hub by name, through the `datasets` package; what a data set is for is seen from its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nmsparse.workbench.datasets._splits import Images, Pair, Sentence, Splits, Text, bytes_tensor
from nmsparse.workbench.datasets._text import text_bytes
from nmsparse.workbench.extras import package

VALID_NAMES = ("validation", "valid", "dev", "val", "validation_matched", "test")
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
SENTENCE_COLUMNS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("sentence",), ("text",))


@dataclass(frozen=True)
class HubData:
    """What a data set turned out to hold: one of these."""

    text: Text | None = None
    images: Splits[Images] | None = None
    sentences: Splits[list[Sentence]] | None = None
    pairs: Splits[list[Pair]] | None = None


def hub(name: str) -> HubData:
    """A data set by "name" or "name:configuration": images, sentences with labels, translations, or (as bytes) plain text."""
    path, _, configuration = name.partition(":")
    module = package("datasets", "hub")
    try:
        found = module.load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"hf:{name} cannot be loaded from the Hugging Face Hub ({error}).") from error
    valid_name = next((split for split in VALID_NAMES if split in found), None)
    if "train" not in found or valid_name is None:
        raise ValueError(f"hf:{name} has the splits {', '.join(found)}; needed are train and one of {', '.join(VALID_NAMES)}.")
    return _interpret(name, Splits(found["train"], found[valid_name]))


def _interpret(name: str, rows: Splits[Any]) -> HubData:
    columns = list(rows.train.column_names)
    label = next((column for column in LABEL_COLUMNS if column in columns), None)
    image = next((column for column in IMAGE_COLUMNS if column in columns), None)
    sentences = next((group for group in SENTENCE_COLUMNS if set(group) <= set(columns)), None)
    if image and label:
        return HubData(images=Splits(*(_images(name, part, image, label) for part in (rows.train, rows.valid))))
    if "translation" in columns:
        return HubData(pairs=Splits(*(_pairs(part) for part in (rows.train, rows.valid))))
    if sentences and label:
        return HubData(sentences=Splits(*(_sentences(name, part, sentences, label) for part in (rows.train, rows.valid))))
    if "text" in columns:
        return HubData(text=text_bytes(*("\n".join(part["text"]) for part in (rows.train, rows.valid))))
    raise ValueError(
        f"hf:{name} has the columns {', '.join(columns)}; needed are an image and a label, a translation, sentences and a "
        "label, or text."
    )


def _images(name: str, rows: Any, image: str, label: str) -> Images:
    """All images as one tensor: they must be square and of one size."""
    pixels = []
    for picture in rows[image]:
        picture = picture if picture.mode == "L" else picture.convert("RGB")
        channels = len(picture.getbands())
        pixels.append(bytes_tensor(picture.tobytes()).view(picture.height, picture.width, channels).permute(2, 0, 1))
    shapes = {tuple(each.shape) for each in pixels}
    if len(shapes) != 1 or (shape := shapes.pop())[1] != shape[2]:
        raise ValueError(f"hf:{name} has images of several sizes, or such that are not square; only square ones of one size fit.")
    return Images(torch.stack(pixels), torch.tensor(rows[label]))


def _sentences(name: str, rows: Any, columns: tuple[str, ...], label: str) -> list[Sentence]:
    firsts, labels = rows[columns[0]], rows[label]
    seconds = rows[columns[1]] if len(columns) > 1 else [None] * len(firsts)
    # -1 marks examples whose label is kept secret
    known = [Sentence(*row) for row in zip(firsts, seconds, labels, strict=True) if row[2] != -1]
    if not known:
        raise ValueError(f"hf:{name} keeps the labels of a split secret, so it cannot be trained on or validated with.")
    return known


def _pairs(rows: Any) -> list[Pair]:
    return [Pair(*list(translation.values())[:2]) for translation in rows["translation"]]
