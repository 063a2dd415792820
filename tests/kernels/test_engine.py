"""The engine's bookkeeping and what it tells the library, with the library and its timings replaced: no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nmsparse.functional as nmf
from nmsparse.kernels import _cusparselt, _engine, _layout, sparse_matmul
from nmsparse.kernels._cusparselt import COLUMN, PLAIN, ROW, TRANSPOSED, Algorithm, CusparseLtError, Plan, Product
from nmsparse.kernels._search import Choice

BF16 = torch.bfloat16


class FakeLibrary:
    """Records calls; answers sizes with 64."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.refuse: str | None = None

    def __call__(self, name: str, *arguments: Any) -> None:
        self.calls.append((name.removeprefix("cusparseLt"), arguments))
        if name == self.refuse:
            raise CusparseLtError(f"{name} failed with status 10: not supported.")

    def arguments(self, name: str) -> list[list[Any]]:
        """Plain numbers of every call of a function, pointers left out."""
        found = [arguments for called, arguments in self.calls if called == name]
        return [
            [a.value for a in arguments[2:] if not isinstance(a, _cusparselt.c_void_p) and hasattr(a, "value")]
            for arguments in found
        ]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(_cusparselt, "library", lambda: fake)
    monkeypatch.setattr(_cusparselt, "_handle", lambda device: _cusparselt._Struct())
    monkeypatch.setattr(_cusparselt, "_stand_in", lambda: torch.zeros(1))
    return fake


T, O, I = 256, 128, 64
FORMS = {  # product: sparse operand as stored, its op, dense operand as stored, its op, order of the result
    "output": (Product(O, T, I, False, True, True, BF16), (O, I), PLAIN, (T, I), TRANSPOSED, COLUMN),
    "grad_input": (Product(I, T, O, True, True, True, BF16), (O, I), TRANSPOSED, (T, O), TRANSPOSED, COLUMN),
    "grad_weight": (Product(O, I, T, True, False, False, BF16), (T, O), TRANSPOSED, (T, I), PLAIN, ROW),
    "grad_input, sparse G": (Product(T, I, O, False, False, False, BF16), (T, O), PLAIN, (O, I), PLAIN, ROW),
}


@pytest.mark.parametrize("form", FORMS)
def test_descriptors_say_how_the_tensors_of_a_linear_layer_lie_in_memory(form: str, library: FakeLibrary) -> None:
    product, sparse, op_a, dense, op_b, order = FORMS[form]
    Plan(product, 0)
    bf16 = 14
    assert library.arguments("StructuredDescriptorInit") == [[*sparse, sparse[1], 16, bf16, ROW, 0]]
    result = [product.m, product.n, product.m if order == COLUMN else product.n, 16, bf16, order]
    assert library.arguments("DenseDescriptorInit") == [[*dense, dense[1], 16, bf16, ROW], result]
    assert library.arguments("MatmulDescriptorInit") == [[op_a, op_b, 2]]


def test_algorithm_and_split_are_set_before_the_plan(library: FakeLibrary) -> None:
    Plan(FORMS["output"][0], 0, Algorithm(17, 4))
    names = [name for name, _ in library.calls]
    assert names.count("MatmulAlgSetAttribute") == 2
    assert names.index("MatmulPlanInit") > max(i for i, name in enumerate(names) if name == "MatmulAlgSetAttribute")
    library.calls.clear()
    Plan(FORMS["output"][0], 0)
    assert "MatmulAlgSetAttribute" not in [name for name, _ in library.calls]


def test_a_bias_is_announced_before_the_plan_is_made(library: FakeLibrary) -> None:
    Plan(FORMS["output"][0]._replace(has_bias=True), 0)
    names = [name for name, _ in library.calls]
    assert names.index("MatmulDescSetAttribute") < names.index("MatmulAlgSelectionInit") < names.index("MatmulPlanInit")


def test_structures_are_aligned_and_large_enough() -> None:
    for _ in range(20):
        struct = _cusparselt._Struct()
        assert struct.pointer.value is not None
        assert struct.pointer.value % 64 == 0
        start = _cusparselt.ctypes.addressof(struct.memory)
        assert start <= struct.pointer.value <= start + len(struct.memory) - 16 * 1024


