"""The mask itself: a corner of a layer's mask at every recorded step, and what changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmsparse.workbench.report._layers import evenly
from nmsparse.workbench.report._runs import Group, Run, Section, unique

LARGEST_SIDE = 64
"""Of a larger corner, only the first rows and columns are shown: cells must remain visible."""
MOST_FRAMES = 48
Bits = list[str]
"""A mask as rows of "0" and "1"."""


@dataclass(frozen=True)
class Frame:
    step: int
    bits: Bits


@dataclass(frozen=True)
class MaskFilm:
    """The mask of one layer over time, in one run of a group."""

    group: Group
    run: Run
    frames: list[Frame]
    lines: str
    """Where groups of M end, as an SVG path."""

    @property
    def rows(self) -> int:
        return len(self.frames[0].bits)

    @property
    def columns(self) -> int:
        return len(self.frames[0].bits[0])

    def picture(self) -> dict[str, str]:
        """SVG paths for the last frame, as seen from the first: what the page shows without a script."""
        before, now = self.frames[0].bits, self.frames[-1].bits
        return {kind: cell_path(before, now, pair) for kind, pair in (("kept", "11"), ("new", "01"), ("gone", "10"))}

    def words(self) -> str:
        """The last frame in words."""
        last, before = self.frames[-1], self.frames[0]
        cells = self.rows * self.columns
        kept = sum(line.count("1") for line in last.bits) / cells
        changed = sum(a != b for x, y in zip(before.bits, last.bits, strict=True) for a, b in zip(x, y, strict=True)) / cells
        return f"step {last.step}: {kept:.1%} kept, {changed:.2%} changed since step {before.step}"


@dataclass(frozen=True)
class MaskLayer:
    name: str
    films: list[MaskFilm]

    @property
    def steps(self) -> list[int]:
        return sorted({frame.step for film in self.films for frame in film.frames})

    def for_script(self) -> dict[str, Any]:
        films = [
            {
                "group": film.group.index,
                "columns": film.columns,
                "rows": film.rows,
                "frames": [{"step": frame.step, "bits": _packed(frame.bits)} for frame in film.frames],
            }
            for film in self.films
        ]
        return {"steps": self.steps, "films": films}


def mask_layers(section: Section) -> list[MaskLayer]:
    """Every layer of which masks were recorded, with one run of each group; a dense mask has nothing to show."""
    groups = [group for group in section.groups if not group.is_dense]
    names = unique(str(row.get("layer")) for group in groups for run in group.runs for row in run.rows["mask"])
    films = [(name, [film for group in groups if (film := _film(group, name))]) for name in names]
    return [MaskLayer(name, made) for name, made in films if made]


def decode(rows: int, columns: int, digits: str) -> Bits:
    """Hex digits to rows of bits: row-major, the highest bit of the first byte first."""
    text = bin(int("1" + digits, 16))[3:]
    return [text[row * columns : (row + 1) * columns] for row in range(rows)]


def cell_path(before: Bits, now: Bits, pair: str) -> str:
    """An SVG path over all cells that went from pair[0] to pair[1]; neighbours in a row share one stroke."""
    parts: list[str] = []
    for y, (old, new) in enumerate(zip(before, now, strict=True)):
        line = "".join("#" if a + b == pair else "." for a, b in zip(old, new, strict=True))
        parts += [f"M{match.start()} {y}h{len(match.group())}" for match in re.finditer("#+", line)]
    return "".join(parts)


def _film(group: Group, layer: str) -> MaskFilm | None:
    for run in group.most_telling:
        rows = [row for row in run.rows["mask"] if row.get("layer") == layer]
        if rows:
            frames = [_frame(run, rows[i]) for i in evenly(len(rows), MOST_FRAMES)]
            same = [frame for frame in frames if _shape(frame) == _shape(frames[-1])]
            return MaskFilm(group, run, same, _group_lines(run.pattern, same[-1].bits))
    return None


def _shape(frame: Frame) -> tuple[int, int]:
    return len(frame.bits), len(frame.bits[0])


def _frame(run: Run, row: dict[str, Any]) -> Frame:
    rows, columns, digits = row.get("rows"), row.get("columns"), row.get("bits")
    where = f"{run.name}: the mask of step {row['step']}"
    if not (isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0):
        raise ValueError(f"{where} has {rows!r} rows and {columns!r} columns; both must be counts above 0.")
    needed = 2 * ((rows * columns + 7) // 8)
    if not (isinstance(digits, str) and re.fullmatch("[0-9a-fA-F]*", digits) and len(digits) == needed):
        raise ValueError(f"{where} needs {needed} hex digits for its {rows} x {columns} bits, and holds something else.")
    return Frame(row["step"], [line[:LARGEST_SIDE] for line in decode(rows, columns, digits)[:LARGEST_SIDE]])


def _packed(bits: Bits) -> str:
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return f"{int(text, 2):0{len(text) // 4}x}"


def _group_lines(pattern: str, bits: Bits) -> str:
    """Lines between groups of M, along the direction in which the mask obeys N:M (rows first); none if it obeys neither."""
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", pattern)
    if match is None or int(match[2]) < 2:
        return ""
    n, m = int(match[1]), int(match[2])
    rows, columns = len(bits), len(bits[0])
    if _obeys(bits, n, m):
        return "".join(f"M{x} 0v{rows}" for x in range(m, columns, m))
    if _obeys(["".join(column) for column in zip(*bits, strict=True)], n, m):
        return "".join(f"M0 {y}h{columns}" for y in range(m, rows, m))
    return ""


def _obeys(lines: Sequence[str], n: int, m: int) -> bool:
    return all(line[i : i + m].count("1") <= n for line in lines for i in range(0, len(line), m))
