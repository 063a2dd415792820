"""The three products: exactly dense where nothing is pruned, exactly the recipe's operands where something is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.functional import backward_mask, magnitude_mask, sdgp, violations


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Output, input gradient, and every parameter's gradient, for a fixed output gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    return (y.detach(), x.grad, *(p.grad for p in model.parameters()))


def pair(model: nn.Module, recipe: nm.Recipe) -> tuple[nn.Module, nn.Module, nm.Run]:
    """The same model dense and sparse; a dummy optimizer satisfies recipes with a clock."""
    sparse = copy.deepcopy(model)
    run = nm.sparsify_(sparse, recipe, targets="all")
    run.attach(torch.optim.SGD(sparse.parameters(), lr=0.0), total_steps=100)
    return model, sparse, run


def assert_same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for first, second in zip(a, b, strict=True):
        assert torch.equal(first, second)


LINEAR_INPUTS = [(8,), (1, 8), (5, 8), (2, 3, 8), (0, 8), (2, 0, 8)]
CONVS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": 2},
    {"padding": "same", "kernel_size": 2},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": (1, 0), "padding_mode": "circular"},
    {"groups": 2},
    {"kernel_size": 1},
    {"kernel_size": (1, 3)},
]


@pytest.mark.parametrize("shape", LINEAR_INPUTS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_recipe_on_linear_is_dense_bit_for_bit(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Linear(8, 12, bias=bias), nm.Dense())
    x = torch.randn(shape)
    assert_same(gradients(sparse, x), gradients(dense, x))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's own remark on the dense layer
@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_dense_recipe_on_convolution_is_dense_bit_for_bit(options: dict[str, Any], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, **{"kernel_size": 3, **options}).to(memory_format=layout)
    dense, sparse, _ = pair(conv, nm.Dense())
    x = torch.randn(2, 8, 7, 6).to(memory_format=layout)
    a, b = gradients(sparse, x), gradients(dense, x)
    assert_same(a, b)
    assert a[0].stride() == b[0].stride()


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {"padding": (1, 2)}),
        ({}, {"padding": 1}),
        ({"padding": 1}, {"padding": 0}),
        ({"padding": 1}, {"padding": "valid"}),
        ({"padding": 1}, {"padding": (2, 2), "dilation": (2, 2)}),
        ({"padding": "same"}, {"dilation": 2}),
        ({"padding": "same"}, {"padding": 1}),
        ({}, {"padding": "same"}),
        ({"kernel_size": 1}, {"padding": 1}),
        ({"padding": 1}, {"stride": 2}),
        ({"padding": 1, "padding_mode": "reflect"}, {"padding": 0}),
    ],
    ids=str,
)
def test_convolution_follows_what_is_set_after_its_construction(options: dict[str, Any], changes: dict[str, Any]) -> None:
    """Subclasses set ``padding`` in their constructor, and whoever dilates a network sets both; torch takes integers too."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, **{"kernel_size": 3, **options})
    for name, value in changes.items():
        setattr(conv, name, value)
    dense, sparse, _ = pair(conv, nm.STE("4:4"))
    x = torch.randn(2, 8, 7, 6)
    for found, expected in zip(gradients(sparse, x), gradients(dense, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_convolution_of_a_single_image_works() -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Conv2d(8, 4, 3), nm.Dense())
    x = torch.randn(8, 5, 5)
    assert_same(gradients(sparse, x), gradients(dense, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_a_dense_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    dense, sparse, _ = pair(model, nm.STE("4:4"))
    x = torch.randn(6, 16)
    results = []
    for m in (dense, sparse):
        with torch.autocast("cpu", dtype):
            results.append(gradients(m, x))
    assert results[0][0].dtype == results[1][0].dtype == dtype
    assert_same(*results)


def test_mask_under_autocast_comes_from_the_master_weight() -> None:
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1.001, 1.002, 1.003]]))  # all equal once rounded to bf16
    nm.sparsify_(layer, nm.STE("2:4"))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.eye(4))
    assert (y != 0).flatten().tolist() == [False, False, True, True]


