"""Products in the packed layout: the wiring around the kernels, run on the CPU with the layout multiplied in plain torch."""

from __future__ import annotations

import pytest
import torch
from packed_toys import Case, Net, data, make, train
from torch import nn
from toys import CASES, case_id

import nmsparse as nm
from nmsparse.kernels import _dispatch, _ops

pytestmark = pytest.mark.usefixtures("reference_engine")
SPARSE_CASES = [
    case for case in CASES if nm.recipe(case[0], "2:4", **case[1]).sparse_products and case[1].get("precision") is None
]


def test_products_say_what_runs_sparse() -> None:
    _, _, run = make(nm.Trio("2:4"))
    assert run.products["up"] == {"output": "sparse", "grad_input": "sparse", "grad_weight": "sparse"}
    _, _, run = make(nm.Trio("2:4"), emulate=True)
    assert set(run.products["up"].values()) == {"emulate=True"}
    _, _, run = make(nm.STE("1:4"))
    assert run.products["up"]["output"] == "sparse tensor cores multiply 2:4, not 1:4"


@pytest.mark.parametrize("case", SPARSE_CASES, ids=case_id)
def test_packed_products_train_as_the_emulation_does(case: Case) -> None:
    recipe = nm.recipe(case[0], "2:4", **case[1])
    results = []
    for emulate in (True, False):
        model, optimizer, run = make(recipe, emulate=emulate)
        losses = train(model, optimizer)
        results.append(losses)
        if not emulate:
            assert any("sparse" in how.values() or any("dense phase" in h for h in how.values()) for how in run.products.values())
    # both round each product to bf16; what differs is the order of sums, and SDGP's factor after the product
    assert results[0] == pytest.approx(results[1], rel=2e-2)
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-3)


@pytest.mark.parametrize(
    "case", [("trio", {}), ("s-ste", {}), ("fst", {"dense_tail": 0.0}), ("sdgp", {"mvue": True})], ids=case_id
)
def test_compiled_graph_is_whole_and_does_not_recompile(case: Case) -> None:
    torch._dynamo.reset()
    recipe = nm.recipe(case[0], "2:4", **case[1])
    eager, compiled = make(recipe), make(recipe)
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(torch.compile(compiled[0], fullgraph=True, backend="aot_eager"), compiled[1])
    assert losses == pytest.approx(train(eager[0], eager[1]), rel=2e-2)


@pytest.mark.parametrize("tokens", [2, 6, 64, 130])
def test_any_number_of_tokens_is_padded_inside(tokens: int) -> None:
    for recipe in (nm.Trio("2:4"), nm.SDGP("2:4", mvue=True)):
        losses = []
        for emulate in (True, False):
            model, optimizer, _ = make(recipe, emulate=emulate)
            losses.append(train(model, optimizer, 4, tokens))
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.parametrize("recipe", [nm.Trio("2:4"), nm.STE("2:4")], ids=lambda r: r.name)
def test_more_tokens_than_the_library_takes_are_multiplied_in_parts(recipe: nm.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for longest in (2_097_120, 128):  # no layer here has more features
        monkeypatch.setattr(_ops, "LONGEST", longest)
        model, optimizer, _ = make(recipe)
        losses.append(train(model, optimizer, 3, 300))
    assert losses[0] == losses[1]


def test_more_packed_tokens_than_the_library_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "LONGEST", 128)
    model, optimizer, _ = make(nm.SDGP("2:4"))
    with pytest.raises(RuntimeError, match=r"at most 128 rows of a packed gradient at once, and this one has 320: use smaller"):
        train(model, optimizer, 1, 300)


def test_phases_switch_the_products_on_and_off() -> None:
    model, optimizer, run = make(nm.STEP("2:4", switch=5))
    assert run.products["up"]["output"] == "step is in a dense phase"
    train(model, optimizer, 5)
    assert run.products["up"]["output"] == "sparse"
    model, optimizer, run = make(nm.FST("2:4", dense_tail=0.5, refresh=2))
    assert run.products["up"]["grad_weight"] == "sparse"
    train(model, optimizer, 8)
    assert run.products["up"]["grad_weight"] == "fst is in a dense phase"


