"""Which layers a conversion is asked for: keywords, name suffixes, or a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import nn

from nmsparse.nn._conv1d import is_hf_conv1d
from nmsparse.nn._experts import ExpertStack, experts_of

Targets = str | Sequence[str]
Target = nn.Module | ExpertStack
KEYWORDS = ("all-linear", "all")


@dataclass
class Selection:
    """The layers asked for, whether the user named them, and those left out with a reason."""

    layers: dict[str, Target]
    is_named: bool
    skipped: dict[str, str] = field(default_factory=dict)


def is_linear(module: Target) -> bool:
    return isinstance(module, nn.Linear | ExpertStack) or any(is_hf_conv1d(kind) for kind in type(module).__mro__)


def select(model: nn.Module, targets: Targets, exclude: Targets | None) -> Selection:
    """Resolve ``targets`` and ``exclude`` against the names of the model's modules."""
    _check_spec("targets", targets)
    if exclude is not None:
        _check_spec("exclude", exclude)
    modules = {name: module for name, module in model.named_modules() if is_linear(module) or isinstance(module, nn.Conv2d)}
    every: dict[str, Target] = {**modules, **experts_of(model)}
    names = _all_names(model, every)
    if targets in KEYWORDS:
        selection = _sweep(model, modules, keyword=str(targets))
        selection.layers |= experts_of(model)
    else:
        chosen = {name: module for name, module in every.items() if any(matches(n, targets) for n in names[name])}
        selection = Selection(chosen, is_named=True)
        _check_all_found(model, every, {n for name in every for n in names[name]}, targets)
    if exclude is not None:
        selection.layers = {n: module for n, module in selection.layers.items() if not _is_excluded(names[n], module, exclude)}
        selection.skipped = {name: why for name, why in selection.skipped.items() if not matches(name, exclude)}
    if not selection.layers:
        raise ValueError(
            f"targets={targets!r} with exclude={exclude!r} selects no layer of this {type(model).__name__}. "
            f"Its linear and convolution layers are: {_shorten(every)}."
            + (' targets="all" takes convolutions too.' if every else "")
        )
    return selection


def matches(name: str, spec: Targets) -> bool:
    """A string is a regular expression for the whole name; a list holds names or their last parts."""
    if isinstance(spec, str):
        return re.fullmatch(spec, name) is not None
    return any(name == suffix or name.endswith("." + suffix) for suffix in spec)


def _all_names(model: nn.Module, every: dict[str, Target]) -> dict[str, list[str]]:
    """By the name under which a layer was found first, all that lead to it: a module may be registered twice."""
    first = {id(module): name for name, module in every.items()}
    names = {name: [name] for name in every}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first and name != first[id(module)]:
            names[first[id(module)]].append(name)
    return names


def _is_excluded(names: list[str], module: Target, exclude: Targets) -> bool:
    if exclude in KEYWORDS:
        return exclude == "all" or is_linear(module)
    return any(matches(name, exclude) for name in names)


def _sweep(model: nn.Module, modules: dict[str, nn.Module], keyword: str) -> Selection:
    if keyword == "all":
        selection = Selection(dict(modules), is_named=False)
    else:
        linear = {name: module for name, module in modules.items() if is_linear(module)}
        heads = _output_heads(model, linear)
        selection = Selection({name: m for name, m in linear.items() if name not in heads}, is_named=False, skipped=heads)
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            where = f"{name}.in_proj_weight" if name else "in_proj_weight"
            selection.skipped[where] = "nn.MultiheadAttention holds this weight itself, outside any linear layer"
    selection.skipped.update(_stacked_parameters(model))
    _leave_out_adapters(model, selection)
    return selection


def _stacked_parameters(model: nn.Module) -> dict[str, str]:
    """Parameters that seem to hold one matrix per expert, in modules that are not known to read them as transformers' do."""
    found: dict[str, str] = {}
    known = experts_of(model)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn."):  # a Conv1d has a weight of three dims too
            continue
        for key, parameter in module._parameters.items():
            label = f"{name}.{key}" if name else key
            if parameter is None or parameter.ndim != 3 or parameter.shape[0] == 1 or label in known:
                continue  # a position embedding is (1, n, c)
            found[label] = (
                f"a stack of {parameter.shape[0]} matrices (experts) that {type(module).__name__} multiplies itself, outside any "
                "linear layer"
            )
    return found


def _leave_out_adapters(model: nn.Module, selection: Selection) -> None:
    """PEFT puts layers of its own inside the layer that it adapts; only ``base_layer`` is the model's."""
    for owner, module in model.named_modules():
        if not type(module).__module__.startswith("peft.tuners.") or not hasattr(module, "base_layer"):
            continue
        for name in list(selection.layers):
            if name.startswith(f"{owner}.") and not name.startswith(f"{owner}.base_layer"):
                del selection.layers[name]
                selection.skipped[name] = "part of a PEFT adapter, which is small and stays dense unless it is named in targets"


def _output_heads(model: nn.Module, linear: dict[str, nn.Module]) -> dict[str, str]:
    """The layers that produce the model's final output, with how they were recognised."""
    if callable(getattr(model, "get_output_embeddings", None)):  # a transformers model knows its own
        head = model.get_output_embeddings()  # pyrefly: ignore
        prefix = getattr(model, "base_model_prefix", "")
        base = getattr(model, prefix, None) if prefix else None
        inside = {id(module) for module in base.modules()} if isinstance(base, nn.Module) else None
        return {
            name: "output head of the model; name it in targets to make it sparse"
            for name, module in linear.items()
            if module is head or (inside is not None and id(module) not in inside)
        }
    parametrized = [name for name, module in model.named_modules() if module._parameters]
    if parametrized == list(linear):  # the linear layer is all there is
        linear = {} if len(linear) == 1 else linear
    if not linear:
        return {}
    return {list(linear)[-1]: "taken for the output head (the last linear layer); name it in targets to make it sparse"}


def _check_spec(argument: str, spec: object) -> None:
    if isinstance(spec, str):
        if spec not in KEYWORDS:
            try:
                re.compile(spec)
            except re.error as error:
                raise ValueError(
                    f'{argument}={spec!r} is not a valid regular expression ({error}); for names use a list, e.g. ["fc1", "fc2"].'
                ) from None
    elif not isinstance(spec, Sequence) or not all(isinstance(item, str) for item in spec):
        raise TypeError(f'{argument} is "all-linear", "all", a list of name suffixes or a regular expression, got {spec!r}.')


def _check_all_found(model: nn.Module, every: dict[str, Target], names: set[str], targets: Targets) -> None:
    for item in [targets] if isinstance(targets, str) else targets:
        spec: Targets = item if isinstance(targets, str) else [item]
        if any(matches(name, spec) for name in names):
            continue
        other = next((f"{name} ({type(m).__name__})" for name, m in model.named_modules() if name and matches(name, spec)), None)
        stacked = next((name for name in _stacked_parameters(model) if matches(name, spec)), None)
        if stacked is not None:
            hint = f" It matches {stacked}, {_stacked_parameters(model)[stacked]}: such parameters cannot be sparse yet."
        elif other is not None:
            hint = f" It matches {other}, which is no linear or convolution layer."
        else:
            tails = {name.rsplit(".", 1)[-1] for name in every}
            close = get_close_matches(item, sorted(tails | set(every)), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"target {item!r} matches no layer of this {type(model).__name__}.{hint} Its layers are: {_shorten(every)}."
        )


def _shorten(names: dict[str, Target], most: int = 8) -> str:
    shown = [name or "(the model itself)" for name in list(names)[:most]]
    return (", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")) or "none"
