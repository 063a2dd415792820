"""StepAdamW: AdamW whose variance can be frozen for chosen parameters, as STEP needs.

Until :meth:`StepAdamW.freeze_variance` is called it is ``torch.optim.AdamW``, bit for bit. Setting ``betas=(b1, 1.0)`` on
AdamW does not freeze anything: its bias correction becomes 0 and the parameter silently stops moving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nmsparse.kernels import frozen_adamw_kernel
from nmsparse.nn import held, whole

FROZEN_OPTIONS = ("freeze", "eps_inside", "max_update", "floor_quantile")
QUANTILE_SAMPLE = 1 << 20
"""A low quantile of more entries than this is estimated from an even sample."""


class StepAdamW(torch.optim.AdamW):
    """AdamW with an optional frozen preconditioner per parameter.

    A frozen parameter moves by ``lr * mhat / sqrt(v* + eps)``: momentum goes on, v* stays. Options for that phase:

    - ``freeze``: "corrected" freezes the bias-corrected variance; "raw" the plain one, whose steps are larger by
      ``1 / sqrt(1 - beta2**T0)`` (3.2 times after 100 updates at beta2 = 0.999);
    - ``eps_inside``: eps under the root (floor 1e-4 of the denominator at eps = 1e-8) or beside it;
    - ``max_update``: clamp of ``|mhat / denominator|``;
    - ``floor_quantile``: raise v* to this quantile of its own entries, per parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        freeze: Literal["corrected", "raw"] = "corrected",
        eps_inside: bool = True,
        max_update: float | None = None,
        floor_quantile: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if freeze not in ("corrected", "raw"):
            raise ValueError(f'freeze is "corrected" or "raw", got {freeze!r}.')
        if max_update is not None and not max_update > 0:
            raise ValueError(f"max_update must be positive, got {max_update!r}.")
        if not 0 <= floor_quantile < 1:
            raise ValueError(f"floor_quantile must be at least 0 and below 1, got {floor_quantile!r}.")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, fused=fused)
        self.defaults.update(freeze=freeze, eps_inside=eps_inside, max_update=max_update, floor_quantile=floor_quantile)
        self._fill_options()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fill_options()

    def _fill_options(self) -> None:
        """Groups from the constructor or from a checkpoint of plain AdamW know nothing of the frozen phase."""
        for group in self.param_groups:
            for name in FROZEN_OPTIONS:
                group.setdefault(name, self.defaults[name])

    @torch.no_grad()
    def freeze_variance(self, params: Iterable[Tensor]) -> None:
        """From the next step on, keep the variance of these parameters at its present value."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        params = list(params)
        for p in params:
            if id(p) not in groups:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is not in this optimizer, so its variance cannot be frozen."
                )
            state = self.state.get(p, {})
            if "exp_avg_sq" not in state or float(state["step"]) < 1:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has no variance to freeze yet: take at least one step before "
                    "freeze_variance."
                )
        for p in params:
            if self.is_frozen(p):
                continue
            group, state = groups[id(p)], self.state[p]
            taken = float(state["step"])
            # plain floats: tensors in the state would be cast to the parameter's dtype when a checkpoint is loaded
            state["frozen_scale"] = 1 / (1 - group["betas"][1] ** taken) if group["freeze"] == "corrected" else 1.0
            state["frozen_floor"] = _low_quantile(_variance(state), group["floor_quantile"]) * state["frozen_scale"]

    def is_frozen(self, p: Tensor) -> bool:
        return p in self.state and self.state[p].get("frozen_scale", 0.0) > 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore
        """One update of every parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            frozen = [p for p in group["params"] if p.grad is not None and self.is_frozen(p)]
            self._ordinary_update(group)
            if frozen:
                self._frozen_update(group, frozen)
        return loss

    def _ordinary_update(self, group: dict[str, Any]) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        moving = {**group, "params": [p for p in group["params"] if not self.is_frozen(p)]}
        has_complex = self._init_group(moving, *lists)
        if not lists[0]:
            return
        for p in lists[0]:
            # torch's distributed checkpoints restore the entries that a new optimizer has, and no others
            self.state[p].setdefault("frozen_scale", 0.0)
            self.state[p].setdefault("frozen_floor", 0.0)
        adamw(
            *lists,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=has_complex,
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _frozen_update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        kernel = frozen_adamw_kernel() if group["fused"] and params[0].is_cuda else None
        if kernel is not None:
            for p in params:
                kernel(p, p.grad, self.state[p], _variance(self.state[p]), group, grad_scale, found_inf)
            return
        if found_inf is not None and float(found_inf) > 0:
            return
        grads: list[Tensor] = [p.grad for p in params]  # pyrefly: ignore
        if grad_scale is not None:
            grads = [g / grad_scale.to(g.device) for g in grads]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        foreach = group["foreach"] if group["foreach"] is not None else params[0].is_cuda
        batches = [list(range(len(params)))] if foreach else [[i] for i in range(len(params))]
        for batch in batches:
            _frozen_foreach([params[i] for i in batch], [grads[i] for i in batch], [self.state[params[i]] for i in batch], group)


def _momentum(state: dict[str, Any]) -> Tensor:
    momentum: Tensor = state["exp_avg"]
    return momentum


def _variance(state: dict[str, Any]) -> Tensor:
    """The variance that preconditions: the running maximum under AMSGrad."""
    variance: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    return variance


def _low_quantile(variance: Tensor, quantile: float) -> float:
    if quantile == 0:
        return 0.0
    flat = whole(variance).flatten()
    sample = flat[:: max(1, flat.numel() // QUANTILE_SAMPLE)].float()
    return float(sample.kthvalue(1 + int(quantile * (sample.numel() - 1))).values)


def _frozen_foreach(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """The frozen update of several parameters, a few multi-tensor calls at a time."""
    beta1, lr = float(group["betas"][0]), float(group["lr"])
    for state in states:
        state["step"] += 1
    # each rank the part that it holds: torch 2.11 knows not all of these operations for sharded tensors
    params, grads = [held(p) for p in params], [held(grad) for grad in grads]
    momenta, variances = ([held(tensor(state)) for state in states] for tensor in (_momentum, _variance))
    torch._foreach_lerp_(momenta, grads, 1 - beta1)
    denominators = list(torch._foreach_mul(variances, [state["frozen_scale"] for state in states]))
    torch._foreach_clamp_min_(denominators, [state["frozen_floor"] for state in states])
    if group["eps_inside"]:
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_sqrt_(denominators)
    else:
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
    torch._foreach_mul_(denominators, [1 - beta1 ** float(state["step"]) for state in states])
    updates = torch._foreach_div(momenta, denominators)
    if group["max_update"] is not None:
        torch._foreach_clamp_max_(updates, group["max_update"])
        torch._foreach_clamp_min_(updates, -group["max_update"])
    torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_add_(params, updates, alpha=-lr)
