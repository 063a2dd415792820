"""The registry: one record of facts per recipe, open to third parties."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatch
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from nmsparse.pattern import Pattern
from nmsparse.recipes._base import Recipe

R = TypeVar("R", bound=type[Recipe])


@dataclass(frozen=True)
class RecipeInfo:
    """Facts about a recipe that users choose by; the conformance suite checks them."""

    name: str
    cls: type[Recipe]
    summary: str
    paper: str
    patterns: str
    """Which N:M it takes, in words."""
    products: tuple[str, ...]
    """Products with a sparse operand, at default settings, once in full effect."""
    needs: tuple[str, ...] = ()
    """Methods the optimizer must have."""
    ends_dense: bool = False
    """The finished model's weights are dense."""


_RECIPES: dict[str, RecipeInfo] = {}


def register_recipe(
    name: str,
    *,
    paper: str,
    patterns: str = "any N:M",
    needs: tuple[str, ...] = (),
    ends_dense: bool = False,
) -> Callable[[R], R]:
    """Class decorator: list a recipe under ``name``. The first line of its docstring becomes the summary."""

    def add(cls: R) -> R:
        if name in _RECIPES and _RECIPES[name].cls.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"a recipe named {name!r} is registered already ({_RECIPES[name].cls.__qualname__}); choose another name."
            )
        cls.name = name
        summary = (inspect.getdoc(cls) or name).splitlines()[0]
        products = cls().sparse_products
        _RECIPES[name] = RecipeInfo(name, cls, summary, paper, patterns, products, needs, ends_dense)
        return cls

    return add


def recipes(pattern: str = "*") -> list[RecipeInfo]:
    """All registered recipes whose name matches a glob, in the order they were registered."""
    return [info for name, info in _RECIPES.items() if fnmatch(name, pattern)]


def recipe_info(recipe: str | Recipe) -> RecipeInfo:
    """The record of a recipe, by name or by instance."""
    name = recipe if isinstance(recipe, str) else recipe.name
    if name not in _RECIPES:
        close = get_close_matches(name, _RECIPES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no recipe named {name!r}.{hint} Registered are: {', '.join(_RECIPES)}.")
    return _RECIPES[name]


def recipe(name: str, pattern: str | Pattern = "2:4", **options: Any) -> Recipe:
    """Build a recipe by name: ``recipe("sr-ste", "2:4", decay=1e-4)``."""
    cls = recipe_info(name).cls
    known = [f.name for f in fields(cls) if f.name != "pattern"]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise TypeError(f"{name} has no option {unknown[0]!r}; its options are: {', '.join(known) or 'none'}.")
    hints = _hints(cls)
    for option, value in options.items():
        _check_number(f"option {option} of {name}", value, hints.get(option))
    return cls(pattern, **options)


def _hints(cls: type[Recipe]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # a recipe of others, with names that only type checkers see
        return {}


def _check_number(what: str, value: Any, hint: Any) -> None:
    """A value from a command line or a file, where the hint asks for a number; words and flags the recipes check themselves."""
    hints = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds = {type(word) for each in hints if get_origin(each) is Literal for word in get_args(each)} | set(hints)
    if not kinds & {int, float}:
        return
    is_number = isinstance(value, Real if float in kinds else Integral) and not isinstance(value, bool) and value == value
    if not is_number and type(value) not in kinds - {int, float}:
        noun = "a number" if float in kinds else "a whole number"
        raise TypeError(f"{what} is {noun}{' or None' if NoneType in kinds else ''}, got {value!r}.")
