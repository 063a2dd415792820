"""Formulas as MathML, which browsers draw by themselves: pages need no script from elsewhere, and work without a network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx


def visit_inline(translator: Any, node: nodes.math) -> None:
    _write(translator, node, as_block=False)


def visit_block(translator: Any, node: nodes.math_block) -> None:
    _write(translator, node, as_block=True)


def _write(translator: Any, node: nodes.Element, as_block: bool) -> None:
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=as_block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
