"""Parts of a recipe's card that come from its dataclass and its record in the registry, so that they cannot go stale."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields

from markdown_directive import Generated, table
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import nmsparse as nm
from nmsparse.recipes import PRODUCTS
from nmsparse.recipes._autoswitch import STATISTICS

ALIASES = {
    "Estimator": 'bool | Literal["approximate"]',
    "Statistic": f"Literal{list(STATISTICS)}".replace("'", '"'),
}
"""What stands behind the names that fields of several recipes share."""


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field, from the class and those it inherits from."""
    docs: dict[str, str] = {}
    for kind in reversed(inspect.getmro(cls)):
        if kind is object:
            continue
        found = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
        docs.update({name: " ".join(lines).strip() for (owner, name), lines in found.items() if owner == kind.__qualname__})
    return docs


def default(entry: Field[object]) -> str:
    if entry.name == "pattern":
        return '`"2:4"`'
    return "required" if entry.default is MISSING else f"`{_number(entry.default)}`"


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value).replace("'", '"')


def kind(entry: Field[object]) -> str:
    if entry.name == "pattern":
        return "`str | Pattern`"
    words = str(entry.type).replace("'", '"')
    return f"`{ALIASES.get(words, words)}`"


class Knobs(Generated):
    """The fields of a recipe: name, type, default, meaning."""

    required_arguments = 1
    optional_arguments = 0

    def markdown(self) -> str:
        cls = nm.recipe_info(self.arguments[0]).cls
        docs = field_docs(cls)
        rows = [[f"`{entry.name}`", kind(entry), default(entry), docs[entry.name]] for entry in fields(cls)]
        return table(["knob", "type", "default", "meaning"], rows)


class Facts(Generated):
    """Class, sparse products, patterns, optimizer and finished model of a recipe."""

    required_arguments = 1
    optional_arguments = 0

    def markdown(self) -> str:
        info = nm.recipe_info(self.arguments[0])
        made = info.cls()
        rows = [
            ["in code", f'`nm.{info.cls.__name__}("2:4")` or `nm.recipe("{info.name}", "2:4")`'],
            *([f"`{product}`", "sparse" if product in info.products else "dense"] for product in PRODUCTS),
            ["patterns", info.patterns],
            ["optimizer", f"needs `{'`, `'.join(info.needs)}`: `nm.StepAdamW`" if info.needs else "any torch optimizer"],
            ["`run.attach`", _attach(made)],
            ["random draws", "yes, counter-based" if made.is_random else "none"],
            ["finished model", "dense" if info.ends_dense else "N:M sparse"],
        ]
        return table(["property", "value"], rows)


def _attach(recipe: nm.Recipe) -> str:
    if recipe.needs_total_steps:
        return "needed, with `total_steps`"
    return "needed" if recipe.needs_clock else "optional (statistics, tensor cores)"


class Index(Generated):
    """All recipes of the registry in one table, each with a link to its card."""

    optional_arguments = 0

    def markdown(self) -> str:
        rows = [
            [f"[{info.name}]({info.name}.md)", info.summary, ", ".join(f"`{p}`" for p in info.products) or "none", info.paper]
            for info in nm.recipes()
        ]
        return table(["recipe", "what it does", "sparse products", "paper"], rows)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("recipe-knobs", Knobs)
    app.add_directive("recipe-facts", Facts)
    app.add_directive("recipe-index", Index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