def test_float32_calls_are_told_and_run_emulated() -> None:
    model, optimizer, run = make(nm.STE("2:4"))
    monkey = _dispatch.Row("sparse_matmul", "reference", (torch.bfloat16,), lambda _: None)
    _dispatch.TABLE[:] = [monkey]
    x, y = data()
    (model(x) - y).square().mean().backward()
    with pytest.warns(UserWarning, match="computes in torch.float32, so its products run emulated"):
        optimizer.step()
    assert "not in float32" in run.products["up"]["output"]


def test_half_precision_is_followed_when_it_is_met() -> None:
    model, optimizer, run = make(nm.STE("2:4"))
    x, y = data()
    with torch.autocast("cpu", torch.float16):
        (model(x).float() - y).square().mean().backward()
    optimizer.step()
    assert run._layers["up"].layer.sparse.copies["output"].dtype == torch.float16


def test_densify_and_freeze_work_in_the_middle() -> None:
    model, optimizer, _ = make(nm.Trio("2:4"))
    train(model, optimizer, 2)
    nm.freeze_(model)
    assert type(model.up) is nn.Linear
    assert nm.functional.violations(model.up.weight, "2:4") == 0


def test_layers_that_do_not_fit_the_layout_say_so() -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 4))
    run = nm.sparsify_(model, nm.Trio("2:4"))
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.products["0"]["output"] == "the hardware's layout needs multiples of 64 x 32, and this operand is 64 x 48"
    assert run.products["1"]["output"] == "the hardware's layout needs multiples of 64 x 32, and this operand is 96 x 64"
    assert run.products["2"]["output"] == "sparse"


