"""Layers that run the three products as a recipe says, and the surgery that puts them into a model."""

from typing import Any

from nmsparse.nn._compiled import fast
from nmsparse.nn._convert import (
    RemovedWithSparsity,
    SparseModule,
    convert_,
    densify_,
    freeze_,
    keep_forwards_,
    layer_sizes,
    reshard,
    sparse_modules,
)
from nmsparse.nn._experts import EXPERT_NAMES, grouped_weights
from nmsparse.nn._layer import Layer
from nmsparse.nn._mlp import fused_mlp
from nmsparse.nn._modules import (
    SparseConv2d,
    SparseLinear,
    SparseMixin,
    effective_weight,
    final_weight,
    follow_loaded,
    grouped_dim,
    layer_of,
    sparse_class,
)
from nmsparse.nn._packed import PackedLinear, PackedMixin, pack_, packed_class, unpack_, unpack_all_
from nmsparse.nn._permute import Permuted, permute_channels_
from nmsparse.nn._sharded import held, is_sharded, rank, ranks, splits_rows, spread, sum_over_shards, whole
from nmsparse.nn._sparse import SparseProducts, obstacles
from nmsparse.nn._targets import Targets
from nmsparse.nn._targets import select as select_layers

__all__ = [
    "EXPERT_NAMES",
    "Layer",
    "PackedLinear",
    "PackedMixin",
    "Permuted",
    "RemovedWithSparsity",
    "SparseConv2d",
    "SparseLinear",
    "SparseMixin",
    "SparseModule",
    "SparseProducts",
    "Targets",
    "convert_",
    "densify_",
    "effective_weight",
    "fast",
    "final_weight",
    "follow_loaded",
    "freeze_",
    "fused_mlp",
    "grouped_dim",
    "grouped_weights",
    "held",
    "is_sharded",
    "keep_forwards_",
    "layer_of",
    "layer_sizes",
    "obstacles",
    "pack_",
    "packed_class",
    "permute_channels_",
    "rank",
    "ranks",
    "reshard",
    "select_layers",
    "sparse_modules",
    "splits_rows",
    "spread",
    "sum_over_shards",
    "unpack_",
    "unpack_all_",
    "whole",
]


def __getattr__(name: str) -> Any:
    # built on demand, because its base class belongs to transformers; unpickling finds it here
    if name == "SparseConv1D":
        from transformers.pytorch_utils import Conv1D

        return sparse_class(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
