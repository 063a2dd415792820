"""Train a 2:4 sparse model in Lightning: one callback converts it, keeps the clock and logs what happens to the masks.

    python examples/lightning_sparse.py                  # seconds, on a CPU

The model, the LightningModule and the data are as they would be without sparsity; the data are made up here. Afterwards the zeros
are baked in, and what is written down is checked. Needs pip install "nmsparse[lightning]".
"""

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nmsparse as nm
from nmsparse.integrations.lightning import SparsityCallback

PATTERN, WIDTH, CLASSES = "2:4", 64, 8


class Classifier(pl.LightningModule):
    """Knows nothing of sparsity."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        hits = (self.net(batch[0]).argmax(1) == batch[1]).float()
        self.log("accuracy", hits.mean(), batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Printer(pl.Callback):
    """What a logger would get: the callback's metrics stand beside the model's own."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not trainer.sanity_checking:
            print(
                f"epoch {trainer.current_epoch}  accuracy {found['accuracy']:.3f}  density {found['sparsity/density']:.3f}  "
                f"flip rate {found['sparsity/flip_rate']:.4f}"
            )


def make_data(count: int, seed: int) -> DataLoader:
    """Points around eight centres; the task is to say which."""
    centres = 3.5 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    points = centres[labels] + torch.randn(count, WIDTH, generator=generator)
    return DataLoader(TensorDataset(points, labels), batch_size=128, shuffle=seed == 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="lightning-sparse", help="folder for the finished model")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")  # data in memory need none

    pl.seed_everything(0)
    task = Classifier()
    sparsity = SparsityCallback(nm.SRSTE(PATTERN), module="net")  # all linear layers of task.net but its last
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        callbacks=[sparsity, Printer()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, make_data(8192, seed=1), make_data(1024, seed=2))

    # plain layers again, with exact zeros: a model that anybody can load
    nm.freeze_(task.net)
    nm.save(task.net, options.output, pattern=PATTERN)
    report = nm.verify(options.output)
    density = sum(tensor.density for tensor in report.tensors) / len(report.tensors)
    print(f"density {density:.3f} in {len(report.tensors)} sparse layers; verified: {report.ok}; model in {options.output}")


if __name__ == "__main__":
    main()
