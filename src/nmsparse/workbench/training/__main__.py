"""Trains runs of a comparison, one after another: each as config.json in its folder says.

Folders come in as lines, and a line goes out for each that has ended, trained or diverged. What a run prints goes to the log in
its folder. An error ends the process: after one nothing is certain, least of all a GPU.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch

from nmsparse.workbench._workers import LOG
from nmsparse.workbench.training import DivergenceError, TrainConfig, train


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        with (folder / LOG).open("ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        run(folder)
        sys.stdout.flush()
        answers.write(b"\n")


def run(folder: Path) -> None:
    config = TrainConfig.from_dict(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))
    try:
        train(config, folder, resume=True)
    except DivergenceError as error:
        print(error)
    finally:
        forget()


def forget() -> None:
    """Leave nothing of a run to the next: neither memory, nor its peak, nor compiled code that counts against a limit."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
