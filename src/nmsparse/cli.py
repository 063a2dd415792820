"""The command line: typer commands over the workbench. Exit codes: 0 done, 1 it failed, 2 what was asked for makes no sense."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import nmsparse as nm

try:
    import typer
except ImportError:
    sys.exit('the command line needs typer and rich: pip install "nmsparse[cli]".')

from nmsparse.workbench.flags import takes_settings
from nmsparse.workbench.training import TrainConfig

WRONG_PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables and progress.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help='Train PyTorch models with N:M structured sparsity. "2:4" keeps 2 of every 4 weights.',
)


@app.command(short_help="List the recipes, their papers and their options.")
def recipes(
    pattern: Annotated[str, typer.Argument(help='Names to show, as a glob such as "*-decay".')] = "*",
    as_json: Json = False,
) -> None:
    """List the recipes: name, paper, which products they make sparse, and their options."""
    from nmsparse.workbench.terminal import is_terminal

    found = nm.recipes(pattern)
    if not found:
        typer.echo(f"no recipe is named {pattern!r}; without an argument all are listed.", err=True)
        raise typer.Exit(1)
    rows = [_facts(info) for info in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif is_terminal():
        _table(rows)
    else:
        for row in rows:
            typer.echo(f"{row['name']:16} {','.join(row['products']) or '-':30} {row['paper']}: {row['summary']}")


def _facts(info: nm.RecipeInfo) -> dict[str, Any]:
    options = {f.name: f.default for f in fields(info.cls) if f.name != "pattern" and f.default is not MISSING}
    return {
        "name": info.name,
        "class": info.cls.__name__,
        "summary": info.summary,
        "paper": info.paper,
        "patterns": info.patterns,
        "products": list(info.products),
        "needs": list(info.needs),
        "ends_dense": info.ends_dense,
        "options": options,
    }


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Recipes")
    table.add_column("recipe", no_wrap=True)
    for name in ("sparse products", "what it does", "options", "paper"):
        table.add_column(name, overflow="fold")  # a narrow terminal must not cut names
    for row in rows:
        options = "\n".join(f"{name}={value}" for name, value in row["options"].items())
        table.add_row(row["name"], "\n".join(row["products"]) or "-", row["summary"], options, row["paper"])
    Console().print(table)


def _need_gpu(command: str) -> None:
    import torch

    if not torch.cuda.is_available():
        typer.echo(f"nmsparse {command} measures a CUDA GPU, and torch sees none on this machine.", err=True)
        raise typer.Exit(1)


def _check_names(option: str, given: list[str], known: Any) -> list[str]:
    for name in given:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}.", param_hint=option)
    return given or list(known)


def _recipe(name: str, pattern: str) -> nm.Recipe:
    try:
        return nm.recipe(name, pattern)
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(str(error).strip("\"'"), param_hint="--recipe") from None


@app.command(short_help="Measure each layer on this GPU: what pays, sparse or dense.")
def plan(
    model: Annotated[
        str, typer.Argument(help="A shape of nmsparse bench (such as llama-8b), or a transformers model or folder.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch: batch times length.")] = 16384,
    recipe: Annotated[str, typer.Option(help="Recipe by name; nmsparse recipes lists them.")] = "trio",
    pattern: Annotated[str, typer.Option(help="N:M.")] = "2:4",
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per update.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Save the plan here, for sparsify_(..., plan=Plan.load(...)).")] = None,
    as_json: Json = False,
) -> None:
    """Measure every layer of a model on this GPU and say which products to run sparse, and why not the others."""
    chosen = _recipe(recipe, pattern)
    _need_gpu("plan")
    from nmsparse.workbench.bench import meta_model

    try:
        built = meta_model(model)
    except (OSError, ValueError) as error:
        typer.echo(f"{model!r} is neither a shape of nmsparse bench nor a model transformers can configure: {error}", err=True)
        raise typer.Exit(1) from None
    made = nm.plan(built, chosen, tokens, micro_batches=micro_batches, device="cuda")
    if output is not None:
        made.save(output)
    typer.echo(made.to_json() if as_json else str(made))


@app.command(short_help="Measure this GPU: kernels, products, layers, steps.")
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="kernels, products, layer, steps, sharded (steps under FSDP2); all of them by default."),
    ] = None,
    models: Annotated[list[str] | None, typer.Option("--model", help="Shapes for the steps; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="How long each side runs before the other has its turn.")] = 1.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 2,
    inference: Annotated[bool, typer.Option("--inference", help="Prefill and decode of served models, not training.")] = False,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines in place of the table.")] = False,
) -> None:
    """Measure this GPU: pack kernels, products, one layer, and whole training steps, dense and sparse in turn."""
    from nmsparse.workbench.bench import MODELS, SUITES, Recorder, bench_inference, headline, run_suites

    chosen = _check_names("SUITES", suites or [], SUITES)
    if inference and suites:
        raise typer.BadParameter("--inference measures served models, not the suites of training: ask for one or the other")
    shapes = _check_names("--model", models or [], MODELS)
    _need_gpu("bench")
    show = json.dumps if as_json else headline
    record = Recorder(output, lambda row: typer.echo(show(row)))
    if inference:
        bench_inference(record, seconds, turns, shapes)
    else:
        run_suites(chosen, record, seconds, turns, shapes)


@app.command(short_help="Write a model for others: dense, packed or ONNX.")
def export(
    source: Annotated[Path, typer.Argument(help="A run's folder, a transformers folder, or a safetensors file or folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; with --format onnx, the file.")],
    form: Annotated[Literal["dense", "packed", "onnx"], typer.Option("--format", help="What to write.")] = "dense",
    pattern: Annotated[str | None, typer.Option(help="N:M of the sparse layers; by default what sparsity.json says.")] = None,
    opset: Annotated[int | None, typer.Option(min=1, help="Of ONNX; by default what torch recommends.")] = None,
    as_json: Json = False,
) -> None:
    """Write a model for others: dense safetensors with exact zeros, packed safetensors, or ONNX."""
    from nmsparse.workbench.exporting import export_graph, export_weights

    with _in_words():
        if form == "onnx":
            graph = export_graph(source, target, pattern, opset)
            facts, size, kept = graph.to_dict(), graph.bytes, f"{len(graph.weights)} sparse weights"
            how = f"as onnxruntime computes it, to {graph.difference:.1e}" if graph.checked else f"not run: {graph.why_unchecked}"
        else:
            made = export_weights(source, target, form, pattern)
            facts, size, kept = made.to_dict(), made.bytes_after, f"{len(made.sparse)} sparse tensors"
            how = f"{made.bytes_after / max(1, made.bytes_before):.0%} of the bytes"
    typer.echo(json.dumps(facts) if as_json else f"{target}: {form}, {kept}, {size:,} bytes, {how}")


@app.command(short_help="Check the N:M pattern of any checkpoint.")
def verify(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, a folder with one or more, or a run's folder.")],
    pattern: Annotated[str | None, typer.Option(help="N:M to check; by default what sparsity.json says, else 2:4.")] = None,
    as_json: Json = False,
) -> None:
    """Check the pattern of every sparse tensor in a checkpoint. Exits with 1 where one is violated, with 2 on a broken file."""
    from nmsparse.workbench.exporting import weights_of

    try:
        report = nm.verify(weights_of(path), pattern)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        for tensor in report.tensors:
            broken = f"{tensor.violations} of {tensor.groups} groups broken"
            typer.echo(f"{tensor.status:9} {tensor.pattern:6} density {tensor.density:.4f}  {broken:32} {tensor.name}")
        counts = {status: sum(t.status == status for t in report.tensors) for status in ("ok", "violated", "dense")}
        typer.echo(f"{report.path}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    if not report.ok:
        raise typer.Exit(1)


@contextmanager
def _in_words() -> Iterator[None]:
    """Mistakes of the caller end in one sentence and exit code 2, failures of a run in one sentence and 1."""
    from safetensors import SafetensorError

    from nmsparse.workbench.training import CheckpointError, DivergenceError

    try:
        yield
    except typer.Exit:  # a RuntimeError too, which has said what it had to say
        raise
    except SafetensorError as error:  # a full disk, for one
        typer.echo(f"Error: a safetensors file could not be written or read: {error}.", err=True)
        raise typer.Exit(1) from None
    except (CheckpointError, DivergenceError, RuntimeError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except (ValueError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"Error: {where}{error.strerror or error}.", err=True)
        raise typer.Exit(2 if isinstance(error, WRONG_PATHS) else 1) from None


def _new_folder(kind: str) -> Path:
    return Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"


def _config(file: Path | None, settings: dict[str, Any]) -> TrainConfig:
    """Settings from a file, if there is one, and from flags, which win."""
    made = TrainConfig.from_dict((TrainConfig.read(file) if file else {}) | settings, "these settings")
    if made.pretrained is not None and Path(made.pretrained).is_dir():
        return replace(made, pretrained=str(Path(made.pretrained).absolute()))  # a run may be continued from elsewhere
    return made


def _check_for_comparison(file: Path) -> None:
    """A file that was written for nmsparse train may say what candidates say."""
    named = [name for name in ("recipe", "options") if name in TrainConfig.read(file)]
    if named:
        raise ValueError(
            f"{file} gives {' and '.join(named)}, but recipe and options of a comparison are given with its candidates, such as "
            '"s-ste:mvue=false": leave them out of the file.'
        )


@app.command(short_help="List what can be learned, and the models that fit.")
def tasks(as_json: Json = False) -> None:
    """List what can be learned, and the models that fit."""
    from nmsparse.workbench.models import models as all_models
    from nmsparse.workbench.tasks import tasks as all_tasks

    fitting = {info.kind: [model.name for model in all_models() if info.kind in model.kinds] for info in all_tasks()}
    rows = [
        {
            "name": info.name,
            "kind": info.kind,
            "embedded": info.is_embedded,
            "summary": info.summary,
            "models": fitting[info.kind],
        }
        for info in all_tasks()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        where = "embedded" if row["embedded"] else "--data-dir"
        typer.echo(f"{row['name']:16} {row['kind']:12} {where:11} {row['summary']}; models: {', '.join(row['models'])}")


@app.command(short_help="Train one model with one recipe.")
@takes_settings()
def train(
    *,
    config: Annotated[Path | None, typer.Option(help="Settings from a JSON or TOML file; flags go before them.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for records, checkpoints and the model.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder, with its settings.")] = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Train one model with one recipe. Works under torchrun and accelerate launch as well."""
    from nmsparse.workbench.records import RunRecord
    from nmsparse.workbench.terminal import training_progress
    from nmsparse.workbench.training import train as run_training

    with _in_words():
        if resume is not None:
            if output is not None or config is not None:
                raise ValueError("--resume takes its settings and its folder from the run; leave --output and --config out.")
            file: Path | None = None
            folder, settings = resume, RunRecord(resume).settings | settings
        else:
            file, folder = config, output or _new_folder("train")
        made = _config(file, settings)
        is_first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun started
        with training_progress(made.label, made.steps, quiet=as_json or not is_first) as progress:
            try:
                record = run_training(made, folder, resume=resume is not None, progress=progress)
            except KeyboardInterrupt:
                typer.echo(f"stopped; nmsparse train --resume {folder} continues from the last checkpoint.", err=True)
                raise typer.Exit(130) from None
    result = record.result or {}
    if not is_first:
        return
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "label": made.label, "seed": made.seed, **result}))
        return
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in result["valid"].items() if value is not None)
    typer.echo(f"validation: {metrics}")
    typer.echo(f"{result['non_zero']:.1%} of the weights of sparse layers are non-zero; model and records are in {folder}")


