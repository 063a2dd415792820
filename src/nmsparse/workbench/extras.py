"""Packages that only the workbench needs, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def package(name: str, extra: str = "workbench") -> Any:
    """A module of an optional package, or an error that says how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f'this needs the package {name.partition(".")[0]}, which is not installed: pip install "nmsparse[{extra}]".'
        ) from error
