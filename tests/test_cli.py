"""The command line, as a new user tries it; what trains is in tests/workbench."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import nmsparse as nm
from nmsparse.cli import app
from nmsparse.workbench import terminal


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)


def test_recipes_are_listed_as_lines_without_a_terminal() -> None:
    result = command("nmsparse", "recipes")
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [info.name for info in nm.recipes()]


@pytest.mark.parametrize(("is_terminal", "title"), [(True, True), (False, False)])
def test_recipes_are_a_table_on_a_terminal_only(is_terminal: bool, title: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI services pretend to be terminals; is_terminal knows them. A narrow one cuts no name."""
    monkeypatch.setattr(terminal, "is_terminal", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["recipes"]).stdout
    assert ("Recipes" in shown) == title
    assert "structure-decay" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_a_narrow_terminal_cuts_no_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    name = "sdgp@2:4:selector=random,rescale=false"
    terminal.print_table(["recipe", "validation loss"], [[name, "2.345 ± 0.012"]])
    cells = [line.split("\N{BOX DRAWINGS LIGHT VERTICAL}") for line in capsys.readouterr().out.splitlines()]
    assert "".join(cell[1].strip() for cell in cells if len(cell) > 2) == name


def test_recipes_are_listed_as_json() -> None:
    rows = json.loads(command("nmsparse", "recipes", "--json", "s-*").stdout)
    assert [row["name"] for row in rows] == ["s-ste"]
    assert rows[0]["products"] == ["output", "grad_weight"]
    assert rows[0]["options"] == {"mvue": True, "precision": None}


@pytest.mark.parametrize(
    "arguments", [("nmsparse", "recipes", "--wrong"), ("nmsparse", "train", "--wrong"), ("nmsparse", "trian")]
)
def test_wrong_words_exit_with_2_and_say_which(arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert arguments[-1] in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_recipe_name_exits_with_1() -> None:
    result = command("nmsparse", "recipes", "nothing*")
    assert result.returncode == 1
    assert "no recipe is named 'nothing*'" in result.stderr


def test_importing_the_library_needs_torch_and_safetensors_only() -> None:
    extras = ["numpy", "typer", "rich", "triton", "transformers", "scipy", "accelerate", "lightning", "torchtitan", "onnx"]
    code = f"import sys, json, nmsparse; print(json.dumps([m for m in {extras} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # torch itself imports numpy where it is installed
    assert set(json.loads(result.stdout)) <= {"numpy"}


def test_core_names_nothing_but_torch_and_safetensors() -> None:
    """Where an extra is installed nobody would notice: torch brings numpy into every process here."""
    import ast
    from pathlib import Path

    root = Path(nm.__file__).parent
    allowed = {*sys.stdlib_module_names, "torch", "safetensors", "nmsparse"}
    for file in root.rglob("*.py"):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        if room in ("integrations", "workbench", "cli"):
            continue
        for node in ast.parse(file.read_text()).body:  # of the module itself: functions import extras when they are called
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found = {name.partition(".")[0] for name in names} - allowed
            assert found <= ({"triton"} if room == "kernels" else set()), f"{file.relative_to(root)} imports {found}"


def test_imports_point_down() -> None:
    """functional <- recipes <- nn <- run; kernels and pattern are leaves; nothing points back up."""
    import ast
    from pathlib import Path

    order = {"pattern": 0, "functional": 1, "recipes": 2, "kernels": 2, "nn": 3, "optim": 4, "_stats": 3}
    order |= {"_update": 4, "_saved": 4, "_micro_batches": 4, "_wrappers": 5, "_tensor_cores": 5, "_step_clock": 6, "run": 7}
    order |= {"plan": 8, "checkpoint": 8, "inference": 9, "__init__": 10}
    order |= {"integrations": 11, "workbench": 12, "cli": 13, "__main__": 14}
    root = Path(nm.__file__).parent
    for file in root.rglob("*.py"):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                target = parts[1] if len(parts) > 1 else "__init__"
                if parts[0] == "nmsparse" and target != room:
                    assert order[target] < order[room], f"{file.name} imports {name}"
                    assert target == "pattern" or not parts[-1].startswith("_") or len(parts) == 2, (
                        f"{file.name} reaches into {name}"
                    )
