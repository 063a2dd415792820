"""The run: a handle on a sparse model, whose clocks (_step_clock) follow the optimizers that are attached.

Modules hold no counters, and everything is keyed by module name: wrappers may replace parameters behind our back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nmsparse._micro_batches import BeforeForward, first_counter
from nmsparse._saved import VERSION, check_same_model, copied, describe, from_saved, to_saved
from nmsparse._stats import numbers, totals
from nmsparse._step_clock import Shared, StepClock
from nmsparse._tensor_cores import Rule, TensorCores, Verdict
from nmsparse._update import LayerHandle
from nmsparse._wrappers import check_shapes, check_untied, parameters_of
from nmsparse.nn import Permuted, SparseModule, Targets, convert_, layer_of, ranks, reshard, sparse_modules
from nmsparse.recipes import Recipe, recipe_info


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
        self._tensor_cores = TensorCores(recipe, verdict)
        self._shared = Shared(recipe, seed, self._layers, self._hook, self._tensor_cores)
        self._hook.run = self
        self._hook_handle = model.register_forward_pre_hook(self._hook)

    @property
    def _clocks(self) -> list[StepClock]:
        return self._shared.clocks

    @property
    def layers(self) -> list[str]:
        """Names of the sparse layers."""
        return list(self._layers)

    def parameters(self) -> list[Tensor]:
        """The weights of the sparse layers, as they are now: wrappers may replace them."""
        return [handle.parameter for handle in self._shared.live_layers]

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """How each layer computes the recipe's sparse products: "sparse" on sparse tensor cores, else why not."""
        return {handle.name: self._tensor_cores.describe(handle) for handle in self._shared.live_layers}

    def refresh(self) -> None:
        """Pack all weights again: after changing them other than by an attached optimizer or ``load_state_dict``.

        An eager model notices in-place changes by itself, but neither those through ``.data`` nor those of a fused optimizer
        that is not attached; a compiled model notices nothing, and a warning follows at the next update.
        """
        for handle in self._shared.live_layers:
            handle.layer.refresh(handle.parameter)

    @property
    def step(self) -> int:
        """Updates done (by the first attached optimizer)."""
        return self._clocks[0].step if self._clocks else 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The attached optimizers."""
        return [clock.optimizer for clock in self._clocks]

    def __repr__(self) -> str:
        attached = f"step {self.step}" if self._clocks else "not attached"
        counts = f"{len(self._layers)} sparse layers, {len(self.skipped)} skipped"
        return f"Run({self.recipe.name} {self.recipe.pattern}, {counts}, {attached})"

    def begin_micro_batch(self) -> None:
        """Move the random numbers on, where micro-batches do not pass through the converted model's own forward (Lightning
        calls ``training_step``); once per micro-batch, whether or not they do is no matter."""
        self.follow_loaded()
        self._hook.move_on()

    def follow_loaded(self) -> None:
        """Weights that were loaded after ``attach``, before the first update, are those that the run starts with. The model calls
        this before its forward passes."""
        if not self._shared.has_started:
            for clock in self._clocks:
                clock.follow_loaded()

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
        live = self._shared.live_layers
        check_shapes(live)
        owned = parameters_of(optimizer)
        layers = [handle for handle in live if id(handle.parameter) in owned]
        if not layers:
            raise ValueError(
                f"this {type(optimizer).__name__} updates none of the run's {len(self._layers)} sparse layers: build it "
                "from model.parameters() after sparsify_, and after any wrapper that replaces parameters (fully_shard does). "
                "DeepSpeed's ZeRO optimizers update flat copies: use fully_shard (FSDP2) or DDP instead."
            )
        check_untied(layers, self._model)
        for other in self._clocks:
            twice = next((layer.name for layer in layers if layer in other.layers), None)
            if twice is not None:
                raise ValueError(
                    f"{twice} is updated by two attached optimizers; a layer follows one clock: run.detach(...) the old "
                    "one first."
                )
        self._hook_handle.remove()  # to come before FSDP2's, which gathers weights and casts them
        self._hook_handle = self._model.register_forward_pre_hook(self._hook, prepend=True)
        StepClock(self._shared, optimizer, layers, total_steps, stats_every, check_finite).start()
        return self

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the clock off an optimizer, to attach another in its place; the new clock starts at 0."""
        optimizer = _unwrap(optimizer)
        clock = next((clock for clock in self._clocks if clock.optimizer is optimizer), None)
        if clock is None:
            raise RuntimeError(f"this {type(optimizer).__name__} is not attached, so there is nothing to detach.")
        clock.stop()

    def _check_attachable(self, optimizer: torch.optim.Optimizer, total_steps: int | None, stats_every: int) -> None:
        if any(clock.optimizer is optimizer for clock in self._clocks):
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
        measured = {handle.name: self._measured(handle) for handle in self._shared.live_layers}
        layers = {name: self._layer_stats(self._layers[name], values) for name, values in numbers(measured).items()}
        total = totals(layers)
        for clock in self._clocks:
            total |= self.recipe.summarize(clock.memory)
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
        return {"density": handle.density(), "flip_rate": self._shared.flips.get(handle.name), **described}

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
        optimizers = tuple(clock.state_dict() for clock in self._clocks)
        return {
            "version": VERSION,
            "recipe": describe(self.recipe),
            "seed": self.seed,
            "optimizers": optimizers,
            "layers": layers,
            "permuted": [(name, dim, copied(order)) for name, dim, order in self._hook.permuted.moves],
            "flips": {name: copied(rate) for name, rate in self._shared.flips.items()},
        }

    def _counter_start(self, name: str) -> int:
        """What the random counter of a layer starts from at the present update."""
        owner = next((clock for clock in self._clocks if any(layer.name == name for layer in clock.layers)), None)
        return 0 if owner is None else first_counter(self.seed, owner.step)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken. Attach the optimizers first; nothing changes if anything differs."""
        self._check_loadable(state)
        self._shared.go_on()
        for clock, saved in self._clocks_in(state):
            clock.set_to(saved["step"], saved["memory"])
        self._copy_layers(state)
        for clock in self._clocks:
            clock.pack()
        self._shared.flips = {name: copied(rate) for name, rate in state.get("flips", {}).items()}

    @torch.no_grad()
    def load_layers(self, state: dict[str, Any]) -> None:
        """Of :meth:`state_dict`, what evaluation needs beside the weights: the masks and scales of the layers. The clock stays as
        it is, and no optimizer need be attached; a run that goes on training takes :meth:`load_state_dict`."""
        check_same_model(state, self.recipe, self.seed, {name: handle.state for name, handle in self._layers.items()})
        self._shared.go_on()  # what was frozen at the start of the saved run stays: a new clock does not make it anew
        self._copy_layers(state)
        self.refresh()

    @torch.no_grad()
    def copy_state_to(self, model: nn.Module) -> None:
        """Give a copy of the model the masks, scales and phases that its original has now. A copy (an average of the weights, for
        instance) keeps those of the moment it was made; before it is evaluated it wants the present ones."""
        copies: dict[str, nn.Module] = dict(sparse_modules(model))
        for name, handle in self._layers.items():
            target = layer_of(copies.get(name, model))
            for key, value in handle.state.items():
                target.state[key].copy_(value)

    def _copy_layers(self, state: dict[str, Any]) -> None:
        self._hook.permuted.moves[:] = [(name, dim, copied(order)) for name, dim, order in state["permuted"]]
        for name, saved in state["layers"].items():
            own = self._layers[name].state
            for key, value in saved.items():
                own[key].copy_(from_saved(value, own[key]))
            if "counter" in own:
                own["counter"].mul_(ranks()).add_(self._counter_start(name))

    def _check_loadable(self, state: dict[str, Any]) -> None:
        check_same_model(state, self.recipe, self.seed, {name: handle.state for name, handle in self._layers.items()})
        if len(state["optimizers"]) != len(self._clocks):
            raise ValueError(
                f"the saved run had {len(state['optimizers'])} attached optimizers, this one has {len(self._clocks)}: "
                "attach them before load_state_dict."
            )
        for clock, saved in self._clocks_in(state):
            if self.recipe.needs_total_steps and saved["total_steps"] != clock.total_steps:
                raise ValueError(
                    f"the saved run planned {saved['total_steps']} updates, this one {clock.total_steps}, and the schedule "
                    f"of {self.recipe.name} follows that number: attach with the same total_steps."
                )

    def _clocks_in(self, state: dict[str, Any]) -> list[tuple[StepClock, dict[str, Any]]]:
        """Every attached clock with what was saved of it: optimizers may be attached in another order than they were then."""
        entries = state["optimizers"]
        if not all("layers" in saved for saved in entries):  # older states tell their clocks by the order of attach alone
            return list(zip(self._clocks, entries, strict=True))
        clocks = {frozenset(clock.layer_names): clock for clock in self._clocks}
        for saved in entries:
            names = frozenset(saved["layers"])
            if names not in clocks:
                odd = sorted(min((names ^ attached for attached in clocks), key=len))
                raise ValueError(
                    f"an optimizer of the saved run updated {len(names)} sparse layers, and none that is attached now updates "
                    f"the same ones (the nearest differs by {', '.join(odd[:4])}): build the optimizers over the parameters that "
                    "they had then, and attach them before load_state_dict."
                )
        return [(clocks[frozenset(saved["layers"])], saved) for saved in entries]


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", None)  # accelerate's wrapper
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"attach takes a torch optimizer, got {type(optimizer).__name__}.")
    return optimizer
