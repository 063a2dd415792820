"""torchtitan: two overrides, activated by name, that make a run sparse without touching its config functions.

    --override.imports 'nmsparse.integrations.torchtitan.sparse_linear={"recipe": "s-ste", "pattern": "2:4"}'
                       'nmsparse.integrations.torchtitan.sparse_optimizers={"total_steps": 10000}'

``sparse_linear`` replaces the linear layers of attention and feed-forward blocks (not the output head, nor routers and experts);
``sparse_optimizers`` puts the step clock on the optimizers that torchtitan builds and saves the run's state with theirs. Both are
needed, except for recipes without schedule, decay or state (``ste``). The runs, one per part of the model, are
``trainer.optimizers.runs``; ``run.skipped`` says which layers stayed dense, and why. torchtitan builds models on the meta device
and fills them later, so a recipe's state is made when the weights are: in ``init_states``.

For torchtitan 0.3, whose interface changes often. Tested against the interface on one process; training under its own launcher,
with FSDP, tensor or pipeline parallelism, was not tested.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from nmsparse.functional import hash_integers
from nmsparse.nn import Layer, Permuted, SparseLinear, grouped_dim, select_layers, sparse_modules
from nmsparse.recipes import Recipe
from nmsparse.recipes import recipe as make_recipe
from nmsparse.run import Run

try:
    from torchtitan.components.optimizer.optimizer import OptimizersContainer
    from torchtitan.components.optimizer.utils import init_optim_state
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.linear import Linear
except ImportError as error:
    raise ImportError(
        f"nmsparse.integrations.torchtitan needs torchtitan 0.3, which does not import here ({error}): "
        'pip install "nmsparse[titan]".'
    ) from error

LINEARS = ["*layers.*.attention.*", "*layers.*.feed_forward.*"]
"""The linear layers of torchtitan's decoder layers, by their names in a model (layers.0.attention.wo) and by those in a trainer's
configuration (model_spec.model.layers.0.attention.wo). Experts are 3-D parameters, no linear layers, and stay dense."""
CHECKPOINTED = "_checkpoint_wrapped_module"
"""What torch's checkpoint_wrapper puts into names."""
STATE = "nmsparse"
"""Key of the runs' states in the optimizers' state dict."""


class SparseTitanLinear(SparseLinear, Linear):
    """torchtitan's ``Linear`` whose products follow a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: str = "s-ste"
        """Of the registry; see nmsparse.recipes()."""
        pattern: str = "2:4"
        options: dict[str, Any] = field(default_factory=dict)
        """Of the recipe."""
        seed: int = 0
        """Keys every random draw of the recipe."""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        recipe = _recipe(config.recipe, config.pattern, config.options)
        fit = recipe.fit(config.out_features, config.in_features)
        if fit.refused is not None:
            raise ValueError(
                f"a {config.out_features} x {config.in_features} layer cannot follow {recipe.name}: {fit.refused}. Narrow the "
                "override to other layers."
            )
        self._nmsparse = Layer("", recipe, stream=0, dense=dict(fit.dense))
        self._nmsparse.awaits_optimizer = recipe.needs_clock
        self._seed = config.seed

    def _init_self_parameters(self) -> None:
        """torchtitan's: the weights have just been filled."""
        super()._init_self_parameters()
        self.init_recipe_state()

    @torch.no_grad()
    def init_recipe_state(self) -> None:
        """What the recipe remembers, from the weight as it is; whole on every rank, as the forward pass sees it."""
        layer, awaits = self._nmsparse, self._nmsparse.awaits_optimizer
        layer.init_state(_whole(self.weight.detach()).float())
        layer.awaits_optimizer = awaits

    def name_as(self, name: str) -> None:
        """Known once the model is built: its random numbers are keyed by its name."""
        layer = self._nmsparse
        layer.name = name
        layer.stream = hash_integers(self._seed, zlib.crc32(name.encode()))
        if "stream" in layer.state:
            layer.state["stream"].fill_(layer.stream)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _recipe(name: str, pattern: str, options: dict[str, Any]) -> Recipe:
    recipe = make_recipe(name, pattern, **options)
    if recipe.permutes_channels:
        raise ValueError(
            f"sparse_linear cannot follow {name} with permute=True: channels are reordered across layers by their weights, and "
            "torchtitan builds every layer by itself, before there are weights. Leave permute out, or sparsify_ a trained model "
            "in a training loop of your own."
        )
    return recipe


