"""The page: everything a section shows, put into the templates."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from nmsparse.workbench.extras import package
from nmsparse.workbench.report import _facts, _results, _rows
from nmsparse.workbench.report._charts import HEIGHT, WIDTH, Chart, Spec, line_chart
from nmsparse.workbench.report._layers import HeatMaps, LayerTable, heat_maps, layer_tables
from nmsparse.workbench.report._masks import MaskLayer, mask_layers
from nmsparse.workbench.report._numbers import MINUS, brief, counted, listed, magnitude, share
from nmsparse.workbench.report._results import Finding, Measure, Result, metric_words
from nmsparse.workbench.report._runs import Section, mapping, number
from nmsparse.workbench.report._table import Column, columns

LARGEST_DOWNLOAD = 700_000
"""Characters of a download inside the page; a larger CSV lies beside the page only."""


@dataclass(frozen=True)
class Download:
    name: str
    address: str
    """A data: URL; empty when the data would be too large for the page."""
    is_packed: bool
    about: str


@dataclass(frozen=True)
class View:
    """One section, ready for the template."""

    section: Section
    number: int
    facts: list[tuple[str, list[str]]]
    finding: Finding
    rows: list[Result]
    columns: list[Column]
    measure: Measure
    notes: list[str]
    emulation: str
    headline_rows: _rows.RowChart | None
    time_rows: _rows.RowChart | None
    charts: list[Chart]
    more_charts: list[Chart]
    missing: list[str]
    tables: list[LayerTable]
    heat: HeatMaps | None
    masks: list[MaskLayer]
    settings: _facts.Facts
    environment: _facts.Facts
    skipped: list[_facts.Reasons]
    products: list[tuple[str, str, str, int]]

    @property
    def metric(self) -> str:
        return metric_words(self.section.task)

    @property
    def metric_title(self) -> str:
        return _title(self.metric)

    @property
    def thinned_from(self) -> int:
        return max((chart.thinned_from for chart in [*self.charts, *self.more_charts]), default=0)

    def for_script(self) -> dict[str, Any]:
        return {
            "groups": [group.name for group in self.section.groups],
            "charts": {chart.spec.key: chart.data for chart in [*self.charts, *self.more_charts]},
            "heat": self.heat.for_script() if self.heat else [],
            "masks": [layer.for_script() for layer in self.masks],
        }


def render(sections: Sequence[Section], title: str | None, csv: dict[str, str]) -> str:
    """The whole HTML file; csv holds the files that can be downloaded from it, by name."""
    jinja2, markup = package("jinja2"), package("markupsafe").Markup
    loader = jinja2.PackageLoader("nmsparse.workbench.report", "templates")
    templates = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"brief": brief, "share": share}
    views = [view(section, index) for index, section in enumerate(sections)]
    script = _asset("report.js")
    return templates.get_template("report.html.j2").render(
        title=title or default_title(sections),
        views=views,
        most_groups=max(len(section.groups) for section in sections),
        downloads=[_download(name, text) for name, text in csv.items()],
        # the browser itself refuses whatever this page does not hold: other scripts, and everything from a network
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=markup(_asset("report.css")),
        script=markup(script),
        data=markup(_inert_json({"sections": [v.for_script() for v in views]})),
        surface={"width": WIDTH, "height": HEIGHT},
    )


def default_title(sections: Sequence[Section]) -> str:
    if len(sections) > 1:
        return f"N:M sparse training on {listed([section.task.name for section in sections])}"
    names = list(dict.fromkeys(run.recipe for run in sections[0].runs))
    compared = listed(names) if len(names) <= 6 else counted(len(names), "recipe")
    return f"{compared} on {sections[0].task.name}"


def view(section: Section, index: int) -> View:
    rows = _results.results(section)
    measure = _results.measure_of(section, rows)
    main = [(spec, line_chart(section, spec)) for spec in _specs(section, measure)]
    more = [(spec, line_chart(section, spec)) for spec in _more_specs(section)]
    tables, heat, masks = layer_tables(section), heat_maps(section), mask_layers(section)
    absent = [spec.title for spec, chart in main if chart is None]
    absent += [] if tables else ["Density per layer"]
    absent += [] if masks else ["The mask as a picture"]
    return View(
        section=section,
        number=index,
        facts=_head(section),
        finding=_results.finding(section, rows, measure),
        rows=rows,
        columns=columns(section, rows, measure),
        measure=measure,
        notes=_facts.notes(section),
        emulation=_results.emulation_note(rows),
        headline_rows=_rows.headline_chart(rows, measure),
        time_rows=_rows.time_chart(rows, _results.step_time),
        charts=[chart for _, chart in main if chart is not None],
        more_charts=[chart for _, chart in more if chart is not None],
        missing=absent,
        tables=tables,
        heat=heat,
        masks=masks,
        settings=_facts.settings(section),
        environment=_facts.environment(section),
        skipped=_facts.skipped(section),
        products=_facts.products(section),
    )


def _head(section: Section) -> list[tuple[str, list[str]]]:
    """The few facts at the top, in parts that a line break should not split."""
    runs, groups = section.runs, section.groups
    steps = sorted({run.planned_steps or run.last_step for run in runs})
    devices = list(dict.fromkeys(str(mapping(run.info.get("environment")).get("device", "")) for run in runs))
    facts = [
        ("Task", [section.task.name]),
        ("Model", [*section.models, *_sizes(section)]),
        ("Compared", [group.name for group in groups]),
        ("Runs", [counted(len(runs), "run"), f"{_facts.seeds_words(groups)} each"]),
        ("Length", [counted(steps[0], "step") if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"]),
    ]
    return facts + ([("Device", devices)] if any(devices) else [])


def _sizes(section: Section) -> list[str]:
    """Of the model, where all runs have the same one, and of its sparse layers, where all that are not dense agree."""
    sizes = {run.sized_model for run in section.runs}
    (_, size), *others = sizes
    if size is None or others:
        return []
    found = [mapping(run.info.get("model")).get("sparse_parameters") for run in section.runs if not run.is_dense]
    sparse = {number(value) for value in found}
    words = [f"{magnitude(value)} of them sparse" for value in sparse if value and len(sparse) == 1]
    return [f"{magnitude(size)} parameters", *words]


def _specs(section: Section, measure: Measure) -> list[Spec]:
    """The charts that every report shows."""
    task = section.task
    views = ("linear", "log", "close-up")
    headline = Spec(
        *("headline", "valid", task.headline, _title(metric_words(task)), task.headline.replace("_", " ")),
        "On held-out data, " + ("higher" if task.higher_is_better else "lower") + " is better.",
        is_percent=measure.is_percent,
        variants=("linear", "close-up") if task.higher_is_better else views,
        cuts_start=not task.higher_is_better,
    )
    extra = [Spec("valid_loss", "valid", "loss", "Validation loss", "loss", "On held-out data.", variants=views, cuts_start=True)]
    return [
        Spec("loss", "train", "loss", "Training loss", "loss", "Mean of each logging interval.", variants=views, cuts_start=True),
        headline,
        *(extra if task.headline != "loss" else []),
        Spec(
            *("flip_rate", "train", "flip_rate", "Flip rate", "mask bits changed by an update"),
            "How restless the masks are, at the first update of each logging interval. A healthy run falls as the learning rate "
            "does; a rate that stays high never settles.",
            is_percent=True,
            is_about_masks=True,
            variants=("log", "linear"),
        ),
        Spec(
            *("churn", "masks", "churn", "Mask churn", "mask bits changed since the record before"),
            "What remains of all flips after a while: bits that flip back do not count.",
            is_percent=True,
            is_about_masks=True,
            variants=("linear", "log"),
        ),
        Spec(
            *("from_start", "masks", "from_start", "Distance from the first mask", "mask bits that differ from the first record"),
            "How far training has moved the masks from where they began.",
            is_percent=True,
            is_about_masks=True,
        ),
        Spec(
            *("gradient_noise", "train", "gradient_noise", "Gradient noise", "share of the second moment that is variance"),
            f"1 {MINUS} Σm² / Σv over the sparse layers, from Adam's moments: 0 is a steady gradient, 1 is pure noise.",
        ),
    ]


def _more_specs(section: Section) -> list[Spec]:
    """Charts for those who look for a cause."""
    unit = section.task.unit
    return [
        Spec(
            *("density", "train", "density", "Density over time", "non-zero weights in sparse layers"),
            "Share of weights that the forward product sees.",
            is_percent=True,
        ),
        Spec("grad_norm", "train", "grad_norm", "Gradient norm", "norm", "Before clipping.", variants=("linear", "log")),
        Spec("lr", "train", "lr", "Learning rate", "learning rate", "Of the first parameter group."),
        Spec("throughput", "train", "units_per_second", "Throughput", f"{unit} per second", "Over each logging interval."),
    ]


def _title(words: str) -> str:
    return words[:1].upper() + words[1:]


def _asset(name: str) -> str:
    return (files("nmsparse.workbench.report") / "templates" / name).read_text(encoding="utf-8")


def _inert_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever text it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _download(name: str, text: str) -> Download:
    """A CSV as a data: URL: small ones as they are, larger ones packed (the script unpacks them)."""
    raw = text.encode(errors="replace")
    about = f"{text.count(chr(10)) - 1:,} rows".replace(",", " ")
    if len(raw) < 20_000:
        return Download(name, "data:text/csv;charset=utf-8;base64," + base64.b64encode(raw).decode(), False, about)
    packed = base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()
    address = "data:application/gzip;base64," + packed if len(packed) <= LARGEST_DOWNLOAD else ""
    return Download(name, address, True, about)
