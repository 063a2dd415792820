"""DeepSpeed's ZeRO optimizers update flat copies of the parameters: refused with a sentence, before anything trains wrong."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest
from others import OTHERS

if importlib.util.find_spec("deepspeed") is None and not (OTHERS / "deepspeed").is_dir():
    pytest.skip("needs deepspeed; make test installs it", allow_module_level=True)

SCRIPT = """
import sys, torch, deepspeed, nmsparse as nm
stage, attaches_first = int(sys.argv[1]), sys.argv[2] == "True"
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
run = nm.sparsify_(model, nm.SRSTE("2:4", decay=0.1), ["0", "1"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
try:
    if attaches_first:
        run.attach(optimizer)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False}
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if not attaches_first:
        run.attach(wrapped)
    engine.backward(engine(torch.ones(4, 16)).square().mean())
    engine.step()
    print("ANSWER trained", run.step)
except (ValueError, RuntimeError) as error:
    print("ANSWER", error)
"""


def train(stage: int, attaches_first: bool) -> str:
    """In a process of its own: DeepSpeed changes torch and the process group for good."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = [str(OTHERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | names | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SCRIPT, str(stage), str(attaches_first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    answers = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr[-2000:]
    return answers[0]


@pytest.mark.parametrize("attaches_first", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused_with_what_to_use(stage: int, attaches_first: bool) -> None:
    answer = train(stage, attaches_first)
    assert "ZeRO" in answer
    assert "fully_shard (FSDP2)" in answer


def test_stage_zero_trains() -> None:
    assert train(0, True) == "trained 1"
