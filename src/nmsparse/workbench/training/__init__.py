"""One run: configuration, loop, checkpoints."""

from nmsparse.workbench.training._build import make_model, open_task
from nmsparse.workbench.training._checkpoints import CheckpointError, Checkpoints
from nmsparse.workbench.training._config import TrainConfig
from nmsparse.workbench.training._loop import DivergenceError, Progress, silent, train

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "DivergenceError",
    "Progress",
    "TrainConfig",
    "make_model",
    "open_task",
    "silent",
    "train",
]
