"""Claims: that their files make sense, that a study trains, stops and goes on, and that verdicts follow from the runs."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_worker import InProcessWorker
from scipy import stats

from nmsparse.recipes import OUTPUT, Clock
from nmsparse.recipes import recipe as make_recipe
from nmsparse.workbench import compare as compare_module
from nmsparse.workbench.compare import run_study
from nmsparse.workbench.reproduce import (
    CLAIMS,
    SCALES,
    Claim,
    Ledger,
    Study,
    claims_at,
    decision_table,
    plan,
    print_outcome,
    print_plan,
    reproduce,
    to_dict,
    write_results,
)
from nmsparse.workbench.reproduce import _runner as runner
from nmsparse.workbench.reproduce._claim import Contender, Experiment, Setup, Statement
from nmsparse.workbench.reproduce._flops import density, equal_flops_steps, training_flops, update_cost
from nmsparse.workbench.reproduce._ledger import Run, settings_hash, settings_of
from nmsparse.workbench.reproduce._outcome import advise, gain_words, judge_all, table
from nmsparse.workbench.reproduce._runner import Progress
from nmsparse.workbench.reproduce._statistics import Difference, is_better, is_equal, is_not_worse, paired_difference
from nmsparse.workbench.reproduce._study import TUNING_SEED
from nmsparse.workbench.reproduce._verdicts import judge, seconds_to, steps_to, times_to_common_loss
from nmsparse.workbench.training import TrainConfig, train

TINY: dict[str, Any] = {
    "task": "shakespeare", "model": "gpt2", "width": 16, "layers": 1, "heads": 2, "length": 16, "limit": 32, "batch": 4,
    "steps": 4, "eval_batches": 1, "log_every": 1, "eval_every": 2, "emulate": True, "save": False,
}  # fmt: skip


def small_claim(rates: tuple[float, ...] = (1e-3, 3e-3), **changes: Any) -> Claim:
    contenders = (Contender("dense"), Contender("ste@2:4"), Contender("ste@1:4", tuned_as="ste@2:4"))
    experiment = Experiment("gpt", "a tiny GPT", dict.fromkeys(SCALES, Setup(TINY | changes, rates)), contenders)
    statement = Statement("gpt", "dense", "better", "ste@1:4", "dense is better than ste at 1:4")
    return Claim("tiny", "Tiny", "Nobody, 2026.", "Nothing in particular.", (experiment,), (statement,))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(InProcessWorker, "given", [])
    monkeypatch.setattr(compare_module, "Worker", InProcessWorker)
    monkeypatch.setattr(compare_module, "POLL_SECONDS", 0.0)
    return monkeypatch


# ---- statistics ----


def test_the_paired_interval_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 5, 12):
        left, right = torch.randn(2, count, generator=generator, dtype=torch.float64).tolist()
        ours = paired_difference(dict(enumerate(left)), dict(enumerate(right)))
        theirs = stats.ttest_rel(left, right).confidence_interval(0.95)
        assert ours is not None
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=2e-4)
        assert ours.mean == pytest.approx((theirs.low + theirs.high) / 2)


def test_only_seeds_that_both_sides_have_are_paired() -> None:
    paired = paired_difference({0: 3.0, 1: 5.0, 2: 100.0}, {0: 1.0, 1: 3.0, 7: 0.0})
    assert paired == Difference(2.0, 2.0, 2.0, 2)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("low", "high", "better", "not_worse", "equal"),
    [
        (0.1, 0.3, "holds", "holds", "within noise"),
        (0.3, 0.5, "holds", "holds", "fails"),
        (-0.1, 0.1, "within noise", "holds", "holds"),
        (-0.3, 0.3, "within noise", "within noise", "within noise"),
        (-0.3, -0.1, "fails", "within noise", "within noise"),
        (-0.5, -0.3, "fails", "fails", "fails"),
    ],
)
def test_a_verdict_asks_where_the_whole_interval_lies(low: float, high: float, better: str, not_worse: str, equal: str) -> None:
    gain = Difference((low + high) / 2, low, high, 3)
    assert (is_better(gain), is_not_worse(gain, 0.2), is_equal(gain, 0.2)) == (better, not_worse, equal)


def test_one_seed_decides_nothing() -> None:
    single = paired_difference({0: 2.0}, {0: 1.0})
    assert single is not None
    assert {is_better(single), is_not_worse(single, 9.0), is_equal(single, 9.0)} == {"too few seeds"}
    assert is_better(Difference(1.0, 0.9, 1.1, 2)) == "too few seeds", "two seeds tell little of their spread"


# ---- FLOPs ----


def test_a_linear_layer_costs_three_products_and_sparse_ones_their_density() -> None:
    config = TrainConfig.from_dict(TINY | {"recipe": "dense"})
    cost = update_cost(config)
    tokens = config.batch * 16
    assert cost.layers["transformer.h.0.mlp.c_fc"] == (2 * tokens * 16 * 64, 64, 16)
    linear = sum(forward for forward, _, _ in cost.layers.values())
    assert training_flops(config).dense == training_flops(config).sparse == cost.total * config.steps
    ste, trio, sdgp = (training_flops(replace(config, recipe=name)) for name in ("ste", "trio", "sdgp"))
    assert ste.dense - ste.sparse == config.steps * linear / 2
    assert trio.dense - trio.sparse == config.steps * 3 * linear / 2
    assert sdgp.dense - sdgp.sparse == config.steps * linear / 2


@pytest.mark.parametrize(
    ("name", "pattern", "options", "expected"),
    [
        ("sr-ste", "1:16", {}, 0.0625),
        ("structure-decay", "2:4", {}, 0.625),
        ("structure-decay", "1:8", {}, 0.4375),
        ("structure-decay", "1:16", {}, 0.375),
        ("structure-decay", "1:16", {"shape": "geometric"}, 0.0625),
        ("mask-decay", "1:8", {}, 0.738),
        ("mask-decay", "1:32", {}, 0.709),
        ("step", "1:4", {"switch": 0.2}, 0.4),
        ("asp", "2:4", {"start": 0.5}, 0.75),
        ("fst", "2:4", {"dense_tail": 0.5}, 0.75),
    ],
)
def test_mean_forward_densities_follow_the_schedules(name: str, pattern: str, options: dict[str, Any], expected: float) -> None:
    """The table of the progressive paper's specification, without dense and fixed shares."""
    spans = {"mask-decay": {"dense": 0.0, "fixed": 0.0}, "structure-decay": {"dense": 0.0, "fixed": 0.0}}.get(name, {})
    recipe = make_recipe(name, pattern, **spans, **options)
    steps = 8000
    mean = sum(density(recipe, OUTPUT, Clock(step, steps)) for step in range(steps)) / steps
    assert mean == pytest.approx(expected, abs=1e-3)


