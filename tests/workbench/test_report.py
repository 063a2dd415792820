"""The report: what it says must be what the runs recorded, and nothing in a run may break the page."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import math
import random
import re
import shutil
import statistics
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from synthetic_runs import CHARACTERS, LAYERS, Character, information, write_comparison, write_run

from nmsparse.workbench.records import RunWriter
from nmsparse.workbench.report import ReportFiles, write_report
from nmsparse.workbench.report._axes import linear_axis, log_axis, step_axis
from nmsparse.workbench.report._charts import spread_out
from nmsparse.workbench.report._curves import Curve, average, thin
from nmsparse.workbench.report._masks import _group_lines, _packed, cell_path, decode
from nmsparse.workbench.report._numbers import Estimate, brief, estimate, fixed, interval, share, student

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&"
DENSE, SRSTE, SSTE, TRIO = CHARACTERS


class Page(HTMLParser):
    """A page as a browser reads it: elements, text, and the data inside."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.blocks: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", " ".join(self.pieces))
        self.data = json.loads(self.blocks["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = None if tag in ("script", "style") else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.pieces.append(data)
        else:
            self.blocks[self._inside] = self.blocks.get(self._inside, "") + data

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in (attributes.get("class") or "").split()]

    def charts(self) -> list[str | None]:
        return [attributes["data-chart"] for attributes in self.with_class("chart")]


def report(folder: Path, **options: Any) -> tuple[Page, ReportFiles]:
    written = write_report([folder], folder.parent / "out" / "report.html", **options)
    return Page(written.html), written


def read_csv(path: Path) -> Iterator[dict[str, str]]:
    return csv.DictReader(io.StringIO(path.read_text(), newline=""))


def write_values(folder: Path, character: Character, seed: int, value: float, **changes: Any) -> Path:
    """A finished run with a chosen result, and nothing else."""
    writer = RunWriter(folder)
    writer.describe(information(character, seed, 10, **changes))
    writer.add("train", 10, loss=value, lr=0.1, step_ms=2.0, flip_rate=None, density=1.0)
    facts = {"status": "finished", "steps": 10, "valid": {"loss": value, "accuracy": value}, "non_zero": 0.5, "violations": 0}
    writer.finish(facts | {"step_ms": 2.0, "seconds": 1.0})
    return folder


def finding(folder: Path, values: dict[Character, list[float]], **changes: Any) -> str:
    """The words at the top of a report on runs with these results."""
    for character, results in values.items():
        for seed, value in enumerate(results):
            write_values(folder / "runs" / character.recipe / str(seed), character, seed, value, **changes)
    return report(folder / "runs")[0].text.partition("Task")[0]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("comparison") / "runs")


@pytest.fixture(scope="module")
def page(comparison: Path) -> Page:
    return report(comparison)[0]


def test_the_page_shows_what_was_compared(page: Page) -> None:
    for words in ("dense, s-ste, sr-ste and trio on shakespeare", "12 runs,", "3 seeds each", "400 steps", "10.8M parameters"):
        assert words in page.text
    assert page.charts() == [
        *("loss", "headline", "flip_rate", "churn", "from_start", "gradient_noise"),
        *("density", "grad_norm", "lr", "throughput"),
    ]
    assert page.data["sections"][0]["groups"] == ["dense", "s-ste 2:4", "sr-ste 2:4", "trio 2:4"]
    assert len(page.with_class("film")) == 3
    assert len(page.with_class("heat-map")) == 3
    assert "Not recorded" not in page.text
    for words in ("lm_head", "out_features = 65 is not a multiple of 4", "torch sees no CUDA GPU", "cosine", "cpu_threads"):
        assert words in page.text


def test_curves_are_drawn_without_a_script(page: Page) -> None:
    lines = [a for tag, a in page.tags if tag == "path" and a.get("class") == "line"]
    bands = [a for tag, a in page.tags if tag == "path" and "band" in (a.get("class") or "")]
    assert len(lines) == len(bands) > 40
    assert all(re.fullmatch(r"(M-?\d+ ?-?\d+|l-?\d+ ?-?\d+)+", line["d"] or "") for line in lines)


