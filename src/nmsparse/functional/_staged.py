"""A magnitude mask whose pattern moves with time, as one opaque op."""

from __future__ import annotations

import torch
from torch import Tensor

from nmsparse.functional._masks import magnitude_mask
from nmsparse.pattern import Pattern


def stage_at(progress: float, stages: int) -> int:
    """Which of equal stages a progress from 0 to 1 falls into."""
    # the nudge is far below one update of any run and keeps a boundary on the right side of the rounding
    return min(int(stages * progress + 1e-9), stages - 1)


# The group size changes from stage to stage, and with it every shape inside. As an opaque op the change stays invisible
# to torch.compile; `progress` lies on the CPU, so reading it does not wait for a GPU.
@torch.library.custom_op("nmsparse::staged_mask", mutates_args=())
def staged_mask(x: Tensor, progress: Tensor, kept: list[int], sizes: list[int]) -> Tensor:
    """Magnitude mask along the last dim under the pattern of the present stage.

    ``progress`` (0-d, on the CPU) runs from 0 to 1 through equal stages ``kept[i]:sizes[i]``; below 0 all is kept.
    """
    value = float(progress)
    if value < 0:
        return torch.ones(x.shape, dtype=torch.bool, device=x.device)
    stage = stage_at(value, len(kept))
    return magnitude_mask(x, Pattern(kept[stage], sizes[stage])).contiguous()


@staged_mask.register_fake
def _(x: Tensor, progress: Tensor, kept: list[int], sizes: list[int]) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)
