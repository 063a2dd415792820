"""Measure each layer's products on this GPU, dense and sparse with packing, and decide which to run how.

Dense is always a legal answer, and every layer that stays dense says why. Times are those of one update: products once per
micro-batch, packing of the weight once. Legend: T tokens of a micro-batch, O out_features, I in_features.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmsparse._saved import describe
from nmsparse.kernels import (
    Product,
    device_milliseconds,
    hardware,
    misfit,
    pack_gradient,
    pack_weight_,
    packed_size,
    padded,
    time_products,
)
from nmsparse.nn import Targets, layer_sizes, obstacles, select_layers
from nmsparse.recipes import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, PRODUCTS, Recipe

FORMAT = 1
MARGIN = 0.01
"""A sparse layer must be faster by this share, or the noise of the measurement decides."""
PROJECTION = 1.5
"""What projecting a weight in plain torch takes, in casts of it."""
NOT_FASTER = "measured: the dense product is as fast"


@dataclass(frozen=True)
class ProductTime:
    """One product of a layer, in milliseconds per micro-batch."""

    dense_ms: float | None
    sparse_ms: float | None
    pack_ms: float
    """Packing of its sparse operand: of G per micro-batch, of the weight per update."""
    reason: str | None
    """Why it stays dense; None if it runs sparse."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its products, and what they take in all."""

    out_features: int
    in_features: int
    products: dict[str, ProductTime]
    dense_ms: float
    planned_ms: float