def test_the_page_asks_for_nothing_outside_itself(page: Page) -> None:
    addresses = [value for _, a in page.tags for name in ("src", "href") if (value := a.get(name)) is not None]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.search(r"@import|url\(|https?://", page.blocks["style"] + page.blocks["script"])
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_metrics_csv_holds_every_recorded_number(comparison: Path) -> None:
    _, written = report(comparison)
    rows = list(read_csv(written.metrics))
    assert list(rows[0]) == ["run", "label", "seed", "kind", "step", "name", "value"]
    read = {(r["run"], r["kind"], int(r["step"]), r["name"]): r["value"] for r in rows}
    assert len(read) == len(rows)
    expected: dict[tuple[str, str, int, str], float | None] = {}
    for file in sorted(comparison.rglob("metrics.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            if row["kind"] == "layers":
                values = {f"{layer}.{k}": v for layer, facts in row["layers"].items() for k, v in facts.items()}
            else:
                values = {k: v for k, v in row.items() if k not in ("kind", "step")}
            if row["kind"] != "mask":
                run = file.parent.relative_to(comparison).as_posix()
                expected |= {(run, row["kind"], row["step"], name): value for name, value in values.items()}
    assert read.keys() == expected.keys()
    assert all((None if read[key] == "" else float(read[key])) == value for key, value in expected.items())


def test_the_results_csv_holds_means_and_deviations_over_seeds(comparison: Path) -> None:
    _, written = report(comparison)
    rows = {row["label"]: row for row in read_csv(written.results)}
    ends = {
        label: [json.loads(f.read_text()) for f in sorted(comparison.glob(f"{folder}/*/result.json"))]
        for label, folder in (("dense", "dense"), ("s-ste 2:4", "s-ste-2x4"))
    }
    losses = {label: [end["valid"]["loss"] for end in results] for label, results in ends.items()}
    for label, values in losses.items():
        assert float(rows[label]["mean"]) == pytest.approx(sum(values) / 3, rel=1e-12)
        assert float(rows[label]["std"]) == pytest.approx(statistics.stdev(values), rel=1e-12)
        assert rows[label]["seeds"] == "0 1 2"
    change = statistics.fmean(losses["s-ste 2:4"]) - statistics.fmean(losses["dense"])
    spread = math.hypot(statistics.stdev(losses["s-ste 2:4"]), statistics.stdev(losses["dense"]))
    assert float(rows["s-ste 2:4"]["difference_from_dense"]) == pytest.approx(change)
    assert float(rows["s-ste 2:4"]["difference_std"]) == pytest.approx(spread)
    times = {label: statistics.fmean(end["step_ms"] for end in results) for label, results in ends.items()}
    assert float(rows["s-ste 2:4"]["speedup"]) == pytest.approx(times["dense"] / times["s-ste 2:4"])
    assert rows["dense"]["difference_from_dense"] == ""


def test_charts_hold_mean_and_deviation_at_every_step(comparison: Path, page: Page) -> None:
    series = page.data["sections"][0]["charts"]["loss"]["series"][1]
    files = sorted(comparison.glob("s-ste-2x4/*/metrics.jsonl"))
    runs = [[r["loss"] for r in map(json.loads, f.read_text().splitlines()) if r["kind"] == "train"] for f in files]
    assert series["steps"] == list(range(5, 401, 5))
    assert series["means"] == pytest.approx([statistics.fmean(v) for v in zip(*runs, strict=True)], rel=1e-4)
    assert series["deviations"] == pytest.approx([statistics.stdev(v) for v in zip(*runs, strict=True)], rel=1e-4)


def test_downloads_in_the_page_are_the_files_beside_it(comparison: Path) -> None:
    page, written = report(comparison)
    links = {a["download"]: a["href"] for tag, a in page.tags if tag == "a" and "download" in a}
    content = {name: base64.b64decode((address or "").partition(",")[2]) for name, address in links.items()}
    assert content["report.results.csv"] == written.results.read_bytes()
    assert gzip.decompress(content["report.metrics.csv.gz"]) == written.metrics.read_bytes()


def test_the_same_runs_give_the_same_files(comparison: Path) -> None:
    first = [path.read_bytes() for path in _paths(report(comparison)[1])]
    assert first == [path.read_bytes() for path in _paths(report(comparison)[1])]


def _paths(files: ReportFiles) -> list[Path]:
    return [files.html, *files.csv]


def test_text_from_runs_stays_text(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "label": HOSTILE,
        "pattern": HOSTILE,
        "task": {"name": HOSTILE, "headline": "loss", "higher_is_better": False, "unit": HOSTILE},
        "model": {"name": HOSTILE},
        "config": {HOSTILE: HOSTILE, "steps": 400},
        "environment": {"device": HOSTILE, HOSTILE: [HOSTILE]},
        "skipped": {HOSTILE: HOSTILE},
        "products": {HOSTILE: {HOSTILE: HOSTILE}},
    }
    folder = write_run(tmp_path / "runs" / "a", SSTE, 0, **changes)
    write_run(tmp_path / "runs" / "b", SSTE, 1, ending="diverged", stop=200, **changes)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(LAYERS[2], json.dumps(HOSTILE)[1:-1]))
    result = tmp_path / "runs" / "b" / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"message": HOSTILE}))
    page, written = report(tmp_path / "runs", title=HOSTILE)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.data["sections"][0]["groups"] == [HOSTILE]
    assert page.text.count(HOSTILE) > 10
    assert {row["label"] for row in read_csv(written.metrics)} == {HOSTILE}


