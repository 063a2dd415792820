"""The user's own model, names and tensors, whatever torch.compile and DistributedDataParallel put around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"
"""Under which torch.compile keeps the module that it wraps."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), nn.Module):
            model = inner
        else:
            return model


def own_name(name: str) -> str:
    """The name of a parameter or module, without what compiled submodules add to it."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict under own names: the parameters and buffers themselves."""
    found = {own_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}, and safetensors hold tensors only: keep it outside of the state dict, or "
                "make its get_extra_state return a tensor."
            )
        if value.is_meta:
            raise ValueError(
                f"{name} is on the meta device, so it has no values to save and no memory to load into: give it memory first, as "
                'model.to_empty(device="cpu") does.'
            )
    return found


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor (tied weights); an empty tensor has none but its own."""
    address = tensor.data_ptr() if tensor.numel() else id(tensor)
    return address, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
