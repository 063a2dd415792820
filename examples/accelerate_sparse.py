"""Train a 2:4 sparse model in a plain loop with accelerate: accumulated gradients, a checkpoint half-way, an exact restart.

    python examples/accelerate_sparse.py                     # seconds, on a CPU
    python examples/accelerate_sparse.py --resume            # goes on from the checkpoint that the first run wrote
    accelerate launch examples/accelerate_sparse.py          # on all GPUs of a machine

Three lines are nmsparse's: convert before ``prepare``, attach after it, and register the run, so that accelerate saves masks and
schedules with the rest. Needs pip install "nmsparse[hf]".
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nmsparse as nm

PATTERN, WIDTH, EPOCHS = "2:4", 64, 4


def make_data(count: int = 4096) -> TensorDataset:
    """A task without data: a fixed random mixing of the inputs."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    x = torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(x, torch.tanh(x @ mixing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="start from the checkpoint in the output folder")
    parser.add_argument("--output", type=Path, default=Path("accelerate-sparse"), help="folder for checkpoint and model")
    options = parser.parse_args()

    # shuffling by seed and epoch: on several processes accelerate's checkpoint does not bring back any other order
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=order)
    set_seed(0)  # every process starts from the same weights
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    # 1. convert the plain model, 2. let accelerate wrap it, 3. attach the optimizer, 4. register the run
    # transposable masks, searched anew every 10 updates; without FST's dense tail, so that the finished model is sparse
    run = nm.sparsify_(model, nm.FST(PATTERN, refresh=10, dense_tail=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_data(), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = len(loader) // accelerator.gradient_accumulation_steps  # per epoch, and not micro-batches
    run.attach(optimizer, total_steps=EPOCHS * updates)
    accelerator.register_for_checkpointing(run)
    if options.resume:
        accelerator.load_state(options.output / "half")

    for epoch in range(run.step // updates, EPOCHS):  # the run knows how far it is
        loader.set_epoch(epoch)
        for x, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        total = run.stats()["total"]
        accelerator.print(f"epoch {epoch}  update {run.step}  loss {loss.item():.6f}  density {total['density']:.3f}")
        if epoch + 1 == EPOCHS // 2:
            accelerator.save_state(options.output / "half")

    # plain layers again, with exact zeros: every process bakes its copy, one writes it down
    model = nm.freeze_(accelerator.unwrap_model(model))
    if accelerator.is_main_process:
        nm.save(model, options.output / "model", format="packed", pattern=PATTERN)
        report = nm.verify(options.output / "model")
        print(f"saved {len(report.tensors)} packed layers in {options.output / 'model'}; verified: {report.ok}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