def test_a_lone_surrogate_in_a_label_can_be_written(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", SSTE, label="half \ud800 a character")
    assert "half ? a character" in report(tmp_path / "runs")[0].text


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        ([1.5], "With 1 seed nothing can be said about significance"),
        ([1.5, 1.6], "With 2 seeds nothing can be said about significance"),
        ([1.50, 1.51, 1.52], "so these seeds show a loss"),
        ([0.50, 0.51, 0.52], "so these seeds show a gain"),
        ([0.99, 1.03, 1.02], "which contains 0, so these seeds do not establish a difference"),
        ([1.0, 1.01, 1.02], "equals dense"),
    ],
)
def test_the_finding_claims_no_more_than_the_seeds_allow(tmp_path: Path, sparse: list[float], words: str) -> None:
    text = finding(tmp_path, {DENSE: [1.0, 1.01, 1.02], SSTE: sparse})
    assert words in text
    assert "the best of" not in text


def test_the_finding_names_the_best_recipe_in_the_direction_of_the_metric(tmp_path: Path) -> None:
    values = {DENSE: [0.80, 0.81, 0.82], SRSTE: [0.70, 0.71, 0.72], SSTE: [0.78, 0.79, 0.80]}
    accuracy = {"task": {"name": "images", "headline": "accuracy", "higher_is_better": True, "unit": "images"}}
    as_accuracy = finding(tmp_path / "a", values, **accuracy)
    assert "s-ste 2:4 comes closest to dense: validation accuracy 79.0 ± 1.0 % against 81.0 ± 1.0 %" in _plain(as_accuracy)
    assert ", 2.0 points worse." in as_accuracy
    assert "It is the best of 2" in as_accuracy
    assert "sr-ste 2:4 does better than dense: validation loss 0.710 ± 0.010" in finding(tmp_path / "b", values)


