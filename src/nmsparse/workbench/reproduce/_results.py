"""RESULTS.md and its pictures, and the decision table of the documentation, from the books of finished runs.

Every sentence about a result is made from runs; where there are none, it says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmsparse.workbench.reproduce._claim import Advice, Claim, Experiment, Published, Scale
from nmsparse.workbench.reproduce._ledger import Ledger, Run
from nmsparse.workbench.reproduce._outcome import Table, advise, gain_words, judge_all, standings, table
from nmsparse.workbench.reproduce._plots import draw
from nmsparse.workbench.reproduce._statistics import FEWEST_SEEDS
from nmsparse.workbench.reproduce._study import Study
from nmsparse.workbench.reproduce.claims import CLAIMS
from nmsparse.workbench.reproduce.claims._setups import BYTES_PER_TOKEN

NOT_RUN = "not run yet"
FILE, PLOTS = "RESULTS.md", "plots"

INTRODUCTION = f"""\
# Do the papers' claims hold?

Written by `nmsparse reproduce --report` from the `*.jsonl` beside this file; edit the claim files, not this page. Every row there
has the settings, seed, versions and hardware of one run, and a hash of its settings. On the hardware of the runs,
`nmsparse reproduce CLAIM --only EXPERIMENT --scale SCALE --max-minutes 0 --json` trains nothing and prints the values behind the
tables and verdicts with the hashes of their runs; an experiment that lacks runs asks for its data first.

