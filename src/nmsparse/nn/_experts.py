"""Experts of a mixture: weights in 3-D parameters that transformers' modules multiply themselves.

Such a module (MixtralExperts, Qwen3MoeExperts, ... since transformers 5) reads its parameters in a forward of its own: one expert
after the other, batched, or grouped. So a recipe acts where they are read: while the forward runs, the projected weights stand in
the module's table of parameters, and afterwards the parameters again, which never change.

Only what the module sees of a weight can be pruned so: `output`, and `grad_input` with the same weight. Gradients stay whole.

Legend: E experts, O out_features, I in_features. A stack is stored (E, O, I), or (E, I, O) where the module says that it is
transposed; recipes see it as (O, E, I), like the taps of a convolution between its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nmsparse.nn._layer import Layer
from nmsparse.nn._modules import SparseMixin, begin_call, follow_loaded, grouped_dim, refuse_data_parallel
from nmsparse.nn._products import forward_weight
from nmsparse.nn._swapped import Swapped, Unannounced, reduced_by
from nmsparse.recipes import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Recipe

EXPERT_NAMES = ("gate_up_proj", "up_proj", "down_proj")
"""Of the parameters, in all of transformers' expert modules."""
FACTS = ("is_transposed", "has_gate", "has_bias")
"""Attributes that transformers gives such modules, and by which they are known without importing it."""


TURN = RLock()
"""Threads run experts in turn, each with the table of parameters to itself. With a lock of its own no module could be copied."""