def _plain(text: str) -> str:
    return text.replace("\N{NARROW NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


@pytest.mark.parametrize(
    ("characters", "words"),
    [
        ([DENSE], "no sparse run has finished"),
        ([SSTE], "no dense run has finished"),
        ([SSTE, SRSTE], "what sparsity costs cannot be said"),
    ],
)
def test_the_finding_says_what_is_missing(tmp_path: Path, characters: list[Character], words: str) -> None:
    assert words in finding(tmp_path, {character: [1.0, 1.1, 1.2] for character in characters})


def test_one_seed_run_three_times_proves_nothing(tmp_path: Path) -> None:
    for index in range(3):
        write_values(tmp_path / "runs" / f"d{index}", DENSE, 0, 1.0 + index / 100)
        write_values(tmp_path / "runs" / f"s{index}", SSTE, 0, 2.0 + index / 100)
    assert "With 1 seed nothing can be said about significance" in report(tmp_path / "runs")[0].text


def test_finished_runs_without_the_metric_do_not_count_as_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        write_values(tmp_path / "runs" / f"d{seed}", DENSE, seed, 1.0)
        folder = write_values(tmp_path / "runs" / f"s{seed}", SSTE, seed, 2.0)
        _change(folder, "result.json", valid={"loss": 2.0} if seed == 0 else {})
    assert "With 1 seed nothing can be said about significance" in report(tmp_path / "runs")[0].text


@pytest.mark.parametrize("counts", [(4, 3), (3, 3), (2, 3), (20, 25), (40, 60)])
def test_the_interval_is_that_of_welch(counts: tuple[int, int]) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        a, b = ([draw.gauss(0, 1 + 3 * draw.random()) for _ in range(count)] for count in counts)
        found, exact = interval(_known(a), _known(b)), stats.ttest_ind(a, b, equal_var=False).confidence_interval()
        assert found[1] - found[0] == pytest.approx(exact.high - exact.low, rel=0.01)
        assert found[1] + found[0] == pytest.approx(exact.high + exact.low)
    assert interval(Estimate(1.0, 0.0, 3), Estimate(0.5, 0.0, 3)) == (0.5, 0.5)


def test_student_is_that_of_scipy_between_the_tabulated_values() -> None:
    freedoms = [1 + step / 50 for step in range(2500)]
    assert [student(freedom) for freedom in freedoms] == pytest.approx(list(stats.t.ppf(0.975, freedoms)), rel=0.005)


def _known(values: list[float]) -> Estimate:
    value = estimate(values)
    assert value is not None
    return value


def test_runs_that_went_wrong_are_shown_and_enter_no_mean(tmp_path: Path) -> None:
    runs = write_comparison(tmp_path / "runs", seeds=2)
    write_run(runs / "trio-2x4" / "seed-1", TRIO, 1, stop=210, ending="diverged")
    write_run(runs / "s-ste-2x4" / "seed-1", SSTE, 1, stop=300, ending=None)
    write_run(runs / "step", Character("step", 1.5, 0.003), 0, stop=100, ending=None)
    page, written = report(runs)
    for words in (
        "trio 2:4, seed 1: diverged at step 210 of 400: the loss became NaN at step 210",
        "s-ste 2:4, seed 1: not finished, last seen at step 300 of 400. It is drawn by itself, in no mean.",
        "step 2:4, seed 0: not finished, last seen at step 100 of 400",
        "so far",
    ):
        assert words in page.text
    rows = {row["label"]: row for row in read_csv(written.results)}
    assert rows["trio 2:4"]["status"] == "1 finished, 1 diverged"
    assert rows["s-ste 2:4"]["status"] == "1 finished, 1 unfinished"
    finished = json.loads((runs / "trio-2x4" / "seed-0" / "result.json").read_text())
    assert float(rows["trio 2:4"]["mean"]) == finished["valid"]["loss"]
    assert rows["step 2:4"]["difference_from_dense"] == ""
    notes = [series["note"] for series in page.data["sections"][0]["charts"]["loss"]["series"]]
    assert notes == ["", "", "", "", "seed 1, unfinished", "seed 0, unfinished", "seed 1, diverged"]
    assert {c for a in page.with_class("lone-mark") for c in (a["class"] or "").split()} >= {"diverged", "unfinished"}


def test_a_winner_with_diverged_seeds_is_named_as_such(tmp_path: Path) -> None:
    for seed in range(3):
        write_values(tmp_path / "runs" / f"d{seed}", DENSE, seed, 1.0 + seed / 100)
        write_values(tmp_path / "runs" / f"s{seed}", SSTE, seed, 0.5 + seed / 100)
    write_run(tmp_path / "runs" / "s3", SSTE, 3, stop=50, ending="diverged")
    assert "1 of 4 runs of s-ste 2:4 diverged and is not in its mean." in report(tmp_path / "runs")[0].text


def test_a_diverging_loss_does_not_squeeze_the_other_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", SSTE, 0)
    bad = write_run(tmp_path / "runs" / "b", SSTE, 1, stop=200, ending="diverged")
    with (bad / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 205, "loss": 1e9}) + "\n")
    page, _ = report(tmp_path / "runs")
    axis = page.data["sections"][0]["charts"]["loss"]["variants"]["log"]["y"]
    assert axis["high"] < 10
    assert "↑ cut, up to 1.00e9" in page.text


