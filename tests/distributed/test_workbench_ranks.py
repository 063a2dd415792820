"""The workbench's training loop on two ranks: a killed run resumes as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file

pytest.importorskip("accelerate")
TINY: dict[str, Any] = {
    "width": 16, "layers": 1, "heads": 2, "length": 16, "limit": 64, "batch": 4, "steps": 6, "eval_batches": 2, "log_every": 1,
    "eval_every": 3, "checkpoint_every": 2, "recipe": "fst", "options": {"refresh": 2},
}  # fmt: skip


class KillError(Exception):
    """Stands for the end of a process."""


def train_killed_at(rank: int, world: int, folder: str, step: int | None, resume: bool) -> str:
    from nmsparse.workbench.training import TrainConfig, train

    def listen(now: int, row: dict[str, Any] | None) -> None:
        if now == step:
            raise KillError

    try:
        # under torchrun a process ends with its run; these go on to the next test
        with mock.patch.object(torch.distributed, "destroy_process_group"):
            record = train(TrainConfig.from_dict(TINY), folder, resume=resume, progress=listen)
    except KillError:
        return "killed"
    assert record.result is not None
    return str(record.result["status"])


def test_killed_run_on_two_ranks_resumes_to_the_same_weights(two_ranks: Ranks, tmp_path: Path) -> None:
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    assert two_ranks.run(train_killed_at, whole, None, False) == ["finished"] * 2
    assert two_ranks.run(train_killed_at, cut, 5, False) == ["killed"] * 2
    assert two_ranks.run(train_killed_at, cut, None, True) == ["finished"] * 2
    expected, found = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
