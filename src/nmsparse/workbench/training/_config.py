"""Everything that defines a run, in one place: flags, configuration files and checkpoints all come from these fields."""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import nmsparse as nm


def setting(default: Any, text: str, *, at_least: float | None = None, free: bool = False) -> Any:
    """A field with its help text. A ``free`` one may differ when a run is resumed, because it does not change the result."""
    facts = {"help": text, "at_least": at_least, "free": free}
    return field(default_factory=lambda: copy(default), metadata=facts)  # lists and dicts must not be shared between runs


@cache
def _hints() -> dict[str, Any]:
    """Types of all settings: a study makes thousands of configurations, and finding them out takes longer than all the rest."""
    return get_type_hints(TrainConfig)


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    task: str = setting("shakespeare", "What to learn; nmsparse tasks lists the names.")
    model: str | None = setting(None, "Model by name; by default a small one that fits the task.")
    pretrained: str | None = setting(None, "Fine-tune the model in this transformers folder in place of a fresh one.")
    width: int | None = setting(None, "Hidden size, or channels of a ResNet's first stage.", at_least=1)
    layers: int | None = setting(None, "Transformer layers.", at_least=1)
    heads: int | None = setting(None, "Attention heads.", at_least=1)
    dropout: float | None = setting(None, "Dropout of the model.", at_least=0)
    recipe: str = setting("s-ste", "Recipe by name; nmsparse recipes lists them.")
    pattern: str = setting("2:4", "Keep N of every M.")
    options: dict[str, Any] = setting({}, "Option of the recipe as name=value; repeat for several.")
    targets: list[str] = setting([], "Layers to make sparse: all-linear, all, or names; by default what suits the model.")
    exclude: list[str] = setting([], "Layers that stay dense, by name or suffix; repeat for several.")
    emulate: bool = setting(False, "Ordinary products on any device, exact to the paper; no sparse tensor cores.")
    steps: int = setting(300, "Updates.", at_least=1)
    batch: int = setting(16, "Examples per update, over all processes and micro-batches.", at_least=1)
    accumulate: int = setting(1, "Micro-batches per update.", at_least=1)
    length: int | None = setting(None, "Tokens of a sequence; by default the task's.", at_least=2)
    limit: int | None = setting(None, "Use only so many training and validation examples.", at_least=1)
    optimizer: Literal["adamw", "sgd", "step-adamw"] | None = setting(
        None, "adamw by default, step-adamw for recipes that need it."
    )
    lr: float | None = setting(None, "Peak learning rate; by default 1e-3, with sgd 0.1.", at_least=0)
    weight_decay: float = setting(0.01, "Weight decay.", at_least=0)
    momentum: float = setting(0.9, "Momentum of sgd.", at_least=0)
    beta2: float = setting(0.999, "Share of its second moment that Adam keeps at an update.", at_least=0)
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "Learning rate after the warm-up.")
    warmup: float = setting(0.1, "Share of the run in which the learning rate rises.", at_least=0)
    clip: float = setting(1.0, "Largest norm of all gradients together; 0 switches clipping off.", at_least=0)
    precision: Literal["fp32", "bf16", "fp16"] = setting("fp32", "Mixed precision.")
    compile: bool = setting(False, "Compile with torch.compile: the blocks of a stack, or else the whole model.")
    seed: int = setting(0, "Of initialisation, order of examples and random draws.", at_least=0)
    eval_every: int | None = setting(None, "Updates between validations; by default a tenth of the run.", at_least=1)
    eval_batches: int = setting(20, "Batches of a validation, each of --batch examples; 0 takes all.", at_least=0)
    log_every: int | None = setting(None, "Updates between log rows; by default a fortieth of the run.", at_least=1)
    checkpoint_every: int | None = setting(
        None, "Updates between checkpoints; by default a fifth of the run.", at_least=1, free=True
    )
    keep: int = setting(2, "Checkpoints to keep.", at_least=1, free=True)
    save: bool = setting(True, "Write checkpoints and the finished model; a run without them starts anew.", free=True)
    tracker: list[str] = setting([], "Also log to tensorboard, wandb, trackio, ...; repeat for several.", free=True)
    data_dir: str | None = setting(None, "Folder with data sets; by default $NMSPARSE_DATA.", free=True)

    def __post_init__(self) -> None:
        hints = _hints()
        for entry in fields(self):
            _check(entry.name, getattr(self, entry.name), hints[entry.name], entry.metadata["at_least"])
        if self.warmup > 1:
            raise ValueError(f"warmup is a share of the run, at most 1, got {self.warmup!r}.")
        if self.beta2 >= 1:
            raise ValueError(f"beta2 is below 1, got {self.beta2!r}.")
        if self.dropout is not None and self.dropout >= 1:
            raise ValueError(f"dropout is below 1, got {self.dropout!r}.")
        if self.batch % self.accumulate:
            raise ValueError(f"batch = {self.batch} examples do not divide into accumulate = {self.accumulate} micro-batches.")
        if self.seed >= 1 << 63:
            raise ValueError(f"seed is below 2**63, got {self.seed!r}.")
        needs = nm.recipe_info(self.make_recipe()).needs
        if needs and self.optimizer not in (None, "step-adamw"):
            raise ValueError(f"{self.recipe} needs an optimizer with {needs[0]}(): choose step-adamw, not {self.optimizer}.")

    def make_recipe(self) -> nm.Recipe:
        if "pattern" in self.options:
            raise ValueError("pattern is a setting of its own, not an option of the recipe.")
        return nm.recipe(self.recipe, self.pattern, **self.options)

    @property
    def label(self) -> str:
        """How tables and reports call the run's recipe."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return " ".join(filter(None, [self.recipe, "" if self.recipe == "dense" else self.pattern, options]))

    @property
    def chosen_optimizer(self) -> str:
        needs = nm.recipe_info(self.make_recipe()).needs
        return self.optimizer or ("step-adamw" if needs else "adamw")

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else 0.1 if self.chosen_optimizer == "sgd" else 1e-3

    @property
    def intervals(self) -> tuple[int, int, int]:
        """Updates between log rows, validations and checkpoints."""
        return (
            self.log_every or max(1, self.steps // 40),
            self.eval_every or max(1, self.steps // 10),
            self.checkpoint_every or max(1, self.steps // 5),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the configuration") -> TrainConfig:
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ValueError(f"{source}: {name!r} is not a setting.{hint}")
        try:
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{source}: {error.args[0]}") from error

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        """The settings in a JSON or TOML file."""
        try:
            text = path.read_text()
            values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold an object of settings, got {type(values).__name__}.")
        cls.from_dict(values, str(path))
        return values

    def differences(self, other: TrainConfig) -> list[str]:
        """Settings that would make the other run another one."""
        pairs = [
            (entry.name, getattr(self, entry.name), getattr(other, entry.name))
            for entry in fields(self)
            if not entry.metadata["free"] and entry.name != "pretrained"
        ]
        # a folder may have moved with its data; checkpoints hold its weights
        ours, theirs = (None if each.pretrained is None else Path(each.pretrained).name for each in (self, other))
        pairs.append(("pretrained", ours, theirs))
        return [f"{name} {ours!r} against {theirs!r}" for name, ours, theirs in pairs if ours != theirs]


def _check(name: str, value: Any, hint: Any, at_least: float | None) -> None:
    """One setting against its declared type and least value, for files that anybody wrote."""
    options = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if value is None and type(None) in options:
        return
    kind = next(option for option in options if option is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} is one of {', '.join(get_args(kind))}, got {value!r}.")
        return
    plain = get_origin(kind) or kind
    accepted = (int, float) if plain is float else plain
    if not isinstance(value, accepted) or (isinstance(value, bool) and plain is not bool):
        raise ValueError(f"{name} is of type {plain.__name__}, got {value!r}.")
    if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
        raise ValueError(f"{name} is a list of words, got {value!r}.")
    if plain is float and not abs(value) < float("inf"):
        raise ValueError(f"{name} is a finite number, got {value!r}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} is at least {at_least}, got {value!r}.")
