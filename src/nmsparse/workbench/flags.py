"""Command-line flags from the settings of a run: one flag per field, with the field's own help text and limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from nmsparse.workbench.compare import parse_option
from nmsparse.workbench.training import TrainConfig

NAMES = {"options": "--option", "targets": "--target"}
"""Flags that are given several times are called by the one thing each gives."""


def takes_settings(without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command: its ``**settings`` become one flag each; those that were not given are left out."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        hints = get_type_hints(TrainConfig)
        made = [_flag(entry, hints[entry.name]) for entry in fields(TrainConfig) if entry.name not in without]
        names = {flag.name for flag in made}

        def run(**values: Any) -> None:
            given = {name: value for name, value in values.items() if name in names and value is not None}
            if "options" in given:
                given["options"] = _options(given["options"])
            command(**{name: value for name, value in values.items() if name not in names}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *made]}
        return run

    return decorate


def _flag(entry: Any, hint: Any) -> inspect.Parameter:
    """A flag that is None unless given, so that a configuration file can be told from the command line."""
    default = entry.default_factory()
    kind = next((option for option in get_args(hint) if option is not type(None)), hint) if type(None) in get_args(hint) else hint
    plain = list[str] if default in ([], {}) else kind
    word = NAMES.get(entry.name, "--" + entry.name.replace("_", "-"))
    words = [f"{word}/--no-{entry.name.replace('_', '-')}"] if plain is bool else [word]
    least = entry.metadata["at_least"]
    limits = {} if least is None or plain not in (int, float) else {"min": least}
    shown = False if default is None or default is False or default in ([], {}) else str(default)
    option = typer.Option(*words, help=entry.metadata["help"], show_default=shown, **limits)
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option])


def _options(words: list[str]) -> dict[str, Any]:
    try:
        return dict(parse_option(word) for word in words)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--option") from None
