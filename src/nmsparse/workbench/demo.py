"""``make demo``: a small transformer learns Shakespeare's letters, dense and with s-ste, side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.workbench.text import CharacterText, embedded_text

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 2, 4, 64, 32
LEARNING_RATE = 2e-3
Report = Callable[[str, int, float], None]


class Block(nn.Module):
    """Attention and MLP with residuals; its four linear layers are what becomes sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A character-level GPT; embedding and head stay dense."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Result:
    """What one training run ended with."""

    recipe: str
    pattern: str
    valid_loss: float
    """Nats per character on the last tenth of the text, with the weights that would be shipped."""
    non_zero: float
    """Share of non-zero weights in the layers that were made sparse (all linear layers of the blocks)."""
    flip_rate: float | None
    """Share of mask bits that the last measured update changed."""
    step_ms: float
    groups_broken: int
    """Groups of the shipped weights with more non-zeros than the pattern allows."""


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(recipe: nm.Recipe, text: CharacterText, steps: int, seed: int, report: Report) -> Result:
    """The five lines of the README, inside an ordinary training loop."""
    torch.manual_seed(seed)
    model = Decoder(len(text.vocabulary))
    run = nm.sparsify_(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    run.attach(optimizer, total_steps=steps)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    batches = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step in range(steps):
        loss = loss_of(model, text.batch("train", BATCH, LENGTH, batches))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(recipe.name, step + 1, loss.item())
    seconds = time.perf_counter() - start
    flips = run.stats()["total"]["flip_rate"]
    nm.freeze_(model.eval())
    weights = [model.get_submodule(name).get_parameter("weight") for name in run.layers]
    with torch.no_grad():
        fixed = torch.Generator().manual_seed(0)
        valid = sum(loss_of(model, text.batch("valid", 64, LENGTH, fixed)).item() for _ in range(20)) / 20
    non_zero = sum(int((w != 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    broken = 0 if recipe.name == "dense" else sum(int(nm.functional.violations(w, recipe.pattern)) for w in weights)
    return Result(recipe.name, str(recipe.pattern), valid, non_zero, flips, 1e3 * seconds / steps, broken)


@contextmanager
def progress(steps: int, recipes: list[str], quiet: bool) -> Iterator[Report]:
    """A progress bar on a terminal, a line now and then elsewhere, nothing with --json."""
    if quiet:
        yield lambda name, step, loss: None
    elif sys.stdout.isatty():
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description:8}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar:
            tasks = {name: bar.add_task(name, total=steps, loss=float("nan")) for name in recipes}
            yield lambda name, step, loss: bar.update(tasks[name], completed=step, loss=loss)
    else:

        def line(name: str, step: int, loss: float) -> None:
            if step % max(1, steps // 5) == 0 or step == steps:
                print(f"{name:8} step {step:4d} of {steps}  loss {loss:.3f}", flush=True)

        yield line


def show(results: list[Result]) -> None:
    rows = [
        (
            r.recipe if r.recipe == "dense" else f"{r.recipe} {r.pattern}",
            f"{r.valid_loss:.3f}",
            f"{r.non_zero:.0%}",
            "-" if r.flip_rate is None else f"{r.flip_rate:.2%}",
            f"{r.step_ms:.0f}",
        )
        for r in results
    ]
    header = ("recipe", "validation loss", "non-zero weights", "flip rate at the end", "ms per step")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, title="Shakespeare, character by character")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        for row in [header, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("Validation uses the weights that would be shipped; every group of 4 holds at most 2 non-zeros (checked).")
    print(
        "Times are emulation on a CPU: masks cost time there. Speed comes from the sparse tensor cores of Hopper GPUs (README)."
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nmsparse.workbench.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="updates per run (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of initialisation, batches and random draws (default 0)")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON list and nothing else")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}.")
    recipes: list[nm.Recipe] = [nm.Dense(), nm.SSTE("2:4")]
    text = embedded_text()
    with progress(options.steps, [r.name for r in recipes], quiet=options.json) as report:
        results = [train(recipe, text, options.steps, options.seed, report) for recipe in recipes]
    if any(result.groups_broken for result in results):
        raise SystemExit("a shipped weight breaks its pattern; please report this as a bug.")
    print(json.dumps([asdict(result) for result in results])) if options.json else show(results)


if __name__ == "__main__":
    main()
