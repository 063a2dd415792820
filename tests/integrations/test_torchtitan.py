"""torchtitan's overrides: against a stub of its published interface, and against the real package where it is installed.

The stub below follows config/override.py, config/configurable.py, models/common/linear.py, protocols/module.py and
components/optimizer of 0.3.0. ``make setup`` installs the real one without its dependencies, of which our part needs few.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from toys import assert_identical

import nmsparse as nm
from nmsparse.nn import sparse_modules

MODULE = "nmsparse.integrations.torchtitan"
SECTION = re.compile(r"^## torchtitan$.*?(?=^## )", re.M | re.S)
OUTSIDE = "outside the attention and feed-forward blocks of decoder layers, which sparse_linear takes"
only_real = pytest.mark.parametrize("titan", ["real"], indirect=True)


def stub() -> dict[str, types.ModuleType]:
    """Modules that offer what we use of torchtitan, and behave as it does."""

    class Configurable:
        @dataclass(kw_only=True, slots=True)
        class Config:
            _owner: ClassVar[Any] = None

            def build(self, **kwargs: Any) -> Any:
                return self._owner(config=replace(self), **kwargs)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if "Config" in cls.__dict__:
                assert "__slots__" in cls.Config.__dict__, "torchtitan enforces slots"
                assert all(f.kw_only for f in fields(cls.Config) if f.init), "torchtitan enforces keywords"
                cls.Config._owner = cls

    class Module(nn.Module, Configurable):
        _param_init: Any = None

        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            param_init: dict[str, Any] | None = None
            sharding_config: Any = None

            def build(self, **kwargs: Any) -> Any:
                instance = Configurable.Config.build(self, **kwargs)
                if self.param_init is not None:
                    instance._param_init = self.param_init
                return instance

        def init_states(self, *, buffer_device: Any = None) -> None:
            for child in self.children():
                if isinstance(child, Module):
                    child.init_states(buffer_device=buffer_device)
            self._init_self_parameters()

        def _init_self_parameters(self) -> None:
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._param_init[name](parameter)

    class Linear(nn.Linear, Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            in_features: int
            out_features: int
            bias: bool = False

        def __init__(self, config: Any) -> None:
            super().__init__(config.in_features, config.out_features, bias=config.bias)

    registry: dict[str, Any] = {}

    def override(*, target: Any, fqns: Any = None, description: str = "", exact: bool = False) -> Any:
        assert issubclass(target, Configurable.Config)

        def register(factory: Any) -> Any:
            registry[f"{factory.__module__}.{factory.__name__}"] = types.SimpleNamespace(
                target_cls=target, factory=factory, fqns=fqns, description=description, exact=exact
            )
            return factory

        return register

    def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
        names = {f.name for f in fields(target_cls) if f.init}
        assert not set(deltas) - names
        shared = {f.name: getattr(source, f.name) for f in fields(source) if f.name in names and f.name not in deltas}
        return target_cls(**shared, **deltas)

    class OptimizersContainer(torch.optim.Optimizer, Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            param_groups: list[Any] = field(default_factory=list)
            implementation: str = "for-loop"

        def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
            self.model_parts = model_parts
            self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in model_parts]
            torch.optim.Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], {})

        def step(self, closure: Any = None) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)

        def state_dict(self) -> dict[str, Any]:
            for optimizer in self.optimizers:
                init_optim_state(optimizer)
            return {f"{i}": optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            for i, optimizer in enumerate(self.optimizers):
                init_optim_state(optimizer)
                optimizer.load_state_dict(state_dict[f"{i}"])

    def init_optim_state(optimizer: torch.optim.Optimizer) -> None:
        """torchtitan makes Adam's state by a step without gradient."""
        if optimizer.state:
            return
        groups = optimizer.param_groups
        for p in (p for group in groups for p in group["params"]):
            p.grad = torch.zeros_like(p)
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)

    contents: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.config": {},
        "torchtitan.config.configurable": {"Configurable": Configurable},
        "torchtitan.config.override": {"override": override, "derive": derive, "_REGISTRY": registry},
        "torchtitan.protocols": {},
        "torchtitan.protocols.module": {"Module": Module},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.linear": {"Linear": Linear},
        "torchtitan.components": {},
        "torchtitan.components.optimizer": {},
        "torchtitan.components.optimizer.optimizer": {"OptimizersContainer": OptimizersContainer, "ParamGroupConfig": None},
        "torchtitan.components.optimizer.utils": {"init_optim_state": init_optim_state},
    }
    made = {}
    for name, names in contents.items():
        made[name] = types.ModuleType(name)
        made[name].__dict__.update(names)
    return made


