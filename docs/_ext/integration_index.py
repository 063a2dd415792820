"""The table of integrations, from the modules' docstrings: they are read, not imported, since their libraries are optional."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from markdown_directive import Generated, table
from sphinx.application import Sphinx

INTEGRATIONS = Path(__file__).parents[2] / "src" / "nmsparse" / "integrations"


class IntegrationIndex(Generated):
    """One row per module."""

    optional_arguments = 0

    def markdown(self) -> str:
        files = [*INTEGRATIONS.glob("*.py"), *INTEGRATIONS.glob("*/__init__.py")]
        public = [file for file in files if not _name(file).startswith("_")]
        return table(["module", "what it is for", "public names"], [row(file) for file in sorted(public, key=_name)])


def row(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    paragraph = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
    plain = re.sub(r":\w+:`([^`]+)`", r"`\1`", paragraph).replace("``", "`")
    return [f"`nmsparse.integrations.{_name(file)}`", plain, ", ".join(f"`{name}`" for name in public_names(tree))]


def public_names(tree: ast.Module) -> list[str]:
    """``__all__`` where there is one, else the functions and classes without an underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _name(file: Path) -> str:
    return file.parent.name if file.name == "__init__.py" and file.parent != INTEGRATIONS else file.stem


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("integration-index", IntegrationIndex)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
