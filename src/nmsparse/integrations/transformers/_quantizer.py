"""``from_pretrained`` for packed checkpoints.

transformers builds the model on the meta device, opens the files memory-mapped and hands over the two tensors that stand for a
weight; :class:`Unpack` makes the weight from them, which takes its place in the model at once. Packed and dense form of one
weight meet in memory, of the whole model never. Nothing packed remains, so the loaded model is marked as an ordinary one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nmsparse.checkpoint import INDICES, VALUES, Layout, unpack_tensor
from nmsparse.nn import EXPERT_NAMES

METHOD = "nmsparse"
VERSION = 1
NAMES = ("weight", *EXPERT_NAMES)
"""Of parameters that may be packed."""
CASTS = hasattr(HfQuantizer, "get_new_dtype")
"""transformers casts the values before they are unpacked (5.22 does, 5.17 leaves their type to the conversion)."""
PARTS = {name: [name + VALUES, name + INDICES] for name in NAMES}


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a packed checkpoint: how each packed tensor is laid out."""

    def __init__(self, tensors: Mapping[str, Any], version: int = VERSION, **kwargs: Any) -> None:
        if version != VERSION:
            raise ValueError(f"config.json has packed weights of version {version!r}; this nmsparse reads version {VERSION}.")
        if not isinstance(tensors, Mapping):
            raise ValueError("config.json: quantization_config.tensors maps names of packed tensors to their layouts.")
        self.quant_method = METHOD
        self.version = version
        self.tensors = dict(tensors)

    @property
    def dequantize(self) -> bool:
        """For transformers: weights are whole again once they are loaded."""
        return True


class Unpack(ConversionOps):
    """Values and index bits of a weight, to the weight."""

    def __init__(self, hf_quantizer: PackedQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: nn.Module,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        layout = self.hf_quantizer.layout(full_layer_name, model)
        parts = PARTS[full_layer_name.rpartition(".")[2]]
        if set(input_dict) != set(parts):
            raise ValueError(f"{full_layer_name} is packed in two tensors; the files hold only {', '.join(input_dict)}.")
        expected = tuple(model.get_parameter(full_layer_name).shape)
        if layout.shape != expected:
            raise ValueError(f"{full_layer_name} is packed with shape {layout.shape}; this model's has {expected}.")
        values, indices = (input_dict[key][0] for key in parts)
        if not CASTS:
            values = values.to(_wanted_dtype(full_layer_name, model))
        return {full_layer_name: unpack_tensor(values, indices, layout, full_layer_name)}


def _wanted_dtype(name: str, model: Any) -> torch.dtype:
    """The type that the caller of ``from_pretrained`` asked for, or that the architecture insists on for this weight."""
    wanted: torch.dtype = model.get_parameter(name).dtype
    kept: Mapping[str, torch.dtype] = model._get_dtype_plan(wanted)
    return next((dtype for part, dtype in kept.items() if part in name.split(".")), wanted)


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Reads packed checkpoints; there is nothing to quantize."""

    requires_calibration = True  # transformers' way to refuse a model that is not packed yet
    serialized_names: ClassVar[dict[str, list[str]]] = PARTS
    quantization_config: PackedConfig

    def layout(self, name: str, model: nn.Module) -> Layout:
        """How a weight is packed. A model with a head and the one without differ in a prefix."""
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        tensors = self.quantization_config.tensors
        for candidate in (name, prefix + name, name.removeprefix(prefix)):
            if candidate in tensors:
                return Layout.read(candidate, tensors[candidate])
        raise ValueError(f"config.json does not say how {name} is packed; write the folder with save_packed.")

    def get_weight_conversions(self) -> list[WeightConverter]:
        """All that older versions ask for; newer ones make the same of ``serialized_names`` and ``get_load_operations``."""
        return [WeightConverter(parts, name, [Unpack(self)]) for name, parts in PARTS.items()]

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": Unpack}

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Values are cast as any weight would be, before they are unpacked; index bits are not."""
        return dtype if param.get_dtype().startswith(("F", "BF")) else None

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # save_pretrained would undo the conversions of loading, but what is saved from here on is dense
        used = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [item for item in used if not _unpacks(item)] or None
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _unpacks(conversion: Any) -> bool:
    return any(isinstance(operation, Unpack) for operation in getattr(conversion, "operations", ()))
