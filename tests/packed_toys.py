"""A small network on products that the reference multiplies in the packed layout, with the fixture ``reference_engine``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import make_optimizer

import nmsparse as nm

Case = tuple[str, dict[str, Any]]
STEPS = 12


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width, bias=False),
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(F.gelu(self.up(x))))


def make(recipe: nm.Recipe, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, nm.Run]:
    torch.manual_seed(0)
    model = Net()
    run = nm.sparsify_(model, recipe, **options)
    optimizer = make_optimizer(recipe, model)
    run.attach(optimizer, total_steps=STEPS)
    return model, optimizer, run


def data(tokens: int = 100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, tokens // 2, 64, generator=generator), torch.randn(2, tokens // 2, 8, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, tokens: int = 100) -> list[float]:
    x, y = data(tokens)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copies_of(run: nm.Run) -> dict[str, set[str]]:
    return {name: set(handle.layer.sparse.copies) for name, handle in run._layers.items()}