@app.command(short_help="Train several recipes and seeds side by side, and report.")
@takes_settings(without=("recipe", "pattern", "options"))
def compare(
    candidates: Annotated[
        list[str] | None,
        typer.Argument(help='Recipes, such as dense s-ste sr-ste@1:4 "s-ste:mvue=false"; by default dense sr-ste s-ste trio.'),
    ] = None,
    *,
    pattern: Annotated[list[str] | None, typer.Option(help="Keep N of every M; repeat for several. [default: 2:4]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each, counted from --seed.")] = 3,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default as many as memory and cores allow.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings from a JSON or TOML file; flags go before them.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the runs; one that was interrupted is continued.")] = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Train several recipes with several seeds side by side, and write a report."""
    from nmsparse.workbench.compare import run_study, study
    from nmsparse.workbench.report import summarize, write_report
    from nmsparse.workbench.terminal import print_summary, study_progress

    folder = output or _new_folder("compare")
    with _in_words():
        wanted = candidates or ["dense", "sr-ste", "s-ste", "trio"]
        if config is not None:
            _check_for_comparison(config)
        base = _config(config, settings)
        configs = study(base, wanted, pattern or [base.pattern], seeds)
        try:
            with study_progress(quiet=as_json) as listen:
                done = run_study(configs, folder, jobs=jobs, listen=listen)
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command with --output {folder} continues.", err=True)
            raise typer.Exit(130) from None
        failed = [job for job in done if job.status == "failed"]
        if len(failed) == len(done):
            if as_json:
                typer.echo(json.dumps({"folder": str(folder), "report": None, "failed": len(failed), "results": []}))
        else:
            page, tables = write_report([folder], folder / "report.html").html, summarize([folder])
            if as_json:
                facts = [table.to_dict() for table in tables]
                typer.echo(json.dumps({"folder": str(folder), "report": str(page), "failed": len(failed), "results": facts}))
            else:
                for table in tables:
                    print_summary(table)
                typer.echo(f"report: {page}")
    for job in failed:
        typer.echo(f"{job.name} failed: {job.failure} (see {job.folder / 'log.txt'})", err=True)
    if failed:
        raise typer.Exit(1)


@app.command(short_help="Write one self-contained HTML page about runs.")
def report(
    paths: Annotated[list[Path], typer.Argument(help="Folders that nmsparse train or compare wrote.")],
    output: Annotated[Path, typer.Option(help="The HTML file; two CSV files go beside it.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about runs, and the same data as CSV."""
    from nmsparse.workbench.report import write_report

    with _in_words():
        files = write_report(paths, output, title)
    if as_json:
        typer.echo(json.dumps({"html": str(files.html), "csv": [str(file) for file in files.csv]}))
    else:
        typer.echo(f"report: {files.html}")


@app.command(short_help="Test a paper's claim over several seeds.")
def reproduce(
    claim: Annotated[str | None, typer.Argument(help="Claim by name, or all of them: all; without one they are listed.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets; by default $NMSPARSE_DATA.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Seeds of every contender; at least 3 to say anything.")] = 3,
    scale: Annotated[
        Literal["toy", "cpu", "small", "full"],
        typer.Option(help="small: one GPU, minutes; cpu: two cores, an hour; full: as in the paper; toy: embedded data."),
    ] = "small",
    only: Annotated[list[str] | None, typer.Option(help="Experiments of the claim; repeat for several. All by default.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default as many as memory and cores allow.")] = None,
    max_minutes: Annotated[float | None, typer.Option(min=0, help="End within this; call again to go on.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the books (*.jsonl), RESULTS.md and plots.")] = Path(
        "benchmarks/reproduction"
    ),
    runs: Annotated[Path, typer.Option(help="Folder for the runs themselves.")] = Path("runs/reproduce"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be trained.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Train nothing: write RESULTS.md and plots from the books.")] = False,
    as_json: Json = False,
) -> None:
    """Test a paper's claim: train its contenders with several seeds, compare them pair by pair, and say what holds."""
    from nmsparse.workbench import reproduce as room
    from nmsparse.workbench.terminal import study_progress

    if claim is None and not report:
        if as_json:
            claims = room.CLAIMS.values()
            listed = [{"name": c.name, "says": c.says, "experiments": [e.name for e in c.experiments]} for c in claims]
            typer.echo(json.dumps(listed, indent=2))
            return
        for known in room.CLAIMS.values():
            typer.echo(f"{known.name:12} {known.says} Experiments: {', '.join(e.name for e in known.experiments)}.")
        return
    chosen = room.claims_at(scale) if claim == "all" else _check_names("CLAIM", [claim] if claim else [], room.CLAIMS)
    failed: dict[str, str] = {}
    outcomes: list[dict[str, Any]] = []
    with _in_words():
        if only and claim == "all":
            raise ValueError("--only names experiments of one claim; leave it out for all claims.")
        if report and dry_run:
            raise ValueError("--report trains nothing and writes files, --dry-run writes none: ask for one or the other.")
        claims = [room.CLAIMS[name] for name in chosen if not report]
        if dry_run:
            studies = [room.Study(known, scale, room.Ledger(results), room.device_name(), only or ()) for known in claims]
            plans = [room.plan(study, seeds) for study in studies]
            if as_json:
                typer.echo(json.dumps(plans if claim == "all" else plans[0]))
            for planned in [] if as_json else plans:
                room.print_plan(planned)
            return
        if claims:
            with study_progress(quiet=as_json) as listen:
                ended = room.reproduce(
                    claims, results, scale=scale, seeds=seeds, only=only or (), data_dir=data_dir, folder=runs, jobs=jobs,
                    minutes=max_minutes, listen=listen,
                )  # fmt: skip
            for study, progress in ended:
                failed |= progress.failed
                outcomes.append(room.to_dict(study, study.claim) | {"left": progress.left, "failed": progress.failed})
                if not as_json:
                    room.print_outcome(study, progress)
        if as_json and outcomes:
            typer.echo(json.dumps(outcomes if claim == "all" else outcomes[0]))
        if report or scale in ("small", "cpu"):
            page = room.write_results(results, scale)
            if not as_json:
                typer.echo(f"results: {page}")
            elif report:
                typer.echo(json.dumps({"results": str(page)}))
    if failed:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``nmsparse`` script."""
    app()
