"""Slow, obvious answers in plain Python, and the inputs that the property tests draw."""

import math

import torch
from hypothesis import strategies as st

from nmsparse import Pattern

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -3.0, math.inf, -math.inf, math.nan]


@st.composite
def patterns(draw, largest=64, smallest=1):
    m = draw(st.integers(smallest, largest))
    return Pattern(draw(st.integers(1, m)), m)


def finite(width=32, bound=1e6):
    return st.floats(-bound, bound, width=width, allow_subnormal=False)


def tied(low=-3, high=3):
    return st.integers(low, high).map(float)


@st.composite
def cases(draw, pattern_strategy, values, dtype=torch.float32):
    """A pattern, a tensor of one to three dims that it fits, and the dim that holds the groups."""
    pattern = draw(pattern_strategy)
    dim = draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 2)) for _ in range(3)]
    shape[dim] *= pattern.m
    count = math.prod(shape)
    flat = draw(st.lists(values, min_size=count, max_size=count))
    return pattern, torch.tensor(flat, dtype=dtype).view(shape), dim


def groups_of(x, m, dim=-1):
    """Every group as a list of Python numbers, in a fixed order."""
    return x.movedim(dim, -1).reshape(-1, m).tolist()


def from_lists(groups, like, dim=-1, dtype=None):
    """Undo :func:`groups_of` for a tensor shaped like ``like``."""
    return torch.tensor(groups, dtype=dtype).view(like.movedim(dim, -1).shape).movedim(-1, dim)


def largest_positions(group, n):
    """Positions of the n largest magnitudes: NaN above all, on ties the lower index."""

    def order(index):
        magnitude = abs(group[index])
        return (0, 0.0, index) if math.isnan(magnitude) else (1, -magnitude, index)

    return sorted(sorted(range(len(group)), key=order)[:n])


def mask_of(group, n):
    kept = largest_positions(group, n)
    return [index in kept for index in range(len(group))]


def samples(kind, *shape, seed=0):
    """Synthetic data with a known distribution of magnitudes; the sign plays no role."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(shape, generator=generator)
    if kind == "gaussian cut at 2 sigma":
        return torch.nn.init.trunc_normal_(torch.empty(shape), a=-2, b=2, generator=generator)
    if kind == "uniform":
        return torch.rand(shape, generator=generator) * 2 - 1
    if kind == "laplace":
        return torch.empty(shape).exponential_(generator=generator)
    if kind == "log-normal":
        return torch.empty(shape).log_normal_(0, 1, generator=generator)
    raise ValueError(kind)
