"""What was run and with what: settings, environment, layers that stayed dense, products, and notes on runs that went wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nmsparse.workbench.report._numbers import NOTHING, counted, listed
from nmsparse.workbench.report._runs import Group, Run, Section, mapping, unique

OF_A_RUN = ("seed", "label", "recipe", "pattern", "output", "resume", "checkpoint_every", "keep", "tracker", "data_dir")
"""Settings that tell runs apart by their nature, or do not change a result: a difference in them is no news."""

OF_A_GROUP = (*OF_A_RUN, "options", "optimizer", "model", "pretrained", "steps", "log_every", "eval_every", "save")
"""Settings in which groups differ by their nature, or of which a report speaks elsewhere, or that change no result."""


@dataclass(frozen=True)
class Facts:
    """Settings of several runs: what all share, and what differs, by group."""

    shared: list[tuple[str, str]]
    differing: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Reasons:
    """One reason, and the layers it holds for."""

    groups: str
    reason: str
    layers: list[str]


def settings(section: Section) -> Facts:
    return _facts(section, lambda run: mapping(run.info.get("config")))


def environment(section: Section) -> Facts:
    return _facts(section, lambda run: mapping(run.info.get("environment")))


def skipped(section: Section) -> list[Reasons]:
    """Layers that stayed dense, by reason; groups that skipped the same layers share a line."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for group in section.groups:
        by_reason: dict[str, list[str]] = {}
        for layer, reason in mapping(group.first.info.get("skipped")).items():
            by_reason.setdefault(str(reason), []).append(layer)
        for reason, layers in by_reason.items():
            found.setdefault((reason, tuple(layers)), []).append(group.name)
    return [Reasons(listed(groups), reason, list(layers)) for (reason, layers), groups in found.items()]


def products(section: Section) -> list[tuple[str, str, str, int]]:
    """Product, how it was computed ("sparse", or why not), in which groups, and in how many layers of each."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for group in section.groups:
        layers = mapping(group.first.info.get("products")).values()
        counts = Counter((product, str(how)) for layer in layers for product, how in mapping(layer).items())
        for (product, how), count in counts.items():
            found.setdefault((product, how, count), []).append(group.name)
    return [(product, how, listed(groups), count) for (product, how, count), groups in sorted(found.items())]


def notes(section: Section) -> list[str]:
    """What a reader must know before trusting a mean."""
    remarks = [_unfinished(group, run) for group in section.groups for run in group.runs if run.status != "finished"]
    for group in section.groups:
        remarks += _repeated(group) + _unlike(group) + _lengths(group)
    remarks += _unlike_groups(section)
    steps = {run.last_step for group in section.groups for run in group.finished}
    if len(steps) > 1:
        lengths = f"{min(steps)} to {max(steps)} steps"
        remarks.append(f"Finished runs have different lengths ({lengths}): their results are not like for like.")
    devices = unique(str(mapping(run.info.get("environment")).get("device")) for run in section.runs)
    if len(devices) > 1:
        remarks.append(f"Runs used different devices ({listed(devices)}): their step times cannot be compared.")
    return remarks


def _facts(section: Section, facts_of: Callable[[Run], dict[str, Any]]) -> Facts:
    keys = unique(key for run in section.runs for key in facts_of(run))
    shared: list[tuple[str, str]] = []
    differing: list[tuple[str, list[str]]] = []
    for key in keys:
        by_group = [unique(_text(facts_of(run).get(key)) for run in group.runs) for group in section.groups]
        if len(unique(value for values in by_group for value in values)) == 1:
            shared.append((key, by_group[0][0]))
        else:
            differing.append((key, [", ".join(values) for values in by_group]))
    return Facts(shared, differing)


def _text(value: Any) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _unfinished(group: Group, run: Run) -> str:
    who = f"{group.name}, seed {run.seed}"
    planned = f" of {run.planned_steps}" if run.planned_steps else ""
    message = run.result.get("message")
    why = f": {message}" if isinstance(message, str) and message else ""
    if run.status == "diverged":
        at = run.result.get("steps") if isinstance(run.result.get("steps"), int) else run.last_step
        return f"{who}: diverged at step {at}{planned}{why.rstrip('.')}. It is drawn by itself and in no mean."
    if run.last_step == 0:
        return f"{who}: no step was recorded."
    use = "in no mean" if group.finished else "its values are those of that step"
    return f"{who}: not finished, last seen at step {run.last_step}{planned}. It is drawn by itself, {use}."


def _repeated(group: Group) -> list[str]:
    twice = [seed for seed, count in Counter(run.seed for run in group.runs).items() if count > 1]
    return [f"{group.name} holds seed {seed} more than once: the spread is over runs, not over seeds." for seed in twice]


def _unlike(group: Group) -> list[str]:
    """Settings that differ within a group: its mean is then over more than seeds."""
    configs = [mapping(run.info.get("config")) for run in group.runs]
    keys = unique(key for config in configs for key in config if key not in OF_A_RUN)
    unlike = [key for key in keys if len({_text(config.get(key)) for config in configs}) > 1]
    return [f"The runs of {group.name} differ in more than the seed: {listed(unlike)}."] if unlike else []


def _unlike_groups(section: Section) -> list[str]:
    """Settings that differ from group to group: not the recipe alone then makes the difference."""
    unlike = [key for key, texts in settings(section).differing if key not in OF_A_GROUP and len(set(texts)) > 1]
    if not unlike:
        return []
    return [f"Groups differ in more than their recipe: {listed(unlike)}. The settings below have the values."]


def _lengths(group: Group) -> list[str]:
    steps = sorted({run.last_step for run in group.finished})
    return [f"The curves of {group.name} end with its shortest run, at step {steps[0]}."] if len(steps) > 1 else []


def seeds_words(groups: Sequence[Group]) -> str:
    """How many seeds each group has: one number, or a range."""
    counts = sorted({len(group.seeds) for group in groups})
    return counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