@override(target=Linear.Config, fqns=LINEARS, exact=True, description="N:M sparse linear layers (nmsparse)")
def sparse_linear(
    cfg: Any, *, recipe: str = "s-ste", pattern: str = "2:4", seed: int = 0, **options: Any
) -> SparseTitanLinear.Config:
    """A linear layer's config as that of a sparse one; keyword arguments beyond these are the recipe's own."""
    _recipe(recipe, pattern, options)  # wrong words fail here, before anything is built
    return derive(cfg, SparseTitanLinear.Config, recipe=recipe, pattern=pattern, options=options, seed=seed)


class SparseOptimizers(OptimizersContainer):
    """torchtitan's optimizers with a step clock for every part of the model that has sparse layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        total_steps: int | None = None
        """Planned number of updates, which recipes with a schedule need: the run's training.steps."""
        stats_every: int = 10

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            init_optim_state(optimizer)  # by a step, later on; the clock must not count that one
        self.runs = [run for part in model_parts if (run := run_of(part)) is not None]
        if not self.runs:
            raise ValueError(
                "sparse_optimizers found no sparse layer: activate nmsparse.integrations.torchtitan.sparse_linear as well, and "
                "see that its names fit this model."
            )
        for run in self.runs:
            if config.total_steps is None and run.recipe.needs_total_steps:
                raise ValueError(
                    f"{run.recipe.name} plans over the whole run: give its number of updates, training.steps, as "
                    'nmsparse.integrations.torchtitan.sparse_optimizers={"total_steps": ...}.'
                )
            sparse = {id(parameter) for parameter in run.parameters()}
            for optimizer in self.optimizers:
                if any(id(p) in sparse for group in optimizer.param_groups for p in group["params"]):
                    run.attach(optimizer, total_steps=config.total_steps, stats_every=config.stats_every)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), STATE: {str(i): run.state_dict() for i, run in enumerate(self.runs)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != STATE})
        for i, run in enumerate(self.runs):
            if STATE in state_dict:  # else a dense run's checkpoint: the clock starts at 0
                run.load_state_dict(state_dict[STATE][str(i)])


@override(target=OptimizersContainer.Config, description="step clock of nmsparse on the optimizers")
def sparse_optimizers(cfg: Any, *, total_steps: int | None = None, stats_every: int = 10) -> SparseOptimizers.Config:
    """The config of optimizers as that of optimizers with a clock."""
    return derive(cfg, SparseOptimizers.Config, total_steps=total_steps, stats_every=stats_every)


def run_of(model: nn.Module) -> Run | None:
    """The handle of a model that ``sparse_linear`` made sparse; None where it has no such layer."""
    modules = {_own_name(name): module for name, module in sparse_modules(model) if isinstance(module, SparseTitanLinear)}
    if not modules:
        return None
    for name, module in modules.items():
        module.name_as(name)
    first = next(iter(modules.values()))
    recipe: Recipe = first._nmsparse.recipe
    other = next((name for name, module in modules.items() if module._nmsparse.recipe != recipe), None)
    if other is not None:
        raise ValueError(f"{other} follows another recipe than {next(iter(modules))}: a run has one recipe.")
    products = {f"{name} ({product})": why for name, m in modules.items() for product, why in m._nmsparse.dense.items()}
    return Run(model, recipe, modules, _dense_layers(model) | products, Permuted(), first._seed)


def _dense_layers(model: nn.Module) -> dict[str, str]:
    """Linear layers, and weights of experts, that stayed dense: name to reason."""
    found = select_layers(model, "all", None)  # "all-linear" would call the last layer of a pipeline stage an output head
    linears = {name: module for name, module in found.layers.items() if isinstance(module, nn.Linear)}
    dense = {name: _why_dense(name, m) for name, m in linears.items() if not isinstance(m, SparseLinear)}
    return {_own_name(name): why for name, why in (dense | found.skipped).items()}


def _own_name(name: str) -> str:
    """Of a layer, whether or not torchtitan has wrapped its block for activation checkpointing: random numbers and the saved
    state are keyed by it, and that option may change from one start to the next."""
    return ".".join(part for part in name.split(".") if part != CHECKPOINTED)


def _why_dense(name: str, module: nn.Module) -> str:
    if not any(fnmatch(name, glob) for glob in LINEARS):
        return "outside the attention and feed-forward blocks of decoder layers, which sparse_linear takes"
    if grouped_dim(module) is None:
        return f"{type(module).__name__} is a subclass with a forward of its own, which the recipe would replace"
    return "no override made it sparse; sparse_linear takes torchtitan's own Linear.Config only, no subclass"
