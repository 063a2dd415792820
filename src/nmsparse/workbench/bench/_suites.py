"""The suites of ``nmsparse bench``. Every comparison alternates its sides in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.kernels import (
    Product,
    activation_backward,
    pack_gradient,
    pack_weight_,
    packed_size,
    sparse_matmul,
    time_products,
)
from nmsparse.workbench.bench._blocks import MODELS, Shape, blocks_of, captured, make_trainer, meta_model, one_rank
from nmsparse.workbench.bench._records import Recorder
from nmsparse.workbench.bench._timing import alternate, fastest_blas, replayed, side_facts

TOKENS = 16384
SIZES = [(14336, 4096), (4096, 14336), (4096, 4096), (8192, 2048), (2048, 8192), (6400, 1600), (3072, 768), (768, 3072)]
LAYERS = [(14336, 4096), (4096, 14336), (4096, 4096), (2048, 8192)]
BF16 = torch.bfloat16
REPLAYED = 8
"""Calls of a pack kernel in a row."""
STEP_RECIPES = {"llama-8b": ("trio", "fst", "s-ste"), "llama-1b": ("trio",), "gpt2-xl": ("trio",), "gpt2-124m": ("trio",)}


def bench_kernels(record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """Pack kernels in bytes per second, beside a plain copy of as many bytes."""
    word = torch.tensor(7, dtype=torch.int32, device="cuda")
    scale = torch.tensor(1.25, device="cuda")
    rows, columns = 14336, 4096
    copies = [torch.empty(packed_size(rows, columns), dtype=BF16, device="cuda") for _ in range(2)]
    grad = torch.randn(TOKENS, rows, device="cuda", dtype=BF16)
    cases: dict[str, tuple[float, int, Callable[[], object]]] = {}
    for master in (torch.float32, BF16):
        weight = torch.randn(rows, columns, device="cuda").to(master)
        for name, along, count in (("K-major", (0, None), 1), ("M-major", (None, 1), 1), ("both", (0, 1), 2)):
            for how, factor in (("top", None), ("soft", scale)):
                along_columns, along_rows = (None if i is None else copies[i] for i in along)

                def pack(w: Tensor = weight, a: Any = along_columns, b: Any = along_rows, f: Tensor | None = factor) -> None:
                    pack_weight_(w, a, b, columns_first=a is not None, scale=f)

                cases[f"weight {name} {how} from {str(master)[6:]}"] = (master.itemsize + 1.125 * count, rows * columns, pack)
    for name, flags, size in (("MVUE along tokens", (True, False), 3.125), ("SDGP along channels", (False, True), 3.125),
                              ("both, one after the other", (True, True), 6.25)):  # fmt: skip
        cases[f"gradient {name}"] = (size, TOKENS * rows, lambda f=flags: pack_gradient(grad, word, word, *f))
    gate, up = (torch.randn(TOKENS, rows, device="cuda", dtype=BF16) for _ in range(2))
    for name, wants, size in (("", False, 12.25), (", hidden again", True, 14.25)):
        cases[f"gated SiLU backward, both gradients packed{name}"] = (
            size, TOKENS * rows, lambda w=wants: activation_backward(grad, gate, up, 4 * [word], "silu", w)
        )  # fmt: skip
    for name, (per_entry, entries, call) in cases.items():
        total = per_entry * entries
        source = torch.empty(int(total / 2), dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {"copy": lambda t=target, s=source: t.copy_(s), "pack": call}
        sides = alternate({side: replayed(once, REPLAYED) for side, once in calls.items()}, seconds / 4, turns)
        sides = {side: replace(times, ms=times.ms / REPLAYED) for side, times in sides.items()}
        speeds = {side: round(total / times.ms / 1e9, 3) for side, times in sides.items()}
        record.add("kernels", kernel=name, megabytes=round(total / 1e6), tb_per_s=speeds["pack"], copy_tb_per_s=speeds["copy"],
                   **side_facts("pack", sides["pack"]))  # fmt: skip


def linear_products(out_features: int, in_features: int, tokens: int) -> dict[str, Product]:
    """The three products of an nn.Linear, and SDGP's form of the second."""
    return {
        "output": Product(out_features, tokens, in_features, False, True, True, BF16),
        "grad_input": Product(in_features, tokens, out_features, True, True, True, BF16),
        "grad_weight": Product(out_features, in_features, tokens, True, False, False, BF16),
        "grad_input (sparse G)": Product(tokens, in_features, out_features, False, False, False, BF16),
    }