def test_equal_flops_are_equal() -> None:
    config = TrainConfig.from_dict(TINY | {"steps": 4000, "recipe": "sr-ste", "pattern": "1:8"})
    reference = replace(config, recipe="mask-decay")
    longer = replace(config, steps=equal_flops_steps(config, reference))
    assert longer.steps > config.steps
    assert training_flops(longer).sparse == pytest.approx(training_flops(reference).sparse, rel=1e-3)


# ---- claim files ----


def contenders(name: str) -> list[tuple[Experiment, Contender]]:
    return [(experiment, contender) for experiment in CLAIMS[name].experiments for contender in experiment.contenders]


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_configuration_is_valid_and_its_model_can_be_built(name: str, scale: Any, tmp_path: Path) -> None:
    if name not in claims_at(scale):
        with pytest.raises(ValueError, match="not at scale cpu, only at toy, small, full"):
            Study(CLAIMS[name], scale, Ledger(tmp_path), "none")
        return
    study = Study(CLAIMS[name], scale, Ledger(tmp_path), "none")
    assert study.tuning() or study.finals(1)  # timed experiments on one GPU take one rate
    for experiment, contender in contenders(name):
        if experiment not in study.experiments:
            continue
        rates = experiment.setups[scale].rates
        config = study.config(experiment, contender, rates[0], 0)
        flops = training_flops(config)
        assert (flops.sparse < flops.dense) == (config.recipe != "dense"), contender.label
        assert config.emulate != experiment.is_timed or scale == "toy"
        if scale != "toy":
            assert config.precision == "bf16"


@pytest.mark.parametrize("name", CLAIMS)
def test_names_of_runs_and_folders_are_unique(name: str, tmp_path: Path) -> None:
    study = Study(CLAIMS[name], "small", Ledger(tmp_path), "none")
    names = [planned.name for planned in [*study.tuning(), *study.finals(3)]]
    assert len(set(names)) == len(names)
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-") for each in names)


@pytest.mark.parametrize("name", CLAIMS)
def test_every_contender_of_every_claim_trains(name: str, tmp_path: Path) -> None:
    study = Study(CLAIMS[name], "toy", Ledger(tmp_path), "none")
    for number, (experiment, contender) in enumerate(contenders(name)):
        config = study.config(experiment, contender, experiment.setups["toy"].rates[0], 0)
        short = replace(config, steps=1, eval_batches=1, batch=4, limit=4)
        result = train(short, tmp_path / str(number)).result or {}
        assert (result["status"], result["violations"]) == ("finished", 0)


def test_claims_share_the_runs_that_they_have_in_common(tmp_path: Path) -> None:
    hashes = {}
    for name in ("step", "progressive", "sdgp", "trio"):
        study = Study(CLAIMS[name], "small", Ledger(tmp_path), "none")
        hashes[name] = {settings_hash(planned.config) for planned in [*study.tuning(), *study.finals(1)]}
    assert hashes["step"] & hashes["progressive"]  # dense and sr-ste 1:16 on the ViT
    assert hashes["sdgp"] & hashes["trio"]  # the dense wide GPT


def test_a_statement_about_an_unknown_contender_is_refused() -> None:
    claim = small_claim()
    with pytest.raises(ValueError, match="has no contender 'sr-ste'"):
        replace(claim, statements=(Statement("gpt", "dense", "better", "sr-ste", "..."),))
    with pytest.raises(ValueError, match="refers to 'fst'"):
        Experiment("gpt", "", {}, (Contender("dense", tuned_as="fst"),))


# ---- studies ----