@pytest.mark.parametrize(
    ("kinds", "missing"),
    [
        (("train",), "validation loss, mask churn, distance from the first mask, density per layer, the mask as a picture"),
        (("valid",), "training loss, flip rate"),
        (("train", "valid", "layers", "masks"), "Not recorded in these runs: the mask as a picture."),
        (("train", "valid", "masks", "mask"), "Not recorded in these runs: density per layer."),
        ((), "training loss, validation loss"),
    ],
)
def test_missing_records_are_named(tmp_path: Path, kinds: tuple[str, ...], missing: str) -> None:
    write_run(tmp_path / "runs" / "dense", DENSE, kinds=kinds)
    write_run(tmp_path / "runs" / "sparse", SSTE, kinds=kinds)
    assert missing in report(tmp_path / "runs")[0].text


def test_a_run_that_recorded_nothing_is_still_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", SSTE, kinds=(), ending=None)
    (folder / "metrics.jsonl").unlink()
    page, written = report(folder)
    assert "no step was recorded" in page.text
    assert "No run has finished with a validation loss yet." in page.text
    assert written.metrics.read_text().count("\n") == 1


def test_half_a_last_line_is_no_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", SSTE, stop=200, ending=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert "last seen at step 200 of 400" in report(folder)[0].text


def test_numbers_that_are_none_or_not_finite_leave_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", SSTE, kinds=("valid",))
    with (folder / "metrics.jsonl").open("a") as file:
        for step, loss in enumerate(("null", "NaN", "1e999", "1" + "0" * 400, '"text"', "true", "2.5"), 401):
            file.write(f'{{"kind": "train", "step": {step}, "loss": {loss}}}\n')
    series = report(folder)[0].data["sections"][0]["charts"]["loss"]["series"]
    assert [(s["steps"], s["means"]) for s in series] == [([407], [2.5])]


def test_tasks_get_a_section_each(tmp_path: Path) -> None:
    write_comparison(tmp_path / "runs" / "text", seeds=1)
    write_comparison(tmp_path / "runs" / "images", seeds=1, accuracy=True)
    page, _ = report(tmp_path / "runs")
    assert [a["aria-label"] for a in page.with_class("section")] == ["fashion-mini", "shakespeare"]
    assert "N:M sparse training on fashion-mini and shakespeare" in page.text
    assert "valid_loss" in page.charts()


def test_groups_are_compared_with_the_dense_run_of_their_model(tmp_path: Path) -> None:
    for model, dense in (("gpt2", 1.0), ("llama", 2.0)):
        write_values(tmp_path / "runs" / f"{model}-d", DENSE, 0, dense, model={"name": model})
        write_values(tmp_path / "runs" / f"{model}-s", SSTE, 0, dense + 0.25, model={"name": model})
    rows = list(read_csv(report(tmp_path / "runs")[1].results))
    assert {row["label"]: row["difference_from_dense"] for row in rows} == {
        "dense · gpt2": "",
        "dense · llama": "",
        "s-ste 2:4 · gpt2": "0.25",
        "s-ste 2:4 · llama": "0.25",
    }


def test_a_model_is_not_compared_with_a_dense_one_of_another_size(tmp_path: Path) -> None:
    for seed in range(3):
        write_values(tmp_path / "runs" / f"d{seed}", DENSE, seed, 2.0 + seed / 100)
        larger = {"name": "gpt2", "parameters": 2 * 10_788_929, "sparse_parameters": 1}
        config = information(SSTE, seed, 10)["config"] | {"width": 512, "batch": 64}
        write_values(tmp_path / "runs" / f"s{seed}", SSTE, seed, 1.0 + seed / 100, model=larger, config=config)
    page, files = report(tmp_path / "runs")
    assert [row["difference_from_dense"] for row in read_csv(files.results)] == ["", ""]
    for words in ("dense · gpt2, 10,788,929 parameters", "s-ste 2:4 · gpt2, 21,577,858 parameters"):
        assert words in page.text
    assert "No dense run of the same model has finished" in page.text
    assert "a gain" not in page.text
    assert "10.8M" not in page.text
    assert "Groups differ in more than their recipe: batch, decay and width." in page.text


