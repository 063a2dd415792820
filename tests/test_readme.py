"""The README's examples run as they are printed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

import nmsparse as nm
from nmsparse.recipes import _registry

README = (Path(__file__).parent.parent / "README.md").read_text()


def examples() -> list[str]:
    return [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "import nmsparse" in block]


def test_five_line_example_ends_with_a_sparse_plain_model() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(examples()[0], names)
    model = names["model"]
    assert [type(layer).__name__ for layer in model] == ["Linear", "GELU", "Linear", "Linear"]
    assert nm.functional.violations(model[0].weight, "2:4") == 0


def test_own_recipe_of_the_readme_is_registered_and_works() -> None:
    try:
        exec(examples()[1], {"__name__": "readme"})
        layer = torch.nn.Linear(8, 8)
        nm.sparsify_(layer, nm.recipe("top-n", "2:4"))
        assert nm.functional.violations(nm.effective_weight(layer), "2:4") == 0
    finally:
        _registry._RECIPES.pop("top-n", None)


def test_table_of_recipes_lists_the_registry() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| `(\w+)` \| ([^|]+) \|", README, re.M)
    expected = {info.name: (info.cls.__name__, info.products) for info in nm.recipes()}
    assert [name for name, _, _ in rows] == list(expected)
    for name, cls, products in rows:
        declared = {"-": (), "all three": ("output", "grad_input", "grad_weight")}.get(products, tuple(products.split(", ")))
        assert (cls, declared) == expected[name]


def test_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("table", Path(__file__).parent.parent / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.with_tables(README) == README, "run python benchmarks/table.py --write"
    facts = {"dense_ms": 2.0, "sparse_ms": 1.6, "speedup": 1.25, "packed": 3, "layers": 4, "weight_bytes": 0.5625, "blocks": 2}
    call = {"suite": "inference", "model": "llama-8b", "phase": "decode", "batch": 16, "length": 1}
    assert module.serving_table([call | facts])[-1] == (
        "| llama-8b x2, decode | 16 x 1 | 2.000 | 1.600 | **1.25** | 3 of 4 | 0.562 |"
    )
    assert module.serving_table([]) == []
