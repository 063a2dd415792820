"""STEP's optimizer, as the Trainer takes it."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from nmsparse.optim import StepAdamW


def step_optimizer(args: TrainingArguments, **options: Any) -> tuple[type[StepAdamW], dict[str, Any]]:
    """What STEP needs in ``Trainer(optimizer_cls_and_kwargs=step_optimizer(args))``.

    Learning rate, betas and eps come from the training arguments, weight decay from the groups that the Trainer makes;
    ``options`` are those of :class:`nmsparse.StepAdamW` and override all of them.
    """
    given = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "fused": True if args.device.type == "cuda" else None,
    }
    return StepAdamW, {**given, **options}
