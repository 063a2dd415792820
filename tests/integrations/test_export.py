"""Leaving eager mode for good: torch.export of every recipe before and after freezing, and torch.jit.trace after it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CASES, case_id

import nmsparse as nm

ROWS, IN = 8, 16


def trained(model: nn.Module, x: Tensor, name: str, options: dict[str, Any], targets: nm.nn.Targets = "all-linear") -> nn.Module:
    """Two updates on, so that masks, scales and factors are no longer those of the start; then in evaluation mode."""
    recipe = nm.recipe(name, "2:4", **options)
    run = nm.sparsify_(model, recipe, targets)
    kind = nm.StepAdamW if nm.recipe_info(recipe).needs else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    run.attach(optimizer, total_steps=4)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 32), nn.GELU(), nn.Linear(32, 4))


def vectors(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(1))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1),
        nn.Flatten(2),
        nn.Linear(36, 4),
    )


def images(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 8, 6, 6, generator=torch.Generator().manual_seed(1))


def check_program(model: nn.Module, x: Tensor, more: Tensor, is_strict: bool) -> None:
    """For any number of rows, with the stock keys."""
    shapes = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=is_strict)
    assert torch.equal(program.module()(more), model(more))
    assert set(program.state_dict) == set(model.state_dict())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_exported_program_equals_the_sparse_model_and_the_frozen_one(case: tuple[str, dict[str, Any]]) -> None:
    model = trained(mlp(), vectors(), *case)
    check_program(model, vectors(), vectors(3), is_strict=False)
    check_program(nm.freeze_(model), vectors(), vectors(3), is_strict=False)


@pytest.mark.parametrize("name", [info.name for info in nm.recipes()])
def test_strict_export_traces_every_recipe(name: str) -> None:
    """Strict export reads the bytecode, as torch.compile does: graph breaks would be errors."""
    check_program(trained(mlp(), vectors(), name, {}), vectors(), vectors(3), is_strict=True)


@pytest.mark.parametrize("is_strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ["sr-ste", "fst"])
def test_exported_convolutions_equal_the_model(name: str, is_strict: bool) -> None:
    model = trained(convolutions(), images(), name, {}, targets="all")
    assert any(isinstance(module, nm.nn.SparseConv2d) for module in model)
    check_program(model, images(), images(3), is_strict)
    check_program(nm.freeze_(model), images(), images(3), is_strict)


@pytest.mark.parametrize("name", ["s-ste", "fst"])
def test_exported_program_survives_a_file(name: str) -> None:
    """Masks and scales are constants of the program: it needs nmsparse no more."""
    model, file = trained(mlp(), vectors(), name, {}), io.BytesIO()
    torch.export.save(torch.export.export(model, (vectors(),)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(vectors()), model(vectors()))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_frozen_model_can_be_traced_by_torchscript() -> None:
    """Freeze first: before that, ``torch.jit.trace`` ends in an internal assertion of torch 2.13 ("We don't have an op for
    aten::view") for every recipe but dense, fst and sdgp. TorchScript is deprecated; ``torch.export`` takes both."""
    model = nm.freeze_(trained(mlp(), vectors(), "sr-ste", {}))
    traced = torch.jit.trace(model, vectors())
    assert torch.equal(traced(vectors(3)), model(vectors(3)))
