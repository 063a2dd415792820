"""The run: a handle on a sparse model, and the step clock that an optimizer drives.

    forward, backward ...  (any number of micro-batches)      the model's hook moves the random counters
    unscale, clip                                             the user's, or the trainer's
    optimizer.step()
        pre-hook    gradients are final: decay terms, gradient masks, statistics
        update      the optimizer's own
        post-hook   the clock ticks: schedules, mask refreshes, telemetry

Modules hold no counters, and everything is keyed by module name: wrappers may replace parameters behind our back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmsparse._micro_batches import BeforeForward, first_counter
from nmsparse._saved import VERSION, check_same_model, copied, describe, from_saved, to_saved
from nmsparse._stats import numbers, totals
from nmsparse._tensor_cores import Rule, TensorCores, Verdict
from nmsparse._update import FiniteCheck, LayerHandle, OptimizerUpdate, fill, is_rehearsal
from nmsparse._wrappers import (
    check_left_out,
    check_moments,
    check_not_captured,
    check_shapes,
    check_untied,
    check_updated,
    parameters_of,
    warn_of_bypass,
)
from nmsparse.nn import Permuted, SparseModule, Targets, convert_, layer_of, ranks, reshard
from nmsparse.recipes import Clock, Recipe, recipe_info


def sparsify_(
    model: nn.Module,
    recipe: Recipe,
    targets: Targets = "all-linear",
    exclude: Targets | None = None,
    *,
    plan: Verdict | None = None,
    emulate: bool = False,
    seed: int = 0,
) -> Run:
    """Convert a model in place and return the handle of the run.

    ``targets`` is "all-linear" (every linear layer but the output head), "all" (convolutions and the head too), a list of
    module names or name suffixes, or a regular expression for whole names; ``exclude`` likewise. Layers that a keyword
    sweeps up but that cannot be sparse stay dense, with the reason in ``run.skipped``; layers named one by one must
    fit. ``seed`` keys every random draw of the recipe. On an error the model is as it was.

    On a Hopper GPU the 2:4 products of a training run go to the sparse tensor cores where that is faster: as ``plan``
    says (see :func:`nmsparse.plan`), or by a rule from our measurements; a backward product that stays dense then sees its
    operand in full, unpruned. ``run.products`` tells what runs how, and why. ``emulate=True`` prunes all that the recipe
    prunes and computes with ordinary products, as on any other device: the same mathematics everywhere.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f'recipe must be a recipe such as nmsparse.SSTE("2:4") or nmsparse.recipe("s-ste", "2:4"), got {recipe!r}.'
        )
    if plan is not None:
        if not hasattr(plan, "unprofitable"):
            raise TypeError(f"plan is what nmsparse.plan(...) returns or nmsparse.Plan.load(...) reads, got {plan!r}.")
        plan.check(recipe)
    modules, skipped, permuted = convert_(model, recipe, targets, exclude, seed)
    return Run(model, recipe, modules, skipped, permuted, seed, None if emulate else plan or Rule(recipe))


def run_of(model: nn.Module) -> Run | None:
    """The run of a model that :func:`sparsify_` converted; None for a plain model, and for a copy of a converted one."""
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, BeforeForward))
    return next((hook.run for hook in hooks if hook.run is not None), None)


@dataclass(eq=False)
class _Attachment:
    """One optimizer, the layers it updates, and their common clock."""

    optimizer: torch.optim.Optimizer
    layers: list[LayerHandle]
    total_steps: int | None
    stats_every: int
    check_finite: bool | None
    step: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    scheduled: dict[str, float] = field(default_factory=dict)
    """Scalars as last set; only changes are written."""
    is_running: bool = False
    """Between a pre-hook that let the update through and its post-hook."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Masks before an update whose flips are measured."""
    finite: FiniteCheck = field(default_factory=FiniteCheck)
    hooks: list[Any] = field(default_factory=list)
    """Handles of the optimizer's hooks."""
    is_checked: bool = False
    """At its first update the optimizer was seen to update these layers."""

    @property
    def clock(self) -> Clock:
        return Clock(self.step, self.total_steps)

    @property
    def live_layers(self) -> list[LayerHandle]:
        return [layer for layer in self.layers if layer.is_live]


