"""Trains runs of a comparison, one after another: each as config.json in its folder says.

Folders come in as lines, and each goes out again when its run has ended, trained or diverged. What a run prints goes to the log
in its folder. An error ends the process: after one nothing is certain, least of all a GPU.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch

from nmsparse._tensor_cores import tell_emulated
from nmsparse.workbench._workers import LOG, die_with_parent
from nmsparse.workbench.training import DivergenceError, TrainConfig, train

SHAPES = ("task", "model", "pretrained", "width", "layers", "heads", "length", "batch", "accumulate", "precision", "compile")
RECIPES = 64
"""Whose code a block may have at a time; past it torch would run blocks eagerly, and say so in the log only."""


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whoever prints does not answer
    threads = torch.get_num_threads()
    torch._dynamo.config.recompile_limit = RECIPES
    shapes = ""
    for line in sys.stdin.buffer:
        folder = Path(os.fsdecode(line.rstrip(b"\n")))
        with (folder / LOG).open("ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        torch.set_num_threads(threads)  # a resumed run takes as many as it began with
        with warnings.catch_warnings():  # so that each log has its own
            config = TrainConfig.from_dict(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))
            if shapes != (shapes := shapes_of(config)):
                torch.compiler.reset()
            run(config, folder)
        forget()
        sys.stdout.flush()
        answers.write(line)


def shapes_of(config: TrainConfig) -> str:
    """Runs that agree in this can share compiled code: recipes are told apart by guards, while another shape would make code for
    all shapes. Layers on sparse tensor cores hold addresses, so those runs share nothing."""
    if not config.emulate:
        return os.urandom(8).hex()
    return json.dumps([getattr(config, name) for name in SHAPES])


def run(config: TrainConfig, folder: Path) -> None:
    try:
        train(config, folder, resume=True)
    except DivergenceError as error:
        print(error)


def forget() -> None:
    """Leave nothing of a run to the next but compiled code: neither memory, nor its peak on a GPU (a process on a CPU keeps its
    own), nor what is told once."""
    gc.collect()
    tell_emulated.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # of a terminal, which tells the comparison too
        sys.exit(130)