def test_runs_of_one_label_in_two_sizes_are_two_groups(tmp_path: Path) -> None:
    for seed, size in enumerate((1000, 2000)):
        write_values(tmp_path / "runs" / str(size), DENSE, seed, 1.0, model={"name": "gpt2", "parameters": size})
    groups = report(tmp_path / "runs")[0].data["sections"][0]["groups"]
    assert groups == ["dense · gpt2, 1,000 parameters", "dense · gpt2, 2,000 parameters"]


def test_one_label_for_two_patterns_makes_two_groups(tmp_path: Path) -> None:
    for pattern in ("1:4", "2:4"):
        write_values(tmp_path / "runs" / pattern.replace(":", "x"), SSTE, 0, 1.0, label="mine", pattern=pattern)
    assert report(tmp_path / "runs")[0].data["sections"][0]["groups"] == ["mine · 1:4", "mine · 2:4"]


def test_what_makes_a_mean_doubtful_is_noted(tmp_path: Path) -> None:
    config = information(SSTE, 0, 10)["config"]
    write_values(tmp_path / "runs" / "a", SSTE, 0, 1.0)
    write_values(tmp_path / "runs" / "b", SSTE, 0, 1.1, config=config | {"lr": 0.5}, environment={"device": "cuda"})
    text = report(tmp_path / "runs")[0].text
    assert "s-ste 2:4 holds seed 0 more than once" in text
    assert "The runs of s-ste 2:4 differ in more than the seed: lr." in text
    assert "Runs used different devices (cpu and cuda): their step times cannot be compared." in text


def test_step_times_of_emulation_are_called_that(tmp_path: Path) -> None:
    write_values(tmp_path / "runs" / "dense", DENSE, 0, 1.0)
    write_values(tmp_path / "runs" / "sparse", SSTE, 0, 1.0)
    assert "None of these runs computed a product on sparse tensor cores" in report(tmp_path / "runs")[0].text
    write_values(tmp_path / "runs" / "sparse", SSTE, 0, 1.0, products={"h.0": {"output": "sparse", "grad_input": "too small"}})
    text = report(tmp_path / "runs")[0].text
    assert "sparse tensor cores:" not in text
    assert "too small" in text


def test_overlapping_folders_count_a_run_once(tmp_path: Path, comparison: Path) -> None:
    written = write_report([comparison, comparison / "dense"], tmp_path / "report.html")
    assert "12 runs," in Page(written.html).text


