"""Prune a trained model to 2:4, fine-tune it under the mask, save it for others, and serve it on sparse tensor cores.

    python examples/prune_finetune_serve.py            a toy, on any machine, in seconds
    python examples/prune_finetune_serve.py --width 4096 --device cuda   layers that are large enough to gain

The published ASP recipe: train dense, find the mask once, train again with it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import nmsparse as nm

parser = argparse.ArgumentParser(description="Prune, fine-tune, save, verify, load and serve.")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=150, help="Of dense training, and again of fine-tuning.")
parser.add_argument("--device", default="cpu")
parser.add_argument("--output", type=Path, help="Folder for the checkpoint; a temporary one by default.")
options = parser.parse_args()
torch.manual_seed(0)


def make_model() -> nn.Module:
    width = options.width
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, 8))


def make_batch(count: int = 256) -> tuple[Tensor, Tensor]:
    """Points around eight centres; the task is to say which."""
    labels = torch.randint(8, (count,), device=options.device)
    return centres[labels] + torch.randn(count, options.width, device=options.device), labels


def train(model: nn.Module, run: nm.Run | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if run is not None:
        run.attach(optimizer, total_steps=options.steps)
    for _ in range(options.steps):
        inputs, labels = make_batch()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, dtype: torch.dtype = torch.float32) -> float:
    inputs, labels = test
    return float((model(inputs.to(dtype)).argmax(1) == labels).float().mean())


centres = 3.5 * torch.randn(8, options.width, device=options.device) / options.width**0.5  # so that nobody gets all of them right
test = make_batch(4096)
folder = options.output or Path(tempfile.mkdtemp()) / "model"

# 1. a dense model, as you have it already
model = make_model().to(options.device)
train(model)
print(f"dense:       accuracy {accuracy(model):.3f}")

# 2. prune it: two of every four weights stay, in every linear layer but the head
run = nm.sparsify_(model, nm.ASP("2:4"))
print(f"pruned:      accuracy {accuracy(model):.3f}   {len(run.layers)} sparse layers, left dense: {', '.join(run.skipped)}")

# 3. fine-tune what is left
train(model, run)
print(f"fine-tuned:  accuracy {accuracy(model):.3f}")

# 4. bake the zeros in, write it down, and check what was written
nm.freeze_(model)
nm.save(model, folder, pattern="2:4")
report = nm.verify(folder)
print(f"saved:       {len(report.tensors)} tensors in {folder.name} obey their pattern: {report.ok}")

# 5. somebody else loads it: plain layers, stock keys, no nmsparse needed for this
served = nm.load(make_model(), folder).to(options.device, torch.bfloat16).eval()

# 6. on a Hopper GPU the sparse layers go to sparse tensor cores where that is faster; elsewhere they stay as they are
handle = nm.accelerate_(served, tokens=256, keep_dense=False)
print(f"served:      accuracy {accuracy(served, torch.bfloat16):.3f}   " + str(handle).replace("\n", "\n             "))