def test_dtypes_that_do_not_match_fail_as_in_a_dense_layer() -> None:
    layer = nn.Linear(8, 8)
    nm.sparsify_(layer, nm.STE("2:4"))
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(2, 8, dtype=torch.bfloat16))


def test_sixteen_bit_parameters_train() -> None:
    layer = nn.Linear(8, 8).bfloat16()
    nm.sparsify_(layer, nm.SSTE("2:4"))
    _, grad_x, grad_w, grad_b = gradients(layer, torch.randn(4, 8).bfloat16())
    assert grad_x.dtype == grad_w.dtype == grad_b.dtype == torch.bfloat16


def test_ste_gives_every_weight_the_dense_gradient() -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Linear(16, 8), nm.STE("2:4"))
    x = torch.randn(5, 16)
    y, grad_x, grad_w, grad_b = gradients(sparse, x)
    weight = dense.weight * magnitude_mask(dense.weight, "2:4")
    assert torch.equal(y, F.linear(x, weight, dense.bias))
    _, dense_x, dense_w, dense_b = gradients(dense, x)
    assert torch.equal(grad_w, dense_w)
    assert torch.equal(grad_b, dense_b)
    assert not torch.equal(grad_x, dense_x)
    assert (grad_w != 0).all()


def test_bi_mask_differs_from_sr_ste_only_in_the_input_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    _, first, _ = pair(model, nm.SRSTE("2:4"))
    _, second, run = pair(model, nm.BiMask("2:4"))
    x = torch.randn(5, 16)
    a, b = gradients(first, x), gradients(second, x)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[2], b[2])
    order = run._layers[""].state["permutation"]
    grad_y = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    expected = grad_y @ (model.weight * backward_mask(model.weight, "2:4", order))
    torch.testing.assert_close(b[1], expected)


def test_bi_mask_equals_sr_ste_where_the_backward_mask_drops_nothing() -> None:
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():  # each column keeps two weights already
        model.weight.copy_(torch.tensor([[9.0, 8, 1, 1], [1, 1, 9, 8], [9, 8, 1, 1], [1, 1, 9, 8]]))
    _, first, _ = pair(model, nm.SRSTE("2:4"))
    _, second, _ = pair(model, nm.BiMask("2:4", permutation="identity"))
    x = torch.randn(3, 4)
    assert_same(gradients(first, x), gradients(second, x))


def test_sdgp_changes_only_the_input_gradient() -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Linear(16, 8), nm.SDGP("2:4"))
    x = torch.randn(5, 16)
    a, b = gradients(dense, x), gradients(sparse, x)
    grad_y = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[2], b[2])
    assert torch.equal(a[3], b[3])
    torch.testing.assert_close(b[1], sdgp(grad_y, "2:4") @ dense.weight)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_sdgp_groups_convolution_gradients_along_channels_whatever_the_layout(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Conv2d(4, 8, 3), nm.SDGP("2:4"))
    x = torch.randn(2, 4, 6, 6).to(memory_format=layout)
    a, b = gradients(dense, x), gradients(sparse, x)
    grad_y = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(3))
    pruned = sdgp(grad_y, "2:4", dim=1, over=(2, 3))
    assert violations(pruned, "2:4", dim=1) == 0
    torch.testing.assert_close(pruned.abs().sum((2, 3)), grad_y.abs().sum((2, 3)))
    torch.testing.assert_close(b[1], torch.nn.grad.conv2d_input(x.shape, dense.weight, pruned))
    assert torch.equal(a[0], b[0])
    torch.testing.assert_close(a[2], b[2], rtol=0, atol=0)
    assert torch.equal(a[3], b[3])


