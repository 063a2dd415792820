"""What a run reports to the Trainer's loggers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nmsparse.run import Run, run_of

DENSITY = "sparsity/density"


def metrics_of(run: Run) -> dict[str, float]:
    """Totals of ``run.stats()`` under their names in a log; what is not measured yet is left out."""
    stats = run.stats()
    total = {key: value for key, value in stats["total"].items() if key not in ("entries", "mask_changes")}
    decay = next((layer["decay"] for layer in stats["layers"].values() if "decay" in layer), None)  # one for all layers
    total["decay"] = decay
    return {f"sparsity/{key}": float(value) for key, value in total.items() if value is not None}


def add_metrics(run: Run, logs: dict[str, float], state: TrainerState) -> None:
    """Add a run's metrics to the logs of training (not to those of an evaluation), once."""
    if DENSITY in logs or not ("loss" in logs or "train_loss" in logs):
        return
    found = metrics_of(run)
    logs.update(found)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(found)  # the Trainer wrote this entry before it asked its callbacks


class EarlyMetrics(TrainerCallback):
    """Stands before every other callback and lets them see the metrics.

    A callback of its own, because the Trainer may replace a callback that has state by a copy at the end of the list.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        run = None if model is None else run_of(model)
        if run is not None and logs is not None:
            add_metrics(run, logs, state)