# ---- the engine ----


class FakePlan:
    def __init__(self, product: Product, device: int, algorithm: Algorithm = _cusparselt.DEFAULT) -> None:
        if algorithm.id == 99:
            raise CusparseLtError("not for these sizes")
        self.product, self.algorithm, self.closed = product, algorithm, False

    def close(self) -> None:
        self.closed = True


class FakeChoices:
    def __init__(self, device: int) -> None:
        self.known: dict[Product, Choice] = {}
        self.searched: list[Product] = []
        self.answer: Choice | None = Choice(7, 1, 0.5, 1.0, 1e-3)

    def near(self, product: Product) -> Choice | None:
        return self.known.get(product)

    def search(self, products: Any) -> dict[Product, Choice | None]:
        self.searched += products
        return dict.fromkeys(products, self.answer)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_engine, "Plan", FakePlan)
    monkeypatch.setattr(_engine, "Choices", FakeChoices)
    monkeypatch.setattr(_engine, "version", lambda device: 800)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return _engine.Engine(0)


def test_a_product_is_searched_once_and_its_plan_kept(engine: Any) -> None:
    product = FORMS["output"][0]
    plan = engine.plan(product)
    assert plan.algorithm == (7, 1)
    assert engine.plan(product) is plan
    assert engine.choices.searched == [product]


def test_a_bias_makes_another_plan_but_no_other_search(engine: Any) -> None:
    product = FORMS["output"][0]
    engine.choices.known[product] = Choice(3, 1, 0.5, 1.0, 1e-3)
    assert engine.plan(product._replace(has_bias=True)).algorithm == (3, 1)
    assert engine.choices.searched == []


def test_without_a_choice_the_default_is_used_with_a_warning(engine: Any) -> None:
    engine.choices.answer = None
    with pytest.warns(UserWarning, match="no algorithm could be timed"):
        assert engine.plan(FORMS["output"][0]).algorithm == (-1, 1)


def test_a_neighbours_algorithm_that_is_not_legal_falls_back_to_the_default(engine: Any) -> None:
    engine.choices.answer = Choice(99, 1, 0.5, 1.0, 1e-3)
    assert engine.plan(FORMS["output"][0]).algorithm == (-1, 1)


def test_nothing_is_searched_while_a_graph_is_captured(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = FORMS["output"][0]
    engine.plan(known)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert engine.plan(known) is not None
    with pytest.raises(RuntimeError, match="run one training step before the capture"):
        engine.plan(FORMS["grad_input"][0])


def test_plans_not_used_for_longest_are_given_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "PLANS", 3)
    products = [FORMS["output"][0]._replace(n=64 * i) for i in range(1, 5)]
    plans = [engine.plan(product) for product in products[:3]]
    engine.plan(products[0])  # used again: the second is now the oldest
    engine.plan(products[3])
    assert [plan.closed for plan in plans] == [False, True, False]
    assert len(engine.plans) == 3


@pytest.mark.parametrize("rows", [1, 5, 8, 13])
@pytest.mark.parametrize("flags", [(False, True, True), (False, True, False), (True, True, False)], ids=str)
def test_products_of_any_number_of_rows_have_the_shape_that_compilers_are_told(flags: tuple[bool, bool, bool], rows: int) -> None:
    """What n is filled up with may be anything, and none of it is seen."""
    torch.manual_seed(0)
    stored = torch.randn(64, 128).to(BF16)
    mask = nmf.magnitude_mask(stored, "2:4", 0 if flags[0] else 1)
    m, k = (128, 64) if flags[0] else (64, 128)
    packed = _layout.compress(torch.where(mask, stored, 0), "m" if flags[0] else "k")
    a = _layout.decompress(packed, m, k, "m" if flags[0] else "k")
    a = a.t() if flags[0] else a
    dense = torch.randn(rows, k).to(BF16)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        found = sparse_matmul(packed, dense, None, m, k, *flags)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = (a.float() @ dense.float().t()).to(BF16)
    assert torch.equal(found, expected.t() if flags[2] else expected)
    assert found.is_contiguous()
