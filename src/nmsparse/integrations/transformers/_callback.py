"""SparsityCallback: a recipe in a ``Trainer``.

Trainer(...)     on_init_end      the plain model is converted, before anything wraps it
train()          on_train_begin   the step clock goes onto the optimizer; a resumed run takes up its state
                 on_log           density, flip rate and decay join the logs
                 checkpoints      state() becomes part of trainer_state.json
                 on_train_end     masks of the best model, if the Trainer has loaded its weights
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from nmsparse._saved import describe
from nmsparse._tensor_cores import Verdict
from nmsparse.integrations.transformers._json import from_json, to_json
from nmsparse.integrations.transformers._metrics import EarlyMetrics, add_metrics
from nmsparse.nn import Targets
from nmsparse.recipes import Recipe, recipe_info
from nmsparse.recipes import recipe as build_recipe
from nmsparse.run import Run, run_of, sparsify_

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"


class SparsityCallback(TrainerCallback, ExportableState):
    """Trains the Trainer's model with a recipe.

    Arguments are those of :func:`nmsparse.sparsify_`; flip rates are measured at every ``stats_every``-th update. STEP needs
    its own optimizer: ``Trainer(optimizer_cls_and_kwargs=step_optimizer(args))``.

    Given in ``callbacks=[...]`` it reports to ``state.log_history`` and to callbacks after it; the reporting integrations
    (``report_to``) come before, and see its metrics only after :meth:`attach`.

    The run is resumed with the Trainer, whether or not ``restore_callback_states_from_checkpoint`` is set. A second
    ``train()`` that does not resume starts the clock anew on the weights and masks as they are.
    """

    def __init__(
        self,
        recipe: Recipe | Mapping[str, Any],
        targets: Targets = "all-linear",
        exclude: Targets | None = None,
        *,
        plan: Verdict | None = None,
        emulate: bool = False,
        seed: int = 0,
        stats_every: int = 10,
    ) -> None:
        # the Trainer rebuilds callbacks from what state() wrote, where a recipe is a mapping
        recipe = build_recipe(**recipe) if isinstance(recipe, Mapping) else recipe
        if not isinstance(recipe, Recipe):
            raise TypeError(f'recipe must be a recipe such as nmsparse.SRSTE("2:4"), got {recipe!r}.')
        self.recipe = recipe
        self.targets = targets
        self.exclude = exclude
        self.plan = plan
        self.emulate = emulate
        self.seed = seed
        self.stats_every = stats_every
        self.saved: dict[str, Any] | None = None
        """What state() wrote, in a callback that the Trainer rebuilt."""
        self.had_plan = plan is not None
        self._run: Run | None = None
        self._first_step = 0

    @property
    def run(self) -> Run:
        """The handle of the run: ``callback.run.stats()``, ``callback.run.skipped``."""
        if self._run is None:
            raise RuntimeError(
                "SparsityCallback has no model yet: give it to a Trainer, in callbacks=[...] or with callback.attach(trainer)."
            )
        return self._run

    def attach(self, trainer: Trainer) -> SparsityCallback:
        """Add this callback to a Trainer, with its metrics in sight of every other callback. Returns the callback."""
        handler = trainer.callback_handler
        if any(isinstance(other, SparsityCallback) and other is not self for other in handler.callbacks):
            raise ValueError("this Trainer has a SparsityCallback already; a model follows one recipe.")
        self._convert(trainer.model)
        if self not in handler.callbacks:
            trainer.add_callback(self)
        if not any(isinstance(other, EarlyMetrics) for other in handler.callbacks):
            handler.callbacks.insert(0, EarlyMetrics())
        return self

    # ---- events ----

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if model is not None:
            self._convert(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None, "the Trainer gives its model to every callback"
        is_resumed = state.global_step > 0
        self._check_late_conversion(model, is_resumed)
        self._convert(model)
        saved = self._saved_in(state) if is_resumed else None
        self._first_step = _first_step(saved, state)
        if state.max_steps <= self._first_step:
            raise ValueError(
                f"the clock of {self.recipe.name} starts at update {self._first_step}, and the Trainer ends at update "
                f"{state.max_steps}, which leaves the recipe none: give TrainingArguments a larger max_steps or num_train_epochs."
            )
        self._attach_clock(optimizer, total_steps=state.max_steps - self._first_step)
        if saved is not None:
            self.run.load_state_dict(from_json(saved["run"]))
        # a checkpoint from before this callback lacks the entry that the Trainer writes to at every save
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._run is not None and logs is not None:
            add_metrics(self._run, logs, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # the weights are those of the best checkpoint by now, and their masks belong to them
            file = Path(state.best_model_checkpoint) / STATE_FILE
            saved = self._saved_in(TrainerState.load_from_json(str(file)))
            if saved is not None:
                self.run.load_state_dict(from_json(saved["run"]))

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """For trainer_state.json: how to build this callback, and the state of its run."""
        args = {
            "recipe": describe(self.recipe),
            "targets": self.targets if isinstance(self.targets, str) else list(self.targets),
            "exclude": self.exclude if self.exclude is None or isinstance(self.exclude, str) else list(self.exclude),
            "emulate": self.emulate,
            "seed": self.seed,
            "stats_every": self.stats_every,
        }
        saved = None
        if self._run is not None:
            saved = {"run": to_json(self._run.state_dict()), "first_step": self._first_step}
        return {"args": args, "attributes": {"saved": saved, "had_plan": self.had_plan}}

    def _saved_in(self, state: TrainerState) -> dict[str, Any] | None:
        """What this callback wrote into a trainer_state.json, if it was there; the Trainer keys it by the name of the class."""
        entry = state.stateful_callbacks.get(type(self).__name__)
        entry = entry[-1] if isinstance(entry, list) else entry
        if entry is None:
            logger.warning(
                "the checkpoint of update %d was written without %s: its weights are taken as they are, and the recipe's clock "
                "starts now.",
                state.global_step,
                type(self).__name__,
            )
            return None
        saved: dict[str, Any] | None = entry["attributes"]["saved"]
        return saved

    # ---- parts ----

    def _convert(self, model: nn.Module) -> None:
        """Make the model sparse, or find the run of a model that is."""
        found = run_of(model)
        if found is not None and found.recipe != self.recipe:
            raise ValueError(
                f"the model is sparse already with {describe(found.recipe)}, this callback asks for {describe(self.recipe)}: "
                "densify_ it first, or ask for the same."
            )
        if found is None and self.had_plan and self.plan is None:
            raise ValueError(
                "this callback was rebuilt from trainer_state.json, which does not hold its plan, and model_init made a new "
                "model: leave restore_callback_states_from_checkpoint off; the run is resumed without it."
            )
        self._run = found or sparsify_(
            model, self.recipe, self.targets, self.exclude, plan=self.plan, emulate=self.emulate, seed=self.seed
        )

    def _check_late_conversion(self, model: nn.Module, is_resumed: bool) -> None:
        if is_resumed and self.recipe.permutes_channels and run_of(model) is None:
            raise ValueError(
                f"{self.recipe.name} reorders channels when it converts a model, but model_init made this one inside train(), "
                "after the reordered checkpoint was loaded: give the Trainer a model in place of model_init."
            )

    def _attach_clock(self, optimizer: Any, total_steps: int) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        needs = recipe_info(self.recipe).needs if self.recipe.name else ()
        if not all(hasattr(inner, need) for need in needs):
            raise TypeError(
                f"{self.recipe.name} cannot use {type(inner).__name__}: build the Trainer with "
                "optimizer_cls_and_kwargs=step_optimizer(args) from nmsparse.integrations.transformers."
            )
        for old in self.run.optimizers:  # of an earlier train()
            self.run.detach(old)
        self.run.attach(inner, total_steps=total_steps, stats_every=self.stats_every)


def _first_step(saved: dict[str, Any] | None, state: TrainerState) -> int:
    """The Trainer's step at which the recipe's clock started."""
    return int(saved["first_step"]) if saved is not None else int(state.global_step)
