import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nmsparse.functional as F
from nmsparse.functional import _channels
from nmsparse.functional._channels import _splits

from .oracles import samples


def kept(weight, spec="2:4"):
    return (weight.double().abs() * F.magnitude_mask(weight, spec)).sum().item()


def best_of_all_orders(weight, spec, m):
    """Largest kept sum over every way to deal the columns into two groups."""
    columns = range(2 * m)
    best = 0.0
    for first in itertools.combinations(columns, m):
        order = [*first, *(column for column in columns if column not in first)]
        best = max(best, kept(weight[:, order], spec))
    return best


@pytest.mark.parametrize(("m", "count"), [(1, 1), (2, 3), (3, 10), (4, 35)])
def test_every_split_of_two_stripes_occurs_once(m, count):
    splits = _splits(m)
    assert len(splits) == count
    assert len({frozenset([frozenset(split[:m]), frozenset(split[m:])]) for split in splits}) == count
    assert all(sorted(split) == list(range(2 * m)) for split in splits)
    assert splits[0] == tuple(range(2 * m))


def test_columns_that_compete_are_dealt_to_different_groups():
    # four heavy columns side by side: half of them would be lost
    weight = torch.tensor([[9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0]])
    order = F.channel_permutation(weight, "2:4")
    assert order.dtype == torch.int64
    assert kept(weight) == 20
    assert kept(weight[:, order]) == 36
    assert F.permutation_efficacy(weight, order, "2:4") == pytest.approx(1.0)


@settings(max_examples=20)
@given(
    st.sampled_from([("1:2", 2), ("1:3", 3), ("2:3", 3), ("1:4", 4), ("2:4", 4), ("3:4", 4)]),
    st.integers(1, 5),
    st.integers(0, 2**31),
)
def test_two_stripes_are_solved_exactly(case, rows, seed):
    spec, m = case
    weight = torch.randn(rows, 2 * m, generator=torch.Generator().manual_seed(seed))
    order = F.channel_permutation(weight, spec)
    assert sorted(order.tolist()) == list(range(2 * m))
    assert kept(weight[:, order], spec) == pytest.approx(best_of_all_orders(weight, spec, m), rel=1e-6)


@settings(max_examples=25)
@given(
    st.sampled_from([("1:2", 2), ("2:3", 3), ("1:4", 4), ("2:4", 4)]),
    st.integers(1, 6),
    st.integers(1, 5),
    st.lists(st.integers(-2, 2).map(float), min_size=120, max_size=120),
)
def test_the_kept_magnitude_never_decreases(case, rows, stripes, values):
    spec, m = case
    weight = torch.tensor(values[: rows * stripes * m]).view(rows, stripes * m)
    order = F.channel_permutation(weight, spec)
    assert sorted(order.tolist()) == list(range(stripes * m))
    assert kept(weight[:, order], spec) >= kept(weight, spec)


@pytest.mark.parametrize(("rows", "columns", "efficacy"), [(128, 64, 0.27), (64, 128, 0.44)])
def test_efficacy_on_a_gaussian(rows, columns, efficacy):
    weight = samples("gaussian", rows, columns)
    order = F.channel_permutation(weight, "2:4")
    assert sorted(order.tolist()) == list(range(columns))
    assert F.permutation_efficacy(weight, order, "2:4") >= efficacy
    assert kept(weight[:, order]) > kept(weight)


def test_escapes_never_make_it_worse():
    weight = samples("gaussian", 8, 24)
    without = F.channel_permutation(weight, "2:4")
    escaped = F.channel_permutation(weight, "2:4", escapes=20)
    assert kept(weight[:, escaped]) >= kept(weight[:, without])


def test_the_same_seed_gives_the_same_order():
    weight = samples("gaussian", 8, 24)
    first, again = (F.channel_permutation(weight, "2:4", escapes=5, seed=3) for _ in range(2))
    assert torch.equal(first, again)


def test_permuting_both_sides_leaves_the_product_unchanged():
    weight, x = samples("gaussian", 8, 16).double(), samples("uniform", 5, 16).double()
    order = F.channel_permutation(weight, "2:4")
    assert torch.allclose(x[:, order] @ weight[:, order].t(), x @ weight.t(), rtol=1e-12)


@pytest.mark.parametrize("spec", ["4:4", "1:1", "2:2"])
def test_keeping_all_needs_no_permutation(spec):
    assert F.channel_permutation(samples("gaussian", 4, 16), spec).tolist() == list(range(16))


def test_one_group_has_nothing_to_exchange():
    assert F.channel_permutation(samples("gaussian", 4, 4), "2:4").tolist() == [0, 1, 2, 3]
    assert F.channel_permutation(samples("gaussian", 4, 16), "8:16").tolist() == list(range(16))


def test_a_weight_that_loses_nothing_stays_in_order():
    weight = samples("gaussian", 16, 32)
    weight = weight * F.magnitude_mask(weight, "2:4")
    order = F.channel_permutation(weight, "2:4")
    assert order.tolist() == list(range(32))
    assert F.permutation_efficacy(weight, order, "2:4") == 0.0


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_an_empty_weight_stays_in_order(shape):
    assert F.channel_permutation(torch.empty(shape), "2:4").tolist() == list(range(shape[1]))


def test_without_time_the_order_stays():
    assert F.channel_permutation(samples("gaussian", 4, 32), "2:4", time_limit=0.0).tolist() == list(range(32))


def test_a_parameter_in_half_precision_is_read_and_left_alone():
    weight = torch.nn.Parameter(samples("gaussian", 4, 16).bfloat16())
    before = weight.detach().clone()
    order = F.channel_permutation(weight, "2:4")
    assert not order.requires_grad
    assert torch.equal(weight.detach(), before)
    assert F.permutation_efficacy(weight, order, "2:4") > 0


def test_efficacy_is_measured_against_free_pruning_of_each_row():
    # plain 2:4 keeps 4 + 4 + 1 + 1; the best half of the row is 4 + 4 + 3 + 3
    weight = torch.tensor([[4.0, 3.0, 3.0, 4.0, 1.0, 1.0, 0.0, 0.0]])
    for order, total, efficacy in [
        ([0, 1, 2, 3, 4, 5, 6, 7], 10, 0.0),
        ([0, 1, 4, 3, 2, 5, 6, 7], 12, 0.5),
        ([0, 1, 4, 6, 3, 5, 2, 7], 14, 1.0),
    ]:
        assert kept(weight[:, order]) == total
        assert F.permutation_efficacy(weight, torch.tensor(order), "2:4") == pytest.approx(efficacy)


def test_groups_too_large_to_search_are_refused():
    with pytest.raises(ValueError, match=r'pattern "8:16" has too many ways .* groups of 16; the search goes up to groups of 8'):
        F.channel_permutation(torch.ones(2, 32), "8:16")


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="size 10 of dim 1"):
        F.channel_permutation(torch.ones(4, 10), "2:4")


def test_the_time_limit_holds_while_pairs_are_scored(monkeypatch):
    """A wide layer has so many pairs of groups that scoring them once takes longer than anybody waits."""
    now = iter(range(1000))
    scored = []
    monkeypatch.setattr(_channels, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(_channels, "ELEMENTS_AT_ONCE", 1)
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, *a, **k: scored.append(1) or topk(self, *a, **k))
    weight = samples("gaussian", 4, 32)  # 28 pairs of groups
    order = F.channel_permutation(weight, "2:4", time_limit=6.0)
    assert len(scored) == 5
    assert sorted(order.tolist()) == list(range(32))
    assert kept(weight[:, order]) > kept(weight)  # what was scored in time is applied
