"""accelerate_ and its benchmark on a real GPU: packed layers compute what dense ones do, however they are called."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import same
from transformers.pytorch_utils import Conv1D

import nmsparse as nm
from nmsparse.kernels import Choice, Product, serving_times
from nmsparse.nn import PackedMixin
from nmsparse.workbench.bench._blocks import Shape
from nmsparse.workbench.bench._inference import frozen_blocks, prepared

BF16, FP16 = torch.bfloat16, torch.float16
TOKENS = (1, 5, 8, 512)
pytestmark = pytest.mark.usefixtures("needs_sparse_tensor_cores")


@pytest.fixture
def unsearched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own algorithm: what is tested is the layer around it, and a search in fp16 restarts after every crash."""
    default = Choice(-1, 1, 1.0, 1.0, 0.0)
    monkeypatch.setattr("nmsparse.kernels._search.Choices.near", lambda self, product: default)


class All:
    """A plan for which every layer pays."""

    def unprofitable(self, name: str, product: str, out_features: int, in_features: int) -> str | None:
        return None


class Layers(nn.Module):
    """Both kinds of storage; one M-major operand whose k is no multiple of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(128, 96), Conv1D(128, 96), nn.Linear(128, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu())


def frozen(dtype: torch.dtype) -> Layers:
    torch.manual_seed(0)
    model = Layers().cuda().to(dtype)
    nm.sparsify_(model, nm.ASP("2:4"), targets="all")
    nm.freeze_(model)
    return model.eval()


def close(a: Tensor, b: Tensor) -> bool:
    return float((a.float() - b.float()).norm() / b.float().norm()) < 1e-2  # three products, each rounded to 16 bits


# in fp16 the library's own algorithm is untried, and an illegal instruction would end all tests of its process
@pytest.mark.usefixtures("unsearched")
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("keep_dense", [True, False])
@torch.inference_mode()
def test_packed_layers_compute_what_dense_ones_do(dtype: torch.dtype, keep_dense: bool) -> None:
    model, dense = frozen(dtype), frozen(dtype)
    handle = nm.accelerate_(model, plan=All(), keep_dense=keep_dense)
    assert handle.packed == ["second", "third"]  # 96 outputs are no multiple of 64
    assert "multiples of 64" in handle.layers["first"]
    for tokens in TOKENS:
        x = torch.randn(tokens, 128, device="cuda", dtype=dtype)
        assert close(model(x), dense(x)), tokens
    assert close(model(x[0]), dense(x[0]))
    assert model(x[:0]).shape == (0, 256)
    assert same(model, dense)
    handle.undo()
    assert not any(isinstance(module, PackedMixin) for module in model.modules())
    assert same(model, dense)


@pytest.mark.usefixtures("unsearched")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of inductor, about this GPU's settings
def test_packed_layers_compile(mode: Any) -> None:
    torch._dynamo.reset()
    model, dense = frozen(BF16), frozen(BF16)
    nm.accelerate_(model, plan=All(), keep_dense=False)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for tokens in (512, 8):
            x = torch.randn(tokens, 128, device="cuda", dtype=BF16)
            for _ in range(3):
                assert close(compiled(x).clone(), dense(x))


@pytest.mark.usefixtures("unsearched")
@torch.inference_mode()
def test_packed_layers_replay_from_a_graph() -> None:
    model, dense = frozen(BF16), frozen(BF16)
    nm.accelerate_(model, plan=All())
    x = torch.randn(5, 128, device="cuda", dtype=BF16)
    model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert close(y, dense(x))


@pytest.mark.alone
def test_times_decide_and_every_layer_says_why() -> None:
    model = nn.Sequential(nn.Linear(2048, 8192, device="cuda", dtype=BF16), nn.Linear(8192, 2048, device="cuda", dtype=BF16))
    nm.sparsify_(model, nm.ASP("2:4"), targets="all")
    nm.freeze_(model)
    handle = nm.accelerate_(model, tokens=4096)
    assert handle.plan is not None
    for name, layer in handle.plan.layers.items():
        time = layer.products["output"]
        assert time.dense_ms is not None
        assert time.sparse_ms is not None
        assert (handle.layers[name] == "sparse") == (time.reason is None)
    # 275 GFLOP that sparse tensor cores do in about two thirds of the time
    assert handle.packed == ["0", "1"]


@pytest.mark.alone
def test_a_weight_that_the_cache_has_lost_takes_the_time_of_reading_it() -> None:
    """One row and a 32 MiB weight: at least 6 us at 5 TB/s, which launches would hide and a cache would shorten."""
    product = Product(8192, 8, 2048, False, True, True, BF16)
    dense_ms, sparse_ms = serving_times(product, 1, True, torch.device("cuda"))
    assert 0.006 < dense_ms < 0.1
    assert 0.003 < sparse_ms < 0.1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of inductor, about this GPU's settings
def test_a_captured_call_of_the_benchmark_owns_its_model() -> None:
    torch._dynamo.reset()
    shape = Shape("llama", 2, 256, 512, 4, 4, 32, 2)
    model, x = frozen_blocks(shape, "cuda"), torch.randn(2, 16, 256, device="cuda", dtype=BF16)
    replay, expected = prepared(model, x)
    del model, x
    gc.collect()
    torch.cuda.empty_cache()
    other = torch.full((64 << 20,), 7, device="cuda", dtype=BF16)
    assert torch.equal(replay(), expected)  # type: ignore[arg-type]
    del other
