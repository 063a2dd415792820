"""Model surgery by class swap: convert, undo, bake. Every check comes before the first change."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmsparse.functional import hash_integers
from nmsparse.nn._experts import ExpertStack, SparseExpertsMixin, dense_products, refused, swap_in
from nmsparse.nn._layer import Layer
from nmsparse.nn._modules import SparseMixin, final_weight, sparse_class
from nmsparse.nn._packed import PackedMixin, unpack_all_
from nmsparse.nn._permute import Permuted, permute_channels_
from nmsparse.nn._products import wide
from nmsparse.nn._swapped import dense_class
from nmsparse.nn._targets import Target, Targets, select
from nmsparse.recipes import Recipe


class SparseModule(nn.Module, SparseMixin):
    """For type checkers: a converted module is an nn.Module with the mixin's methods."""


class RemovedWithSparsity:
    """Base of forward pre-hooks that ``densify_`` and ``freeze_`` take away again."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Called before every forward of the module."""

    def check_removable(self, model: nn.Module) -> None:
        """Called with the model that loses its sparsity, before anything changes: raise where the hook must stay."""

    def removed(self, model: nn.Module) -> None:
        """Called when the hook is gone and the layers of the model are plain."""

    def undo(self) -> None:
        """Called after that by ``densify_``."""


class _KeepsForward(RemovedWithSparsity):
    """nn.TransformerEncoderLayer reads the weights of its linears in a fused fast path unless one of them has a hook."""


def sparse_modules(model: nn.Module) -> Iterator[tuple[str, SparseModule]]:
    """Names and modules of all converted layers; stacks of experts, which are parameters, as if they were modules."""
    for name, module in model.named_modules():
        if isinstance(module, SparseMixin):
            yield name, cast(SparseModule, module)
        elif isinstance(module, SparseExpertsMixin):
            for key, stack in module._nmsparse_stacks.items():
                yield f"{name}.{key}" if name else key, cast(SparseModule, stack)


def convert_(
    model: nn.Module, recipe: Recipe, targets: Targets, exclude: Targets | None, seed: int
) -> tuple[dict[str, SparseModule], dict[str, str], Permuted]:
    """Swap the selected layers in place; return them by name, the reasons of those that stay dense, and what was reordered."""
    _check_model(model)
    selection = select(model, targets, exclude)
    owners = _owners(model)
    records: dict[str, Layer] = {}
    skipped = dict(selection.skipped)
    for name, module in selection.layers.items():
        verdict = _examine(name, module, recipe, owners, seed)
        if isinstance(verdict, Layer):
            records[name] = verdict
            skipped.update({f"{name} ({product})": why for product, why in verdict.dense.items()})
        elif selection.is_named:
            raise ValueError(f"{_label(name)}: {verdict}. Leave it out (exclude=[{name!r}]) or change the layer.")
        else:
            skipped[name] = verdict
    if not records:
        reasons = "; ".join(f"{_label(name)}: {why}" for name, why in list(skipped.items())[:4])
        raise ValueError(
            f"no layer of this {type(model).__name__} can be made sparse with {recipe.name} {recipe.pattern}: {reasons}."
        )
    permuted = Permuted()
    if recipe.permutes_channels:
        modules = {name: module for name in records if isinstance(module := selection.layers[name], nn.Module)}
        permuted = permute_channels_(model, modules, recipe.pattern)
        skipped.update({f"{name} (permutation)": why for name, why in permuted.skipped.items()})
        for layer in records.values():
            layer.permuted = permuted
    try:
        _init_states(records, selection.layers)
    except BaseException:
        permuted.undo_()
        raise
    return _swap(model, records, selection.layers), skipped, permuted