def test_a_claim_runs_from_end_to_end(tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """s-ste at toy scale with three seeds: tuned, trained, judged, printed, written down."""
    ((study, progress),) = reproduce([CLAIMS["s-ste"]], tmp_path / "book", scale="toy", seeds=3, folder=tmp_path / "runs")
    assert progress == Progress([], {})
    rows = [json.loads(line) for line in (tmp_path / "book" / "s-ste.jsonl").read_text().splitlines()]
    assert sum(row["role"] == "tuning" for row in rows) == 5 * 2  # five contenders search, two rates each
    assert sum(row["role"] == "final" for row in rows) == 12 * 3
    assert {row["seed"] for row in rows} == {0, 1, 2, TUNING_SEED}
    assert {row["steps"] for row in rows if row["role"] == "tuning"} == {2}
    row = rows[-1]
    assert row["settings"]["width"] == 32
    assert {"nmsparse", "torch", "device", "commit"} <= set(row["environment"])
    assert len(row["curves"]["train"]["loss"]) == len(row["curves"]["valid"]["loss"]) * 2 == 4
    print_outcome(study, progress)
    shown = capsys.readouterr().out
    assert "s-ste reaches a lower validation loss than sr-ste" in shown
    assert "validation loss" in shown
    values = json.loads(json.dumps(to_dict(study, study.claim)))
    assert {each["verdict"] for each in values["statements"]} <= {"holds", "within noise", "fails"}
    assert len(values["experiments"][0]["contenders"][0]["runs"]) == 3
    page = write_results(tmp_path / "book", "toy").read_text()
    assert "GPT-2 on enwik8" in page
    assert len(list((tmp_path / "book" / "plots").glob("s-ste-*.svg"))) == 2


def test_pairs_start_from_the_same_weights_and_see_the_same_examples(tmp_path: Path, quick: Any) -> None:
    """Two recipes that compute the same agree to the last digit: nothing else differs within a seed."""
    claim = small_claim(rates=(1e-3,))
    twins = (Contender("dense"), Contender("ste@4:4"))
    claim = replace(claim, experiments=(replace(claim.experiments[0], contenders=twins),), statements=())
    ((study, _),) = reproduce([claim], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs")
    dense, ste = (study.results(claim.experiments[0], contender)[0] for contender in twins)
    assert dense.headline == ste.headline


def test_finals_start_as_soon_as_their_rate_is_known(tmp_path: Path, quick: Any) -> None:
    """The first contender's trials are enough for its finals; the second one's come later, what statements name first."""
    reproduce([small_claim()], tmp_path / "book", scale="toy", seeds=2, folder=tmp_path / "runs", jobs=1)
    assert [(config.label, config.seed == TUNING_SEED) for config in InProcessWorker.given] == [
        ("dense", True), ("dense", True), ("dense", False), ("dense", False),
        ("ste 2:4", True), ("ste 2:4", True), ("ste 1:4", False), ("ste 1:4", False), ("ste 2:4", False), ("ste 2:4", False),
    ]  # fmt: skip


def test_time_that_is_up_leaves_the_verdicts_of_the_first_claims(tmp_path: Path, quick: Any) -> None:
    first, second = small_claim(), replace(small_claim(), name="other", experiments=small_claim(batch=8).experiments)
    reproduce([first, second], tmp_path / "book", scale="toy", seeds=2, folder=tmp_path / "runs", jobs=1)
    assert [config.batch for config in InProcessWorker.given] == [4] * 10 + [8] * 10


def test_runs_that_ended_without_being_booked_are_booked_and_followed_by_finals(tmp_path: Path, quick: Any) -> None:
    arguments = {"scale": "toy", "seeds": 1, "folder": tmp_path / "runs", "jobs": 1}
    quick.setattr(InProcessWorker, "stop_after", 4)
    with pytest.raises(KeyboardInterrupt):
        reproduce([small_claim()], tmp_path / "book", **arguments)
    (tmp_path / "book" / "tiny.jsonl").unlink()  # as if it had been killed before it could write
    quick.setattr(InProcessWorker, "stop_after", None)
    ((_, progress),) = reproduce([small_claim()], tmp_path / "book", **arguments)
    assert progress == Progress([], {})
    assert len(InProcessWorker.given) == 4 + 3


def test_claims_that_want_the_same_run_train_it_once(tmp_path: Path, quick: Any) -> None:
    ours, theirs = small_claim(), replace(small_claim(), name="other")
    (one, first), (two, second) = reproduce([ours, theirs], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs")
    assert first == second == Progress([], {})
    assert len((tmp_path / "book" / "tiny.jsonl").read_text().splitlines()) == 4 + 3
    assert not (tmp_path / "book" / "other.jsonl").exists()
    assert judge(one, ours.statements[0]).left == judge(two, theirs.statements[0]).left != {}


def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    book = tmp_path / "book"
    quick.setattr(InProcessWorker, "stop_after", 3)
    with pytest.raises(KeyboardInterrupt):
        reproduce([small_claim()], book, scale="toy", seeds=2, folder=tmp_path / "runs", jobs=1)
    before = (book / "tiny.jsonl").read_text()
    assert before.count("\n") == 3
    (book / "tiny.jsonl").write_text(before + before[:100])  # a kill in the middle of a line
    quick.setattr(InProcessWorker, "stop_after", None)
    # another folder for the runs: a fresh machine that has the book only
    ((_, progress),) = reproduce([small_claim()], book, scale="toy", seeds=2, folder=tmp_path / "elsewhere")
    assert progress.left == []
    lines = (book / "tiny.jsonl").read_text().splitlines()
    assert lines[:3] == before.splitlines()
    hashes = [json.loads(line)["hash"] for line in lines if line not in (before[:100],)]
    assert len(hashes) == len(set(hashes)) == 4 + 6
    modified = (book / "tiny.jsonl").stat().st_mtime_ns
    reproduce([small_claim()], book, scale="toy", seeds=2, folder=tmp_path / "elsewhere")
    assert (book / "tiny.jsonl").stat().st_mtime_ns == modified


def test_time_that_is_up_starts_nothing_and_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((study, progress),) = reproduce(
        [small_claim()], tmp_path / "book", scale="toy", seeds=2, folder=tmp_path / "runs", minutes=0
    )
    assert not (tmp_path / "runs").exists()
    assert len(progress.left) == 4 + 6  # two contenders with two rates; three contenders with two seeds
    assert judge(study, study.claim.statements[0]).verdict == "not run yet"
    print_outcome(study, progress)
    assert "10 runs are left" in capsys.readouterr().out


def test_no_run_starts_after_its_moment(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(TINY)
    jobs = run_study({"late": config}, tmp_path, until=0.0)
    assert [job.status for job in jobs] == ["waiting"]


def test_processes_train_side_by_side_and_failures_are_named(tmp_path: Path) -> None:
    claim = small_claim(rates=(1e-3,))
    good, bad = (
        claim.experiments[0],
        replace(claim.experiments[0], name="bad", setups={"toy": Setup(TINY | {"heads": 3}, (1e-3,))}),
    )
    few = tuple(replace(each, contenders=each.contenders[:1]) for each in (good, bad))
    both = replace(claim, experiments=few, statements=())
    ((_, progress),) = reproduce([both], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs", jobs=2)
    assert Ledger(tmp_path / "book").runs.keys() != set()
    ((name, why),) = progress.failed.items()
    assert name.startswith("bad-dense")
    assert "not a multiple of 3 heads" in why
    assert progress.left == [name]


def test_data_that_is_missing_is_noticed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NMSPARSE_DATA", raising=False)
    with pytest.raises(ValueError, match="NMSPARSE_DATA"):
        reproduce([CLAIMS["bi-mask"]], tmp_path / "book", folder=tmp_path / "runs")
    claim = small_claim(pretrained="{data}/nowhere")
    with pytest.raises(ValueError, match="put the pretrained model there"):
        reproduce([claim], tmp_path / "book", scale="toy", data_dir=tmp_path, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("lacking", "why"), [({"task": "cifar10"}, "cifar10"), ({"pretrained": "{data}/nowhere"}, "nowhere")])
def test_what_one_experiment_lacks_does_not_stop_the_others(
    lacking: dict[str, str], why: str, tmp_path: Path, quick: Any
) -> None:
    claim = small_claim(rates=(1e-3,))
    other = replace(claim.experiments[0], name="other", setups={"toy": Setup(TINY | {"model": None} | lacking, (1e-3,))})
    both = replace(claim, experiments=(other, *claim.experiments))
    ((study, progress),) = reproduce([both], tmp_path / "book", scale="toy", seeds=1, data_dir=tmp_path, folder=tmp_path / "runs")
    assert why in progress.failed["other"]
    assert {run.row["experiment"] for run in study.ledger.runs.values()} == {"gpt"}


def test_no_run_starts_that_would_not_end_in_time(tmp_path: Path) -> None:
    configs = {name: TrainConfig.from_dict(TINY) for name in ("short", "long")}
    lasts = {"short": 0.0, "long": 1e6}.__getitem__
    jobs = run_study(configs, tmp_path, jobs=1, until=time.monotonic() + 1000, lasts=lasts)
    assert {job.name: job.status for job in jobs} == {"short": "finished", "long": "waiting"}


def test_a_run_is_expected_to_take_as_long_as_those_before(tmp_path: Path) -> None:
    """Its own steps at the slowest pace so far, and once what was not steps: compilation."""
    book = Book(tmp_path, small_claim(), "toy")
    session = runner._Session([book.study], tmp_path, None, None, None, lambda jobs: None)
    trials = book.study.tuning()
    names = list(session._begin(book.study, trials, is_timed=False))
    assert [session._seconds(name) for name in names] == len(names) * [0.0], "nobody knows"
    book.add(trials[0], 0.5, steps=100, step_ms=200.0, seconds=65.0)  # 45 of them compile
    book.add(trials[1], 0.5, steps=100, step_ms=500.0, seconds=52.0)
    final = replace(trials[2], config=replace(trials[2].config, steps=1000))
    (name,) = session._begin(book.study, [final], is_timed=False)
    assert session._seconds(name) == pytest.approx(runner.STARTING_SECONDS + 45 + 1000 * 0.5)


def test_a_run_that_cannot_be_recorded_does_not_end_the_others(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    record = runner._Session._record

    def broken(session: Any, study: Any, planned: Any, folder: Path) -> None:
        if planned.contender.label == "dense":
            raise OSError("disk full")
        record(session, study, planned, folder)

    quick.setattr(runner._Session, "_record", broken)
    ((_, progress),) = reproduce([small_claim((1e-3,))], tmp_path / "book", scale="toy", seeds=1, folder=tmp_path / "runs")
    ((name, why),) = progress.failed.items()
    assert name.startswith("gpt-dense")
    assert "disk full" in why
    assert progress.left == [name]


def test_runs_that_statements_name_come_first_experiment_by_experiment(tmp_path: Path) -> None:
    claim = small_claim((1e-3,))
    second = replace(claim.experiments[0], name="second")
    study = Study(replace(claim, experiments=(*claim.experiments, second)), "toy", Ledger(tmp_path), "none")
    order = [(p.experiment.name, p.config.seed, p.contender.label) for p in study.finals(2)]
    assert order[:4] == [("gpt", 0, "dense"), ("gpt", 0, "ste@1:4"), ("gpt", 1, "dense"), ("gpt", 1, "ste@1:4")]
    assert order[4:] == [
        ("gpt", 0, "ste@2:4"), ("gpt", 1, "ste@2:4"),
        *(("second", seed, label) for seed in (0, 1) for label in ("dense", "ste@2:4", "ste@1:4")),
    ]  # fmt: skip


def test_attention_is_counted() -> None:
    """Its two products, of the scores and with the values, in every layer."""
    short, long = (update_cost(TrainConfig.from_dict(TINY | {"length": length})).total for length in (16, 32))
    assert long - 2 * short == 3 * TINY["batch"] * TINY["layers"] * 2 * 2 * TINY["width"] * (32 * 32 - 2 * 16 * 16)


def test_a_plan_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan(Study(CLAIMS["bi-mask"], "small", Ledger(tmp_path), "none"), 3))
    shown = capsys.readouterr().out
    assert "39 final runs follow at the learning rates that these find." in shown
    assert "51 of 51 runs to do." in shown
    print_plan(plan(Study(CLAIMS["trio"], "small", Ledger(tmp_path), "none"), 3))  # one rate: nothing to find
    shown = capsys.readouterr().out
    assert "12 of 12 runs to do" in shown
    assert "that these find" not in shown


# ---- verdicts from made-up runs ----

FALLS = "the flip rate of s-ste falls during training, as that of every recipe does with the learning rate"


class Book:
    """Writes rows as if runs had been made."""

    def __init__(self, folder: Path, claim: Claim, scale: Any = "small", device: str = "a GPU") -> None:
        self.claim, self.device = claim, device
        self.study = Study(claim, scale, Ledger(folder), device)

    def add(self, planned: Any, value: float | None, metric: str = "accuracy", **changes: Any) -> None:
        status = "diverged" if value is None else "finished"
        steps = [0, planned.config.steps // 2, planned.config.steps]
        high = value or 0.0
        row = {
            "version": 1, "claim": self.claim.name, "scale": self.study.scale, "experiment": planned.experiment.name,
            "contender": planned.contender.label, "role": "final", "seed": planned.config.seed, "lr": planned.config.lr,
            "steps": planned.config.steps, "hash": settings_hash(planned.config), "settings": settings_of(planned.config),
            "status": status,
            "metric": {"name": metric, "higher_is_better": metric == "accuracy", "unit": "images"},
            "valid": {} if value is None else {metric: value}, "step_ms": 10.0, "seconds": 60.0,
            "curves": {
                "train": {"step": steps, "flip_rate": [0.1, 0.05, 0.01], "gradient_noise": [0.5, 0.6, 0.7]},
                "valid": {"step": steps, metric: [high / 3, high / 2, high]},
            },
            "flops": {"dense": 2e15, "sparse": 1e15}, "switched_at": None, "when": "2026-11-16T00:00:00+00:00",
            "environment": {"nmsparse": "0.1.0", "torch": "2.13", "device": self.device, "commit": "abc"},
        }  # fmt: skip
        self.study.ledger.add(self.claim.name, row | changes)

    def fill(self, values: Callable[[str, int], float | None], seeds: int = 3, metric: str = "accuracy") -> None:
        """All trials alike, then the final runs with values by contender and seed."""
        for planned in self.study.tuning():
            self.add(planned, 0.5, metric)
        for planned in self.study.finals(seeds):
            self.add(planned, values(planned.contender.label, planned.config.seed), metric)


def bi_mask_values(label: str, seed: int) -> float:
    """bi-mask far above the transposable mask, level with sr-ste, and below its natural order; noise that pairs share."""
    noise = 0.02 * seed
    if label.startswith("t-mask"):
        return 0.80 + noise + 0.001 * seed
    return 0.90 + noise + (0.03 if "natural" in label else 0.0005 * (-1) ** seed if label.startswith("sr-ste") else 0.0)


def test_verdicts_follow_from_paired_runs(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["bi-mask"])
    book.fill(bi_mask_values)
    verdicts = {s.text: judge(book.study, s) for s in CLAIMS["bi-mask"].statements}
    above = verdicts["bi-mask is above the transposable mask at 1:4"]
    assert above.verdict == "holds"
    assert above.gain is not None
    assert above.gain.mean == pytest.approx(0.099)
    assert verdicts["bi-mask is near sr-ste at 2:4 (one point)"].verdict == "holds"
    assert verdicts["searching row orders helps at 1:16"].verdict == "fails"
    assert above.to_dict()["left_values"] == pytest.approx({0: 0.9, 1: 0.92, 2: 0.94})


@pytest.mark.parametrize(
    ("lost", "verdict"),
    [
        ({}, "holds"),
        ({("bi-mask 1:4", 0), ("bi-mask 1:4", 1), ("bi-mask 1:4", 2)}, "fails"),
        ({("bi-mask 1:4", 1)}, "fails"),
        ({("t-mask 1:4", 1)}, "holds"),
        ({("t-mask 1:4", 1), ("bi-mask 1:4", 1)}, "too few seeds"),
        ({(name, seed) for name in ("t-mask 1:4", "bi-mask 1:4") for seed in range(3)}, "within noise"),
    ],
)
def test_a_run_that_diverged_is_the_worst_of_all(tmp_path: Path, lost: set[tuple[str, int]], verdict: str) -> None:
    book = Book(tmp_path, CLAIMS["bi-mask"])
    book.fill(lambda label, seed: None if (label, seed) in lost else bi_mask_values(label, seed))
    judged = {s.text: judge(book.study, s) for s in CLAIMS["bi-mask"].statements}["bi-mask is above the transposable mask at 1:4"]
    assert judged.verdict == verdict
    assert sum(judged.lost) == len(lost)


def test_a_flip_rate_that_rises_does_not_fall(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["s-ste"])
    steps = list(range(0, 100, 10))
    curves = {
        "train": {"step": steps, "flip_rate": [0.01 * (1 + step) for step in steps]},
        "valid": {"step": [90], "loss": [4.0]},
    }
    for planned in book.study.tuning():
        book.add(planned, 4.0, "loss")
    for planned in book.study.finals(3):
        curves["train"]["flip_rate"] = [0.001 * (1 + step) + 0.0001 * planned.config.seed * step for step in steps]
        book.add(planned, 4.0, "loss", curves=curves)
    verdicts = {s.text: judge(book.study, s).verdict for s in CLAIMS["s-ste"].statements}
    assert verdicts[FALLS] == "fails"


def test_losses_gain_by_falling(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["s-ste"])
    values = {"s-ste@2:4": 4.0, "ste@2:4": 4.2}
    book.fill(lambda label, seed: values.get(label, 4.1) + 0.01 * seed + (0.001 * seed if label == "dense" else 0), metric="loss")
    verdicts = {s.text: judge(book.study, s).verdict for s in CLAIMS["s-ste"].statements}
    assert verdicts["s-ste reaches a lower validation loss than ste"] == "holds"
    assert verdicts["s-ste comes near dense (0.03 nats per token)"] == "holds"
    assert verdicts[FALLS] == "holds"


def test_the_best_rate_is_taken_a_diverged_trial_is_the_worst_and_the_edge_is_noticed(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["bi-mask"])
    experiment = CLAIMS["bi-mask"].experiments[0]
    scores = {"dense": (0.8, 0.9, 0.7), "sr-ste 1:4": (0.7, None, 0.8), "t-mask 1:4": (None, None, 0.2)}
    for planned in book.study.tuning():
        values = scores.get(planned.contender.label)
        if values is not None:
            book.add(planned, values[(0.05, 0.1, 0.2).index(planned.config.peak_lr)])
    rates = {label: book.study.rate(experiment, experiment.contender(label)) for label in (*scores, "sr-ste 2:4", "bi-mask 1:4")}
    found = {label: rate and (rate.value, rate.is_at_edge) for label, rate in rates.items()}
    assert found == {
        "dense": (0.1, False), "sr-ste 1:4": (0.2, True), "t-mask 1:4": (0.2, True), "sr-ste 2:4": (0.2, True),
        "bi-mask 1:4": None,
    }  # fmt: skip


def test_runs_of_other_hardware_and_other_settings_do_not_count(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["bi-mask"], device="an old GPU")
    book.fill(bi_mask_values)
    other = Study(CLAIMS["bi-mask"], "small", Ledger(tmp_path), "a new GPU")
    assert other.finals(3) == []
    full = Study(CLAIMS["bi-mask"], "full", Ledger(tmp_path), "an old GPU")
    assert len(full.missing(full.tuning())) == len(full.tuning())


def test_time_to_a_loss_is_that_to_the_loss_both_reach() -> None:
    assert steps_to([(10, 4.0), (20, 3.0), (30, 2.0)], 2.5) == 25
    assert steps_to([(10, 2.0)], 2.5) == 10
    assert steps_to([(10, 4.0), (20, 3.0)], 1.0) == 20

    def run(step_ms: float, losses: list[float]) -> Run:
        curves = {"train": {"step": []}, "valid": {"step": [100, 200, 300], "loss": losses}}
        metric = {"name": "loss", "higher_is_better": False}
        return Run({"status": "finished", "step_ms": step_ms, "curves": curves, "metric": metric, "valid": {"loss": losses[-1]}})

    fast, good = run(5.0, [4.0, 3.0, 2.2]), run(10.0, [4.0, 2.2, 2.0])
    assert times_to_common_loss(fast, good) == pytest.approx((1.5, 2.0))
    assert times_to_common_loss(fast, good, run(1.0, [9.0, 3.0, 2.2])) == pytest.approx((1.5, 2.0, 0.3))


def test_phases_of_a_run_take_their_own_time_and_compilation_none() -> None:
    rows = {"step": [10, 20, 30, 40], "step_ms": [900.0, 5.0, 5.0, 8.0]}  # compiled at first, dense at the end
    run = Run(
        {"status": "finished", "step_ms": 6.5, "curves": {"train": rows, "valid": {"step": []}}, "metric": {"name": "loss"}}
    )
    assert seconds_to(run, 40) == pytest.approx((10 * 6.5 + 10 * 5 + 10 * 5 + 10 * 8) / 1e3)
    assert seconds_to(run, 25) == pytest.approx((10 * 6.5 + 10 * 5 + 5 * 5) / 1e3)


# ---- RESULTS.md ----


def test_results_say_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    Book(tmp_path, CLAIMS["bi-mask"]).fill(bi_mask_values)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.svg").write_text("")
    page = write_results(tmp_path).read_text()
    assert "| CIFAR-10, ResNet-32, 1:16 | 94.52 | 92.92 | 92.02 | 92.77 |" in page
    assert (
        "bi-mask is above the transposable mask at 2:4 | paper | +9.90 points (+9.65 to +10.1, 3 seeds) | **holds** | small |"
        in page
    )
    assert "| `trio` | trio reaches a loss that both reach sooner than dense | ours |  | **not run yet** |  |" in page
    assert (
        "Scale small (51,200 images, the classic widths 16/32/64): 39 runs, 39 minutes of training in sum, 2026-11-16; "
        "nmsparse 0.1.0, torch 2.13, a GPU, commit abc."
    ) in page
    pictures = sorted((tmp_path / "plots").glob("*"))
    assert [picture.name for picture in pictures] == ["bi-mask-1-resnet32.svg", "bi-mask-2-resnet32.svg"]
    for picture in pictures:
        root = ET.fromstring(picture.read_text())
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert "dense" in texts
        assert picture.stat().st_size < 20_000
        assert f"plots/{picture.name}" in page
    assert write_results(tmp_path).read_text() == page


def test_two_cores_stand_in_until_a_gpu_has_run_an_experiment_whole(tmp_path: Path) -> None:
    Book(tmp_path, CLAIMS["bi-mask"], "cpu", "a CPU").fill(bi_mask_values)
    page = write_results(tmp_path).read_text()
    assert "(+9.65 to +10.1, 3 seeds) | **holds** | cpu |" in page
    assert "Scale cpu (20,480 images, the classic widths 16/32/64): 39 runs" in page
    assert "| scale cpu, a CPU |" in page
    Book(tmp_path, CLAIMS["bi-mask"]).fill(bi_mask_values, seeds=2)
    assert write_results(tmp_path).read_text() == page, "two seeds of the GPU decide nothing yet"
    Book(tmp_path, CLAIMS["bi-mask"]).fill(bi_mask_values)
    page = write_results(tmp_path).read_text()
    assert "(+9.65 to +10.1, 3 seeds) | **holds** | small |" in page
    assert "| scale small, a GPU |" in page
    assert "scale cpu" not in page


def test_all_claims_at_a_scale_are_those_that_have_it() -> None:
    assert claims_at("small") == list(CLAIMS)
    assert claims_at("cpu") == [name for name in CLAIMS if name != "trio"]


def test_the_decision_table_names_the_best_and_those_within_noise(tmp_path: Path) -> None:
    assert decision_table(tmp_path).count("not run yet") == sum(len(claim.advice) for claim in CLAIMS.values())
    Book(tmp_path, CLAIMS["bi-mask"]).fill(bi_mask_values)
    table = decision_table(tmp_path)
    assert "`bi-mask 2:4` (validation accuracy 92.0\u202f%), better than `t-mask 2:4`." in table
    assert "not run yet" in table


def test_advice_about_time_counts_time_and_not_the_loss_at_the_end(tmp_path: Path) -> None:
    """trio takes a third of the time and ends a little higher; all others alike."""
    book = Book(tmp_path, CLAIMS["trio"])
    for planned in book.study.tuning():
        book.add(planned, 2.0, "loss")
    for planned in book.study.finals(3):
        is_trio = planned.contender.label == "trio@2:4"
        steps, losses = [100, 200, 400], [4.0, 3.0, 2.1 if is_trio else 2.0]
        curves = {"train": {"step": []}, "valid": {"step": steps, "loss": losses}}
        step_ms = (10.0 if is_trio else 30.0) + 0.1 * planned.config.seed
        book.add(planned, losses[-1], "loss", curves=curves, step_ms=step_ms)
    table = decision_table(tmp_path)
    assert "`trio@2:4` (4.04 s to a loss that all reach), better than `dense`, `s-ste@2:4` and `fst@2:4:refresh=2`." in table
    verdicts = {s.text: judge(book.study, s).verdict for s in CLAIMS["trio"].statements}
    assert verdicts["trio reaches a loss that both reach sooner than dense"] == "holds"
    assert verdicts["trio's loss is near that of s-ste (0.03 nats per token)"] == "fails"


def test_advice_needs_seeds_in_common_and_names_what_is_left_out(tmp_path: Path) -> None:
    """Of two masks at 2:4 one was run once: three seeds that others lack would decide otherwise."""
    book = Book(tmp_path, CLAIMS["progressive"])
    values = {"sr-ste@1:8": (0.9, 0.8, 0.7), "mask-decay@1:8": (0.85,), "structure-decay@1:8": (None, None, None)}
    for planned in book.study.tuning():
        book.add(planned, 0.5)
    for planned in book.study.finals(3):
        known = values.get(planned.contender.label, ())
        if planned.experiment.name == "vit" and planned.config.seed < len(known):
            book.add(planned, known[planned.config.seed])
    assert advise(book.study, CLAIMS["progressive"].advice[0]) is None
    for planned in book.study.finals(3):
        if (planned.experiment.name, planned.contender.label) == ("vit", "mask-decay@1:8"):
            book.add(planned, 0.95 - 0.1 * planned.config.seed)
    words = str(advise(book.study, CLAIMS["progressive"].advice[0]))
    assert words.startswith("`mask-decay@1:8` (validation accuracy 85")
    assert words.endswith("better than `sr-ste@1:8`. `structure-decay@1:8`: 3 of 3 runs diverged.")


def test_a_diverged_run_says_nothing_about_the_time_of_a_step(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["sdgp"])
    (statement,) = (s for s in CLAIMS["sdgp"].statements if s.quantity == "step_ms")
    for planned in book.study.finals(3):
        if planned.experiment.name == "speed":
            is_dense, seed = planned.contender.label == "dense", planned.config.seed
            book.add(planned, None if is_dense and seed == 0 else 2.0, "loss", step_ms=10 + 0.001 * seed + 0.005 * (not is_dense))
    judged = judge(book.study, statement)
    assert judged.gain is not None
    assert judged.gain.mean < 0
    assert judged.verdict == "too few seeds"


def test_margins_in_nats_per_token_are_smaller_where_losses_are_per_byte(tmp_path: Path) -> None:
    def verdict(scale: str) -> str:
        book = Book(tmp_path / scale, CLAIMS["s-ste"], scale)
        values = {"s-ste@2:4": 4.02}
        book.fill(lambda label, seed: values.get(label, 4.0) + 0.01 * seed + 0.001 * seed * (label == "dense"), metric="loss")
        verdicts = {s.text: judge(book.study, s).verdict for s in CLAIMS["s-ste"].statements}
        return verdicts["s-ste comes near dense (0.03 nats per token)"]

    assert verdict("small") == "holds"
    assert verdict("cpu") == "fails"


def test_the_margin_that_decided_stands_beside_the_gain_in_its_unit(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["s-ste"], "cpu")
    book.fill(lambda label, seed: 2.4 + 0.01 * seed + 0.001 * seed * (label == "dense"), metric="loss")
    words = {judged.statement.text: gain_words(judged) for judged in judge_all(book.study)}
    assert words["s-ste comes near dense (0.03 nats per token)"].endswith("3 seeds), margin 0.00870 nats")
    assert "margin" not in words["s-ste reaches a lower validation loss than ste"]
    assert "divided by 3.45 bytes per token" in write_results(tmp_path).read_text()


def test_json_has_the_flips_and_switches_of_the_tables(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["s-ste"])
    for planned in book.study.tuning():
        book.add(planned, 2.4, "loss")
    for planned in book.study.finals(3):
        book.add(planned, 2.4, "loss", switched_at=33 if planned.contender.candidate.recipe == "step" else None)
    (gpt,) = to_dict(book.study, CLAIMS["s-ste"])["experiments"]
    found = {
        each["contender"]: [(run["flip_rate_at_end"], run["switched_at"]) for run in each["runs"]] for each in gpt["contenders"]
    }
    assert found["s-ste@2:4"] == [(0.01, None)] * 3
    assert found["step@2:4"] == [(0.01, 33)] * 3


def test_a_longer_grid_leaves_what_was_published_until_its_rates_are_tried(tmp_path: Path) -> None:
    claim = small_claim((1e-3, 3e-3))
    book = Book(tmp_path, claim, "toy")
    book.fill(lambda label, seed: 2.0 + 0.1 * seed, metric="loss")
    experiment = claim.experiments[0]
    setup = replace(experiment.setups["toy"], rates=(3e-4, 1e-3, 3e-3))
    longer = replace(claim, experiments=(replace(experiment, setups={"toy": setup}),))
    study = Study(longer, "toy", Ledger(tmp_path), "a GPU")
    (experiment,) = longer.experiments
    assert len(study.missing(study.tuning())) == len([c for c in experiment.contenders if not c.tuned_as])
    assert study.finals(3) == [], "nothing is trained at a rate that may not be the best"
    made = table(study, experiment)
    assert made is not None
    assert [row[1] for row in made.rows] == ["3"] * len(experiment.contenders)
    assert all("†" in row[2] for row in made.rows)
    assert any("new rates are not tried yet" in note for note in made.notes)


def test_a_result_with_diverged_runs_says_so(tmp_path: Path) -> None:
    Book(tmp_path, CLAIMS["bi-mask"]).fill(
        lambda label, seed: None if (label, seed) == ("dense", 1) else bi_mask_values(label, seed)
    )
    assert "1 of 3 runs of dense diverged and are not in its mean." in write_results(tmp_path).read_text()


def test_a_recorded_run_is_found_although_a_setting_came_since(tmp_path: Path) -> None:
    book = Book(tmp_path, CLAIMS["bi-mask"])
    planned = book.study.tuning()[0]
    older = {name: value for name, value in settings_of(planned.config).items() if name != "beta2"}
    book.add(planned, 0.5, settings=older, hash="of then")
    found = Ledger(tmp_path).find(planned.config, "a GPU")
    assert found is not None
    assert found.hash == "of then"
    assert Ledger(tmp_path).find(replace(planned.config, beta2=0.9), "a GPU") is None


def test_a_book_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"version": 99}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1"):
        Ledger(tmp_path)


# ---- what training records for claims ----


def test_a_run_that_saves_nothing_leaves_records_only(tmp_path: Path) -> None:
    record = train(TrainConfig.from_dict(TINY | {"recipe": "ste"}), tmp_path / "run")
    assert record.result is not None
    assert (record.result["violations"], record.result["model"]) == (0, None)
    assert sorted(path.name for path in (tmp_path / "run").glob("[!.]*")) == ["metrics.jsonl", "result.json", "run.json"]


def test_the_variance_is_recorded_and_so_is_the_switch(tmp_path: Path) -> None:
    record = train(TrainConfig.from_dict(TINY | {"recipe": "step", "options": {"switch": 2}, "beta2": 0.9}), tmp_path / "run")
    rows = record.rows("train")
    assert all(row["variance"] > 0 for row in rows)
    assert [row.get("switched_at") for row in rows] == [None, 2, 2, 2]
    variances = [row["variance"] for row in rows]
    assert variances[1] == pytest.approx(variances[2]) == pytest.approx(variances[3]), "frozen, and its correction with it"
    assert variances[0] != pytest.approx(variances[1])
