"""What a recipe is: answers to four questions about the three products of a layer.

Legend: T tokens, O out_features, I in_features, M group size. Weights arrive as (O, ..., I) views, with the taps of a
convolution between O and I; output gradients as (T, O), or (samples, height, width, O) from a convolution.

    output       Y  = X Wf^T     what does it see of the weight?        output_weight
    grad_input   dX = Gd Wb      what of the weight, what of G?         grad_input_weight, grad_input_grad
    grad_weight  dW = Gw^T X     what of G?                             grad_weight_grad
    update       W <- ...        how do weights move, and when?         weight_grad, schedule, before_update, after_update

A recipe is a frozen dataclass without memory. Whatever it must remember lives in the ``state`` of a layer (tensors) or in
the ``memory`` of the run (plain values); both are saved with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, overload

import torch
from torch import Tensor

from nmsparse.pattern import Pattern

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = "output", "grad_input", "grad_weight"
PRODUCTS = (OUTPUT, GRAD_INPUT, GRAD_WEIGHT)

State = dict[str, Tensor]
ROUNDING = 1e-9


class PatternField:
    """A dataclass field that takes ``"2:4"`` and holds ``Pattern("2:4")``."""

    @overload
    def __get__(self, owner: None, kind: type) -> Pattern: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Pattern: ...
    def __get__(self, owner: object | None, kind: type) -> Pattern:
        if owner is None:
            return Pattern("2:4")
        value: Pattern = owner._pattern  # pyrefly: ignore
        return value

    def __set__(self, owner: object, value: str | Pattern) -> None:
        # another name than the field's: torch 2.11's compiler would look the field up again and never end
        object.__setattr__(owner, "_pattern", Pattern(value))


@dataclass(frozen=True)
class Fit:
    """How a recipe fits a layer: refused altogether, or with some products left dense, each with its reason."""

    refused: str | None = None
    dense: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Clock:
    """Time as a recipe sees it: updates done so far, and how many are planned."""

    step: int
    total_steps: int | None

    @property
    def total(self) -> int:
        if self.total_steps is None:
            raise ValueError(
                "this recipe plans over the whole run, whose number of updates is not known: pass total_steps, to "
                "run.attach(optimizer, total_steps=...) or to the integration that calls it."
            )
        return self.total_steps


class LayerUpdate(Protocol):
    """One layer during an optimizer step. Weight and gradient are (O, ..., I) views.

    Parameters may be sharded over ranks, each of which makes these calls. Masks are always whole.
    """

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def stream(self) -> int:
        """Key of this layer's random numbers."""

    @property
    def weight(self) -> Tensor:
        """All of the weight, to read. A copy where the parameter is sharded, gathered at every use."""

    @property
    def parameter(self) -> Tensor: ...
    def gradient(self) -> Tensor | None:
        """The gradient of this update in fp32, with any loss scale divided out; None where there is none. Sharded as the
        parameter is."""

    def mask_gradient(self, mask: Tensor) -> None:
        """Set the gradient to zero where ``mask`` is false."""

    def mask_weight(self, mask: Tensor) -> None:
        """Set the weight to zero where ``mask`` is false."""

    def shrink_pruned(self, factor: float) -> None:
        """Multiply the weights that the recipe's mask prunes."""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape (an optimizer's moment) as an (O, ..., I) view."""


class Update(Protocol):
    """One optimizer step as a recipe sees it."""

    @property
    def clock(self) -> Clock: ...
    @property
    def layers(self) -> Sequence[LayerUpdate]:
        """The sparse layers that this optimizer updates."""

    @property
    def covers_all_layers(self) -> bool:
        """No other optimizer updates a layer of this run."""

    @property
    def starts_run(self) -> bool:
        """Nothing was trained or loaded yet: what a recipe took from the weights at conversion, it may take anew from what they
        are now. Wrappers such as DDP replace the weights of all ranks by those of one."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def memory(self) -> dict[str, Any]:
        """What the recipe remembers of this optimizer: numbers and tensors, saved with the run."""

    def decay_pruned(self, decay: float) -> None:
        """Add ``decay * W`` to the gradients where the recipe's mask prunes: in fp32 (fp64 for fp64 weights), and times
        the loss scale if the optimizer has yet to divide it out."""

    def transposable_mask(self, weight: Tensor, pattern: Pattern) -> Tensor:
        """functional.transposable_mask, by a kernel where there is one."""

    def set_scalar(self, name: str, value: float) -> None:
        """Set a scheduled 0-d state tensor in each of these layers."""


@dataclass(frozen=True)
class Packing:
    """How one pass over a weight yields what `output` sees: its mask, then the N largest of M, hard or soft.

    `grad_input` then sees the N largest of M along O of that, if the recipe makes it sparse.
    """

    mask: str | None = None
    """State tensor that zeroes weights first."""
    scale: str | None = None
    """State tensor that multiplies the soft threshold; None selects hard."""


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes; by itself it trains densely."""

    pattern: PatternField = PatternField()
    """Keep N of every M entries along the reduction axis."""

    name: ClassVar[str] = ""
    """Registry name, set by ``register_recipe``."""
    host_state: ClassVar[tuple[str, ...]] = ()
    """Names of state tensors that stay on the CPU, because Python reads them in the forward pass."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError for values that make no sense together."""

    @property
    def sparse_products(self) -> tuple[str, ...]:
        """The products that have an N:M operand once the recipe is in full effect."""
        return ()

    def active_products(self, clock: Clock, memory: dict[str, Any]) -> tuple[str, ...]:
        """The sparse products whose operand is N:M at this time; the others are dense for now."""
        return self.sparse_products

    @property
    def packing(self) -> Packing | None:
        """How a kernel can project and pack the weight in one pass; None where plain torch must project it first."""
        return None

    @property
    def samples_tokens(self) -> bool:
        """`grad_weight` sees functional.mvue of G along tokens, drawn by counter_uniform_grid: a kernel can do the same."""
        return False

    @property
    def prunes_channels(self) -> bool:
        """`grad_input` is sparse in G, not in the weight."""
        return False

    @property
    def prunes_channels_by_magnitude(self) -> bool:
        """That pruning keeps the N largest of M channels: a kernel can do the same."""
        return False

    @property
    def rescales_channels(self) -> bool:
        """... and restores each token's sum of magnitudes."""
        return False

    def row_order(self, state: State) -> Tensor | None:
        """The order of output channels in which `grad_input` groups them, if it is not the natural one."""
        return None

    @property
    def runs_in_fp8(self) -> bool:
        """Run the three products in FP8: e4m3 in `output`, e5m2 in the gradients."""
        return False

    @property
    def is_random(self) -> bool:
        """Draws random numbers: its layers carry the state ``stream`` and ``counter``."""
        return False

    @property
    def masks_rows(self) -> bool:
        """``mask`` and ``output_weight`` of some rows of the weight follow from these rows, and theirs of the state. A rank that
        holds a part of a sharded weight then needs nothing of the others; else it gathers the weight at every update."""
        return False

    @property
    def starts_from_weights(self) -> bool:
        """Takes masks, scales or orders from the weights that a run starts with."""
        return False

    @property
    def permutes_channels(self) -> bool:
        """Reorder channels at conversion so that the pattern keeps more weight."""
        return False

    @property
    def needs_clock(self) -> bool:
        """Training without ``run.attach`` would silently leave something out."""
        return any(
            getattr(type(self), step) is not getattr(Recipe, step) for step in ("schedule", "before_update", "after_update")
        )

    @property
    def needs_total_steps(self) -> bool:
        """The schedule runs over the whole training, so its length must be known."""
        return False

    def fit(self, out_features: int, in_features: int) -> Fit:
        """Decide from the sizes that groups run along (of one group, for a grouped convolution)."""
        return fit_sizes(self, out_features, in_features)

    def init_state(self, weight: Tensor, groups: int = 1) -> State:
        """What this layer must remember, from its weight at conversion; ``groups`` is that of a convolution."""
        return {}

    # ---- what the products see; traced by torch.compile, so no Python value may change over time here ----

    def output_weight(self, weight: Tensor, state: State) -> Tensor:
        return weight

    def grad_input_weight(self, weight: Tensor, state: State) -> Tensor:
        return self.output_weight(weight, state)

    def grad_input_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        return grad

    def grad_weight_grad(self, grad: Tensor, state: State, counter: Tensor | None) -> Tensor:
        return grad

    def weight_grad(self, grad_weight: Tensor, weight: Tensor, state: State) -> Tensor:
        """The gradient given to the weight: straight through unless the recipe says otherwise."""
        return grad_weight

    def final_weight(self, weight: Tensor, state: State) -> Tensor:
        """What evaluation and export use: the weight under the final, hard pattern."""
        return self.output_weight(weight, state)

    def mask(self, weight: Tensor, state: State) -> Tensor | None:
        """The weights that `output` keeps now, for telemetry; None where it keeps all of them."""
        return None

    def mask_changes_at(self, step: int) -> bool | None:
        """Whether update ``step`` may change the mask; None means that every update may."""
        return None

    # ---- how weights move, and when; called by the run, once per optimizer step ----

    def schedule(self, clock: Clock) -> dict[str, float]:
        """Values of the scheduled scalars during update ``clock.step`` (0 is the first): a pure function of time."""
        return {}

    def on_attach(self, update: Update) -> None:
        """Before the first step; raise here what would otherwise fail in the middle of training."""

    def before_update(self, update: Update) -> None:
        """Gradients are final (accumulated, unscaled, clipped) and the weights have not moved."""

    def after_update(self, update: Update) -> None:
        """The weights have moved; ``update.clock.step`` counts the update just done."""

    def summarize(self, memory: dict[str, Any]) -> dict[str, float]:
        """Values of the whole run, from what it remembers of its optimizer, for ``run.stats()``."""
        return {}

    def describe(self, state: State) -> dict[str, Tensor | float]:
        """Scheduled values worth a line in ``run.stats()``; 0-d tensors are read all at once."""
        return {}


def fit_sizes(recipe: Recipe, out_features: int, in_features: int) -> Fit:
    """Weight groups need I, and whatever is grouped along O leaves `grad_input` dense where O does not fit."""
    products, pattern = recipe.sparse_products, recipe.pattern
    if OUTPUT in products and in_features % pattern.m:
        return Fit(refused=not_a_multiple("in_features", in_features, pattern))
    if GRAD_INPUT in products and out_features % pattern.m:
        reason = not_a_multiple("out_features", out_features, pattern)
        return Fit(dense={GRAD_INPUT: reason}) if len(products) > 1 else Fit(refused=reason)
    return Fit()


def not_a_multiple(name: str, size: int, pattern: Pattern) -> str:
    return f'{name} = {size} is not a multiple of {pattern.m}, so pattern "{pattern}" does not fit along it'


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight with zeros where ``mask`` is false (a product would turn an infinity into NaN and keep -0.0)."""
    return torch.where(mask, weight, 0)


def check_decay(decay: float) -> None:
    if not 0 <= decay < float("inf"):
        raise ValueError(f"decay on pruned weights must be a finite number of at least 0, got {decay!r}.")


def fill_states_anew(recipe: Recipe, update: Update) -> None:
    """The states once more, from the weights that the run starts with."""
    if update.starts_run:
        for layer in update.layers:
            weight = layer.weight  # gathered here, where it is sharded
            weight = weight if weight.dtype == torch.float64 else weight.float()
            for name, value in recipe.init_state(weight).items():
                layer.state[name].copy_(value)


def fraction_or_step(value: float, clock: Clock) -> float:
    """A float up to 1 is a fraction of the run, an integer is a step."""
    return share_of(value, clock) if isinstance(value, float) and value <= 1 else float(value)


def share_of(share: float, clock: Clock) -> float:
    """So many updates; a little less, because 0.55 * 100 is above 55 in floating point and update 55 would be missed."""
    return (share - ROUNDING) * clock.total


def is_past(share: float, clock: Clock) -> bool:
    """More than so many updates; 0.29 * 100 is below 29 in floating point, and update 29 would be past it."""
    return clock.step > (share + ROUNDING) * clock.total


def scalar(value: float, device: torch.device) -> Tensor:
    """A 0-d fp32 tensor: scheduled values live in tensors so that a compiled graph need not change with them."""
    return torch.tensor(value, dtype=torch.float32, device=device)