@pytest.mark.parametrize("recipe", [nm.Trio("2:4"), nm.SSTE("2:4"), nm.STE("2:4")], ids=lambda r: r.name)
def test_pointwise_convolutions_in_channels_last_take_the_same_path(recipe: nm.Recipe) -> None:
    results = []
    for emulate in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(64, 128, 1), nn.GELU(), nn.Conv2d(128, 64, 1, bias=False), nn.Conv2d(64, 64, 3))
        model = model.to(memory_format=torch.channels_last)
        run = nm.sparsify_(model, recipe, targets=["0", "2", "3"], emulate=emulate)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(optimizer)
        if not emulate:
            assert run.products["0"]["output"] == "sparse"
            assert run.products["3"]["output"] == "only 1x1 convolutions of stride 1 are matrix products"
        x = torch.randn(2, 64, 5, 7, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
        losses = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            assert y.is_contiguous(memory_format=torch.channels_last)
            loss = (y.float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=2e-2)


def test_conv1d_of_transformers_packs_the_other_way_round() -> None:
    from transformers.pytorch_utils import Conv1D

    for recipe in (nm.Trio("2:4"), nm.FST("2:4", dense_tail=0.0), nm.BiMask("2:4"), nm.SDGP("2:4", mvue=True)):
        results = []
        for emulate in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(Conv1D(128, 64), nn.GELU(), Conv1D(64, 128))
            run = nm.sparsify_(model, recipe, targets=["0", "2"], emulate=emulate)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            run.attach(optimizer, total_steps=8)
            x = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
            losses = []
            for _ in range(6):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = (model(x).float() - x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                assert model[0].weight.grad.is_contiguous()
                optimizer.step()
                losses.append(loss.item())
            results.append(losses)
            assert emulate or "sparse" in run.products["0"].values()
        assert results[0] == pytest.approx(results[1], rel=2e-2)


def test_operators_pass_opcheck() -> None:
    from nmsparse.kernels import pack_gradient, pack_sparse, pack_weight, sampled_grad_weight, sparse_matmul
    from nmsparse.kernels._layout import compress

    dense = torch.where(nm.functional.magnitude_mask(torch.randn(64, 96), "2:4"), torch.randn(64, 96), 0).bfloat16()
    packed = compress(dense, "k")
    torch.library.opcheck(
        sparse_matmul, (packed, torch.randn(10, 96).bfloat16(), torch.randn(64).bfloat16(), 64, 96, False, True, True)
    )
    torch.library.opcheck(sparse_matmul, (packed, torch.randn(96, 40).bfloat16(), None, 64, 96, False, False, False))
    word = torch.tensor(5, dtype=torch.int32)
    torch.library.opcheck(pack_gradient, (torch.randn(70, 64).bfloat16(), word, word, True, True))
    torch.library.opcheck(pack_gradient, (torch.randn(70, 64).bfloat16(), None, None, False, True))
    torch.library.opcheck(pack_sparse, (dense, False))
    torch.library.opcheck(pack_weight, (torch.randn(64, 128), None, torch.tensor(1.5), True, False, torch.bfloat16))
    torch.library.opcheck(pack_weight, (torch.randn(64, 128), torch.rand(64, 128) < 0.5, None, False, True, torch.float16))
    torch.library.opcheck(sampled_grad_weight, (torch.randn(70, 64).bfloat16(), torch.randn(70, 32).bfloat16(), word, word, True))


def test_an_empty_batch_passes_through() -> None:
    for recipe in (nm.Trio("2:4"), nm.STE("2:4"), nm.SDGP("2:4", mvue=True), nm.SSTE("2:4", mvue="approximate")):
        model, _, _ = make(recipe)
        x = torch.zeros(0, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
        assert y.shape == (0, 8)
        assert x.grad is not None
        assert x.grad.shape == (0, 64)
        assert (model.up.weight.grad == 0).all()


def test_an_input_of_another_type_than_the_packed_weight_is_refused() -> None:
    torch.manual_seed(0)
    model = Net().bfloat16()
    run = nm.sparsify_(model, nm.STE("2:4"))
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"needs both operands in one type on one device.*cast its input"):
        model(data()[0])


def test_an_input_of_the_wrong_width_is_refused() -> None:
    from nmsparse.kernels import sparse_matmul
    from nmsparse.kernels._layout import compress

    packed = compress(torch.zeros(64, 96).bfloat16(), "k")
    with pytest.raises(RuntimeError, match="cannot be multiplied with an operand of shape"):
        sparse_matmul(packed, torch.zeros(8, 64).bfloat16(), None, 64, 96, False, True, True)
    with pytest.raises(RuntimeError, match="packed entries are no 64 x 64 operand"):
        sparse_matmul(packed, torch.zeros(8, 64).bfloat16(), None, 64, 64, False, True, True)


def test_one_call_in_float32_does_not_end_the_sparse_products() -> None:
    model, optimizer, run = make(nm.STE("2:4"))
    x, y = data()
    (model(x) - y).square().mean().backward()
    with pytest.warns(UserWarning, match="computes in torch.float32"):
        optimizer.step()
    train(model, optimizer, 1)
    assert run.products["up"]["output"] == "sparse"


def test_bi_mask_attaches_to_a_model_with_1x1_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    run = nm.sparsify_(model, nm.BiMask("2:4"), targets="all")
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "keeps a state per weight of a convolution" in run.products["0"]["output"]


def test_a_convolution_called_in_another_memory_format_says_that_it_is_emulated() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 8, 3))
    run = nm.sparsify_(model, nm.STE("2:4"), targets=["0"])
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 64, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        model[0](x)
        assert run.products["0"]["output"] == "emulated: its input is not in channels_last memory format"
        model[0](x.to(memory_format=torch.channels_last))
    assert run.products["0"]["output"] == "sparse"


def test_sdgp_leaves_widths_that_the_library_refuses_dense() -> None:
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 8))
    run = nm.sparsify_(model, nm.SDGP("2:4"))
    run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.products["0"]["grad_input"] == "in_features = 100 is not a multiple of 8"


def test_operands_begin_where_the_library_expects_them() -> None:
    flat = torch.randn(129).to(torch.bfloat16)
    part = flat[1:]
    assert part.data_ptr() % 16
    assert _ops._aligned(part).data_ptr() % 16 == 0
    assert torch.equal(_ops._aligned(part), part)
    assert _ops._aligned(flat) is flat
