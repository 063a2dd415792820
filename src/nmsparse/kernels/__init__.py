"""What makes it fast. Triton is imported only when a kernel is asked for."""

from nmsparse.kernels._dispatch import frozen_adamw_kernel

__all__ = ["frozen_adamw_kernel"]
