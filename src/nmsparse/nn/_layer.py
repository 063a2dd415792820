"""What the library keeps beside a converted module: the recipe, its state, and which products stay dense."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nmsparse.nn._permute import Permuted
from nmsparse.nn._sparse import SparseProducts
from nmsparse.recipes import Recipe, State


@dataclass(eq=False)
class Layer:
    """Record of one sparse layer. A plain attribute of its module: no buffer, so no key in any state dict."""

    name: str
    recipe: Recipe
    stream: int
    """Key of this layer's random numbers."""
    dense: dict[str, str] = field(default_factory=dict)
    """Products that the recipe would make sparse but that stay dense here, with the reason."""
    state: State = field(default_factory=dict)
    groups: int = 1
    """Of a convolution: each reduces over its own outputs only."""
    permuted: Permuted | None = None
    """The reordering of channels that came with the conversion."""
    sparse: SparseProducts | None = None
    """What runs on sparse tensor cores, once an optimizer is attached; None where everything is emulated."""
    awaits_optimizer: bool = False
    """The recipe runs on an optimizer, and none is attached yet."""
    has_clock: bool = False
    """An attached optimizer updates it."""
    has_started: bool = False
    """Its run has made an update, or loaded the state of one: what the recipe took from the weights is kept from here on."""
    was_loaded: bool = False
    """Other weights came after the clock was attached, and the recipe has not looked at them yet."""
    was_called: bool = False
    """By a forward pass, in Python: compiled code does not come by here."""
    was_traced: ClassVar[bool] = False
    """Any layer, by a compiler: its code may serve layers of other models of this process as well, which then do not know."""
    parked: State = field(default_factory=dict)
    """The state while the weight is on the meta device: accelerate shards models there and loads their weights afterwards."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy (deepcopy, pickle) belongs to no run, which alone would keep its packed weights current and move its clock.
        Masks and scales it keeps as they are."""
        own = {"sparse": None, "has_clock": False, "has_started": True, "awaits_optimizer": self.recipe.needs_clock}
        return {**self.__dict__, **own}

    def init_state(self, weight: Tensor) -> None:
        """Fill the state from the (O, ..., I) weight."""
        self.state = self.recipe.init_state(weight, self.groups)
        self.awaits_optimizer = self.recipe.needs_clock
        if self.recipe.is_random:
            self.state["stream"] = torch.tensor(self.stream, dtype=torch.int32, device=weight.device)
            self.state["counter"] = torch.zeros((), dtype=torch.int32, device=weight.device)

    def note_trace(self) -> bool:
        """Called while a compiler traces, and then never again: no write, guard or graph break is left in what it compiles."""
        Layer.was_traced = True
        return True

    # what torch.compiler.assume_constant_result sets, which would import the compiler here
    note_trace._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]

    def leaves_dense(self, product: str) -> bool:
        """A backward product whose operand is not pruned here: it does not fit, or a dense product is as fast."""
        return product in self.dense or (self.sparse is not None and product in self.sparse.unpruned)

    def refresh(self, weight: Tensor) -> None:
        """Pack the weight again for whatever runs on sparse tensor cores now."""
        if self.sparse is not None and self.sparse.is_active:
            self.sparse.pack(weight, self.recipe, self.state)

    def forget_weight(self) -> None:
        """Before torch may swap the weight for another tensor, which it refuses where anybody holds a reference to it."""
        if self.sparse is not None:
            self.sparse.packed_weight = None

    def refresh_if_stale(self, weight: Tensor) -> None:
        if self.sparse is not None and self.sparse.is_active and not self.sparse.is_fresh(weight):
            self.refresh(weight)

    def to(self, device: torch.device) -> None:
        """Follow the weight to another device; the dtype of the state never changes."""
        if self.sparse is not None and self.sparse.device != device:
            self.sparse = None  # what runs sparse is decided anew, by the run
        for name, tensor in self.state.items():
            if name in self.recipe.host_state or tensor.device == device:
                continue
            if device.type == "meta":
                self.parked[name] = tensor
            self.state[name] = self.parked.pop(name).to(device) if tensor.is_meta else tensor.to(device)
