"""What makes it fast. Triton and cuSPARSELt are loaded only when a kernel is asked for."""

from nmsparse.kernels._dispatch import SPARSE_MATMUL, Selected, frozen_adamw_kernel, select
from nmsparse.kernels._layout import misfit, packed_size
from nmsparse.kernels._ops import pack_gradient, pack_sparse, pack_weight_, padded, sparse_matmul

__all__ = [
    "SPARSE_MATMUL",
    "Selected",
    "frozen_adamw_kernel",
    "misfit",
    "pack_gradient",
    "pack_sparse",
    "pack_weight_",
    "packed_size",
    "padded",
    "select",
    "sparse_matmul",
]
