"""Lightning: one callback that converts the model, drives the clock, logs, and resumes.

    trainer = Trainer(callbacks=[SparsityCallback(nm.SSTE("2:4"))])
    trainer.fit(module)

The model is converted in ``setup``, before the strategy wraps it, for evaluation too; the clock is put on the optimizers when
training starts, after Lightning has restored them. Lightning computes gradients in a closure inside ``optimizer.step``, with
clipping; the run waits for that closure. Tested on one device and with DDP; Lightning's FSDP and DeepSpeed strategies are not.
"""

from __future__ import annotations

import logging
import math
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from nmsparse.nn import Targets, sparse_modules
from nmsparse.plan import Plan
from nmsparse.recipes import Recipe
from nmsparse.run import Run, sparsify_

OLDEST = (2, 6, 4)
MALICIOUS = ("2.6.2", "2.6.3")
"""Published wheels that ran an attacker's code when imported (GHSA-w37p-236h-pfx3)."""
INSTALL = 'pip install "nmsparse[lightning]"'


def check_version(found: str | None) -> None:
    """Raise for versions that must not, or cannot, be imported; ``None`` if there is none."""
    if found is None:
        raise ImportError(f"nmsparse.integrations.lightning needs lightning, which is not installed: {INSTALL}.")
    if found in MALICIOUS:
        raise ImportError(
            f"lightning {found} is one of two published versions with malicious code (GHSA-w37p-236h-pfx3), so it is not "
            f"imported here. Treat this machine's credentials as stolen if it ever was; remove it, then {INSTALL}."
        )
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        raise ImportError(f"lightning {found} is older than {'.'.join(map(str, OLDEST))}, the oldest supported: {INSTALL}.")


def _installed() -> str | None:
    try:
        return version("lightning")
    except PackageNotFoundError:
        return None


check_version(_installed())  # from the package's metadata: importing a malicious package is too late to look
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

logger = logging.getLogger("nmsparse")