def _label(name: str) -> str:
    return name or "the model itself"


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"sparsify_ takes an nn.Module, got {type(model).__name__}.")
    wrappers = {
        "OptimizedModule": "torch.compile",
        "DistributedDataParallel": "DistributedDataParallel",
        "FullyShardedDataParallel": "FSDP",
    }
    for name, module in model.named_modules():
        if type(module).__name__ in wrappers:
            raise ValueError(
                f"{name or 'the model'} is wrapped by {wrappers[type(module).__name__]} already: call sparsify_ on the plain "
                "model first, then wrap it."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device, so it has no values to prune: materialise the model (to_empty and load "
                "weights) before sparsify_."
            )
    sharded = [name for name, parameter in model.named_parameters() if type(parameter.data).__name__ == "DTensor"]
    # after a forward pass FSDP2 leaves whole weights in some modules, and their class alone tells
    sharded += [name or "the model" for name, module in model.named_modules() if _is_fsdp(type(module))]
    if sharded:
        raise ValueError(f"{sharded[0]} is sharded (DTensor) already: call sparsify_ before fully_shard or tensor parallelism.")


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """For every parameter, by identity, the names under which different modules hold it; more than one means tied."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():  # a module reachable by two paths is visited once: one layer, not a tie
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{key}" if name else key)
    return owners


def _examine(name: str, module: Target, recipe: Recipe, owners: dict[int, list[str]], seed: int) -> Layer | str:
    """A record for a layer that can be sparse, or the reason why it stays dense."""
    layer = getattr(module, "_nmsparse", None)
    if isinstance(module, SparseMixin) and layer is not None:
        raise ValueError(
            f"{_label(name)} is sparse already ({layer.recipe.name} {layer.recipe.pattern}): call densify_ first, or exclude it."
        )
    if isinstance(module, ExpertStack):
        why = refused(recipe) or _replaced(module.owner) or _unfit(name, name, module.weight, owners)
    else:
        why = _unswappable(module) or _unfit(
            name, f"{name}.weight" if name else "weight", module._parameters.get("weight"), owners
        )
    if why is not None:
        return why
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    sizes = _view(module, cast(Tensor, module.weight)).shape
    fit = recipe.fit(sizes[0] // groups, sizes[-1])
    if fit.refused is not None:
        return fit.refused
    dense = {**fit.dense, **(dense_products(recipe) if isinstance(module, ExpertStack) else {})}
    return Layer(name, recipe, stream=hash_integers(seed, zlib.crc32(name.encode())), dense=dense, groups=groups)


def _unswappable(module: nn.Module) -> str | None:
    """Why our forward cannot take the place of a module's own."""
    if nn.utils.parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    if sparse_class(type(module)) is None:
        if type(module).__name__ == "NonDynamicallyQuantizableLinear":
            return "nn.MultiheadAttention reads this weight without calling the layer, which would bypass the recipe"
        return f"{type(module).__name__} is a subclass with a forward of its own, which the recipe would replace"
    return _replaced(module)


def _replaced(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "its forward was replaced on the layer itself, as accelerate's hooks do, which would bypass the recipe"
    return None


def _unfit(name: str, key: str, weight: Tensor | None, owners: dict[int, list[str]]) -> str | None:
    """Why a parameter, known to the model as ``key``, cannot be pruned."""
    if weight is None:
        return "its weight is not a plain parameter (weight norm computes it)"
    if nn.parameter.is_lazy(weight):
        return "its weight has no size yet: run one forward pass before sparsify_"
    others = [owner for owner in owners[id(weight)] if owner != key]
    if others:
        return f"its weight is tied to {others[0]}"
    if not weight.requires_grad:
        return "its weight is frozen (requires_grad=False), so training cannot shape its mask"
    if not weight.is_floating_point():
        return f"its weight has dtype {weight.dtype}, which cannot be trained"
    if not bool(weight.detach().isfinite().all()):
        raise ValueError(
            f"{_label(name)}: its {tuple(weight.shape)} weight holds NaN or Inf, so magnitudes mean nothing; repair or "
            "re-initialise it before sparsify_."
        )
    return None


def _view(module: Target, tensor: Tensor) -> Tensor:
    if isinstance(module, ExpertStack):
        return module.view_weight(tensor)
    kind = cast(type[SparseModule], sparse_class(type(module)))
    return kind.view_weight(cast(SparseModule, module), tensor)


def layer_sizes(module: Target) -> tuple[int, int, bool, torch.device, torch.dtype] | None:
    """Of a layer that is one matrix product: O, I, whether its weight is stored (I, O), where, and in which type."""
    if isinstance(module, ExpertStack):
        return None
    kind = sparse_class(type(module))
    weight = module._parameters.get("weight")
    if kind is None or weight is None or nn.parameter.is_lazy(weight) or not cast(Any, kind).multiplies_matrices.fget(module):
        return None
    view = _view(module, weight)
    return view.shape[0], view.shape[-1], view.stride(-1) != 1 and weight.ndim == 2, weight.device, weight.dtype


def _init_states(records: dict[str, Layer], modules: dict[str, Target]) -> None:
    with torch.no_grad():
        for name, layer in records.items():
            layer.init_state(wide(_view(modules[name], cast(Tensor, modules[name].weight).detach())))


def _swap(model: nn.Module, records: dict[str, Layer], modules: dict[str, Target]) -> dict[str, SparseModule]:
    for name, layer in records.items():
        module = modules[name]
        if isinstance(module, ExpertStack):
            swap_in(module, layer)
            continue
        kind = sparse_class(type(module))
        assert kind is not None
        module._nmsparse = layer  # pyrefly: ignore
        module.__class__ = kind
    keep_forwards_(model)
    return {name: cast(SparseModule, modules[name]) for name in records}


def keep_forwards_(model: nn.Module) -> None:
    """See to it that nn.TransformerEncoderLayer calls those of its linears that are ours now."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            for linear in (module.linear1, module.linear2):
                if isinstance(linear, SparseMixin | PackedMixin):
                    cast(nn.Module, linear).register_forward_pre_hook(_KeepsForward())


def densify_(model: nn.Module) -> nn.Module:
    """Undo a conversion: the dense master weights in plain modules, as if nothing had happened. Returns the model.

    What ``accelerate_`` packed is a plain layer with its pruned weight again.
    """
    for _, _, hook in _hooks(model):
        hook.check_removable(model)
    unpack_all_(model)
    reshard(model)
    for hook in _strip(model):
        hook.undo()
    return model


@torch.no_grad()
def freeze_(model: nn.Module) -> nn.Module:
    """Bake the final pattern: exact zeros (+0.0) in the weights, plain modules again. Returns the model.

    Of a sharded model the shards are baked, and every rank must call this.
    """
    for _, _, hook in _hooks(model):
        hook.check_removable(model)
    reshard(model)
    for _, module in sparse_modules(model):
        layer = module._nmsparse
        module.weight.copy_(final_weight(module))
        if layer.permuted is not None:  # undoing the new order would break the pattern just baked
            layer.permuted.moves.clear()
    _strip(model)
    return model


def reshard(model: nn.Module) -> None:
    """FSDP2 leaves whole copies in some modules after a forward pass; what is written there would be lost."""
    for module in model.modules():
        if _is_fsdp(type(module)):
            cast(Any, module).reshard()


def _is_fsdp(kind: type) -> bool:
    """A class that ``fully_shard`` or ``replicate`` made, told without importing torch.distributed."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _without_sparsity(kind: type[nn.Module]) -> type[nn.Module]:
    """The plain class; ``fully_shard`` and ``replicate`` put a class of their own in front of it, which stays."""
    dense, (front, *_) = dense_class(kind), kind.__bases__
    if not _is_fsdp(front):
        return dense
    name = kind.__name__.removesuffix(kind.__bases__[-1].__name__) + dense.__name__
    return type(name, (front, dense), {"__deepcopy__": kind.__dict__["__deepcopy__"]})


def _strip(model: nn.Module) -> list[RemovedWithSparsity]:
    """Turn sparse modules back into plain ones; return the hooks that were taken away."""
    for _, module in list(sparse_modules(model)):
        holder = module.holder
        if getattr(holder, "is_swapped", False):  # a module of two stacks is met twice
            holder.__class__ = _without_sparsity(type(holder))
        holder.__dict__.pop("_nmsparse_stacks", None)
        del module._nmsparse
    removed: list[RemovedWithSparsity] = []
    for module, key, hook in _hooks(model):
        del module._forward_pre_hooks[key]
        hook.removed(model)
        removed.append(hook)
    return removed


def _hooks(model: nn.Module) -> list[tuple[nn.Module, int, RemovedWithSparsity]]:
    """The hooks that go with sparsity, with their modules and keys."""
    hooks = [(module, key, hook) for module in model.modules() for key, hook in module._forward_pre_hooks.items()]
    return [(module, key, hook) for module, key, hook in hooks if isinstance(hook, RemovedWithSparsity)]
