"""The table of example scripts: what their docstrings say first, and how they are run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from markdown_directive import Generated, table
from sphinx.application import Sphinx

EXAMPLES = Path(__file__).parents[2] / "examples"


class ExampleIndex(Generated):
    """One row per script."""

    optional_arguments = 0

    def markdown(self) -> str:
        return table(["script", "what it shows", "command"], [row(script) for script in sorted(EXAMPLES.glob("*.py"))])


def row(script: Path) -> list[str]:
    text = script.read_text()
    paragraph = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    said = re.match(r"# run: (.+)\n", text)
    command = said[1] if said else f"python examples/{script.name}"
    return [f"`{script.name}`", " ".join(paragraph.split()), f"`{command}`"]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("example-index", ExampleIndex)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
