"""The command line. So far it lists the recipes; training, comparing and export come with the workbench."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
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


@app.callback()
def _root() -> None:
    """Makes ``recipes`` a sub-command although it is the only one."""


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


def main() -> None:
    """Entry point of the ``nmsparse`` script."""
    app()