class SparsityCallback(Callback):
    """Train a LightningModule with a recipe.

    The run is resumed with the trainer. A ``fit`` that finds no state of this callback starts the clock anew, on the weights and
    masks as they are and for the updates that are left: a second ``fit``, or one that goes on from a dense checkpoint.
    """

    def __init__(
        self,
        recipe: Recipe,
        targets: Targets = "all-linear",
        exclude: Targets | None = None,
        *,
        module: str = "",
        total_steps: int | None = None,
        stats_every: int = 10,
        plan: Plan | None = None,
        emulate: bool = False,
        seed: int = 0,
    ) -> None:
        """The arguments of :func:`nmsparse.sparsify_` and ``run.attach``, and:

        ``module`` is the name of the submodule to convert, such as "model"; by default the LightningModule itself. Give it where
        that is a transformers model, which knows its own output head. ``total_steps`` counts the updates of the recipe's clock;
        unless given it is what the trainer estimates, less the steps (``trainer.global_step``) before the clock started. Metrics
        are logged whenever flip rates are measured anew (``stats_every``); loggers get the last ones at the trainer's own
        ``log_every_n_steps``.
        """
        self.recipe, self.targets, self.exclude, self.module = recipe, targets, exclude, module
        self.total_steps, self.stats_every = total_steps, stats_every
        self.plan, self.emulate, self.seed = plan, emulate, seed
        self.run: Run | None = None
        self._saved: dict[str, Any] | None = None
        self._first_step = 0
        self._logged = 0

    # ---- converting and attaching ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Whatever the stage: a checkpoint holds dense weights, and evaluation sees what the layers make of them."""
        if stage == "fit":
            self._end_earlier_fit()
        elif self.run is not None:
            return  # what became of the model since (freeze_, densify_) is as the user wants it
        if not any(True for _ in pl_module.parameters()):
            logger.info("nmsparse: the model has no parameters yet; call SparsityCallback.convert(self) in configure_model.")
            return
        self.convert(pl_module)

    def convert(self, pl_module: LightningModule) -> Run:
        """Convert the model, once. For models that make their layers in ``configure_model``: call it at the end of that."""
        target = pl_module.get_submodule(self.module)
        if self.run is None or not self._is_converted(target):
            self.run = sparsify_(
                target, self.recipe, self.targets, self.exclude, plan=self.plan, emulate=self.emulate, seed=self.seed
            )
        return self.run

    def _end_earlier_fit(self) -> None:
        """Before Lightning restores anything: a state that is there when training starts came with this fit's checkpoint."""
        self._saved = None
        if self.run is not None:
            for optimizer in self.run.optimizers:
                self.run.detach(optimizer)

    def _is_converted(self, target: nn.Module) -> bool:
        """By this callback; what another one converted is for ``sparsify_`` to complain about."""
        assert self.run is not None, "asked where there is a run"
        present = dict(sparse_modules(target))
        return all(name in present for name in self.run.layers)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weights and optimizers are restored by now, in every strategy."""
        run, saved = self._converted(pl_module), self._saved
        self._first_step = trainer.global_step if saved is None else saved.get("first_step", 0)
        total = _estimated_steps(trainer, self._first_step) if self.total_steps is None else self.total_steps
        if total is None and self.recipe.needs_total_steps:
            raise ValueError(
                f"{self.recipe.name} plans over the whole run, and this Trainer does not tell how many updates are left of it: "
                "give SparsityCallback(..., total_steps=...) their number, or the Trainer an end (max_steps)."
            )
        if saved is None and self._first_step > 0:
            logger.warning(
                "training goes on at update %d without a saved state of %s: the weights are taken as they are, and the recipe's "
                "clock starts now, for %s updates.",
                self._first_step,
                type(self).__name__,
                total or "an unknown number of",
            )
        for optimizer in self._owners(trainer, run):
            run.attach(optimizer, total_steps=total, stats_every=self.stats_every)
        if saved is not None:
            run.load_state_dict(saved)
        self._saved, self._logged = None, run.step

    def _converted(self, pl_module: LightningModule) -> Run:
        if self.run is None:
            raise RuntimeError(
                f"{type(pl_module).__name__} had no parameters when Lightning set it up, so it is still dense: call the "
                "callback's convert(self) at the end of configure_model."
            )
        return self.run

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_layers(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_layers(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_layers(pl_module)

    def _restore_layers(self, pl_module: LightningModule) -> None:
        """The masks and scales that belong to the weights of a checkpoint; its clock waits for a fit."""
        run = self._converted(pl_module)
        if self._saved is not None:
            run.load_layers(self._saved)

    @staticmethod
    def _owners(trainer: Trainer, run: Run) -> list[torch.optim.Optimizer]:
        """The optimizers that update sparse layers; all of them where none does, for ``attach`` to say so."""
        sparse = {id(parameter) for parameter in run.parameters()}
        owners = [o for o in trainer.optimizers if any(id(p) in sparse for g in o.param_groups for p in g["params"])]
        return owners or list(trainer.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.run is not None:
            self.run.begin_micro_batch()  # training_step need not call the converted module's forward

    # ---- telemetry ----

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        run = self.run
        if run is None or not self.stats_every or run.step == self._logged:
            return
        self._logged = run.step
        if run.step % self.stats_every == 1 % self.stats_every:  # the flips of update 0, n, 2n ... have just been counted
            pl_module.log_dict(sparsity_metrics(run), on_step=True, on_epoch=False, batch_size=1)

    # ---- state ----

    @property
    def state_key(self) -> str:
        return self._generate_state_key(recipe=self.recipe.name, module=self.module)

    def state_dict(self) -> dict[str, Any]:
        if self.run is None or not self.run.optimizers:
            return self._saved or {}
        return {**self.run.state_dict(), "first_step": self._first_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None  # used when the optimizers are there


def sparsity_metrics(run: Run) -> dict[str, float]:
    """``sparsity/density``, ``sparsity/flip_rate`` and so on, of the whole model; what was not measured yet is left out."""
    total = {name: value for name, value in run.stats()["total"].items() if name != "entries"}
    decay = getattr(run.recipe, "decay", None)
    total |= {} if decay is None else {"decay": decay}
    return {f"sparsity/{name}": float(value) for name, value in total.items() if value is not None}


def _estimated_steps(trainer: Trainer, first_step: int) -> int | None:
    """Updates of the whole run from ``first_step`` on, as the trainer's limits say; None where it trains without end."""
    steps = trainer.estimated_stepping_batches - first_step
    return int(steps) if math.isfinite(steps) and steps >= 1 else None