class Run:
    """Handle of a sparse model: attach optimizers, read statistics, save and load the run's state."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        modules: dict[str, SparseModule],
        skipped: dict[str, str],
        permuted: Permuted,
        seed: int,
        verdict: Verdict | None = None,
    ) -> None:
        self.recipe = recipe
        self.skipped = skipped
        """Layers (or products of layers) that stayed dense: name to reason."""
        self.seed = seed
        self._layers = {name: LayerHandle(name, module, layer_of(module)) for name, module in modules.items()}
        self._model = model
        self._hook = BeforeForward([handle.layer for handle in self._layers.values()], recipe, permuted)
        self._attachments: list[_Attachment] = []
        self._tensor_cores = TensorCores(recipe, verdict)
        self._flips: dict[str, Tensor] = {}
        self._has_started = False
        self._hook.run = self
        model.register_forward_pre_hook(self._hook)

    @property
    def layers(self) -> list[str]:
        """Names of the sparse layers."""
        return list(self._layers)

    def parameters(self) -> list[Tensor]:
        """The weights of the sparse layers, as they are now: wrappers may replace them."""
        return [handle.parameter for handle in self._layers.values() if handle.is_live]

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """How each layer computes the recipe's sparse products: "sparse" on sparse tensor cores, else why not."""
        return {name: self._tensor_cores.describe(handle) for name, handle in self._layers.items() if handle.is_live}

    def refresh(self) -> None:
        """Pack all weights again: after changing them other than by an attached optimizer or ``load_state_dict``.

        An eager model notices in-place changes by itself, but neither those through ``.data`` nor those of a fused optimizer
        that is not attached; a compiled model notices nothing, and a warning follows at the next update.
        """
        for handle in self._layers.values():
            if handle.is_live:
                handle.layer.refresh(handle.parameter)

    @property
    def step(self) -> int:
        """Updates done (by the first attached optimizer)."""
        return self._attachments[0].step if self._attachments else 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The attached optimizers."""
        return [attachment.optimizer for attachment in self._attachments]

    def __repr__(self) -> str:
        attached = f"step {self.step}" if self._attachments else "not attached"
        counts = f"{len(self._layers)} sparse layers, {len(self.skipped)} skipped"
        return f"Run({self.recipe.name} {self.recipe.pattern}, {counts}, {attached})"

    def begin_micro_batch(self) -> None:
        """Move the random numbers on, where micro-batches do not pass through the converted model's own forward (Lightning
        calls ``training_step``); once per micro-batch, whether or not they do is no matter."""
        self._hook.move_on()

    # ---- the clock ----

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int | None = None,
        *,
        stats_every: int = 10,
        check_finite: bool | None = None,
    ) -> Run:
        """Put the step clock on an optimizer. Call once per optimizer that updates sparse layers, before training.

        ``total_steps`` is the planned number of updates; recipes with a schedule need it. Flip rates are measured at
        every ``stats_every``-th update (0: never).

        ``check_finite`` stops training when a gradient holds NaN or Inf. By default (None) that is before the update on a
        CPU, and one update later on a GPU, where looking at once would leave it idle; True always looks before the
        update, False never looks.
        """
        optimizer = _unwrap(optimizer)
        self._check_attachable(optimizer, total_steps, stats_every)
        reshard(self._model)  # after a forward pass FSDP2 leaves whole weights in some modules, which no optimizer knows
        live = [handle for handle in self._layers.values() if handle.is_live]
        check_shapes(live)
        owned = parameters_of(optimizer)
        layers = [handle for handle in live if id(handle.parameter) in owned]
        if not layers:
            raise ValueError(
                f"this {type(optimizer).__name__} updates none of the run's {len(self._layers)} sparse layers: build it "
                "from model.parameters() after sparsify_, and after any wrapper that replaces parameters (fully_shard does). "
                "DeepSpeed's ZeRO optimizers update flat copies: use fully_shard (FSDP2) or DDP instead."
            )
        check_untied(layers)
        for other in self._attachments:
            shared = next((layer.name for layer in layers if layer in other.layers), None)
            if shared is not None:
                raise ValueError(
                    f"{shared} is updated by two attached optimizers; a layer follows one clock: run.detach(...) the old "
                    "one first."
                )
        attachment = _Attachment(optimizer, layers, total_steps, stats_every, check_finite)
        self.recipe.on_attach(self._update(attachment))
        self._set_time(attachment)
        self._attachments.append(attachment)
        for layer in layers:
            layer.layer.awaits_optimizer = False
        self._tensor_cores.engage(layers, attachment.clock, attachment.memory)
        attachment.hooks = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(attachment, args, kwargs)),
            optimizer.register_step_post_hook(lambda *_: self._after_step(attachment)),
        ]
        return self

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the clock off an optimizer, to attach another in its place; the new clock starts at 0."""
        optimizer = _unwrap(optimizer)
        attachment = next((a for a in self._attachments if a.optimizer is optimizer), None)
        if attachment is None:
            raise RuntimeError(f"this {type(optimizer).__name__} is not attached, so there is nothing to detach.")
        self._attachments.remove(attachment)
        for hook in attachment.hooks:
            hook.remove()
        for layer in attachment.layers:
            layer.layer.awaits_optimizer = self.recipe.needs_clock
            layer.layer.sparse = None  # nobody would pack its weight after an update

    def _check_attachable(self, optimizer: torch.optim.Optimizer, total_steps: int | None, stats_every: int) -> None:
        if any(attachment.optimizer is optimizer for attachment in self._attachments):
            raise RuntimeError(
                f"this {type(optimizer).__name__} is attached already; attach once, or the clock would tick twice per update."
            )
        needs = recipe_info(self.recipe).needs if self.recipe.name else ()
        for need in needs:
            if not hasattr(optimizer, need):
                raise TypeError(
                    f"{self.recipe.name} needs an optimizer with {need}(), which {type(optimizer).__name__} lacks: use "
                    "nmsparse.StepAdamW in its place."
                )
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"total_steps is the planned number of updates, at least 1, got {total_steps!r}.")
        if total_steps is None and self.recipe.needs_total_steps:
            raise ValueError(
                f"{self.recipe.name} plans over the whole run: pass the number of updates, run.attach(optimizer, "
                "total_steps=...)."
            )
        if stats_every < 0:
            raise ValueError(f"stats_every counts updates, 0 to switch measuring off, got {stats_every!r}.")

    def _update(self, attachment: _Attachment) -> OptimizerUpdate:
        layers = attachment.live_layers
        grad_scale = getattr(attachment.optimizer, "grad_scale", None)
        for layer in layers:
            layer.grad_scale = grad_scale
        is_only_one = len(layers) == sum(handle.is_live for handle in self._layers.values())
        starts = not self._has_started
        return OptimizerUpdate(attachment.clock, layers, is_only_one, attachment.optimizer, attachment.memory, starts)

    def _set_time(self, attachment: _Attachment) -> None:
        """Write the scheduled scalars and the random counters of the coming update."""
        layers = attachment.live_layers
        for name, value in self.recipe.schedule(attachment.clock).items():
            if attachment.scheduled.get(name) != value:
                fill([layer.state[name] for layer in layers], value)
                attachment.scheduled[name] = value
        if self.recipe.is_random:
            fill([layer.state["counter"] for layer in layers], first_counter(self.seed, attachment.step))

    def _before_step(self, attachment: _Attachment, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Make the gradients ready, or see to it that a closure which computes them inside ``step()`` does."""
        attachment.is_running = False
        check_not_captured(attachment.layers)
        if not (any(callable(arg) for arg in args[1:]) or kwargs.get("closure") is not None):
            self._prepare_update(attachment)
            return None
        if isinstance(attachment.optimizer, torch.optim.LBFGS) and self.recipe.needs_clock:
            raise ValueError(self._closure_called_again(attachment))
        swap = partial(self._after_closure, attachment)
        given = tuple(swap(arg) if callable(arg) and i else arg for i, arg in enumerate(args))
        return given, {key: swap(value) if key == "closure" and value is not None else value for key, value in kwargs.items()}

    def _after_closure(self, attachment: _Attachment, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Lightning runs forward, backward and clipping in a closure: the gradients are final when it returns."""

        def compute() -> Any:
            if attachment.is_running and self.recipe.needs_clock:
                raise ValueError(self._closure_called_again(attachment))
            loss = closure()
            self._prepare_update(attachment)
            return loss

        return compute

    def _closure_called_again(self, attachment: _Attachment) -> str:
        return (
            f"{type(attachment.optimizer).__name__} calls its closure more than once per update, and {self.recipe.name} changes "
            "gradients once per update: use an optimizer that calls it once, such as AdamW or SGD."
        )

    @torch.no_grad()
    def _prepare_update(self, attachment: _Attachment) -> None:
        layers = attachment.live_layers
        # a fused optimizer under GradScaler is stepped on overflow too, and then changes nothing
        found_inf = getattr(attachment.optimizer, "found_inf", None)
        attachment.is_running = bool(layers) and not (found_inf is not None and float(found_inf) > 0)
        if not attachment.is_running:
            return
        if is_rehearsal(attachment.optimizer, layers):
            attachment.is_running = False
            return
        if not attachment.is_checked:
            self._check_first_update(attachment)
        update = self._update(attachment)
        self._tensor_cores.check_fresh(layers)
        self._check_gradients(attachment)
        self.recipe.before_update(update)
        if self._is_measured(attachment):
            attachment.masks = update.masks()

    def _check_first_update(self, attachment: _Attachment) -> None:
        """By now every wrapper is there: what they made of the layers that were attached, and of those that were not."""
        layers = attachment.live_layers
        check_shapes(layers)
        check_updated(attachment.optimizer, layers, self.recipe)
        attached = {layer.name for other in self._attachments for layer in other.layers}
        others = [handle for name, handle in self._layers.items() if handle.is_live and name not in attached]
        check_left_out(attachment.optimizer, others)
        if not self._has_started:  # a run that goes on has loaded moments in the new order
            check_moments(attachment.optimizer, self._hook.permuted)
        if self._hook.was_called:
            warn_of_bypass(layers)
        attachment.is_checked = True

    def _check_gradients(self, attachment: _Attachment) -> None:
        if attachment.check_finite is False:
            return
        late = attachment.finite.finish()
        bad = late or attachment.finite.start(attachment.live_layers, wait=attachment.check_finite is True)
        if bad is not None:
            attachment.is_running = False
            step = attachment.step - (late is not None)
            state = "and was applied: go back to a checkpoint" if late is not None else "and nothing was changed"
            raise FloatingPointError(
                f"{bad}: its gradient holds NaN or Inf at update {step}, {state}. "
                "Lower the learning rate, clip, or use a GradScaler."
            )

    @torch.no_grad()
    def _after_step(self, attachment: _Attachment) -> None:
        if not attachment.is_running:
            return
        attachment.is_running = False
        self._has_started = True
        attachment.step += 1
        update = self._update(attachment)
        self.recipe.after_update(update)
        self._set_time(attachment)
        if attachment.masks:
            self._flips.update(update.flip_rates(attachment.masks))
            attachment.masks = {}
        self._tensor_cores.engage(attachment.live_layers, attachment.clock, attachment.memory)

    def _is_measured(self, attachment: _Attachment) -> bool:
        if not attachment.stats_every:
            return False
        changes = self.recipe.mask_changes_at(attachment.step + 1)
        return attachment.step % attachment.stats_every == 0 if changes is None else changes

    # ---- telemetry ----

    @torch.no_grad()
    def stats(self) -> dict[str, Any]:
        """Plain numbers, per layer and in total, as of the last update.

        ``density`` is the share of non-zeros that `output` sees in training; ``flip_rate`` the share of mask bits that
        one update changed, at the last measured update (None before); ``mask_changes`` the same as a count, the papers'
        sparse architecture divergence. ``decay`` is the strength of the pull on pruned weights, where a recipe has one.

        Nothing is sent between ranks, so one of them may call this alone: of a sharded weight, ``density`` is that of the rows
        which this rank holds, and None where rows alone do not tell; flip rates are of the whole.
        """
        live = {name: handle for name, handle in self._layers.items() if handle.is_live}
        measured = {name: self._measured(handle) for name, handle in live.items()}
        layers = {name: self._layer_stats(live[name], values) for name, values in numbers(measured).items()}
        total = totals(layers)
        for attachment in self._attachments:
            total |= self.recipe.summarize(attachment.memory)
        return {
            "step": self.step,
            "recipe": self.recipe.name,
            "pattern": str(self.recipe.pattern),
            "total": total,
            "layers": layers,
        }

    def _measured(self, handle: LayerHandle) -> dict[str, Tensor | float | None]:
        """What must be read from the device."""
        described = self.recipe.describe(handle.state)
        return {"density": handle.density(), "flip_rate": self._flips.get(handle.name), **described}

    def _layer_stats(self, handle: LayerHandle, values: dict[str, float | None]) -> dict[str, Any]:
        entries, rate = handle.parameter.numel(), values["flip_rate"]
        return {
            "entries": entries,
            "density": values["density"],
            "flip_rate": rate,
            "mask_changes": None if rate is None else round(rate * entries),
            **({"decay": self.recipe.decay} if hasattr(self.recipe, "decay") else {}),
            **{name: value for name, value in values.items() if name not in ("density", "flip_rate")},
        }

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Everything that is not a function of the weights and of the optimizer's own state; tensors and plain values."""
        layers = {name: {key: to_saved(value) for key, value in handle.state.items()} for name, handle in self._layers.items()}
        for name, saved in layers.items():
            if "counter" in saved:  # as micro-batches since the last update, which is the same on every rank
                saved["counter"] = (saved["counter"] - self._counter_start(name)) // ranks()
        # a tuple, which torch's distributed checkpoints save as one value: of a dict they restore only the keys that a new run
        # has, and what a recipe remembers grows while it trains
        optimizers = tuple(
            {"step": a.step, "total_steps": a.total_steps, "memory": {key: copied(value) for key, value in a.memory.items()}}
            for a in self._attachments
        )
        return {
            "version": VERSION,
            "recipe": describe(self.recipe),
            "seed": self.seed,
            "optimizers": optimizers,
            "layers": layers,
            "permuted": [(name, dim, copied(order)) for name, dim, order in self._hook.permuted.moves],
            "flips": {name: copied(rate) for name, rate in self._flips.items()},
        }

    def _counter_start(self, name: str) -> int:
        """What the random counter of a layer starts from at the present update."""
        owner = next((a for a in self._attachments if any(layer.name == name for layer in a.layers)), None)
        return 0 if owner is None else first_counter(self.seed, owner.step)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken. Attach the optimizers first; nothing changes if anything differs."""
        self._check_loadable(state)
        self._has_started = True
        for attachment, saved in zip(self._attachments, state["optimizers"], strict=True):
            attachment.step = saved["step"]
            attachment.memory.clear()
            device = attachment.layers[0].parameter.device
            attachment.memory.update({key: copied(value, device) for key, value in saved["memory"].items()})
            attachment.scheduled.clear()
        self._copy_layers(state)
        for attachment in self._attachments:
            self._tensor_cores.engage(attachment.live_layers, attachment.clock, attachment.memory)
        self._hook.permuted.moves[:] = [(name, dim, copied(order)) for name, dim, order in state["permuted"]]
        self._flips = {name: copied(rate) for name, rate in state.get("flips", {}).items()}

    @torch.no_grad()
    def load_layers(self, state: dict[str, Any]) -> None:
        """Of :meth:`state_dict`, what evaluation needs beside the weights: the masks and scales of the layers. The clock stays as
        it is, and no optimizer need be attached; a run that goes on training takes :meth:`load_state_dict`."""
        check_same_model(state, self.recipe, self.seed, {name: handle.state for name, handle in self._layers.items()})
        self._has_started = True  # what was frozen at the start of the saved run stays: a new clock does not make it anew
        self._copy_layers(state)
        self.refresh()

    @torch.no_grad()
    def copy_state_to(self, model: nn.Module) -> None:
        """Give a copy of the model the masks, scales and phases that its original has now. A copy (an average of the weights, for
        instance) keeps those of the moment it was made; before it is evaluated it wants the present ones."""
        for name, handle in self._layers.items():
            target = layer_of(model.get_submodule(name))
            for key, value in handle.state.items():
                target.state[key].copy_(value)

    def _copy_layers(self, state: dict[str, Any]) -> None:
        for name, saved in state["layers"].items():
            own = self._layers[name].state
            for key, value in saved.items():
                own[key].copy_(from_saved(value, own[key]))
            if "counter" in own:
                own["counter"].mul_(ranks()).add_(self._counter_start(name))

    def _check_loadable(self, state: dict[str, Any]) -> None:
        check_same_model(state, self.recipe, self.seed, {name: handle.state for name, handle in self._layers.items()})
        if len(state["optimizers"]) != len(self._attachments):
            raise ValueError(
                f"the saved run had {len(state['optimizers'])} attached optimizers, this one has {len(self._attachments)}: "
                "attach them before load_state_dict."
            )
        for saved, attachment in zip(state["optimizers"], self._attachments, strict=True):
            if self.recipe.needs_total_steps and saved["total_steps"] != attachment.total_steps:
                raise ValueError(
                    f"the saved run planned {saved['total_steps']} updates, this one {attachment.total_steps}, and the schedule "
                    f"of {self.recipe.name} follows that number: attach with the same total_steps."
                )


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", None)  # accelerate's wrapper
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"attach takes a torch optimizer, got {type(optimizer).__name__}.")
    return optimizer
