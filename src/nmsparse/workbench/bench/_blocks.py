"""Transformer blocks in the shapes that people train, from transformers' own models, without embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nmsparse as nm
from nmsparse.nn import fused_mlp


@dataclass(frozen=True)
class Shape:
    """A stack of blocks and the batch it is trained with."""

    family: str
    blocks: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    graph: bool = False
    """Replay forward and backward pass from a CUDA graph: small layers finish before Python has launched the next."""

    @property
    def tokens(self) -> int:
        return self.length * self.batch


MODELS = {
    "llama-8b": Shape("llama", 4, 4096, 14336, 32, 8, 2048, 8),
    "llama-1b": Shape("llama", 8, 2048, 8192, 32, 8, 2048, 8),
    "gpt2-xl": Shape("gpt2", 8, 1600, 6400, 25, 25, 1024, 16, graph=True),
    "gpt2-124m": Shape("gpt2", 12, 768, 3072, 12, 12, 1024, 16, graph=True),
}


def make_blocks(shape: Shape, device: str) -> nn.Module:
    """The blocks as a transformers model that takes embedded tokens."""
    with torch.device(device):  # from the start: a CPU takes ten seconds to draw the weights of four blocks of an 8B model
        if shape.family == "llama":
            from transformers import LlamaConfig, LlamaModel

            return LlamaModel(
                LlamaConfig(
                    vocab_size=8, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.blocks,
                    num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.length,
                    attn_implementation="sdpa", use_cache=False, bos_token_id=None, eos_token_id=None,
                )
            )  # fmt: skip
        from transformers import GPT2Config, GPT2Model

        return GPT2Model(
            GPT2Config(
                vocab_size=8, n_embd=shape.hidden, n_inner=shape.ffn, n_layer=shape.blocks, n_head=shape.heads,
                n_positions=shape.length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                attn_implementation="sdpa", use_cache=False, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip


def fuse_mlps_(model: nn.Module) -> None:
    """Let the MLPs of these models, whose forward is known, run nmsparse.nn.fused_mlp; for comparison."""
    for module in model.modules():
        fused = _FUSED.get(type(module).__name__)
        if fused is not None:
            module.forward = partial(fused, module)


def _llama_mlp(mlp: Any, x: Tensor) -> Tensor:
    return fused_mlp(x, up=mlp.up_proj, down=mlp.down_proj, gate=mlp.gate_proj, activation="silu")


def _gpt2_mlp(mlp: Any, x: Tensor) -> Tensor:
    return fused_mlp(x, up=mlp.c_fc, down=mlp.c_proj, activation="gelu_tanh")  # without its dropout, which is 0 here


_FUSED = {"LlamaMLP": _llama_mlp, "GPT2MLP": _gpt2_mlp}


def meta_model(name: str) -> nn.Module:
    """A model without memory, for its sizes: a shape by name, or whatever transformers can configure."""
    with torch.device("meta"):
        if name in MODELS:
            return make_blocks(MODELS[name], "meta")
        from transformers import AutoConfig, AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
        return model


def blocks_of(model: nn.Module) -> nn.ModuleList:
    found: nn.ModuleList = getattr(model, "layers", None) or getattr(model, "h", None)  # pyrefly: ignore
    return found


def through_blocks(model: nn.Module, hidden: Tensor) -> Tensor:
    """All blocks and the last norm. The model's own forward is passed over: it makes an attention mask while a CUDA graph
    is captured and none otherwise, which would compile the blocks anew in the middle of the capture."""
    for hook in model._forward_pre_hooks.values():
        hook(model, ())  # the run's: it moves the random numbers on
    owner: Any = model
    options: dict[str, Any] = {}
    if hasattr(owner, "rotary_emb"):
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        options = {"position_embeddings": owner.rotary_emb(hidden, positions), "position_ids": positions}
    for block in blocks_of(model):
        hidden = block(hidden, **options)
    last: Tensor = (owner.norm if hasattr(owner, "norm") else owner.ln_f)(hidden)
    return last


@dataclass(eq=False)
class Trainer:
    """One training step after another: fp32 weights, bf16 autocast, fused AdamW, compiled blocks."""

    model: nn.Module
    step: Callable[[], None]
    run: nm.Run | None
    compute: Callable[[], None]
    optimizer: torch.optim.Optimizer


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def shard_(model: nn.Module) -> None:
    """Block by block, as trainers do; products and gathered weights in bf16, sums of gradients in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks_of(model), model):
        fully_shard(module, mp_policy=policy)


def make_trainer(
    shape: Shape,
    device: str,
    recipe: nm.Recipe | None,
    plan: nm.Plan | None,
    emulate: bool = False,
    fused: bool = False,
    sharded: bool = False,
) -> Trainer:
    """``sharded`` by FSDP2, over the ranks that there are."""
    torch.manual_seed(0)
    model = make_blocks(shape, device)
    if fused:
        fuse_mlps_(model)
    run = None if recipe is None else nm.sparsify_(model, recipe, plan=plan, emulate=emulate)
    if sharded:
        shard_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    if run is not None:
        run.attach(optimizer, total_steps=1_000_000)
    for block in blocks_of(model):
        block.compile()
    generator = torch.Generator(device).manual_seed(1)
    sizes = (shape.batch, shape.length, shape.hidden)
    inputs = torch.randn(sizes, device=device, generator=generator, dtype=torch.bfloat16)
    target = torch.randn(sizes, device=device, generator=generator, dtype=torch.bfloat16)

    def compute() -> None:
        with torch.autocast(device, torch.bfloat16):
            hidden = model(inputs_embeds=inputs).last_hidden_state if sharded else through_blocks(model, inputs)
            loss = (hidden.float() * target).mean()
        loss.backward()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compute()
        optimizer.step()

    return Trainer(model, step, run, compute, optimizer)


def captured(trainer: Trainer) -> Callable[[], None]:
    """The same step with forward and backward pass replayed from a CUDA graph; the optimizer and its hooks run as ever."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            trainer.step()
    torch.cuda.current_stream().wait_stream(stream)
    trainer.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trainer.compute()

    def step() -> None:
        graph.replay()
        trainer.optimizer.step()

    return step
