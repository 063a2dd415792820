"""RESULTS.md and its pictures, and the decision table of the documentation, from the books of finished runs.

Every sentence about a result is made from runs; where there are none, it says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from nmsparse.workbench.reproduce._claim import Claim, Published, Scale
from nmsparse.workbench.reproduce._ledger import Ledger, Run
from nmsparse.workbench.reproduce._outcome import Table, advise, gain_words, judge_all, standings, table
from nmsparse.workbench.reproduce._plots import draw
from nmsparse.workbench.reproduce._study import Study
from nmsparse.workbench.reproduce.claims import CLAIMS

NOT_RUN = "not run yet"
FILE, PLOTS = "RESULTS.md", "plots"

INTRODUCTION = """\
# Do the papers' claims hold?

Written by `nmsparse reproduce --report` from the `*.jsonl` beside this file; edit the claim files, not this page. Every row there
has the settings, seed, versions and hardware of one run, and a hash of its settings; `nmsparse reproduce CLAIM --json` prints
every number below with the hashes of its runs.

How to read it: contenders with one seed start from the same weights and see the same examples in the same order. A statement is
tested on the differences within seeds, by Student's 95 % interval of their mean: it **holds** where the whole interval is on its
side, **fails** where the whole interval is on the other side, and is **within noise** otherwise. "Equal" and "not worse" mean
that a difference beyond the stated margin is excluded. Intervals are not corrected for the number of statements. Every contender
tried the same learning rates on a seed of its own, or takes the rate of the contender it is a variant of. Validation of image
tasks is their test part, for all contenders alike. Training FLOPs are relative to dense, with each N:M product counted at its
density: what N:M hardware could skip, not what it does. Step times of runs that share the GPU say nothing. Runs are short: what
is said holds for this size of model and this length of training.
"""


def write_results(folder: Path, scale: Scale = "small") -> Path:
    """Write RESULTS.md and plots/*.svg into the folder of the books; plots that no longer belong there are removed."""
    ledger = Ledger(folder)
    studies = [_study(claim, scale, ledger) for claim in CLAIMS.values()]
    plots = _write_plots(folder / PLOTS, studies)
    parts = [INTRODUCTION, "## Which recipe when\n", _decision_table(studies), "\n## Verdicts\n", _verdict_table(studies)]
    parts += [_section(study, plots.get(study.claim.name, [])) for study in studies]
    file = folder / FILE
    file.write_text("\n".join(parts).rstrip() + "\n")
    return file


def decision_table(folder: Path, scale: Scale = "small") -> str:
    """Markdown: a situation, what the runs say, and where they are."""
    ledger = Ledger(folder)
    return _decision_table([_study(claim, scale, ledger) for claim in CLAIMS.values()])


def _decision_table(studies: Sequence[Study]) -> str:
    rows = [
        [advice.situation, advise(study, advice) or NOT_RUN, advice.cost, f"`{study.claim.name}`, {advice.experiment}"]
        for study in studies
        for advice in study.claim.advice
    ]
    return markdown(["situation", "measured", "beside it", "from"], rows)


def _study(claim: Claim, scale: Scale, ledger: Ledger) -> Study:
    """The study on the hardware that has most of its results; of equals, the newest."""
    studies = [Study(claim, scale, ledger, device) for device in ledger.devices()] or [Study(claim, scale, ledger, "")]
    return max(studies, key=lambda study: len(_runs(study)))


def _runs(study: Study) -> list[Run]:
    """All final runs that a study has."""
    found = {
        run.hash: run
        for experiment in study.experiments
        for standing in standings(study, experiment)
        for run in standing.runs.values()
    }
    return list(found.values())


# ---- parts of the page ----


def _verdict_table(studies: Sequence[Study]) -> str:
    rows = []
    for study in studies:
        for judged in judge_all(study):
            whose = "paper" if judged.statement.is_claimed else "ours"
            rows.append([f"`{study.claim.name}`", judged.statement.text, whose, gain_words(judged), f"**{judged.verdict}**"])
    return markdown(["claim", "statement", "whose", "gain (95 % interval)", "verdict"], rows)


def _section(study: Study, plots: Sequence[str]) -> str:
    claim = study.claim
    lines = [f"\n## {claim.title}\n", f"{claim.paper}\n", f"**Claim.** {claim.says}\n"]
    if claim.published:
        lines += [_published(claim.published), ""]
    if claim.published_note:
        lines += [claim.published_note, ""]
    tables = [table(study, experiment) for experiment in study.experiments]
    for experiment, made in zip(study.experiments, tables, strict=True):
        lines += [f"### {experiment.title}\n", _table(made), ""]
    lines += [f"![{Path(plot).stem}]({plot})\n" for plot in plots]
    lines += ["How it differs from the paper:\n", *(f"- {text}" for text in claim.deviations), ""]
    return "\n".join([*lines, _provenance(study)])


def _table(made: Table | None) -> str:
    if made is None:
        return NOT_RUN.capitalize() + "."
    return "\n".join([markdown(made.header, made.rows), *(f"\n{note}" for note in made.notes)])


def _published(rows: Sequence[Published]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    cells = [[row.setting, *(f"{row.values[name]:g}" if name in row.values else "" for name in names)] for row in rows]
    return markdown(["published", *names], cells)


def _provenance(study: Study) -> str:
    runs = _runs(study)
    if not runs:
        return ""
    versions = {f"nmsparse {e['nmsparse']}, torch {e['torch']}, {e['device']}" for e in (run.row["environment"] for run in runs)}
    commits = {str(run.row["environment"].get("commit")) for run in runs} - {"None"}
    when = sorted(str(run.row["when"])[:10] for run in runs)
    dates = when[0] if when[0] == when[-1] else f"{when[0]} to {when[-1]}"
    seconds = sum(run.row["seconds"] or 0 for run in runs)
    at = f", commit {', '.join(sorted(commits))}" if commits else ""
    return f"{len(runs)} runs, {seconds / 60:.0f} minutes of training in sum, {dates}; {'; '.join(sorted(versions))}{at}.\n"


def _write_plots(folder: Path, studies: Iterable[Study]) -> dict[str, list[str]]:
    """Write the pictures; their paths by claim."""
    written: dict[str, list[str]] = {}
    for study in studies:
        for number, chart in enumerate(study.claim.charts, 1):
            picture = draw(study, chart)
            if picture is None:
                continue
            name = f"{study.claim.name}-{number}-{re.sub(r'[^a-z0-9]+', '-', chart.experiment.lower())}.svg"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(picture)
            written.setdefault(study.claim.name, []).append(f"{PLOTS}/{name}")
    kept = {Path(path).name for paths in written.values() for path in paths}
    for old in folder.glob("*.svg"):
        if old.name not in kept:
            old.unlink()
    return written


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a bar inside a cell would end it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])