How to read it: contenders with one seed start from the same weights and see the same examples in the same order. A statement is
tested on the differences within seeds, by Student's 95 % interval of their mean: it **holds** where the whole interval is on
its side, **fails** where the whole interval is on the other side, and is **within noise** otherwise. "Equal" and "not worse"
mean that a difference beyond the margin is excluded, which stands beside the gain in its unit: at scales where losses are nats
per byte, a margin in nats per token is divided by {BYTES_PER_TOKEN} bytes per token. Intervals are not corrected for the number
of statements. Every contender tried the same learning rates on a seed of its own, or takes the rate of the contender it is a
variant of; where an experiment has one rate, all take that. Validation of image tasks is their test part, for all contenders
alike. Training FLOPs are relative to dense, with each N:M product counted at its density: what N:M hardware could skip, not
what it does. Validation always sees the final, hard pattern, also where a recipe still trains densely: curves of step,
mask-decay and structure-decay turn good only when their masks come. "Flips at the end" are the mask bits changed by the first
update of the last log interval, or by the last search of recipes that search masks now and then. Step times of runs that share
a GPU or a CPU say nothing. Runs are short: what is said holds for this size of model and this length of training. Scale `small`
is made for one GPU; `cpu` is made for two cores and smaller still: a first sign and no more. Each experiment shows the scale
and the hardware on which it got furthest.
"""


@dataclass(frozen=True)
class Place:
    """An experiment of a claim, and the scale and hardware on which it got furthest."""

    claim: Claim
    experiment: Experiment
    study: Study

    @property
    def runs(self) -> list[Run]:
        """All final runs that it has."""
        found = {run.hash: run for standing in standings(self.study, self.experiment) for run in standing.runs.values()}
        return list(found.values())

    @property
    def where(self) -> str:
        return f"scale {self.study.scale}, {self.study.device}"


def places(folder: Path, scale: Scale = "small") -> list[Place]:
    """Every experiment of every claim. What one GPU has not run yet may have been run on two cores."""
    scales: tuple[Scale, ...] = ("small", "cpu") if scale in ("small", "cpu") else (scale,)
    ledger = Ledger(folder)
    return [_furthest(claim, each, scales, ledger) for claim in CLAIMS.values() for each in claim.experiments]


def _furthest(claim: Claim, experiment: Experiment, scales: Sequence[Scale], ledger: Ledger) -> Place:
    """Where most contenders have enough seeds; of equals, the larger scale, and then the newer hardware."""
    found = [
        Place(claim, experiment, Study(claim, scale, ledger, device, (experiment.name,)))
        for scale in scales
        if scale in experiment.setups
        for device in ledger.devices() or [""]
    ]
    return max(found, key=lambda place: (_complete(place), len(place.runs)))


def _complete(place: Place) -> int:
    return sum(len(standing.runs) >= FEWEST_SEEDS for standing in standings(place.study, place.experiment))


def write_results(folder: Path, scale: Scale = "small") -> Path:
    """Write RESULTS.md and plots/*.svg into the folder of the books; plots that no longer belong there are removed."""
    found = places(folder, scale)
    plots = _write_plots(folder / PLOTS, found)
    parts = [INTRODUCTION, "## Which recipe when\n", _decision_table(found), "\n## Verdicts\n", _verdict_table(found)]
    for name, claim in CLAIMS.items():
        mine = [place for place in found if place.claim is claim]
        parts += [_section(claim, mine, plots.get(name, []))]
    file = folder / FILE
    file.write_text("\n".join(parts).rstrip() + "\n")
    return file


def decision_table(folder: Path, scale: Scale = "small") -> str:
    """Markdown: a situation, what the runs say, and where they are."""
    return _decision_table(places(folder, scale))


def _decision_table(found: Sequence[Place]) -> str:
    rows = [
        [advice.situation, *_advised(place, advice), advice.cost, f"`{place.claim.name}`, {advice.experiment}"]
        for place in found
        for advice in place.claim.advice
        if advice.experiment == place.experiment.name
    ]
    return markdown(["situation", "measured", "where", "beside it", "from"], rows)


def _advised(place: Place, advice: Advice) -> tuple[str, str]:
    words = advise(place.study, advice)
    return (NOT_RUN, "") if words is None else (words, place.where)


# ---- parts of the page ----


def _verdict_table(found: Sequence[Place]) -> str:
    rows = []
    for place in found:
        for judged in judge_all(place.study):
            whose = "paper" if judged.statement.is_claimed else "ours"
            where = place.study.scale if judged.gain is not None else ""
            name = f"`{place.claim.name}`"
            rows.append([name, judged.statement.text, whose, gain_words(judged), f"**{judged.verdict}**", where])
    return markdown(["claim", "statement", "whose", "gain (95 % interval), margin", "verdict", "scale"], rows)


def _section(claim: Claim, found: Sequence[Place], plots: Sequence[str]) -> str:
    lines = [f"\n## {claim.title}\n", f"{claim.paper}\n", f"**Claim.** {claim.says}\n"]
    if claim.published:
        lines += [_published(claim.published), ""]
    if claim.published_note:
        lines += [claim.published_note, ""]
    for place in found:
        lines += [f"### {place.experiment.title}\n", _table(table(place.study, place.experiment)), "", _provenance(place)]
    lines += [f"![{Path(plot).stem}]({plot})\n" for plot in plots]
    return "\n".join([*lines, "How it differs from the paper:\n", *(f"- {text}" for text in claim.deviations), ""])


def _table(made: Table | None) -> str:
    if made is None:
        return NOT_RUN.capitalize() + "."
    return "\n".join([markdown(made.header, made.rows), *(f"\n{note}" for note in made.notes)])


def _published(rows: Sequence[Published]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    cells = [[row.setting, *(f"{row.values[name]:g}" if name in row.values else "" for name in names)] for row in rows]
    return markdown(["published", *names], cells)


def _provenance(place: Place) -> str:
    """Size, hardware, versions and dates of the runs behind a table."""
    runs = place.runs
    if not runs:
        return ""
    size = place.experiment.setups[place.study.scale].size
    versions = {f"nmsparse {e['nmsparse']}, torch {e['torch']}, {e['device']}" for e in (run.row["environment"] for run in runs)}
    commits = {str(run.row["environment"].get("commit")) for run in runs} - {"None"}
    when = sorted(str(run.row["when"])[:10] for run in runs)
    dates = when[0] if when[0] == when[-1] else f"{when[0]} to {when[-1]}"
    seconds = sum(run.row["seconds"] or 0 for run in runs)
    at = f", commit {', '.join(sorted(commits))}" if commits else ""
    scale = f"Scale {place.study.scale}" + (f" ({size})" if size else "")
    counted = f"{len(runs)} runs, {seconds / 60:.0f} minutes of training in sum, {dates}"
    return f"{scale}: {counted}; {'; '.join(sorted(versions))}{at}.\n"


def _write_plots(folder: Path, found: Iterable[Place]) -> dict[str, list[str]]:
    """Write the pictures; their paths by claim."""
    written: dict[str, list[str]] = {}
    for place in found:
        for number, chart in enumerate(place.claim.charts, 1):
            picture = draw(place.study, chart) if chart.experiment == place.experiment.name else None
            if picture is None:
                continue
            name = f"{place.claim.name}-{number}-{re.sub(r'[^a-z0-9]+', '-', chart.experiment.lower())}.svg"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(picture)
            written.setdefault(place.claim.name, []).append(f"{PLOTS}/{name}")
    kept = {Path(path).name for paths in written.values() for path in paths}
    for old in folder.glob("*.svg"):
        if old.name not in kept:
            old.unlink()
    return written


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a bar inside a cell would end it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])
