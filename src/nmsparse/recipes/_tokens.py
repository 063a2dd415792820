"""MVUE along tokens: the estimator for `grad_weight` that S-STE, FST, Trio and recipe B of SDGP share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nmsparse.functional import counter_uniform_grid, mvue, mvue_approximate
from nmsparse.pattern import Pattern
from nmsparse.recipes._base import State

Estimator = bool | Literal["approximate"]


def check_estimator(estimator: Estimator, pattern: Pattern) -> None:
    if estimator not in (True, False, "approximate"):
        raise ValueError(f'mvue is True, False or "approximate", got {estimator!r}.')
    if estimator == "approximate" and pattern.n != 2:
        raise ValueError(f'the approximate estimator is defined for N = 2; with pattern "{pattern}" use mvue=True.')


def mvue_along_tokens(grad: Tensor, pattern: Pattern, state: State, counter: Tensor | None, estimator: Estimator) -> Tensor:
    """An unbiased N:M sample of G in groups of M consecutive tokens for each output channel.

    Tokens that do not fill a group are padded with zeros: exact, because a padded group has no error of its own.
    """
    if not estimator or pattern.n == pattern.m:
        return grad
    assert counter is not None, "random recipes get a counter"
    flat = grad.reshape(-1, grad.shape[-1])
    tokens = flat.shape[0]
    missing = -tokens % pattern.m
    padded = torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat
    groups = (tokens + missing) // pattern.m
    draws = 2 if estimator == "approximate" else 1
    uniform = counter_uniform_grid(groups * draws, flat.shape[1], state["stream"], counter, flat.device)
    sample = mvue_approximate if estimator == "approximate" else mvue
    return sample(padded, pattern, dim=0, uniform=uniform)[:tokens].view_as(grad)