class ExpertStack(SparseMixin):
    """One 3-D parameter of a module: what the run takes for a layer."""

    is_stack = True

    def __init__(self, owner: nn.Module, key: str) -> None:
        self.owner = owner
        self.key = key

    @property
    def weight(self) -> nn.Parameter:  # pyrefly: ignore[bad-override]
        """Wrappers replace it."""
        return cast(nn.Parameter, self.owner._parameters[self.key])

    @property
    def training(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.owner.training

    @property
    def holder(self) -> nn.Module:
        return self.owner

    def key_in(self, name: str) -> str:
        return name

    @property
    def multiplies_matrices(self) -> bool:
        return False

    @property
    def grouped_dim(self) -> int:
        """Of the stored parameter, where its groups run: along the inputs."""
        return 1 if cast(Any, self.owner).is_transposed else 2

    def view_weight(self, tensor: Tensor) -> Tensor:
        return tensor.movedim((3 - self.grouped_dim, 0, self.grouped_dim), (0, 1, 2))

    def stored(self, values: Tensor) -> Tensor:
        """(O, E, I) values as the parameter is stored."""
        return values.movedim((0, 1, 2), (3 - self.grouped_dim, 0, self.grouped_dim)).contiguous()

    def seen(self) -> Tensor:
        """What the module's products see of the weight."""
        begin_call(self)
        return cast(Tensor, StackProjection.apply(self._nmsparse, self.training, self, self.weight))


class StackProjection(torch.autograd.Function):
    """The projected weight. Its gradient is that of the products, for whom it was the weight; it goes to the whole weight."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, layer: Layer, training: bool, stack: ExpertStack, weight: Tensor
    ) -> Tensor:
        ctx.layer, ctx.training, ctx.stack = layer, training, stack
        ctx.save_for_backward(weight)
        return stack.stored(forward_weight(layer, training, stack.view_weight(weight)).to(weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        if not ctx.training:
            return None, None, None, grad
        (weight,) = ctx.saved_tensors
        layer, view = ctx.layer, ctx.stack.view_weight
        passed = layer.recipe.weight_grad(view(grad), view(weight), layer.state)
        return None, None, None, ctx.stack.stored(passed).to(weight.dtype)


class SparseExpertsMixin(Swapped):
    """First base of the class that a module of experts gets. Its stacks are the plain attribute ``_nmsparse_stacks``."""

    _nmsparse_stacks: dict[str, ExpertStack]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled writes nothing into the module
            return self._projected_forward(*args, **kwargs)
        with TURN:
            return self._projected_forward(*args, **kwargs)

    def _projected_forward(self, *args: Any, **kwargs: Any) -> Any:
        table: Any = self._parameters  # pyrefly: ignore
        own = {key: table[key] for key in self._nmsparse_stacks}
        seen = {key: stack.seen() for key, stack in self._nmsparse_stacks.items()}
        for key, weight in seen.items():  # one by one: compilers know no other way to write into a module
            table[key] = weight
        try:
            return super().forward(*args, **kwargs)  # pyrefly: ignore
        finally:
            for key, parameter in own.items():
                table[key] = parameter

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # pyrefly: ignore
        self._follow_weights()  # assign=True puts in other tensors
        for stack in self._nmsparse_stacks.values():
            follow_loaded(stack)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = super()._apply(fn, recurse)  # pyrefly: ignore
        self._follow_weights()
        return cast(nn.Module, module)

    def _follow_weights(self) -> None:
        for stack in self._nmsparse_stacks.values():
            stack._nmsparse.to(stack.weight.device)

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise refuse_data_parallel(next(iter(self._nmsparse_stacks.values()))._nmsparse.name)

    def extra_repr(self) -> str:
        recipes = (f"{key}: {s._nmsparse.recipe.name} {s._nmsparse.recipe.pattern}" for key, s in self._nmsparse_stacks.items())
        return ", ".join([*filter(None, [super().extra_repr()]), *recipes])  # pyrefly: ignore


@cache
def sparse_experts(kind: type[nn.Module]) -> type[nn.Module]:
    """The class to swap in for a class of expert modules."""
    doc, reduce = "Experts whose weights follow a recipe.", reduced_by(sparse_experts)
    contents = {"__module__": "nmsparse.nn", "__doc__": doc, "__reduce_ex__": reduce}
    return type(f"Sparse{kind.__name__}", (Unannounced, SparseExpertsMixin, kind), contents)


def swap_in(stack: ExpertStack, layer: Layer) -> None:
    """Make a stack sparse, and its module read it through the recipe."""
    owner: Any = stack.owner
    stack._nmsparse = layer
    if not isinstance(owner, SparseExpertsMixin):
        owner._nmsparse_stacks = dict[str, ExpertStack]()
        owner.__class__ = sparse_experts(type(owner))
    owner._nmsparse_stacks[stack.key] = stack


def experts_of(model: nn.Module) -> dict[str, ExpertStack]:
    """All stacks of a model that could be sparse, or are, by the names of their parameters."""
    return {
        f"{name}.{key}" if name else key: _stack(module, key)
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, fact, None), bool) for fact in FACTS)
        for key in EXPERT_NAMES
        if (parameter := module._parameters.get(key)) is not None and parameter.ndim == 3
    }


def _stack(module: nn.Module, key: str) -> ExpertStack:
    present = module._nmsparse_stacks.get(key) if isinstance(module, SparseExpertsMixin) else None
    return ExpertStack(module, key) if present is None else present


def grouped_weights(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Names of the parameters that could be sparse, sparse or not, with the dim along which their groups run."""
    for name, module in model.named_modules():
        dim = grouped_dim(module)
        if dim is not None:
            yield f"{name}.weight" if name else "weight", dim
    for name, stack in experts_of(model).items():
        yield name, stack.grouped_dim


def refused(recipe: Recipe) -> str | None:
    """Why a recipe cannot make experts sparse."""
    if not recipe.sparse_products:
        return f"{recipe.name} prunes nothing"
    if OUTPUT not in recipe.sparse_products:
        return f"{recipe.name} prunes gradients, which the experts' module, multiplying them itself, does not show"
    if recipe.runs_in_fp8:
        return "the experts' module multiplies them itself, in no FP8"
    return None


def dense_products(recipe: Recipe) -> dict[str, str]:
    """Backward products that stay dense, with the reason."""
    why = "the experts' module multiplies them itself and shows its forward weight only, so {} stays whole"
    sees_another = type(recipe).grad_input_weight is not Recipe.grad_input_weight
    found = {GRAD_INPUT: why.format("its second mask is left out and this product")} if sees_another else {}
    found[GRAD_WEIGHT] = why.format("the gradient")
    return {product: reason for product, reason in found.items() if product in recipe.sparse_products}