def bench_products(record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """Each product with its operand packed already, against the dense product in the same layouts."""
    wanted = {(size, name): p for size in SIZES for name, p in linear_products(*size, TOKENS).items()}
    choices = time_products(wanted.values(), torch.device("cuda"))
    before = torch.backends.cuda.preferred_blas_library()
    try:
        _compare_products(record, seconds, turns, wanted, choices)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _compare_products(
    record: Recorder, seconds: float, turns: int, wanted: dict[tuple[tuple[int, int], str], Product], choices: dict[Product, Any]
) -> None:
    for ((out_features, in_features), name), product in wanted.items():
        choice = choices[product]
        facts = {"product": name, "out_features": out_features, "in_features": in_features, "tokens": TOKENS}
        if choice is None:
            record.add("products", **facts, speedup=None, why="no algorithm of the library computes it")
            continue
        call, dense, error = product_sides(product)
        sides = alternate({**dense, "fp8": fp8_product(product), "sparse": call}, seconds / 2, turns)
        best = min(dense, key=lambda side: sides[side].ms)
        flops = 2 * product.m * product.n * product.k
        record.add(
            "products", **facts, speedup=round(sides[best].ms / sides["sparse"].ms, 3), error=error, dense=best,
            algorithm=choice.algorithm, fp8_speedup=round(sides[best].ms / sides["fp8"].ms, 3),
            dense_tflops=round(flops / sides[best].ms / 1e9, 1),
            sparse_tflops=round(flops / sides["sparse"].ms / 1e9, 1),
            **side_facts("dense", sides[best]), **side_facts("sparse", sides["sparse"]),
        )  # fmt: skip


def fp8_product(product: Product) -> Callable[[], object]:
    """The dense product of these sizes in FP8 (e4m3, one scale per tensor): what 2:4 stands beside."""
    a = torch.randn(product.n, product.k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(product.m, product.k, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=BF16, use_fast_accum=True)


def product_sides(product: Product) -> tuple[Callable[[], object], dict[str, Callable[[], object]], float]:
    """A sparse product, the dense ones beside it (both cuBLAS libraries), and the error against float64."""
    shape = (product.k, product.m) if product.m_major else (product.m, product.k)
    stored = torch.randn(shape, device="cuda").to(BF16)
    packed = torch.empty(packed_size(*shape), dtype=BF16, device="cuda")
    pack_weight_(stored, *((None, packed) if product.m_major else (packed, None)), columns_first=not product.m_major)
    b = torch.randn((product.n, product.k) if product.b_transposed else (product.k, product.n), device="cuda").to(BF16)
    flags = (product.m_major, product.b_transposed, product.d_transposed)

    def sparse() -> Tensor:
        return sparse_matmul(packed, b, None, product.m, product.k, *flags)

    def dense(library: str) -> Callable[[], object]:
        a, other = (stored.t() if product.m_major else stored), (b.t() if product.b_transposed else b)

        def call() -> Tensor:
            torch.backends.cuda.preferred_blas_library(library)
            return torch.mm(other.t(), a.t()) if product.d_transposed else torch.mm(a, other)

        return call

    pruned = torch.where(nm.functional.magnitude_mask(stored, "2:4", 0 if product.m_major else -1), stored, 0)
    some = torch.randperm(product.m, device="cuda")[:64]  # rows of D: float64 for all of them would take longer than the rest
    rows = (pruned.t() if product.m_major else pruned)[some].double()
    exact = rows @ (b.t() if product.b_transposed else b).double()
    got = sparse()
    got = (got.t() if product.d_transposed else got)[some].double()
    error = float((got - exact).norm() / exact.norm())
    return sparse, {"cublas": dense("cublas"), "cublaslt": dense("cublaslt")}, round(error, 6)


def bench_layer(record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """One linear layer, forward and backward with everything around it, three products sparse; no optimizer."""
    for out_features, in_features in LAYERS:
        sides: dict[str, Callable[[], object]] = {}
        how: dict[str, dict[str, str]] = {}
        x = torch.randn(TOKENS, in_features, device="cuda", dtype=BF16, requires_grad=True)
        g = torch.randn(TOKENS, out_features, device="cuda", dtype=BF16)
        for name in ("dense", "trio", "s-ste"):
            torch.manual_seed(0)
            layer = nn.Linear(in_features, out_features, bias=False, device="cuda")
            run = None
            if name != "dense":
                run = nm.sparsify_(layer, nm.recipe(name, "2:4"), targets=[""])
                run.attach(torch.optim.SGD(layer.parameters(), lr=0.0), stats_every=0, check_finite=False)
                how[name] = run.products[""]
            sides[name] = _layer_step(layer, x, g, run)
        with fastest_blas(sides["dense"]) as blas:
            times = alternate(sides, seconds, turns)
        for name in ("trio", "s-ste"):
            record.add(
                "layer", recipe=name, out_features=out_features, in_features=in_features, tokens=TOKENS, products=how[name],
                blas=blas, speedup=round(times["dense"].ms / times[name].ms, 3), **side_facts("dense", times["dense"]),
                **side_facts("sparse", times[name]),
            )  # fmt: skip
        torch._dynamo.reset()


def _layer_step(layer: nn.Module, x: Tensor, g: Tensor, run: nm.Run | None) -> Callable[[], None]:
    layer.compile()

    def step() -> None:
        if run is not None:
            run.refresh()  # what an update would do
        layer.weight.grad = x.grad = None  # pyrefly: ignore
        with torch.autocast("cuda", BF16):
            y = layer(x)
        y.backward(g)

    return step


def bench_steps(record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """Whole training steps of transformer blocks, dense beside sparse."""
    for model in models:
        for name in STEP_RECIPES[model]:
            compare_steps(record, model, MODELS[model], nm.recipe(name, "2:4"), seconds, turns)


def bench_sharded(record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """The same steps under FSDP2 on this GPU alone: nothing travels, but weights are gathered, and packed, in every pass."""
    with one_rank():
        for model in models:
            if not MODELS[model].graph:  # FSDP2's passes are not captured
                compare_steps(record, model, MODELS[model], nm.recipe("trio", "2:4"), seconds, turns, sharded=True)


def compare_steps(
    record: Recorder, model: str, shape: Shape, recipe: nm.Recipe, seconds: float, turns: int, sharded: bool = False
) -> None:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    plan = nm.plan(meta_model(model), recipe, shape.tokens, device="cuda")
    dense = make_trainer(shape, "cuda", None, None, sharded=sharded)
    for _ in range(3):
        dense.step()
    dense_holds = torch.cuda.memory_allocated() - before
    sparse = make_trainer(shape, "cuda", recipe, plan, sharded=sharded)
    for _ in range(3):
        sparse.step()
    sparse_holds = torch.cuda.memory_allocated() - before - dense_holds
    peaks = {}
    for side, trainer, others in (("dense", dense, sparse_holds), ("sparse", sparse, dense_holds)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        torch.cuda.synchronize()
        peaks[side] = torch.cuda.max_memory_allocated() - before - others
    with fastest_blas(dense.step) as blas:
        steps: dict[str, Callable[[], object]] = {"dense": dense.step, "sparse": sparse.step}
        if shape.graph:
            steps = {"dense": captured(dense), "sparse": captured(sparse)}
        sides = alternate(steps, seconds, turns)
    assert sparse.run is not None, "made with a recipe"
    record.add(
        "sharded" if sharded else "steps", model=model, recipe=recipe.name, blocks=shape.blocks, tokens=shape.tokens,
        length=shape.length, graph=shape.graph, blas=blas,
        speedup=round(sides["dense"].ms / sides["sparse"].ms, 3), predicted=round(plan.speedup(sides["dense"].ms), 3),
        memory=round(peaks["sparse"] / peaks["dense"], 3), dense_gib=round(peaks["dense"] / 2**30, 2),
        products=_counts(sparse.run.products), **side_facts("dense", sides["dense"]), **side_facts("sparse", sides["sparse"]),
    )  # fmt: skip
    for trainer in (dense, sparse):
        for block in blocks_of(trainer.model):
            del block._compiled_call_impl


def _counts(products: dict[str, dict[str, str]]) -> dict[str, int]:
    """How many layers run each product sparse."""
    counts: dict[str, int] = {}
    for how in products.values():
        for product, word in how.items():
            counts[product] = counts.get(product, 0) + (word == "sparse")
    return counts


SUITES: dict[str, Callable[[Recorder, float, int, list[str]], None]] = {
    "kernels": bench_kernels,
    "products": bench_products,
    "layer": bench_layer,
    "steps": bench_steps,
    "sharded": bench_sharded,
}


def run_suites(names: list[str], record: Recorder, seconds: float, turns: int, models: list[str]) -> None:
    """Run suites by name."""
    for name in names:
        SUITES[name](record, seconds, turns, models)
