"""What wrappers made of the layers and of the optimizer: FSDP, DeepSpeed and models that pass their own layers by.

Everything here turns numbers that would be silently wrong into an error, or into a warning where only the user can tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nmsparse._update import LayerHandle
from nmsparse.nn import Layer, Permuted
from nmsparse.recipes import Recipe


def parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters that an optimizer updates now, by identity."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_shapes(layers: Sequence[LayerHandle]) -> None:
    """Masks, decay and scales of a flattened weight would be those of another matrix."""
    for layer in layers:
        if layer.parameter.shape != layer.shape:
            raise ValueError(
                f"{layer.name}.weight was {tuple(layer.shape)} at conversion and is {tuple(layer.parameter.shape)} now, so the "
                "N:M groups in it cannot be found: FSDP1 (FullyShardedDataParallel) or DeepSpeed ZeRO-3 flattened it. Shard the "
                "model with torch's fully_shard (FSDP2) instead."
            )


def check_untied(layers: Sequence[LayerHandle], model: nn.Module) -> None:
    """Weights that another module got too after the conversion: two sparse layers would add their decay to one gradient, and
    ``freeze_`` would prune an embedding."""
    by_weight: dict[int, LayerHandle] = {}
    for layer in layers:
        by_weight.setdefault(id(layer.parameter), layer)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            owner = by_weight.get(id(parameter))
            if owner is not None and module is not owner.module.holder:
                other = name if key == "weight" else f"{name}.{key}"
                raise ValueError(
                    f"{owner.name} and {other} share one weight, {tuple(owner.shape)}, tied after sparsify_, so what is done to "
                    "the one would be done to the other: tie them before sparsify_, which then leaves them dense, or exclude "
                    "the layer."
                )


def check_not_captured(layers: Sequence[LayerHandle]) -> None:
    """The clock is Python: a replayed graph would not run it, and schedules, masks and random numbers would stand still."""
    if any(layer.parameter.is_cuda for layer in layers[:1]) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimizer.step() was called while a CUDA graph is captured, and a replay would not move the run's clock: capture "
            "forward and backward pass only, and call optimizer.step() between replays."
        )


def check_updated(optimizer: torch.optim.Optimizer, layers: Sequence[LayerHandle], recipe: Recipe) -> None:
    """What is done to the gradient and the weight of a layer must reach the optimizer."""
    owned = parameters_of(optimizer)
    lost = next((layer for layer in layers if layer.parameter.requires_grad and id(layer.parameter) not in owned), None)
    if lost is None:
        return
    kind = type(optimizer).__name__
    without = "" if recipe.needs_clock else f" {recipe.name} also trains without run.attach, which then only measures."
    raise RuntimeError(
        f"{lost.name}.weight was among the parameters of this {kind} when run.attach was called, and is not at its first update, "
        "so masks and decay would not reach it: DeepSpeed ZeRO-1 and ZeRO-2 give the optimizer flat copies. Use torch's "
        "fully_shard (FSDP2) or DistributedDataParallel instead. (Under fully_shard, the weights must be sharded when the "
        f"optimizer steps: leave set_reshard_after_backward on, or call reshard() first.){without}"
    )


def check_left_out(optimizer: torch.optim.Optimizer, others: Sequence[LayerHandle]) -> None:
    """A layer that no optimizer was attached for, although this one updates it."""
    owned = parameters_of(optimizer)
    found = [layer.name for layer in others if id(layer.parameter) in owned]
    if found:
        raise RuntimeError(
            f"this {type(optimizer).__name__} updates {', '.join(found[:4])} ({len(found)} sparse layers in all) without a "
            "clock: their weights were not among its parameters when run.attach was called. Add parameter groups before that; "
            "and under fully_shard, if a forward pass came before, call reshard() on the outermost sharded module first."
        )


def check_moments(optimizer: torch.optim.Optimizer, permuted: Permuted) -> None:
    """Before a run's first update an optimizer may hold no moments of reordered channels: they are in the old order."""
    held = ((name, parameter, optimizer.state.get(parameter, {})) for name, parameter in permuted.parameters())
    stale = next((name for name, parameter, state in held if _has_moments(parameter, state)), None)
    if stale is not None:
        raise RuntimeError(
            f"{stale}: its channels were reordered when the model was converted (permute=True), and this "
            f"{type(optimizer).__name__} holds state for it from before. Make a new optimizer after sparsify_; to go on with a "
            "saved run, call run.load_state_dict before the first update."
        )


def _has_moments(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    """Zeros have no order: torch.distributed.checkpoint makes such state ahead of time."""
    tensors = (value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape)
    return any(bool(value.any()) for value in tensors)


def warn_of_bypass(layers: Sequence[LayerHandle]) -> None:
    """A model that reads ``layer.weight`` without calling the layer trains it dense, and ``freeze_`` then prunes it."""
    if Layer.was_traced:
        return
    found = [handle.name for handle in layers if handle.parameter.grad is not None and not handle.layer.was_called]
    if found:
        names = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        warnings.warn(
            f"{names}: the weight got a gradient, but the layer itself was never called, so it trains dense and would be pruned "
            "only by freeze_. The model seems to read layer.weight itself, as in F.linear(x, layer.weight): call layer(x) there, "
            "or leave the layer out, sparsify_(..., exclude=[...]).",
            stacklevel=2,
        )
