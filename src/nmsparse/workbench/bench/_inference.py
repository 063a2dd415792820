"""``nmsparse bench --inference``: transformer blocks with 2:4 weights, dense beside what accelerate_ makes of them.

Prefill runs whole sequences, decode one token of each sequence of a batch. Decoding runs through the blocks without a key-value
cache, so the attention to earlier tokens, which sparsity does not touch, is left out: what is compared are the linear layers and
what lies between them. Both sides are replayed from CUDA graphs, as servers do, since small products finish before Python has
launched the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.workbench.bench._blocks import MODELS, Shape, blocks_of, make_blocks, through_blocks
from nmsparse.workbench.bench._records import Recorder
from nmsparse.workbench.bench._timing import BLAS, alternate, side_facts

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Call:
    """One call of a served model."""

    phase: str
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


DECODED_BLOCKS = {"gpt2-124m": 36}
"""So many blocks that packed weights are several times the GPU's cache: a served model has an embedding and a head besides."""
CALLS = [Call("prefill", 1, 2048), Call("prefill", 8, 2048), Call("decode", 1, 1), Call("decode", 16, 1), Call("decode", 128, 1)]


def frozen_blocks(shape: Shape, device: str) -> nn.Module:
    """Random blocks in bf16 whose linear layers are 2:4 by magnitude."""
    torch.manual_seed(0)
    model = make_blocks(shape, device).to(BF16)
    nm.sparsify_(model, nm.ASP("2:4"), targets="all")
    return nm.freeze_(model).eval()


def bench_inference(record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """Every call of every model, dense and accelerated in turn."""
    for name in models:
        for call in CALLS:
            shape = MODELS[name]
            length = min(call.length, shape.length)  # GPT-2 has positions for so many
            if call.phase == "decode":
                shape = replace(shape, blocks=DECODED_BLOCKS.get(name, shape.blocks))
            compare_call(record, name, shape, Call(call.phase, call.batch, length), seconds, turns)


def compare_call(record: Recorder, name: str, shape: Shape, call: Call, seconds: float, turns: int, device: str = "cuda") -> None:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # past it blocks would run eagerly, in silence
    gc.collect()
    sides: dict[str, Callable[[], object]] = {}
    outputs: dict[str, Tensor] = {}
    with torch.inference_mode():  # as what comes from block to block: one graph serves all of them
        x = torch.randn(call.batch, call.length, shape.hidden, device=device, dtype=BF16)
    before = torch.backends.cuda.preferred_blas_library()
    try:
        for library in BLAS:  # dense has its fair chance; a graph keeps the library that it was captured with
            torch.backends.cuda.preferred_blas_library(library)
            sides[library], outputs["dense"] = prepared(frozen_blocks(shape, device), x)
    finally:
        torch.backends.cuda.preferred_blas_library(before)
    model = frozen_blocks(shape, device)
    handle = nm.accelerate_(model, tokens=call.tokens, keep_dense=False)
    sides["sparse"], outputs["sparse"] = prepared(model, x)
    times = alternate(sides, seconds, turns)
    blas = min(BLAS, key=lambda library: times[library].ms)
    times["dense"] = times[blas]
    difference = float((outputs["sparse"] - outputs["dense"]).float().norm() / outputs["dense"].float().norm())
    record.add(
        "inference", model=name, blocks=shape.blocks, phase=call.phase, batch=call.batch, length=call.length, tokens=call.tokens,
        blas=blas, speedup=round(times["dense"].ms / times["sparse"].ms, 3), packed=len(handle.packed), layers=len(handle.layers),
        weight_bytes=round(handle.packed_bytes / handle.dense_bytes, 4) if handle.dense_bytes else 1.0,
        difference=round(difference, 6), **side_facts("dense", times["dense"]), **side_facts("sparse", times["sparse"]),
    )  # fmt: skip


@torch.inference_mode()
def prepared(model: nn.Module, x: Tensor) -> tuple[Callable[[], object], Tensor]:
    """A call of the model that replays a CUDA graph, and its output; on the CPU the call itself."""
    for block in blocks_of(model):
        block.compile()

    @torch.inference_mode()
    def call() -> Tensor:
        return through_blocks(model, x)

    if not x.is_cuda:
        return call, call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and makes the plans that a capture cannot
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    graph.replay()

    def replay(owners: tuple[nn.Module, Tensor] = (model, x)) -> Tensor:
        """A graph does not own what it reads, so the call does."""
        graph.replay()
        return output

    return replay, output.clone()
