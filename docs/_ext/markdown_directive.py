"""A directive whose content is Markdown made by Python: the generated parts of the pages."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class Generated(SphinxDirective):
    """Subclasses write Markdown; it is read as if it stood on the page."""

    optional_arguments = 1

    def markdown(self) -> str:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # what it is made from is no file of the site, so a later build must look again
        source, _ = self.get_source_info()
        made = nodes.Element()
        self.state.nested_parse(StringList(self.markdown().splitlines(), source=source), self.content_offset, made)
        return made.children


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; a bar inside a cell would end it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])
