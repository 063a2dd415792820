"""What makes it fast. Triton and cuSPARSELt are loaded only when a kernel is asked for."""

from nmsparse.kernels._activation_op import ACTIVATIONS, activate, activation_backward
from nmsparse.kernels._cusparselt import Product
from nmsparse.kernels._dispatch import (
    SPARSE_MATMUL,
    Selected,
    frozen_adamw_kernel,
    hardware,
    select,
    time_products,
    transposable_kernel,
)
from nmsparse.kernels._layout import misfit, packed_size, padded
from nmsparse.kernels._ops import (
    pack_gradient,
    pack_sparse,
    pack_weight,
    pack_weight_,
    sampled_grad_weight,
    sparse_matmul,
    trusts_layout,
    unpack_sparse,
)
from nmsparse.kernels._search import Choice, cache_folder, device_milliseconds
from nmsparse.kernels._serving_times import serving_times

__all__ = [
    "ACTIVATIONS",
    "SPARSE_MATMUL",
    "Choice",
    "Product",
    "Selected",
    "activate",
    "activation_backward",
    "cache_folder",
    "device_milliseconds",
    "frozen_adamw_kernel",
    "hardware",
    "misfit",
    "pack_gradient",
    "pack_sparse",
    "pack_weight",
    "pack_weight_",
    "packed_size",
    "padded",
    "sampled_grad_weight",
    "select",
    "serving_times",
    "sparse_matmul",
    "time_products",
    "transposable_kernel",
    "trusts_layout",
    "unpack_sparse",
]
