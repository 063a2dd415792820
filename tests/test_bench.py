"""The benchmark's models and records, without a GPU: what is measured must be what is claimed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nmsparse as nm
from nmsparse.workbench.bench import MODELS, _timing, headline, meta_model
from nmsparse.workbench.bench._blocks import Shape, make_blocks, make_trainer, one_rank, through_blocks
from nmsparse.workbench.bench._power import PowerMeter, Sample

TINY = {"llama": Shape("llama", 2, 64, 128, 4, 2, 32, 2), "gpt2": Shape("gpt2", 2, 64, 128, 4, 4, 32, 2)}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, *a, **k: None)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_compute_what_the_model_of_transformers_computes(family: str) -> None:
    torch.manual_seed(0)
    model = make_blocks(TINY[family], "cpu").eval()
    x = torch.randn(2, 32, 64)
    with torch.no_grad():
        expected = model(inputs_embeds=x).last_hidden_state
        positions = model.wpe(torch.arange(32)) if family == "gpt2" else 0.0  # GPT-2 adds them before its blocks
        torch.testing.assert_close(through_blocks(model, x + positions), expected)


@pytest.mark.usefixtures("eager", "reference_engine")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_sparse_step_moves_weights_and_random_numbers(family: str) -> None:
    trainer = make_trainer(TINY[family], "cpu", nm.Trio("2:4"), None)
    assert trainer.run is not None
    assert all("sparse" in how.values() for how in trainer.run.products.values())
    name = trainer.run.layers[0]
    before = trainer.model.get_submodule(name).weight.clone()
    counter = trainer.run._layers[name].state["counter"].clone()
    trainer.compute()
    assert trainer.run._layers[name].state["counter"] == counter + 1
    trainer.step()
    assert not torch.equal(before, trainer.model.get_submodule(name).weight)
    assert trainer.run.step == 1


@pytest.mark.usefixtures("eager", "reference_engine")
def test_a_sharded_step_gathers_weights_and_packs_them_in_its_passes() -> None:
    with one_rank():
        trainer = make_trainer(TINY["llama"], "cpu", nm.Trio("2:4"), None, sharded=True)
        assert trainer.run is not None
        for handle in trainer.run._layers.values():
            assert "sparse" in trainer.run.products[handle.name].values()
            assert handle.layer.sparse.packs_in_passes
        name = trainer.run.layers[0]
        before = trainer.model.get_submodule(name).weight.full_tensor().clone()
        for _ in range(2):
            trainer.step()
        assert not torch.equal(before, trainer.model.get_submodule(name).weight.full_tensor())
        assert trainer.run.step == 2


@pytest.mark.parametrize("name", list(MODELS))
def test_shapes_have_the_sizes_of_their_models(name: str) -> None:
    per_block = {"llama-8b": 218_112_000, "llama-1b": 60_821_504, "gpt2-xl": 30_740_800, "gpt2-124m": 7_087_872}
    model = meta_model(name)
    blocks: Any = getattr(model, "layers", None) or model.h
    assert len(blocks) == MODELS[name].blocks
    # LLaMA-3 8B and 3.2 1B, GPT-2 XL and 124M: weights of one block, norms and biases included
    assert sum(p.numel() for p in blocks[0].parameters()) == per_block[name]
    assert MODELS[name].tokens == 16384


def test_headlines_say_what_was_measured() -> None:
    rows = [
        json.loads(line) for line in (Path(__file__).parent.parent / "benchmarks/results/bench.jsonl").read_text().splitlines()
    ]
    assert {row["suite"] for row in rows} >= {"kernels", "products", "layer", "steps"}
    for row in rows:
        line = headline(row)
        shown = row.get("speedup", row.get("tb_per_s"))
        assert (row["why"] if shown is None else f"{shown:.2f}") in line
        assert row["gpu"] == "NVIDIA H200"
        assert row["cusparselt"] == 800
        assert row["driver"]


def test_dense_chooses_its_library_and_the_choice_ends_with_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["default"]

    def prefer(library: str | None = None) -> str:
        chosen.append(library or chosen[-1])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(_timing, "_turn", lambda call, count: (2.0 if chosen[-1] == "cublas" else 1.0, 0.0, 0.0))
    with _timing.fastest_blas(lambda: None) as best:
        assert best == chosen[-1] == "cublaslt"
    assert chosen[-1] == "default"


def test_power_is_averaged_over_the_span_of_a_turn() -> None:
    meter = PowerMeter(samples=[Sample(1.0, 1000, 100), Sample(2.0, 1400, 300), Sample(3.0, 1600, 500), Sample(9.0, 1, 1)])
    assert meter.between(1.5, 3.5) == (1500, 400)
    assert meter.between(4.0, 5.0) == (None, None)


@pytest.mark.parametrize("command", [("bench",), ("plan", "llama-8b")])
def test_without_a_gpu_measuring_says_so(command: tuple[str, ...]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU to measure")
    result = subprocess.run([sys.executable, "-m", "nmsparse", *command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "measures a CUDA GPU, and torch sees none" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("bench", "nonsense"), "'nonsense' is not one of kernels, products, layer, steps, sharded"),
        (("bench", "kernels", "--inference"), "--inference measures served models, not the suites of training"),
        (("bench", "--model", "gpt5"), "'gpt5' is not one of llama-8b"),
        (("plan", "llama-8b", "--recipe", "none"), "there is no recipe named 'none'"),
        (("plan", "llama-8b", "--pattern", "4"), "--recipe"),
        (("plan",), "model"),
    ],
)
def test_wrong_words_exit_with_2(command: tuple[str, ...], words: str) -> None:
    result = subprocess.run([sys.executable, "-m", "nmsparse", *command], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
