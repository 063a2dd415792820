"""Train a Vision Transformer at 1:16 with mask decay: one weight in sixteen is left at the end, all of them count at the start.

    python examples/vit_mask_decay.py --toy                       # seconds, on a CPU
    python examples/vit_mask_decay.py                             # 6,000 small images that ship with the package
    python examples/vit_mask_decay.py --data-dir DATA             # CIFAR-10 in DATA

Needs pip install "nmsparse[workbench]", for the data.
"""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

import nmsparse as nm
from nmsparse.workbench.tasks import Facts, Task, load_task


def build_vit(facts: Facts, width: int, layers: int) -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            image_size=facts.side,
            num_channels=facts.channels,
            patch_size=4,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            num_labels=facts.classes,
            problem_type="single_label_classification",
        )
    )


@torch.no_grad()
def accuracy(model: torch.nn.Module, task: Task, size: int, device: str) -> float:
    """Of the hard 1:16 weights, whatever the factor is at present: evaluation mode uses the final pattern."""
    model.eval()
    correct = 0
    for start in range(0, len(task.valid), size):
        batch = task.valid.__getitems__(list(range(start, min(start + size, len(task.valid)))))
        logits = model(pixel_values=batch["pixel_values"].to(device)).logits
        correct += int((logits.argmax(-1).cpu() == batch["labels"]).sum())
    model.train()
    return correct / len(task.valid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny model for a few steps")
    parser.add_argument("--data-dir", help="folder with CIFAR-10; without it, small images that ship with the package")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", default="vit-mask-decay", help="folder for the finished model")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    name = "cifar10" if arguments.data_dir and not arguments.toy else "fashion-mini"
    task = load_task(name, arguments.data_dir, limit=64 if arguments.toy else None)
    width, layers, size, steps = (32, 1, 16, 20) if arguments.toy else (192, 6, 128, arguments.steps)
    model = build_vit(task.facts, width, layers).to(device)

    recipe = nm.MaskDecay("1:16")  # dense for 5 % of the run, the factor at 0 from 70 % on
    run = nm.sparsify_(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    run.attach(optimizer, total_steps=steps)  # the factor is planned over the whole run
    print(f"{run}; {sum(p.numel() for p in model.parameters()):,} parameters on {device}")

    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps):
        indices = torch.randint(len(task.train), (size,), generator=generator).tolist()
        batch = task.augment(task.train.__getitems__(indices), generator)
        loss = model(**{key: tensor.to(device) for key, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % max(1, steps // 10) == 0:
            stats = run.stats()
            factor = next(iter(stats["layers"].values()))["keep"]  # of pruned weights; the same in all layers
            seen = stats["total"]["density"]  # what training sees; hard 1:16 is 0.0625
            print(f"update {step + 1:5d}  loss {loss.item():.3f}  factor {factor:.3f}  density in training {seen:.3f}")

    reached = accuracy(model, task, size, device)
    nm.freeze_(model)
    nm.save(model, arguments.output, pattern="1:16")
    model.config.save_pretrained(arguments.output)
    report = nm.verify(arguments.output)
    density = sum(tensor.density for tensor in report.tensors) / len(report.tensors)
    print(f"validation accuracy {reached:.3f}")
    layers = f"{len(report.tensors)} of {len(run.layers)} sparse layers"
    print(f"density {density:.4f} in {layers}; verified: {report.ok}; model in {arguments.output}")


if __name__ == "__main__":
    main()
