"""What a run tells about its masks and gradients while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse._stats import numbers
from nmsparse.functional import pack_bits, unpack_bits
from nmsparse.nn import SparseModule, sparse_modules

ENTRIES = 1 << 20
"""Mask bits that are followed per layer, from its first rows: a large model's masks would not fit twice beside it."""
PICTURE_ROWS, PICTURE_COLUMNS = 32, 64


class MaskWatch:
    """Follows the masks of the sparse layers from one validation to the next."""

    def __init__(self, model: nn.Module, run: nm.Run) -> None:
        self.modules = {name: module for name, module in sparse_modules(model) if name in run.layers}
        self.picture = next(iter(list(self.modules)[len(self.modules) // 2 :]), None)
        """The layer whose mask is shown: one from the middle of the model."""
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    @torch.no_grad()
    def look(self) -> dict[str, float | None]:
        """Share of mask bits that differ from the last look, and from the first."""
        masks = {name: pack_bits(_mask(module)[: _rows(module)]).cpu() for name, module in self.modules.items()}
        shares = {"churn": self._differing(self._last, masks), "from_start": self._differing(self._first, masks)}
        self._first = self._first or masks
        self._last = masks
        return shares

    def _differing(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> float | None:
        if not before:
            return None
        changed = sum(_count(before[name] ^ bits) for name, bits in after.items())
        return changed / max(1, sum(_rows(m) * _columns(m) for m in self.modules.values()))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run compares with the same masks."""
        return {"first": self._first, "last": self._last}

    def load(self, state: dict[str, Any]) -> None:
        self._first, self._last = state["first"], state["last"]

    @torch.no_grad()
    def corner(self) -> dict[str, Any] | None:
        """The upper left corner of one mask as a bit string: outputs down, inputs across, where the groups are."""
        if self.picture is None:
            return None
        matrix = _mask(self.modules[self.picture])[:PICTURE_ROWS, :PICTURE_COLUMNS]
        rows, columns = matrix.shape
        bits = "".join("1" if bit else "0" for bit in matrix.flatten().tolist())
        padded = bits + "0" * (-len(bits) % 8)
        return {"layer": self.picture, "rows": rows, "columns": columns, "bits": int(padded, 2).to_bytes(len(padded) // 8).hex()}


def _count(bits: Tensor) -> int:
    return int(unpack_bits(bits, torch.Size((8 * bits.numel(),))).sum())


def _mask(module: SparseModule) -> Tensor:
    """Which weights the forward product sees as non-zero, (outputs, inputs)."""
    return module.view_weight(_whole(nm.effective_weight(module))).flatten(1) != 0


def _columns(module: SparseModule) -> int:
    return module.view_weight(module.weight).flatten(1).shape[1]


def _rows(module: SparseModule) -> int:
    """Rows of a mask that are followed."""
    return min(module.weight.numel() // _columns(module), max(1, ENTRIES // _columns(module)))


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # pyrefly: ignore


@dataclass(frozen=True)
class Moments:
    """Adam's moments over some parameters, corrected for their start at 0."""

    mean_square: float = 0.0
    """Sum of the squared first moment."""
    second_moment: float = 0.0
    """Sum of the second moment."""
    entries: int = 0

    @property
    def noise(self) -> float | None:
        """Share of the second moment that is variance and not squared mean; None without moments."""
        return None if self.second_moment == 0 else min(1.0, max(0.0, 1 - self.mean_square / self.second_moment))

    @property
    def variance(self) -> float | None:
        """Mean of the second moment over all entries; None without moments."""
        return self.second_moment / self.entries if self.entries else None


@torch.no_grad()
def moments_of(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> Moments:
    """What an optimizer remembers of the gradients of parameters; a GPU is waited for once."""
    betas: dict[int, Any] = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
    known = [p for p in parameters if betas.get(id(p)) and {"exp_avg", "exp_avg_sq"} <= optimizer.state.get(p, {}).keys()]
    found = numbers({str(place): _sums(optimizer.state[parameter]) for place, parameter in enumerate(known)})
    mean_square = second_moment = 0.0
    entries = 0
    for parameter, values in zip(known, found.values(), strict=True):
        (first, second), step = betas[id(parameter)], values["step"] or 0.0
        if step == 0:
            continue
        mean_square += (values["first"] or 0.0) / (1 - first**step) ** 2
        # StepAdamW freezes the second moment together with its correction
        second_moment += (values["second"] or 0.0) * (values["frozen_scale"] or 1 / (1 - second**step))
        entries += parameter.numel()
    return Moments(mean_square, second_moment, entries)


def _sums(state: dict[str, Any]) -> dict[str, Tensor | float | None]:
    first, second = _whole(state["exp_avg"].float().square().sum()), _whole(state["exp_avg_sq"].float().sum())
    return {"first": first, "second": second, "step": state["step"], "frozen_scale": state.get("frozen_scale")}