@dataclass(frozen=True)
class Plan:
    """What to run sparse, from measurements. Pass it to ``sparsify_(..., plan=plan)``."""

    recipe: dict[str, Any]
    tokens: int
    micro_batches: int
    hardware: dict[str, Any]
    layers: dict[str, LayerPlan]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def dense_ms(self) -> float:
        """All planned layers, dense, per update."""
        return sum(layer.dense_ms for layer in self.layers.values())

    @property
    def planned_ms(self) -> float:
        """All planned layers as planned, per update."""
        return sum(layer.planned_ms for layer in self.layers.values())

    def speedup(self, step_ms: float | None = None) -> float:
        """Predicted: of the planned layers alone, or of a whole dense training step that takes ``step_ms``."""
        if not self.dense_ms:
            return 1.0
        if step_ms is None:
            return self.dense_ms / self.planned_ms
        return step_ms / (step_ms - self.dense_ms + self.planned_ms)

    def check(self, recipe: Recipe) -> None:
        """Raise where the plan was made for another recipe."""
        if self.recipe != describe(recipe):
            raise ValueError(f"this plan is for {self.recipe}, not for {describe(recipe)}: make one with nmsparse.plan.")

    def unprofitable(self, name: str, product: str, out_features: int, in_features: int) -> str | None:
        """Why a product of a layer stays dense; None if it runs sparse."""
        layer = self.layers.get(name)
        if layer is None:
            return "the plan does not know this layer"
        if (layer.out_features, layer.in_features) != (out_features, in_features):
            return f"the plan knows this layer as {layer.out_features} x {layer.in_features}"
        return layer.products[product].reason if product in layer.products else "the plan does not know this product"

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote."""
        try:
            saved = json.loads(Path(path).read_text())
            if saved.pop("format") != FORMAT:
                raise ValueError("it has another format")
            layers = {name: _layer_plan(layer) for name, layer in saved.pop("layers").items()}
            return cls(layers=layers, **saved)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a plan of this nmsparse ({error}); make one with nmsparse.plan.") from error

    def rows(self) -> list[list[str]]:
        """The table: equal layers in one row."""
        groups: dict[str, list[str]] = {}
        for name, layer in self.layers.items():
            groups.setdefault(json.dumps(asdict(layer)), []).append(name)
        rows = []
        for names in groups.values():
            layer = self.layers[names[0]]
            label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            cells = [_cell(layer.products.get(product)) for product in PRODUCTS]
            ratio = layer.dense_ms / layer.planned_ms if layer.planned_ms else 1.0
            rows.append([label, f"{layer.out_features} x {layer.in_features}", *cells, f"{ratio:.2f}"])
        return rows

    def __str__(self) -> str:
        header = ["layer", "O x I", *PRODUCTS, "speed-up"]
        rows = [header, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        reasons = sorted({t.reason for layer in self.layers.values() for t in layer.products.values() if t.reason})
        total = f"these layers: {self.dense_ms:.3f} ms dense, {self.planned_ms:.3f} ms planned, {self.speedup():.2f}x"
        return "\n".join([*lines, total, *(f"dense: {reason}" for reason in reasons)])


def _layer_plan(saved: dict[str, Any]) -> LayerPlan:
    products = {product: ProductTime(**times) for product, times in saved.pop("products").items()}
    return LayerPlan(products=products, **saved)


def _cell(times: ProductTime | None) -> str:
    if times is None:
        return "-"
    if times.dense_ms is None or times.sparse_ms is None:
        return "dense"
    if times.pack_ms == 0 and times.reason is not None:
        return f"dense  {times.dense_ms:.3f} ms"
    shown = f"{times.dense_ms:.3f} -> {times.sparse_ms:.3f} + {times.pack_ms:.3f} ms"
    return f"sparse {shown}" if times.reason is None else f"dense  {shown}"


def plan(
    model: nn.Module,
    recipe: Recipe,
    tokens: int,
    targets: Targets = "all-linear",
    exclude: Targets | None = None,
    *,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Plan:
    """Time every product of every selected layer on this GPU and decide which run on sparse tensor cores.

    ``tokens`` is the size of a micro-batch (batch times length), ``micro_batches`` their number per update, ``dtype`` the
    type of the products (that of autocast), ``device`` where training will run if that is not where the weights are (they
    may be on the meta device). The model is not changed. On a machine without support the plan says so.

    The packing of a weight counts once per update; under FSDP2 it happens in every micro-batch, so give those as updates of one.
    To spare memory, some layers (about two in nine; of ``fst``, all) pack their copy for `grad_input` in every backward pass
    instead, which is not counted: about 0.1 ms for a 14336 x 4096 weight on an H200.
    """
    if tokens < 1 or micro_batches < 1:
        raise ValueError(f"tokens and micro_batches count from 1, got {tokens} and {micro_batches}.")
    if not isinstance(recipe, Recipe):
        raise TypeError(f'recipe must be a recipe such as nmsparse.SSTE("2:4"), got {recipe!r}.')
    selection = select_layers(model, targets, exclude)
    planner = _Planner(recipe, tokens, micro_batches, dtype)
    layers: dict[str, LayerPlan] = {}
    skipped = dict(selection.skipped)
    known: dict[tuple[Any, ...], LayerPlan] = {}
    sizes = {name: _moved(layer_sizes(module), device) for name, module in selection.layers.items()}
    planner.search([size for size in sizes.values() if size is not None])
    for name, size in sizes.items():
        if size is None:
            skipped[name] = "it is no matrix product of its own"
            continue
        if size not in known:
            known[size] = planner.layer(*size)
        layers[name] = known[size]
    device = next((size[3] for size in sizes.values() if size is not None), torch.device("cpu"))
    return Plan(describe(recipe), tokens, micro_batches, hardware(device), layers, skipped)


LayerSize = tuple[int, int, bool, torch.device, torch.dtype]


def _moved(size: LayerSize | None, device: torch.device | str | None) -> LayerSize | None:
    return size if size is None or device is None else (*size[:3], torch.device(device), size[4])


def products_of(
    recipe: Recipe, out_features: int, in_features: int, is_transposed: bool, tokens: int, dtype: torch.dtype
) -> dict[str, Product]:
    """The three products of a layer as the engine knows them."""
    found = {
        OUTPUT: Product(out_features, padded(tokens, 8), in_features, is_transposed, True, True, dtype),
        GRAD_INPUT: Product(in_features, padded(tokens, 8), out_features, not is_transposed, True, True, dtype),
        GRAD_WEIGHT: Product(out_features, in_features, padded(tokens), True, False, is_transposed, dtype),
    }
    if recipe.prunes_channels:
        found[GRAD_INPUT] = Product(padded(tokens), in_features, out_features, False, is_transposed, False, dtype)
    return found


def _timeable(products: dict[str, Product]) -> dict[str, Product]:
    """Those whose sizes the hardware takes; the time of another dense product is not counted."""
    return {name: p for name, p in products.items() if misfit(p.m, p.k) is None and p.n % 8 == 0}


class _Planner:
    """Measures layers of a recipe."""

    def __init__(self, recipe: Recipe, tokens: int, micro_batches: int, dtype: torch.dtype) -> None:
        self.recipe, self.tokens, self.micro_batches, self.dtype = recipe, tokens, micro_batches, dtype

    def _obstacles(self, out_features: int, in_features: int, device: torch.device) -> dict[str, str | None]:
        """For all three products, why they cannot be sparse; None if they can."""
        fit = self.recipe.fit(out_features, in_features)
        if fit.refused is not None:
            return dict.fromkeys(PRODUCTS, fit.refused)
        found = obstacles(self.recipe, out_features, in_features, device, self.dtype, fit.dense)
        return {product: found.get(product, f"{self.recipe.name} keeps it dense") for product in PRODUCTS}

    def search(self, sizes: list[LayerSize]) -> None:
        """Time all products in one go: starting the process that does it takes longer than most products."""
        wanted: dict[torch.device, list[Product]] = {}
        for out_features, in_features, is_transposed, device, _ in dict.fromkeys(sizes):
            possible = self._obstacles(out_features, in_features, device)
            found = products_of(self.recipe, out_features, in_features, is_transposed, self.tokens, self.dtype)
            if None in possible.values():  # then the dense products count as well
                wanted.setdefault(device, []).extend(_timeable(found).values())
        for device, products in wanted.items():
            if products:
                time_products(products, device)

    def layer(
        self, out_features: int, in_features: int, is_transposed: bool, device: torch.device, master: torch.dtype
    ) -> LayerPlan:
        reasons = self._obstacles(out_features, in_features, device)
        open_ = [product for product, reason in reasons.items() if reason is None]
        if not open_:
            times = {product: ProductTime(None, None, 0.0, reason) for product, reason in reasons.items()}
            return LayerPlan(out_features, in_features, times, 0.0, 0.0)
        found = products_of(self.recipe, out_features, in_features, is_transposed, self.tokens, self.dtype)
        chosen = time_products(_timeable(found).values(), device)
        measured = {p: (choice.dense_ms, choice.sparse_ms) for p in PRODUCTS if (choice := chosen.get(found[p])) is not None}
        open_ = [product for product in open_ if product in measured]
        shape = (in_features, out_features) if is_transposed else (out_features, in_features)
        weight = torch.randn(shape, device=device).to(master)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # graphs are captured on the current one
            packs = self._pack_times(weight, is_transposed, open_)
            cast = device_milliseconds(lambda: weight.to(self.dtype), 2) if master != self.dtype else 0.0
        best = self._choose(open_, measured, packs, cast)
        times = {}
        for product, reason in reasons.items():
            if reason is None and product not in measured:
                reason = "no algorithm of the library computes it"
            dense_ms, sparse_ms = measured.get(product, (None, None))
            why = reason if reason is not None else None if product in best else NOT_FASTER
            times[product] = ProductTime(dense_ms, sparse_ms, round(packs.get(product, 0.0), 5), why)
        dense = self.micro_batches * (sum(dense_ms for dense_ms, _ in measured.values()) + cast)
        return LayerPlan(out_features, in_features, times, round(dense, 5), round(self._cost(best, measured, packs, cast), 5))

    def _pack_times(self, weight: Tensor, is_transposed: bool, products: list[str]) -> dict[str, float]:
        """Milliseconds of packing each product's operand; the second copy of a weight adds less than the first."""
        device, recipe = weight.device, self.recipe
        out_features = weight.shape[1] if is_transposed else weight.shape[0]
        packs: dict[str, float] = {}
        copies = [torch.empty(packed_size(*weight.shape), dtype=self.dtype, device=device) for _ in range(2)]
        scale = torch.ones((), device=device) if recipe.packing is not None and recipe.packing.scale is not None else None

        def pack(forward: Tensor | None, backward: Tensor | None) -> float:
            along = (backward, forward) if is_transposed else (forward, backward)
            return device_milliseconds(lambda: pack_weight_(weight, *along, columns_first=not is_transposed, scale=scale), 2)

        if OUTPUT in products:
            packs[OUTPUT] = pack(copies[0], None)
        if GRAD_INPUT in products and not recipe.prunes_channels:
            packs[GRAD_INPUT] = pack(copies[0], copies[1]) - packs[OUTPUT] if OUTPUT in products else pack(None, copies[1])
        word = torch.zeros((), dtype=torch.int32, device=device)
        grad = torch.randn(self.tokens, out_features, device=device).to(self.dtype)
        if GRAD_INPUT in products and recipe.prunes_channels:
            packs[GRAD_INPUT] = device_milliseconds(lambda: pack_gradient(grad, word, word, False, True), 2)
        if GRAD_WEIGHT in products:
            packs[GRAD_WEIGHT] = device_milliseconds(lambda: pack_gradient(grad, word, word, True, False), 2)
        return packs

    def _cost(
        self, chosen: tuple[str, ...], measured: dict[str, tuple[float, float]], packs: dict[str, float], cast: float
    ) -> float:
        """Milliseconds per update with these products sparse."""
        weight_products = {OUTPUT} if self.recipe.prunes_channels else {OUTPUT, GRAD_INPUT}
        per_batch = sum(sparse_ms if product in chosen else dense_ms for product, (dense_ms, sparse_ms) in measured.items())
        per_batch += sum(packs[product] for product in chosen if product not in weight_products)
        # a dense product with the weight projects and casts it anew in every micro-batch
        per_batch += PROJECTION * cast * len(weight_products - set(chosen))
        return self.micro_batches * per_batch + sum(packs[product] for product in chosen if product in weight_products)

    def _choose(
        self, open_: list[str], measured: dict[str, tuple[float, float]], packs: dict[str, float], cast: float
    ) -> tuple[str, ...]:
        """The cheapest set of sparse products; of sets within the margin the smallest."""
        sets = [chosen for count in range(len(open_) + 1) for chosen in combinations(open_, count)]
        best = sets[0]
        for chosen in sets[1:]:
            if self._cost(chosen, measured, packs, cast) < (1 - MARGIN) * self._cost(best, measured, packs, cast):
                best = chosen
        return best
