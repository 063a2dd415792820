"""What each recipe costs in emulation, beside the dense training step of the same run.

    python benchmarks/overhead.py                    a 4-layer, 256-wide transformer on the CPU, eager
    python benchmarks/overhead.py --device cuda      the same 1024 wide, bf16 autocast, torch.compile, fused AdamW

Dense and sparse steps alternate; a step is forward, backward and optimizer. Recipes with a mask search are timed over a
whole search interval, so the search is paid for. Results append to benchmarks/results/overhead.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.workbench.provenance import commit

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
VOCABULARY = 256
LAYERS = 4
SETTINGS = {"cpu": {"width": 256, "batch": 16, "length": 128}, "cuda": {"width": 1024, "batch": 16, "length": 1024}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("ste", {}),
    ("sr-ste", {}),
    ("asp", {}),
    ("step", {"switch": 2}),  # timed in its second, sparse phase
    ("s-ste", {}),
    ("s-ste", {"mvue": False}),
    ("s-ste", {"precision": "fp8"}),
    ("fst", {}),
    ("bi-mask", {}),
    ("sdgp", {}),
    ("mask-decay", {"dense": 0.0}),
    ("structure-decay", {"dense": 0.0}),
    ("structure-decay", {"dense": 0.0, "shape": "geometric"}),
    ("trio", {}),
    ("trio", {"forward": "double-soft"}),
]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small decoder; embedding and head stay dense."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_step(name: str, options: dict[str, Any], device: str, setting: dict[str, int], total: int) -> Callable[[], None]:
    """A function that does one training step with a recipe; None of its set-up is timed."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(setting["width"], setting["length"]).to(device)
    recipe = nm.recipe(name, "2:4", **options)
    run = nm.sparsify_(model, recipe, emulate=True) if name != "dense" else None
    kind = nm.StepAdamW if nm.recipe_info(name).needs else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4, fused=device == "cuda")
    if run is not None:
        run.attach(optimizer, total_steps=total)
    forward = torch.compile(model) if device == "cuda" else model
    ids = torch.randint(VOCABULARY, (setting["batch"], setting["length"] + 1), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = forward(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], count: int, device: str) -> float:
    """Mean seconds per step."""
    start = _now(device)
    for _ in range(count):
        step()
    return (_now(device) - start) / count


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    name: str, options: dict[str, Any], dense: Callable[[], None], device: str, setting: dict[str, int], rounds: int
) -> dict[str, Any]:
    """Alternate dense and sparse; medians over the rounds."""
    recipe = nm.recipe(name, "2:4", **options)
    count = getattr(recipe, "refresh", 10 if device == "cpu" else 30)
    rounds = 1 if count > 30 and device == "cpu" else rounds
    total = 2 * (rounds * count + 8)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = make_step(name, options, device, setting, total)
    for _ in range(4):  # compilation, the optimizer's state, STEP's switch
        step()
    pairs = [(seconds(dense, min(count, 30), device), seconds(step, count, device)) for _ in range(rounds)]
    dense_ms, sparse_ms = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    row = {"recipe": name, "options": options, "dense_ms": round(dense_ms, 3), "step_ms": round(sparse_ms, 3)}
    row["ratio"] = round(statistics.median(b / a for a, b in pairs), 3)
    if device == "cuda":
        row["memory_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return row


def machine(device: str) -> dict[str, Any]:
    facts = {"commit": commit(), "torch": torch.__version__, "python": platform.python_version(), "nmsparse": nm.__version__}
    if device == "cuda":
        return {**facts, "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {**facts, "cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of dense and sparse (default 3)")
    parser.add_argument("--only", nargs="*", help="recipe names; default all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--json", action="store_true", help="print JSON lines in place of the table")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU, and torch sees none.")
    setting = SETTINGS[arguments.device]
    torch._dynamo.config.recompile_limit = 64  # one model per recipe shares a forward; the default limit of 8 would go eager
    dense = make_step("dense", {}, arguments.device, setting, total=1)
    for _ in range(3):
        dense()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    stamp = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": arguments.device,
        **setting,
        **machine(arguments.device),
    }
    if not arguments.json:
        print("| recipe | dense step, ms | step, ms | ratio |\n|---|---|---|---|")
    for name, options in CASES:
        if arguments.only and name not in arguments.only:
            continue
        row = {**stamp, **measure(name, options, dense, arguments.device, setting, arguments.rounds)}
        with arguments.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        text = json.dumps(row) if arguments.json else f"| {label} | {row['dense_ms']} | {row['step_ms']} | {row['ratio']:.2f} |"
        print(text)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