def test_convolution_weights_are_grouped_along_input_channels() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 4, 3)
    nm.sparsify_(conv, nm.STE("2:4"), targets="all")
    weight = nm.effective_weight(conv)
    assert violations(weight, "2:4", dim=1) == 0
    assert violations(weight.flatten(1), "2:4") > 0


@pytest.mark.parametrize("name", ["sr-ste", "s-ste", "fst", "bi-mask", "sdgp", "mask-decay", "structure-decay", "trio", "asp"])
def test_convolutions_train_with_every_recipe(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    run = nm.sparsify_(model, nm.recipe(name, "2:4"), targets=["0", "2"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.attach(optimizer, total_steps=30)
    x, target = torch.randn(8, 8, 8, 8), torch.arange(8) % 2
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    if not nm.recipe_info(name).ends_dense:
        nm.freeze_(model)
        assert violations(model[0].weight, "2:4", dim=1) == 0


def test_bias_gradient_comes_from_the_full_output_gradient() -> None:
    torch.manual_seed(0)
    for recipe in (nm.SSTE("2:4"), nm.Trio("2:4"), nm.SDGP("2:4", mvue=True)):
        dense, sparse, _ = pair(nn.Linear(8, 8), recipe)
        x = torch.randn(6, 8)
        assert torch.equal(gradients(dense, x)[3], gradients(sparse, x)[3])


def test_tokens_that_do_not_fill_a_group_are_padded_inside() -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Linear(8, 8), nm.SSTE("2:4"))
    x = torch.randn(2, 8)  # a group of four tokens with two real ones has no error
    torch.testing.assert_close(gradients(sparse, x)[2], gradients(dense, x)[2])


def test_weight_gradient_of_mvue_is_unbiased_and_differs_between_draws() -> None:
    torch.manual_seed(0)
    dense, sparse, _ = pair(nn.Linear(8, 4, bias=False), nm.SSTE("2:4"))
    x = torch.randn(16, 8)
    exact = gradients(dense, x)[2]
    draws = []
    for _ in range(600):
        sparse.zero_grad()
        draws.append(gradients(sparse, x)[2].clone())
    samples = torch.stack(draws)
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() < 5 * error).all()
    assert samples.std(0).min() > 0


def test_only_the_input_and_the_parameter_are_kept_for_the_backward_pass() -> None:
    """No projected weight and no mask outlives the forward pass."""
    layer = nn.Linear(64, 64)
    nm.sparsify_(layer, nm.SSTE("2:4"))
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    x = torch.randn(2, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    pointers = {t.data_ptr() for t in kept if t.numel() > 1}
    assert pointers == {x.data_ptr(), layer.weight.data_ptr()}


def test_stored_masks_take_one_byte_per_weight() -> None:
    for recipe in (nm.FST("2:4"), nm.ASP("2:4"), nm.BiMask("2:4")):
        layer = nn.Linear(64, 64)
        run = nm.sparsify_(layer, recipe)
        stored = sum(t.numel() * t.element_size() for t in run._layers[""].state.values())
        assert stored <= layer.weight.numel() + 2 * 64 * 8 + 16


def test_changing_a_weight_between_forward_and_backward_is_noticed() -> None:
    layer = nn.Linear(8, 8)
    nm.sparsify_(layer, nm.STE("2:4"))
    y = layer(torch.randn(2, 8)).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_encoder_layer_of_torch_does_not_bypass_the_recipe_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    nm.sparsify_(layer, nm.STE("2:4"), targets=["linear1", "linear2"])
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        sparse = layer(x)
        frozen = nm.freeze_(copy.deepcopy(layer))(x)
    torch.testing.assert_close(sparse, frozen)
    nm.densify_(layer)
    assert not layer.linear1._forward_pre_hooks


def test_fp8_products_are_near_the_exact_ones_and_zeros_stay_finite() -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    _, exact, _ = pair(model, nm.SSTE("2:4", mvue=False))
    _, fp8, _ = pair(model, nm.SSTE("2:4", mvue=False, precision="fp8"))
    x = torch.randn(16, 32)
    for i, (a, b) in enumerate(zip(gradients(exact, x), gradients(fp8, x), strict=True)):
        assert (a - b).norm() <= (0.05 if i == 0 else 0.15) * a.norm()  # e4m3 keeps 3 bits, e5m2 keeps 2
    zero = gradients(fp8, torch.zeros(4, 32))
    assert all(t.isfinite().all() for t in zero)


def test_evaluation_uses_the_final_pattern_and_changes_no_state() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    run = nm.sparsify_(layer, nm.MaskDecay("2:4"))
    run.attach(torch.optim.SGD(layer.parameters(), lr=0.1), total_steps=10)
    assert torch.equal(nm.effective_weight(layer), layer.weight)
    layer.eval()
    assert violations(nm.effective_weight(layer), "2:4") == 0
    before = {k: v.clone() for k, v in run._layers[""].state.items()}
    layer(torch.randn(2, 16))
    assert all(torch.equal(before[k], v) for k, v in run._layers[""].state.items())


def test_state_follows_the_module_and_keeps_its_dtype() -> None:
    layer = nn.Linear(16, 8)
    nm.sparsify_(layer, nm.SSTE("2:4"))
    scale = float(layer._nmsparse.state["scale"])
    layer.bfloat16()
    assert layer._nmsparse.state["scale"].dtype == torch.float32
    assert float(layer._nmsparse.state["scale"]) == scale
    layer.to("meta")
    assert layer._nmsparse.state["scale"].is_meta


def test_deep_copies_are_independent() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    nm.sparsify_(layer, nm.SSTE("2:4"))
    twin = copy.deepcopy(layer)
    layer._nmsparse.state["scale"].fill_(7)
    assert float(twin._nmsparse.state["scale"]) != 7
    assert isinstance(twin, nm.SparseLinear)


def test_shapes_can_be_computed_on_meta() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    nm.sparsify_(model, nm.SSTE("2:4"), targets="all")
    assert model.to("meta")(torch.empty(3, 16, device="meta")).shape == (3, 8)


# ---- sequences of several lengths ----

NESTED = [nm.STE("2:4"), nm.SSTE("2:4"), nm.FST("2:4"), nm.MaskDecay("2:4")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("recipe", NESTED, ids=lambda r: r.name)
def test_an_encoder_with_a_padding_mask_is_evaluated_as_with_padding(recipe: nm.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.TransformerEncoder makes a nested tensor of its input then."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    nm.sparsify_(encoder, recipe, targets=["linear1", "linear2"])
    x, mask = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = True
    encoder.eval()
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=mask)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = encoder(x, src_key_padding_mask=mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(found[~mask], expected[~mask], rtol=1e-5, atol=1e-5)


def test_jagged_inputs_train_as_the_rows_that_they_hold() -> None:
    grads = []
    for is_jagged in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(16, 8)
        run = nm.sparsify_(layer, nm.SSTE("2:4", mvue=False), targets=[""])
        run.attach(torch.optim.SGD(layer.parameters(), lr=0.1))
        parts = [torch.ones(n, 16) * (n + 1) for n in (2, 3)]
        if is_jagged:
            y = layer(torch.nested.nested_tensor(parts, layout=torch.jagged))
            loss = torch.cat([part.flatten() for part in y.unbind()]).square().sum()
        else:
            loss = layer(torch.cat(parts)).square().sum()
        loss.backward()
        grads.append(layer.weight.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided_nested_tensors_do_not_train_and_say_so() -> None:
    layer = nn.Linear(16, 8)
    nm.sparsify_(layer, nm.STE("2:4"), targets=[""])
    with pytest.raises(NotImplementedError, match=r"nested tensor of strided layout.*use layout=torch\.jagged"):
        layer(torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)]))