def test_violations_are_not_hidden(tmp_path: Path) -> None:
    folder = write_values(tmp_path / "runs", SSTE, 0, 1.0)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"violations": 1234}))
    page, written = report(folder)
    assert "1 234" in _plain(page.text)
    assert next(read_csv(written.results))["violations"] == "1234"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: shutil.rmtree(f), "is not a folder"),
        (lambda f: (f / "run.json").unlink(), "no run was found in"),
        (lambda f: (f / "run.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "run.json").write_bytes(b"\xff\xfe\xfa"), "run.json"),
        (lambda f: (f / "run.json").write_text("[]"), "not an object"),
        (lambda f: (f / "run.json").write_text('{"version": 9}'), "has version 9"),
        (lambda f: (f / "run.json").write_text('{"version": 1, "task": {}}'), "'label' is missing"),
        (lambda f: _change(f, "run.json", seed="zero"), "'seed' is 'zero', and a report needs it as int"),
        (lambda f: _change(f, "result.json", status="lost"), "has the status 'lost'"),
        (lambda f: (f / "result.json").write_text("nonsense"), "cannot be read as JSON"),
        (lambda f: (f / "metrics.jsonl").write_text('nonsense\n{"kind": "train", "step": 1}\n'), "line 1"),
        (lambda f: (f / "metrics.jsonl").write_bytes(b"\xff\n\xff\n"), "the metrics of"),
        (lambda f: _mask(f, rows=2, columns=4, bits="xy"), "needs 2 hex digits for its 2 x 4 bits"),
        (lambda f: _mask(f, rows=64, columns=64, bits="ff"), "needs 1024 hex digits"),
        (lambda f: _mask(f, rows=0, columns=4, bits=""), "has 0 rows"),
        (lambda f: _mask(f, rows=2, columns=None, bits="ff"), "None columns"),
    ],
)
def test_runs_that_cannot_be_read_are_refused_in_one_sentence(tmp_path: Path, damage: Any, words: str) -> None:
    folder = write_run(tmp_path / "runs", SSTE, steps=20)
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        write_report([folder], tmp_path / "out" / "report.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def _change(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def _mask(folder: Path, **values: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "mask", "step": 30, "layer": "one", **values}) + "\n")


def test_a_folder_is_no_file_name(tmp_path: Path, comparison: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder; give the name of the HTML file"):
        write_report([comparison], tmp_path)


def test_ten_long_runs_make_a_page_below_two_megabytes(tmp_path: Path) -> None:
    for index in range(10):
        character = Character(f"recipe-{index}", 1.6 + index / 50, 0.003)
        write_run(tmp_path / "runs" / str(index), character, steps=4000, log_every=4, kinds=("train", "valid", "masks", "mask"))
    page, written = report(tmp_path / "runs")
    assert written.html.stat().st_size < 2_000_000
    assert "Long curves (here up to 1000 points) are thinned" in page.text


def test_thinning_keeps_extremes_and_ends() -> None:
    steps = list(range(10, 100_010, 10))
    means = [math.sin(step / 700) for step in steps]
    means[1234], means[5678] = 9.0, -9.0
    deviations = [0.1] * len(steps)
    deviations[4321] = 20.0
    curve = Curve(steps, means, deviations, 3)
    short = thin(curve)
    assert len(short) < 700
    assert (short.steps[0], short.steps[-1]) == (10, 100_000)
    assert (min(short.means), max(short.means)) == (-9.0, 9.0)
    assert (min(short.lows), max(short.highs)) == (min(curve.lows), max(curve.highs))
    assert set(zip(short.steps, short.means, strict=True)) <= set(zip(steps, means, strict=True))
    assert thin(short, longest=len(short)) is short


def test_averages_cover_the_steps_that_all_runs_have() -> None:
    same = average([[(1, 1.0), (2, 2.0)], [(1, 3.0), (2, 6.0)]])
    assert same == Curve([1, 2], [2.0, 4.0], [math.sqrt(2), math.sqrt(8)], 2)
    unlike = average([[(0, 0.0), (4, 4.0)], [(1, 1.0), (3, 3.0), (9, 9.0)]])
    assert unlike == Curve([1, 3, 4], [1.0, 3.0, 4.0], [0.0, 0.0, 0.0], 2)
    assert average([[], []]) is None
    assert average([[(1, 1.0)], [(2, 1.0)]]) is None


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (linear_axis(1.5, 4.2), ["2", "3", "4"]),
        (linear_axis(0.0, 1.0), ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (linear_axis(0.82, 0.86, percent=True), ["82%", "83%", "84%", "85%", "86%"]),
        (linear_axis(5.0, 5.0), ["4.50", "4.75", "5.00", "5.25", "5.50"]),
        (linear_axis(0.0, 0.0, from_zero=True), ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (log_axis(1e-4, 0.05, percent=True), ["0.01%", "0.1%", "1%"]),
        (log_axis(1.5, 4.2), ["2", "3", "4"]),
        (log_axis(1e-9, 1.0), ["10⁻⁸", "10⁻⁶", "10⁻⁴", "0.01", "1"]),
        (step_axis(0, 400), ["0", "100", "200", "300", "400"]),
        (step_axis(0, 100_000), ["0", "20k", "40k", "60k", "80k", "100k"]),
        (step_axis(0, 3), ["0", "1", "2", "3"]),
    ],
)
def test_ticks_stand_at_round_numbers(axis: Any, texts: list[str]) -> None:
    assert [tick.text for tick in axis.ticks] == texts
    assert all(-1e-9 <= tick.place <= 1 + 1e-9 for tick in axis.ticks)


@pytest.mark.parametrize("low", [1e-12, 0.3, 7.0, 1e6])
@pytest.mark.parametrize("span", [1e-6, 0.01, 0.5, 3.3, 1e4])
def test_any_range_gets_a_few_ticks_inside_it(low: float, span: float) -> None:
    for axis in (linear_axis(low, low + span), linear_axis(low, low + span, percent=True), log_axis(low, low + span)):
        assert 1 <= len(axis.ticks) <= 9
        assert len({tick.text for tick in axis.ticks}) == len(axis.ticks)
        assert all(0 <= tick.place <= 1 for tick in axis.ticks)


@pytest.mark.parametrize("places", [[0.5] * 6, [0.0, 0.01, 0.02], [1.0, 0.99, 0.98, 0.1], [0.2], [-3.0, 5.0], [0.5] * 30])
def test_labels_at_the_ends_of_lines_do_not_overlap(places: list[float]) -> None:
    moved = spread_out(dict(enumerate(places)), spacing=0.06)
    ordered = sorted(moved.values())
    gap = min(0.06, 1 / max(1, len(places) - 1))
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(ordered))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in ordered)
    assert sorted(moved, key=moved.__getitem__) == sorted(moved, key=lambda key: (min(1, max(0, places[key])), key))


