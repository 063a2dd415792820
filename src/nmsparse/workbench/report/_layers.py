"""Layers: density and flip rate at the end, and the flip rate of each layer over time as a heat map."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmsparse.workbench.report._numbers import share
from nmsparse.workbench.report._runs import Group, Run, Section, mapping, number, unique

LEVELS = 9
"""Shades of the heat map, beside blank."""
MOST_COLUMNS = 48
"""A heat map shows at most so many of the recorded steps."""
MOST_LABELS = 26


@dataclass(frozen=True)
class Cell:
    text: str
    fill: float | None
    """Length of the bar, in percent of the cell."""


@dataclass(frozen=True)
class LayerTable:
    """One quantity at the end: a row per layer, a column per group."""

    title: str
    caption: str
    groups: list[Group]
    rows: list[tuple[str, str, list[Cell]]]
    """A layer's full name, its short name, its cells."""


@dataclass(frozen=True)
class HeatMap:
    """Flip rate of one group: a row per layer, a column per recorded step; a path for each shade."""

    group: Group
    steps: list[int]
    shades: list[tuple[int, str]]
    values: list[list[float | None]]
    """By layer, then by step."""


@dataclass(frozen=True)
class HeatMaps:
    """The heat maps of all groups, which share layers and shades."""

    layers: list[str]
    labels: list[tuple[float, str]]
    """Where a layer's short name stands (in percent of the height), and the name."""
    low: float
    high: float
    maps: list[HeatMap]

    @property
    def longest_name(self) -> int:
        return max(len(name) for _, name in self.labels)

    def for_script(self) -> list[dict[str, Any]]:
        return [{"group": m.group.index, "steps": m.steps, "layers": self.layers, "values": m.values} for m in self.maps]


def layer_names(section: Section) -> list[str]:
    """All layers that any run has recorded, in the order of the model."""
    return unique(name for run in section.runs for row in run.rows["layers"] for name in mapping(row.get("layers")))


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the dotted prefix that all of them share."""
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return [".".join(part[shared:]) for part in parts]


def layer_tables(section: Section) -> list[LayerTable]:
    """Density and flip rate per layer at the end, for the groups that recorded them."""
    density = _table(section, "density", "Density per layer", "Share of non-zero weights at the end.", 1.0)
    flips = _table(section, "flip_rate", "Flip rate per layer", "Share of mask bits that the last measured update changed.", None)
    return [table for table in (density, flips) if table is not None]


def heat_maps(section: Section) -> HeatMaps | None:
    """How fast each layer's mask settles; None where no flip rates above zero were recorded."""
    names = layer_names(section)
    grids = [(group, _grid(group.measured or group.most_telling)) for group in section.groups]
    positive = [value for _, grid in grids for column in grid.values() for value in column.values() if value > 0]
    if not positive:
        return None
    low, high = min(positive), max(positive)
    maps = [_heat_map(group, grid, names, low, high) for group, grid in grids if any(grid.values())]
    every = math.ceil(len(names) / MOST_LABELS)
    labels = [(100 * (i + 0.5) / len(names), name) for i, name in enumerate(short_names(names)) if i % every == 0]
    return HeatMaps(names, labels, low, high, maps)


def evenly(count: int, most: int) -> list[int]:
    """Indices of at most so many of count things, spread evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _table(section: Section, key: str, title: str, caption: str, full: float | None) -> LayerTable | None:
    names = layer_names(section)
    columns = [(group, _last(group.measured or group.most_telling, key)) for group in section.groups]
    columns = [(group, values) for group, values in columns if values]
    if not columns:
        return None
    scale = full or max(value for _, values in columns for value in values.values()) or 1.0
    rows = [
        (name, short, [_cell(values.get(name), scale) for _, values in columns])
        for name, short in zip(names, short_names(names), strict=True)
    ]
    return LayerTable(title, caption, [group for group, _ in columns], rows)


def _cell(value: float | None, scale: float) -> Cell:
    return Cell(share(value), None if value is None else round(100 * min(1.0, max(0.0, value / scale)), 1))


def _last(runs: Sequence[Run], key: str) -> dict[str, float]:
    """Each layer's last value, as a mean over runs."""
    ends: dict[str, list[float]] = {}
    for run in runs:
        last: dict[str, float] = {}
        for row in run.rows["layers"]:
            for name, values in mapping(row.get("layers")).items():
                if (value := number(mapping(values).get(key))) is not None:
                    last[name] = value
        for name, value in last.items():
            ends.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in ends.items()}


def _grid(runs: Sequence[Run]) -> dict[int, dict[str, float]]:
    """Flip rates by step and layer, as means over runs."""
    seen: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        for row in run.rows["layers"]:
            for name, values in mapping(row.get("layers")).items():
                if (value := number(mapping(values).get("flip_rate"))) is not None:
                    seen.setdefault(row["step"], {}).setdefault(name, []).append(value)
    return {step: {name: statistics.fmean(v) for name, v in seen[step].items()} for step in sorted(seen)}


def _heat_map(group: Group, grid: dict[int, dict[str, float]], names: Sequence[str], low: float, high: float) -> HeatMap:
    recorded = list(grid)
    steps = [recorded[i] for i in evenly(len(recorded), MOST_COLUMNS)]
    values = [[grid[step].get(name) for step in steps] for name in names]
    paths: dict[int, list[str]] = {}
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value is not None:
                paths.setdefault(_level(value, low, high), []).append(f"M{x} {y}h1")
    rounded = [[None if value is None else float(f"{value:.3g}") for value in line] for line in values]
    return HeatMap(group, steps, [(level, "".join(paths[level])) for level in sorted(paths)], rounded)


def _level(value: float, low: float, high: float) -> int:
    """The shade of a flip rate: 0 for none, then by its logarithm."""
    if value <= 0:
        return 0
    place = 1.0 if high <= low else math.log(value / low) / math.log(high / low)
    return 1 + min(LEVELS - 1, int(place * LEVELS))
