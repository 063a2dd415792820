"""The documentation builds without a warning, covers the registry and the public names, and its runnable blocks run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import nmsparse as nm
from nmsparse.recipes import _registry
from nmsparse.workbench.reproduce import decision_table

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", re.S)
OURS = [info for info in nm.recipes() if info.cls.__module__.startswith("nmsparse.")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; the tests of this file share one build."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(target / "trees")]
    done = subprocess.run([*command, str(DOCS), str(target / "html")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target / "html"


def test_site_builds_with_warnings_as_errors(site: Path) -> None:
    assert (site / "index.html").stat().st_size > 0
    assert {page.relative_to(DOCS).with_suffix(".html") for page in PAGES} <= {p.relative_to(site) for p in site.rglob("*.html")}


def test_pages_ask_nothing_of_the_network(site: Path) -> None:
    """Links are for readers; scripts, styles and pictures must be there."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded[0]}"


@pytest.mark.parametrize("info", OURS, ids=lambda info: info.name)
def test_recipe_has_a_card_with_its_knobs(info: nm.RecipeInfo, site: Path) -> None:
    card = re.sub(r"<[^>]+>", "", (site / "recipes" / f"{info.name}.html").read_text())
    for heading in ("When to use it, and when not", "Maths", "Which products are sparse", "Knobs", "Results", "Cite"):
        assert heading in card
    assert [field.name for field in fields(info.cls) if field.name not in card] == []


def test_no_card_is_left_of_a_recipe_that_is_gone() -> None:
    cards = {page.stem for page in (DOCS / "recipes").glob("*.md")} - {"index"}
    assert cards == {info.name for info in OURS}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "api.html").read_text()
    public = [f"nmsparse.{name}" for name in nm.__all__ if name != "functional"]
    public += [f"nmsparse.functional.{name}" for name in nm.functional.__all__]
    assert [name for name in public if f'id="{name}"' not in page] == []


def test_choosing_a_recipe_says_where_nothing_was_run(site: Path) -> None:
    """The table is made from the books of finished runs, and invents nothing where there are none."""
    expected = decision_table(ROOT / "benchmarks" / "reproduction").count("not run yet")
    page = (site / "choosing.html").read_text()
    assert page.count("<p>not run yet</p>") == expected


@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE.search(page.read_text())], ids=lambda page: page.stem)
def test_runnable_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_registry, "_RECIPES", dict(_registry._RECIPES))  # a page may register a recipe of its own
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    for block in RUNNABLE.findall(page.read_text()):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)  # without this file's __future__
    assert len(names) > 1


def test_every_example_is_listed(site: Path) -> None:
    page = (site / "examples.html").read_text()
    assert [script.name for script in (ROOT / "examples").glob("*.py") if script.name not in page] == []