def is_installed() -> bool:
    try:
        importlib.import_module("torchtitan.config.override")
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module", params=["stub", "real"])
def titan(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Our module, imported over the stub or over the real package; both go away again."""
    before = dict(sys.modules)
    if request.param == "stub":
        sys.modules.update(stub())
    elif not is_installed():
        pytest.skip("needs torchtitan; make setup installs it")
    yield importlib.import_module(MODULE)
    for name in [name for name in sys.modules if name.startswith("torchtitan") or name == MODULE]:
        if name not in before:
            del sys.modules[name]


def registered(name: str) -> Any:
    return importlib.import_module("torchtitan.config.override")._REGISTRY[f"{MODULE}.{name}"]


def linear_config(titan: Any, rows: int, columns: int) -> Any:
    init = {"weight": partial(nn.init.normal_, std=0.1)}
    return titan.Linear.Config(in_features=columns, out_features=rows, param_init=init)


def build(titan: Any, recipe: str, **options: Any) -> nn.Module:
    """As the trainer does: on meta, then memory, then values."""
    protocol: Any = importlib.import_module("torchtitan.protocols.module").Module

    class Model(protocol):
        def __init__(self, convert: Any) -> None:
            super().__init__()
            self.up = convert(linear_config(titan, 64, 16)).build()
            self.down = convert(linear_config(titan, 16, 64)).build()
            self.head = linear_config(titan, 4, 16).build()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.down(self.up(x).relu()))

    with torch.device("meta"):
        model = Model(lambda cfg: titan.sparse_linear(cfg, recipe=recipe, **options))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model.train()


def container(titan: Any, model: nn.Module, total_steps: int | None = 8) -> Any:
    kind = importlib.import_module("torchtitan.components.optimizer.optimizer")
    groups = []
    if kind.ParamGroupConfig is not None:
        groups = [kind.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
    stock = kind.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return titan.sparse_optimizers(stock, total_steps=total_steps).build(model_parts=[model])


def steps(model: nn.Module, optimizers: Any, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 4, generator=generator)
    for _ in range(count):
        optimizers.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizers.step()


@pytest.mark.parametrize("prefix", ["", "model_spec.model."])  # in a model, and in the configuration of a trainer
def test_overrides_are_registered_for_blocks_and_not_for_head_or_router(titan: Any, prefix: str) -> None:
    found = registered("sparse_linear")
    assert found.target_cls is titan.Linear.Config
    assert found.exact
    assert found.description
    claimed = {
        "layers.0.attention.wo": True,
        "layers.3.attention.qkv_linear.wq": True,
        "layers.0.feed_forward.w1": True,
        "lm_head": False,
        "layers.0.moe.router.gate": False,
        "layers.0.moe.shared_experts.w1": False,
        "vision_encoder.block.attn.wq": False,
    }
    assert {fqn: any(fnmatch(prefix + fqn, glob) for glob in found.fqns) for fqn in claimed} == claimed
    assert registered("sparse_optimizers").target_cls is titan.OptimizersContainer.Config


def test_factory_keeps_the_fields_of_the_config(titan: Any) -> None:
    stock = linear_config(titan, 64, 16)
    made = titan.sparse_linear(stock, recipe="sr-ste", pattern="1:4", decay=0.1)
    assert (made.in_features, made.out_features, made.bias) == (16, 64, False)
    assert made.param_init is stock.param_init
    assert (made.recipe, made.pattern, made.options) == ("sr-ste", "1:4", {"decay": 0.1})
    with pytest.raises(ValueError, match="there is no recipe named 'nothing'"):
        titan.sparse_linear(stock, recipe="nothing")


def test_built_layer_is_both_theirs_and_ours_and_keeps_its_keys(titan: Any) -> None:
    model = build(titan, "ste")
    assert isinstance(model.up, titan.Linear)
    assert isinstance(model.up, nm.SparseLinear)
    assert list(model.state_dict()) == ["up.weight", "down.weight", "head.weight"]
    assert nm.functional.violations(nm.effective_weight(model.up), "2:4") == 0
    x = torch.randn(4, 16)
    assert torch.equal(model.up(x), x @ nm.effective_weight(model.up).t())


def test_activation_checkpointing_changes_no_name_and_no_number(titan: Any) -> None:
    results = []
    for is_wrapped in (False, True):
        model = build(titan, "s-ste")
        if is_wrapped:
            model.up = checkpoint_wrapper(model.up)
        optimizers = container(titan, model)
        steps(model, optimizers, 3)
        assert optimizers.runs[0].layers == ["up", "down"]
        assert list(optimizers.runs[0].skipped) == ["head"]
        results.append(([p.detach().clone() for p in model.parameters()], optimizers.runs[0].state_dict()))
    for plain, wrapped in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(plain, wrapped)
    optimizers.runs[0].load_state_dict(results[0][1])  # of the plain model, into the wrapped one


@pytest.mark.parametrize(
    ("recipe", "options"), [("sr-ste", {"decay": 0.1}), ("s-ste", {}), ("mask-decay", {}), ("asp", {"start": 3})]
)
def test_training_equals_that_of_a_converted_model(titan: Any, recipe: str, options: dict[str, Any]) -> None:
    model = build(titan, recipe, **options)
    optimizers = container(titan, model)
    assert optimizers.runs[0].layers == ["up", "down"]
    assert optimizers.runs[0].skipped == {"head": OUTSIDE}

    plain = nn.ModuleDict({"up": nn.Linear(16, 64, False), "down": nn.Linear(64, 16, False), "head": nn.Linear(16, 4, False)})
    plain.load_state_dict(model.state_dict())
    plain.forward = lambda x: plain.head(x + plain.down(plain.up(x).relu()))  # type: ignore[method-assign]
    run = nm.sparsify_(plain, nm.recipe(recipe, "2:4", **options))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    # torchtitan's optimizer has made one step without gradient, which counts in Adam's bias correction
    for p in plain.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    run.attach(optimizer, total_steps=8)
    steps(model, optimizers, 8)
    steps(plain, optimizer, 8)
    assert optimizers.runs[0].step == run.step == 8
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


def test_saving_does_not_move_the_clock_and_resuming_is_exact(titan: Any) -> None:
    whole = build(titan, "s-ste")
    optimizers = container(titan, whole)
    assert optimizers.state_dict()["nmsparse"]["0"]["optimizers"][0]["step"] == 0
    steps(whole, optimizers, 8)

    half = build(titan, "s-ste")
    optimizers = container(titan, half)
    steps(half, optimizers, 4)
    saved, weights = optimizers.state_dict(), half.state_dict()

    resumed = build(titan, "s-ste")
    resumed.load_state_dict(weights)
    optimizers = container(titan, resumed)
    optimizers.load_state_dict(saved)
    assert optimizers.runs[0].step == 4
    steps(resumed, optimizers, 4)
    assert_identical(dict(resumed.state_dict()), dict(whole.state_dict()))


def test_model_can_be_frozen_and_saved_by_stock_keys(titan: Any, tmp_path: Any) -> None:
    model = build(titan, "s-ste")
    steps(model, container(titan, model), 2)
    nm.save(model, tmp_path, format="packed")
    assert {tensor.name for tensor in nm.verify(tmp_path).tensors} == {"up.weight", "down.weight"}
    nm.freeze_(model)
    assert type(model.up) is titan.Linear
    assert not list(sparse_modules(model))


def test_forgotten_clock_and_forgotten_layers_are_errors(titan: Any) -> None:
    model = build(titan, "sr-ste", decay=0.1)
    with pytest.raises(RuntimeError, match="no attached optimizer"):
        model(torch.randn(4, 16))
    dense = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="sparse_linear"):
        container(titan, dense)
    with pytest.raises(ValueError, match=r"4 x 6 layer cannot follow s-ste: in_features = 6 is not a multiple of 4"):
        titan.sparse_linear(linear_config(titan, 4, 6)).build()


def test_missing_number_of_updates_names_the_argument_of_the_override(titan: Any) -> None:
    model = build(titan, "mask-decay")
    with pytest.raises(ValueError, match=r"mask-decay plans over the whole run.*sparse_optimizers=\{\"total_steps\": \.\.\.\}"):
        container(titan, model, total_steps=None)


def test_channel_permutation_is_refused(titan: Any) -> None:
    with pytest.raises(ValueError, match=r"sparse_linear cannot follow asp with permute=True: .* Leave permute out"):
        titan.sparse_linear(linear_config(titan, 64, 16), recipe="asp", permute=True)
    config = titan.SparseTitanLinear.Config(in_features=16, out_features=64, recipe="asp", options={"permute": True})
    with pytest.raises(ValueError, match="permute=True"):
        config.build()
    assert titan.sparse_linear(linear_config(titan, 64, 16), recipe="asp", permute=False).recipe == "asp"


# ---- models of torchtitan, through its command line's parser and its overrides ----


def documented(language: str) -> str:
    """The code that the section of docs/integrations.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    section = SECTION.search(page)
    assert section is not None
    return section[0].split(f"```{language}\n")[1].split("```")[0]


def documented_imports() -> list[str]:
    words = shlex.split(documented("bash").replace("\\\n", " "))  # lines end as in a shell
    return words[words.index("--override.imports") + 1 :]


def stock_spec(family: str) -> Any:
    """A debug model of two layers. torchtitan's attentions for language models have no backward pass on a CPU."""
    attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = attention.Config()
    return spec


def overridden(family: str, imports: list[str]) -> Any:
    """The fields that matter here of a Trainer.Config, which does not import without datasets, after the overrides."""
    configurable: Any = importlib.import_module("torchtitan.config.configurable").Configurable
    optimizer = importlib.import_module("torchtitan.components.optimizer.optimizer")

    class Root(configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(configurable.Config):
            model_spec: Any
            optimizer: Any

    override = importlib.import_module("torchtitan.config.override")
    adamw = replace(optimizer.default_adamw(lr=1e-2), implementation="for-loop")
    root = Root.Config(model_spec=stock_spec(family), optimizer=adamw)
    override.apply_overrides(override.OverrideConfig(imports=override.parse_cli_imports(imports)), root)
    return root


def on_meta(spec: Any) -> Any:
    with torch.device("meta"):
        return spec.model.build()


def filled(model: Any) -> Any:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model.train()


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.randint(2048, (2, 17), generator=torch.Generator().manual_seed(1))
    predicted = model(tokens[:, :-1], positions=torch.arange(16).expand(2, 16), attention_masks=None)
    return nn.functional.cross_entropy(predicted.flatten(0, 1).float(), tokens[:, 1:].flatten())


def block_linears(titan: Any, model: Any) -> list[str]:
    """Found by the tree of modules, not by the patterns of names."""
    blocks = [getattr(layer, kind, None) for layer in model.layers.values() for kind in ("attention", "feed_forward")]
    inside = {id(module) for block in blocks if block is not None for module in block.modules()}
    return [name for name, module in model.named_modules() if id(module) in inside and isinstance(module, titan.Linear)]


@only_real
@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torchtitan's router asks for fp32
def test_documented_command_makes_a_real_model_sparse_and_it_trains(titan: Any, family: str) -> None:
    root = overridden(family, documented_imports())
    model = filled(on_meta(root.model_spec))
    assert list(model.state_dict()) == list(on_meta(stock_spec(family)).state_dict())
    optimizers = root.optimizer.build(model_parts=[model])
    (run,) = optimizers.runs
    assert run.layers == block_linears(titan, model)
    assert all(isinstance(model.get_submodule(name), titan.SparseTitanLinear) for name in run.layers)

    losses = []
    for _ in range(3):
        optimizers.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert run.step == 3
    for name in run.layers:
        assert nm.functional.violations(nm.effective_weight(model.get_submodule(name)), "2:4") == 0


@only_real
@pytest.mark.parametrize("family", ["llama3", "deepseek_v3", "gpt_oss"])
def test_everything_dense_of_a_real_model_is_in_skipped(titan: Any, family: str) -> None:
    model = on_meta(overridden(family, [f'{MODULE}.sparse_linear={{"recipe": "ste"}}']).model_spec)
    run = titan.run_of(model)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    assert set(run.skipped) == (linears | experts) - set(run.layers)
    assert run.skipped["lm_head"] == OUTSIDE
    if family == "deepseek_v3":
        assert run.skipped["layers.1.moe.router.gate"] == OUTSIDE
        assert run.skipped["layers.1.moe.shared_experts.w1"] == OUTSIDE
        why = run.skipped["layers.1.moe.routed_experts.inner_experts.w1_EFD"]
        assert "a stack of 8 matrices (experts) that GroupedExperts multiplies itself" in why
    if family == "gpt_oss":
        assert run.skipped["layers.0.attention.wo"].startswith("ScaledBiasRowwiseLinear is a subclass with a forward of its own")
    assert bool(experts) is (family != "llama3")


@only_real
def test_documented_override_of_ones_own_takes_fewer_layers(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("users_overrides")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(documented("python"), module.__dict__)
    run = titan.run_of(on_meta(overridden("llama3", ['users_overrides.sparse_feed_forward={"recipe": "sr-ste"}']).model_spec))
    assert run.layers == [f"layers.{layer}.feed_forward.{name}" for layer in (0, 1) for name in ("w1", "w2", "w3")]
    assert run.skipped["layers.0.attention.wo"].startswith("no override made it sparse")


def test_without_torchtitan_the_error_names_the_extra() -> None:
    code = f"import sys; sys.modules['torchtitan'] = None; import {MODULE}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert 'pip install "nmsparse[titan]"' in result.stderr
