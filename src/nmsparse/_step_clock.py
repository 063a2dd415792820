"""The step clock of a run: what happens around every update of one attached optimizer.

    forward, backward ...  (any number of micro-batches)      the model's hook moves the random counters
    unscale, clip                                             the user's, or the trainer's
    optimizer.step()
        pre-hook    gradients are final: decay terms, gradient masks, statistics
        update      the optimizer's own
        post-hook   the clock ticks: schedules, mask refreshes, telemetry, packing

Layers hold no counters: the clock writes into their state what the coming update needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nmsparse._micro_batches import BeforeForward, first_counter
from nmsparse._saved import copied
from nmsparse._tensor_cores import TensorCores
from nmsparse._update import FiniteCheck, LayerHandle, OptimizerUpdate, fill, is_rehearsal
from nmsparse._wrappers import check_left_out, check_moments, check_not_captured, check_shapes, check_updated, warn_of_bypass
from nmsparse.recipes import Clock, Recipe


@dataclass(eq=False)
class Shared:
    """What the clocks of a run have in common."""

    recipe: Recipe
    seed: int
    layers: dict[str, LayerHandle]
    before_forward: BeforeForward
    tensor_cores: TensorCores
    clocks: list[StepClock] = field(default_factory=list)
    flips: dict[str, Tensor] = field(default_factory=dict)
    """Flip rates by layer, of the last measured update."""
    has_started: bool = False
    """An update was made, or a state loaded."""

    @property
    def live_layers(self) -> list[LayerHandle]:
        return [layer for layer in self.layers.values() if layer.is_live]

    def begin(self) -> None:
        """From here on weights go on with the run, and do not start it."""
        self.has_started = True
        for layer in self.layers.values():
            layer.layer.has_started = True

    def go_on(self) -> None:
        """With a saved state, which has what was taken from the weights."""
        self.begin()
        for layer in self.layers.values():
            layer.layer.was_loaded = False


class StepClock:
    """Follows one optimizer and the layers that it updates."""

    def __init__(
        self,
        shared: Shared,
        optimizer: torch.optim.Optimizer,
        layers: list[LayerHandle],
        total_steps: int | None,
        stats_every: int,
        check_finite: bool | None,
    ) -> None:
        self.optimizer = optimizer
        self.layers = layers
        self.total_steps = total_steps
        self.stats_every = stats_every
        self.check_finite = check_finite
        self.step = 0
        self.memory: dict[str, Any] = {}
        """What the recipe remembers from update to update."""
        self._shared = shared
        self._recipe = shared.recipe
        self._scheduled: dict[str, float] = {}
        """Scalars as last set; only changes are written."""
        self._is_running = False
        """Between a pre-hook that let the update through and its post-hook."""
        self._masks: dict[str, Tensor] = {}
        """Masks before an update whose flips are measured."""
        self._finite = FiniteCheck()
        self._hooks: list[Any] = []
        """Handles of the optimizer's hooks."""
        self._may_be_stale = not shared.has_started
        """The optimizer may hold moments from before the conversion."""
        self._is_checked = False
        """At its first update the optimizer was seen to update these layers."""

    @property
    def live_layers(self) -> list[LayerHandle]:
        return [layer for layer in self.layers if layer.is_live]

    def start(self) -> None:
        """Prepare the first update, and follow the optimizer from here on."""
        self._recipe.on_attach(self._update())
        self._set_time()
        try:
            self.pack()
        except BaseException:
            for layer in self.layers:
                layer.layer.sparse = None
            raise
        self._shared.clocks.append(self)
        for layer in self.layers:
            layer.layer.awaits_optimizer, layer.layer.has_clock, layer.layer.was_loaded = False, True, False
        self._hooks = [
            self.optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(args, kwargs)),
            self.optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def follow_loaded(self) -> None:
        """Start anew where other weights were loaded before the first update."""
        if any(layer.layer.was_loaded for layer in self.layers):
            self.memory.clear()
            self._scheduled.clear()
            self._recipe.on_attach(self._update())
            self._set_time()
            self.pack()
            for layer in self.layers:
                layer.layer.was_loaded = False

    def stop(self) -> None:
        """Let the optimizer go."""
        self._shared.clocks.remove(self)
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer.layer.awaits_optimizer, layer.layer.has_clock = self._recipe.needs_clock, False
            layer.layer.sparse = None  # nobody would pack its weight after an update

    @property
    def layer_names(self) -> list[str]:
        """What tells the clocks of a run apart: no layer follows two."""
        return sorted(layer.name for layer in self.layers)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        memory = {key: copied(value) for key, value in self.memory.items()}
        return {"layers": self.layer_names, "step": self.step, "total_steps": self.total_steps, "memory": memory}

    def set_to(self, step: int, memory: dict[str, Any]) -> None:
        """Continue from a saved update; the layers' own state is loaded beside it."""
        self.step = step
        self._finite = FiniteCheck()  # what it holds is of an update that is taken back, as are these masks
        self._masks.clear()
        self._may_be_stale = False
        self.memory.clear()
        device = self.layers[0].parameter.device
        self.memory.update({key: copied(value, device) for key, value in memory.items()})
        self._scheduled.clear()

    def pack(self) -> None:
        """Pack the weights for the tensor cores, where a product uses them now."""
        self._shared.tensor_cores.engage(self.live_layers, self._time, self.memory)

    @property
    def _time(self) -> Clock:
        return Clock(self.step, self.total_steps)

    def _update(self) -> OptimizerUpdate:
        layers = self.live_layers
        grad_scale = getattr(self.optimizer, "grad_scale", None)
        for layer in layers:
            layer.grad_scale = grad_scale
        is_only_one = len(layers) == len(self._shared.live_layers)
        return OptimizerUpdate(self._time, layers, is_only_one, self.optimizer, self.memory, not self._shared.has_started)

    def _set_time(self) -> None:
        """Write the scheduled scalars and the random counters of the coming update."""
        layers = self.live_layers
        for name, value in self._recipe.schedule(self._time).items():
            if self._scheduled.get(name) != value:
                fill([layer.state[name] for layer in layers], value)
                self._scheduled[name] = value
        if self._recipe.is_random:
            fill([layer.state["counter"] for layer in layers], first_counter(self._shared.seed, self.step))

    # ---- before the update ----

    def _before_step(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Make the gradients ready, or see to it that a closure which computes them inside ``step()`` does."""
        self._is_running = False
        check_not_captured(self.layers)
        if not (any(callable(arg) for arg in args[1:]) or kwargs.get("closure") is not None):
            self._prepare_update()
            return None
        if isinstance(self.optimizer, torch.optim.LBFGS) and self._recipe.needs_clock:
            raise ValueError(self._closure_called_again())
        swap = self._after_closure
        given = tuple(swap(arg) if callable(arg) and i else arg for i, arg in enumerate(args))
        return given, {key: swap(value) if key == "closure" and value is not None else value for key, value in kwargs.items()}

    def _after_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Lightning runs forward, backward and clipping in a closure: the gradients are final when it returns."""

        def compute() -> Any:
            if self._is_running and self._recipe.needs_clock:
                raise ValueError(self._closure_called_again())
            loss = closure()
            self._prepare_update()
            return loss

        return compute

    def _closure_called_again(self) -> str:
        return (
            f"{type(self.optimizer).__name__} calls its closure more than once per update, and {self._recipe.name} changes "
            "gradients once per update: use an optimizer that calls it once, such as AdamW or SGD."
        )

    @torch.no_grad()
    def _prepare_update(self) -> None:
        layers = self.live_layers
        # a fused optimizer under GradScaler is stepped on overflow too, and then changes nothing
        found_inf = getattr(self.optimizer, "found_inf", None)
        self._is_running = bool(layers) and not (found_inf is not None and float(found_inf) > 0)
        if not self._is_running:
            return
        if is_rehearsal(self.optimizer, layers):
            self._is_running = False
            return
        if not self._is_checked:
            self._check_first_update()
        update = self._update()
        self._shared.tensor_cores.check_fresh(layers)
        self._check_gradients()
        self._recipe.before_update(update)
        if self._is_measured:
            self._masks = update.masks()

    def _check_first_update(self) -> None:
        """By now every wrapper is there: what they made of the layers that were attached, and of those that were not."""
        layers, shared = self.live_layers, self._shared
        check_shapes(layers)
        check_updated(self.optimizer, layers, self._recipe)
        attached = {layer.name for clock in shared.clocks for layer in clock.layers}
        check_left_out(self.optimizer, [layer for layer in shared.live_layers if layer.name not in attached])
        late = next((layer.name for layer in layers if layer.layer.was_loaded), None)
        if late is not None:
            raise RuntimeError(
                f"{late}: weights were loaded after run.attach, and a model that is compiled, or called by its parts, has used "
                f"what {self._recipe.name} took from those before them: load weights first, or call run.follow_loaded() after it."
            )
        if self._may_be_stale:  # a run that goes on has loaded moments in the new order
            check_moments(self.optimizer, shared.before_forward.permuted)
        if shared.before_forward.was_called:
            warn_of_bypass(layers)
        self._is_checked = True

    def _check_gradients(self) -> None:
        if self.check_finite is False:
            return
        late = self._finite.finish()
        bad = late or self._finite.start(self.live_layers, wait=self.check_finite is True)
        if bad is not None:
            self._is_running = False
            step = self.step - (late is not None)
            state = "and was applied: go back to a checkpoint" if late is not None else "and nothing was changed"
            raise FloatingPointError(
                f"{bad}: its gradient holds NaN or Inf at update {step}, {state}. "
                "Lower the learning rate, clip, or use a GradScaler."
            )

    @property
    def _is_measured(self) -> bool:
        if not self.stats_every:
            return False
        changes = self._recipe.mask_changes_at(self.step + 1)
        return self.step % self.stats_every == 0 if changes is None else changes

    # ---- after it ----

    @torch.no_grad()
    def _after_step(self) -> None:
        if not self._is_running:
            return
        self._is_running = False
        if not self._shared.has_started:
            self._shared.begin()
        self.step += 1
        update = self._update()
        self._recipe.after_update(update)
        self._set_time()
        if self._masks:
            self._shared.flips.update(update.flip_rates(self._masks))
            self._masks = {}
        self.pack()
