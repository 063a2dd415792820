"""Every script in examples/ runs at toy size, as its users would run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
LAST_LINES = {
    "accelerate_sparse": r"epoch 3  update 128  loss \d.*\nsaved 2 packed layers in .*; verified: True",
    "finetune_bert_step": r"validation accuracy \d.*\ndensity 0\.500; verified: True",
    "lightning_sparse": r"epoch 2  accuracy 0\.9\d+ .*\ndensity 0\.500 in 2 sparse layers; verified: True",
    "pretrain_gpt_sste": r"validation loss \d.*\ndensity 0\.500 in 4 of 4 sparse layers; verified: True",
    "resnet_cifar_bimask": r"validation accuracy \d.*\ndensity 0\.500 in 19 of 19 sparse layers; verified: True",
    "vit_mask_decay": r"validation accuracy \d.*\ndensity 0\.0625 in 6 of 6 sparse layers; verified: True",
}
"""What a script must say at its end, where it is known here; all others must say something."""
LONGEST = 120


def command_of(script: Path) -> list[str]:
    """How a script says that it is run: a first line ``# run: torchrun ...``, or plain Python. One without ``--toy`` is a toy."""
    text = script.read_text()
    toy = ["--toy"] if '"--toy"' in text else []
    said = re.match(r"# run: (.+)\n", text)
    if said is None:
        return [sys.executable, str(script), *toy]
    program, *words = shlex.split(said[1])
    programs = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
    named = [str(script) if word.endswith(script.name) else word for word in words]
    return [*programs[program], *named, *(flag for flag in toy if flag not in words)]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_runs_at_toy_size_and_says_what_came_out(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command_of(script), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert re.search(LAST_LINES.get(script.stem, r"\S"), done.stdout), done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_is_short_enough_to_read(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= LONGEST


def test_first_line_tells_how_a_script_is_run(tmp_path: Path) -> None:
    script = tmp_path / "several.py"
    script.write_text('# run: torchrun --nproc-per-node 2 examples/several.py\nparser.add_argument("--toy")\n')
    assert command_of(script)[1:] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "--toy"]
