"""Train a CIFAR-10 ResNet-18 with Bi-Mask under SGD: convolutions that are 2:4 in the forward and in the backward product.

    python examples/resnet_cifar_bimask.py --toy                   # seconds, on a CPU: small images that ship with the package
    python examples/resnet_cifar_bimask.py --data-dir DATA         # CIFAR-10 in DATA, in one of its usual forms; wants a GPU

Needs pip install "nmsparse[workbench]", for the data and the network.
"""

import argparse
import math

import torch

import nmsparse as nm
from nmsparse.workbench.models import build_model
from nmsparse.workbench.tasks import Batch, Task, load_task


def to_device(batch: Batch, device: str) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def epoch_batches(task: Task, size: int, generator: torch.Generator) -> list[list[int]]:
    """All training examples in a new order; a rest that fills no batch is left out."""
    order = torch.randperm(len(task.train), generator=generator)
    return order[: len(order) // size * size].view(-1, size).tolist()


@torch.no_grad()
def validate(model: torch.nn.Module, task: Task, size: int, device: str) -> dict[str, float]:
    """Metrics of the weights that would be shipped: in evaluation mode layers obey their final pattern."""
    model.eval()
    totals: dict[str, torch.Tensor] = {}
    for start in range(0, len(task.valid), size):
        batch = to_device(task.valid.__getitems__(list(range(start, min(start + size, len(task.valid))))), device)
        for name, value in task.measure(model(**batch), batch).items():
            totals[name] = totals.get(name, 0) + value
    model.train()
    return task.summarize(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a narrow network on a few small images")
    parser.add_argument("--data-dir", help="folder with CIFAR-10")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", default="resnet-bimask", help="folder for the finished model")
    arguments = parser.parse_args()
    if not arguments.toy and arguments.data_dir is None:
        parser.error("give --data-dir with CIFAR-10, or --toy.")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    if arguments.toy:
        task, width, size, epochs = load_task("fashion-mini", limit=64), 8, 16, 1
    else:
        task, width, size, epochs = load_task("cifar10", arguments.data_dir), 64, 128, arguments.epochs
    model = build_model("resnet18", task.facts, width=width).to(device, memory_format=torch.channels_last)

    # groups run along input channels: the stem, which has one or three, stays dense and is listed in run.skipped
    run = nm.sparsify_(model, nm.BiMask("2:4", refresh=100), targets="all", exclude=["classifier"])
    for name, why in run.skipped.items():
        print(f"dense: {name}: {why}")

    steps = epochs * (len(task.train) // size)
    peak = 0.1 * size / 128
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    run.attach(optimizer, total_steps=steps)
    print(f"{run}; {steps} updates on {device}")

    generator = torch.Generator().manual_seed(0)
    model.train()
    for epoch in range(epochs):
        for indices in epoch_batches(task, size, generator):
            batch = task.augment(to_device(task.train.__getitems__(indices), device), generator)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        metrics, flips = validate(model, task, size, device), run.stats()["total"]["flip_rate"]
        print(f"epoch {epoch + 1:3d}  training loss {loss.item():.3f}  accuracy {metrics['accuracy']:.3f}  flip rate {flips:.4f}")

    nm.save(model, arguments.output)  # the recipe knows which tensors are sparse, so no freeze_ is needed first
    report = nm.verify(arguments.output)
    density = sum(tensor.density for tensor in report.tensors) / len(report.tensors)
    print(f"validation accuracy {metrics['accuracy']:.3f}, loss {metrics['loss']:.3f}")
    layers = f"{len(report.tensors)} of {len(run.layers)} sparse layers"
    print(f"density {density:.3f} in {layers}; verified: {report.ok}; model in {arguments.output}")


if __name__ == "__main__":
    main()