def test_mask_bits_are_read_in_their_order() -> None:
    assert decode(2, 4, "a5") == ["1010", "0101"]
    assert decode(1, 3, "60") == ["011"]
    assert _packed(["1010", "0101"]) == "a5"
    assert cell_path(["1100"], ["0110"], "01") == "M2 0h1"
    assert cell_path(["1100", "1111"], ["1100", "1101"], "11") == "M0 0h2M0 1h2M3 1h1"
    assert cell_path(["1100"], ["0110"], "10") == "M0 0h1"


def test_lines_between_groups_follow_the_direction_of_the_pattern() -> None:
    along_rows = ["11001010", "00110101"]
    along_columns = ["1111", "1111", "0000", "0000", "1111", "0000", "1111", "0000"]
    assert _group_lines("2:4", along_rows) == "M4 0v2"
    assert _group_lines("2:4", along_columns) == "M0 4h4"
    assert _group_lines("1:4", ["1111", "1111"]) == ""
    assert _group_lines("", along_rows) == ""


def test_masks_of_the_page_are_those_of_the_run(comparison: Path, page: Page) -> None:
    film = page.data["sections"][0]["masks"][0]["films"][0]
    file = comparison / "s-ste-2x4" / "seed-0" / "metrics.jsonl"
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["kind"] == "mask"]
    assert [(f["step"], f["bits"]) for f in film["frames"]] == [(row["step"], row["bits"]) for row in rows]


def test_a_dense_run_has_no_mask_to_show(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "dense", Character("dense", 1.6, flips=0.001))
    write_run(tmp_path / "runs" / "sparse", SSTE)
    page, _ = report(tmp_path / "runs")
    assert [film["group"] for film in page.data["sections"][0]["masks"][0]["films"]] == [1]
    assert [series["group"] for series in page.data["sections"][0]["charts"]["churn"]["series"]] == [1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixed(-0.0004, 2, signed=True), "0.00"),
        (fixed(-1.5, 1), "-1.5"),
        (fixed(None, 1), "\N{EN DASH}"),
        (fixed(1e12, 3), "1e+12"),
        (brief(0.000012), "1.20e-5"),
        (brief(1234.5), "1234"),
        (share(0.5), "50.0 %"),
        (share(0.00012), "0.012 %"),
        (share(0.0), "0.0 %"),
    ],
)
def test_numbers_are_written_plainly(text: str, expected: str) -> None:
    assert _plain(text) == expected
