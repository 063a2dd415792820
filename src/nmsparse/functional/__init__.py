"""Stateless maths on tensors, in plain torch: the reference for every kernel.

All functions work on groups of M consecutive entries along ``dim``. Patterns are written ``"N:M"`` and keep N of M.
"""

from nmsparse.functional._bits import pack_bits, unpack_bits
from nmsparse.functional._channels import LARGEST_PERMUTED_GROUP, channel_permutation, permutation_efficacy
from nmsparse.functional._fp8 import matmul_fp8, quantize_fp8
from nmsparse.functional._groups import check_divisible, from_groups, magnitude_rank, to_groups
from nmsparse.functional._masks import backward_mask, flip_rate, magnitude_mask, violations
from nmsparse.functional._mvue import mvue, mvue_approximate, mvue_probabilities
from nmsparse.functional._pack import pack, unpack
from nmsparse.functional._random import (
    counter_permutation,
    counter_uniform,
    counter_uniform_grid,
    hash_integers,
    wrap_int32,
)
from nmsparse.functional._sdgp import sdgp
from nmsparse.functional._soft import least_squares_scale, soft_threshold, soft_threshold_scale
from nmsparse.functional._staged import stage_at, staged_mask
from nmsparse.functional._transposable import LARGEST_MAGNITUDE, block_patterns, transposable_mask

__all__ = [
    "LARGEST_MAGNITUDE",
    "LARGEST_PERMUTED_GROUP",
    "backward_mask",
    "block_patterns",
    "channel_permutation",
    "check_divisible",
    "counter_permutation",
    "counter_uniform",
    "counter_uniform_grid",
    "flip_rate",
    "from_groups",
    "hash_integers",
    "least_squares_scale",
    "magnitude_mask",
    "magnitude_rank",
    "matmul_fp8",
    "mvue",
    "mvue_approximate",
    "mvue_probabilities",
    "pack",
    "pack_bits",
    "permutation_efficacy",
    "quantize_fp8",
    "sdgp",
    "soft_threshold",
    "soft_threshold_scale",
    "stage_at",
    "staged_mask",
    "to_groups",
    "transposable_mask",
    "unpack",
    "unpack_bits",
    "violations",
    "wrap_int32",
]
