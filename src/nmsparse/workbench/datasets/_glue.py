"""Five tasks of GLUE (Wang et al., 2018) as tab-separated files, laid out as in GLUE's archives or as in the tasks' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nmsparse.workbench.datasets._files import Source, look_up, missing
from nmsparse.workbench.datasets._splits import Sentence, Splits


@dataclass(frozen=True)
class Form:
    """One way in which a task's files are laid out."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    columns: tuple[str | int, ...]
    """First sentence, second sentence where there is one, label: by the names in the header, or by position without one."""


@dataclass(frozen=True)
class Layout:
    """Where a task's files may be, and how a label is written."""

    folder: str
    forms: tuple[Form, ...]
    label: Callable[[str], float]


def _binary(text: str) -> float:
    return ("0", "1").index(text)


def _entailment(text: str) -> float:
    return ("not_entailment", "entailment").index(text)


def _score(text: str) -> float:
    if not (math.isfinite(score := float(text)) and 0 <= score <= 5):
        raise ValueError("a score is 0 .. 5")
    return score


TRAIN, DEV = ("train.tsv",), ("dev.tsv",)
LAYOUTS = {
    "sst2": Layout("SST-2", (Form(TRAIN, DEV, ("sentence", "label")),), _binary),
    "mrpc": Layout("MRPC", (Form(TRAIN, DEV, ("#1 string", "#2 string", "quality")),), _binary),
    "rte": Layout("RTE", (Form(TRAIN, DEV, ("sentence1", "sentence2", "label")),), _entailment),
    "cola": Layout(
        "CoLA",
        (
            Form(TRAIN, DEV, (3, 1)),
            Form(("in_domain_train.tsv",), ("in_domain_dev.tsv", "out_of_domain_dev.tsv"), (3, 1)),
        ),
        _binary,
    ),
    "stsb": Layout(
        "STS-B",
        (
            Form(TRAIN, DEV, ("sentence1", "sentence2", "score")),
            Form(("sts-train.csv",), ("sts-dev.csv",), (5, 6, 4)),
        ),
        _score,
    ),
}


def glue(task: str, root: Path | None) -> Splits[list[Sentence]]:
    """Training and development sentences of sst2, mrpc, cola, rte or stsb."""
    layout = LAYOUTS[task]
    places = [f"{above}{layout.folder}{suffix}" for suffix in ("", ".zip") for above in ("glue/", "glue_data/", "")]
    for form in layout.forms:
        if found := look_up(root, places, [*form.train, *form.valid]):
            parts = found[: len(form.train)], found[len(form.train) :]
            return Splits(*([row for file in part for row in _sentences(file, form, layout)] for part in parts))
    forms = " or ".join(", ".join([*form.train, *form.valid]) for form in layout.forms)
    raise missing(task, root, f"{forms} (plain, .xz or .gz) in glue/{layout.folder}/ or {layout.folder}/, or {layout.folder}.zip")


def _sentences(source: Source, form: Form, layout: Layout) -> list[Sentence]:
    lines = source.text().split("\n")
    numbered = [(number, line.removesuffix("\r").split("\t")) for number, line in enumerate(lines, 1) if line.strip()]
    if isinstance(form.columns[0], str) and numbered:
        columns = _columns(source, form, numbered.pop(0)[1])
    else:
        columns = [column for column in form.columns if isinstance(column, int)]
    if not numbered:
        raise ValueError(f"{source.where} holds no examples: it is incomplete.")
    return [_sentence(source, layout, columns, number, cells) for number, cells in numbered]


def _columns(source: Source, form: Form, header: list[str]) -> list[int]:
    names = [name.strip().lower() for name in header]
    absent = [column for column in form.columns if column not in names]
    if absent:
        raise ValueError(f"{source.where} has no column {absent[0]!r} in its first line; its columns are: {', '.join(header)}.")
    return [names.index(str(column)) for column in form.columns]


def _sentence(source: Source, layout: Layout, columns: list[int], number: int, cells: list[str]) -> Sentence:
    try:
        *sentences, label = (cells[column] for column in columns)
        return Sentence(sentences[0], sentences[1] if len(sentences) > 1 else None, layout.label(label.strip()))
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"{source.where}, line {number}: {len(cells)} columns, of which {[column + 1 for column in columns]} should be "
            f"the text and the label ({error})."
        ) from error
