"""The command line: recipes, plans and benchmarks so far; training, comparing and export come with the workbench."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import nmsparse as nm

try:
    import typer
except ImportError:
    sys.exit('the command line needs typer and rich: pip install "nmsparse[cli]".')

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help='Train PyTorch models with N:M structured sparsity. "2:4" keeps 2 of every 4 weights.',
)


@app.command()
def recipes(
    pattern: Annotated[str, typer.Argument(help='Names to show, as a glob such as "*-decay".')] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """List the recipes: name, paper, which products they make sparse, and their options."""
    found = nm.recipes(pattern)
    if not found:
        typer.echo(f"no recipe is named {pattern!r}; without an argument all are listed.", err=True)
        raise typer.Exit(1)
    rows = [_facts(info) for info in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif sys.stdout.isatty():
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

    table = Table("recipe", "sparse products", "what it does", "options", "paper", title="Recipes")
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


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A shape of nmsparse bench (such as llama-8b), or a transformers model or folder.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch: batch times length.")] = 16384,
    recipe: Annotated[str, typer.Option(help="Recipe by name; nmsparse recipes lists them.")] = "trio",
    pattern: Annotated[str, typer.Option(help="N:M.")] = "2:4",
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per update.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Save the plan here, for sparsify_(..., plan=Plan.load(...)).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
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


@app.command()
def bench(
    suites: Annotated[list[str] | None, typer.Argument(help="kernels, products, layer, steps; all of them by default.")] = None,
    models: Annotated[list[str] | None, typer.Option("--model", help="Shapes for the steps; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="How long each side runs before the other has its turn.")] = 1.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines in place of the table.")] = False,
) -> None:
    """Measure this GPU: pack kernels, products, one layer, and whole training steps, dense and sparse in turn."""
    from nmsparse.workbench.bench import MODELS, SUITES, Recorder, headline, run_suites

    chosen = _check_names("SUITES", suites or [], SUITES)
    shapes = _check_names("--model", models or [], MODELS)
    _need_gpu("bench")
    show = json.dumps if as_json else headline
    run_suites(chosen, Recorder(output, lambda row: typer.echo(show(row))), seconds, turns, shapes)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder with one or more.")],
    pattern: Annotated[str | None, typer.Option(help="N:M to check; by default what sparsity.json says, else 2:4.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """Check the pattern of every sparse tensor in a checkpoint. Exits with 1 where one is violated, with 2 on a broken file."""
    try:
        report = nm.verify(path, pattern)
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


def main() -> None:
    """Entry point of the ``nmsparse`` script."""
    app()
