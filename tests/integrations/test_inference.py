"""Packing a frozen model for inference: the wiring, on the CPU with the packed layout multiplied in plain torch."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from toys import same

import nmsparse as nm
from nmsparse.kernels import Choice, Product, _dispatch, _serving_times, serving_times
from nmsparse.nn import PackedLinear

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(x))))


def frozen(dtype: torch.dtype = BF16) -> Net:
    """up and down are 2:4, the head is dense."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    nm.sparsify_(model, nm.ASP("2:4"))
    return nm.freeze_(model).eval()  # type: ignore[return-value]


def some_input(dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


class Everything:
    """A plan for which all layers pay, but those named."""

    def __init__(self, but: Iterable[str] = ()) -> None:
        self.but = set(but)

    def unprofitable(self, name: str, product: str, out_features: int, in_features: int) -> str | None:
        return "the plan says so" if name in self.but else None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference serve sparse products on the CPU."""
    monkeypatch.setattr(_dispatch, "TABLE", [_dispatch.REFERENCE])


def test_without_a_gpu_the_model_is_left_alone_with_one_warning() -> None:
    model, reference = frozen(), frozen()
    with pytest.warns(UserWarning, match="sparse tensor cores need a CUDA GPU") as caught:
        handle = nm.accelerate_(model)
    assert len(caught) == 1
    assert handle.packed == []
    assert handle.layers["up"] == "sparse tensor cores need a CUDA GPU"
    assert type(model.up) is nn.Linear
    assert same(model, reference)
    assert "0 of 3 linear layers" in str(handle)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_packed_layers_compute_what_the_dense_ones_do(keep_dense: bool, dtype: torch.dtype) -> None:
    model = frozen(dtype)
    with torch.inference_mode():
        expected = model(some_input(dtype))
        handle = nm.accelerate_(model, plan=Everything(), keep_dense=keep_dense)
        assert handle.packed == ["up", "down"]
        assert "groups of its weight break 2:4" in handle.layers["head"] or "multiples of 64" in handle.layers["head"]
        torch.testing.assert_close(model(some_input(dtype)), expected, rtol=2e-2, atol=2e-2)
        assert model(some_input(dtype)[:0]).shape == (0, 5, 8)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("undo", [lambda model, handle: handle.undo(), lambda model, handle: nm.densify_(model)])
@pytest.mark.parametrize("keep_dense", [True, False])
def test_undo_gives_back_the_model_bit_for_bit(undo: Any, keep_dense: bool) -> None:
    model, reference = frozen(), frozen()
    handle = nm.accelerate_(model, plan=Everything(), keep_dense=keep_dense)
    assert isinstance(model.up, PackedLinear)
    undo(model, handle)
    assert type(model.up) is nn.Linear
    assert same(model, reference)
    assert model.up.weight.requires_grad
    assert not hasattr(model.up, "_packed")


@pytest.mark.usefixtures("engine")
def test_without_the_dense_copy_nine_sixteenths_remain_and_keys_stay() -> None:
    model, reference = frozen(), frozen()
    handle = nm.accelerate_(model, plan=Everything(), keep_dense=False)
    assert handle.packed_bytes * 16 == handle.dense_bytes * 9
    assert model.up.weight.numel() == 0
    assert torch.equal(nm.effective_weight(model.up), reference.up.weight)
    assert model.up.weight.dtype == BF16
    assert same(model, reference)  # the state dict, by stock keys and with the weights
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]


@pytest.mark.usefixtures("engine")
def test_measured_times_decide_and_can_be_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Product] = []

    def times(products: Iterable[Product], device: torch.device) -> dict[Product, Choice | None]:
        asked.extend(products)
        return dict.fromkeys(asked, Choice(1, 1, 9.0, 9.0, 0.0))

    def serving(product: Product, tokens: int, has_bias: bool, device: torch.device) -> tuple[float, float]:
        assert (tokens, has_bias) == (13, product.m == 128)
        return 1.0, 0.5 if product.m == 128 else 2.0

    monkeypatch.setattr("nmsparse.inference.time_products", times)
    monkeypatch.setattr("nmsparse.inference.serving_times", serving)
    model = frozen()
    handle = nm.accelerate_(model, tokens=13)
    assert [(p.m, p.n, p.k, p.has_bias) for p in asked] == [(128, 16, 64, False), (64, 16, 128, False)]
    assert handle.packed == ["up"]
    assert handle.layers["down"] == "measured: the dense product is as fast"
    assert handle.plan is not None
    assert (handle.plan.dense_ms, handle.plan.planned_ms) == (2.0, 1.5)
    handle.plan.save(tmp_path / "plan.json")
    asked.clear()
    again = nm.accelerate_(frozen(), plan=nm.Plan.load(tmp_path / "plan.json"))
    assert again.packed == ["up"]
    assert not asked


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_served_calls_are_timed_on_weights_in_turn(is_transposed: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights of 16 KiB and packed ones of 9 KiB, as many as the cache cannot keep; the calls are those of the layer."""
    timed: list[tuple[int, list[Tensor]]] = []

    def device_milliseconds(call: Callable[[], Tensor], at_least_ms: float, calls: int) -> float:
        timed.append((calls, [call() for _ in range(calls + 1)]))
        return float(len(timed))

    monkeypatch.setattr(_serving_times, "device_milliseconds", device_milliseconds)
    monkeypatch.setattr(_serving_times, "COLD_BYTES", 48 << 10)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    product = Product(128, 16, 64, is_transposed, True, True, BF16)
    assert serving_times(product, 13, has_bias, torch.device("cpu")) == (1.0, 2.0)
    assert [calls for calls, _ in timed] == [3, 6]
    for calls, outputs in timed:
        assert {output.shape for output in outputs} == {(13, 128)}
        assert torch.equal(outputs[0], outputs[calls]), "the first weight again"
        assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.usefixtures("engine")
def test_a_layer_whose_forward_was_replaced_stays_dense() -> None:
    """accelerate's hooks keep the forward of the class that they found, which would never see the packed weight."""
    model = frozen()
    add_hook_to_module(model.up, AlignDevicesHook())
    handle = nm.accelerate_(model, plan=Everything(), keep_dense=False)
    assert handle.layers["up"] == "its forward was replaced on the layer itself, as accelerate's hooks do"
    assert handle.packed == ["down"]
    with torch.inference_mode():
        torch.testing.assert_close(model(some_input()), frozen()(some_input()), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("engine")
def test_a_single_vector_is_an_input_too() -> None:
    model = frozen()
    x = some_input()[0, 0]
    with torch.inference_mode():
        expected = model(x)
        nm.accelerate_(model, plan=Everything())
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
        assert model.up(x).shape == (128,)


@pytest.mark.usefixtures("engine")
def test_plan_keeps_layers_dense() -> None:
    handle = nm.accelerate_(frozen(), plan=Everything(but=["down"]))
    assert handle.packed == ["up"]
    assert handle.layers["down"] == "the plan says so"


@pytest.mark.usefixtures("engine")
def test_float32_model_runs_packed_under_autocast_only() -> None:
    model = frozen(torch.float32)
    x = some_input(torch.float32)
    with torch.inference_mode():
        expected = model(x)
        nm.accelerate_(model, plan=Everything())
        with torch.autocast("cpu", BF16), warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(model(x).float(), expected, rtol=5e-2, atol=5e-2)
        with pytest.warns(UserWarning, match="runs dense: it was called in torch.float32"):
            assert torch.equal(model(x), expected)
    with pytest.warns(UserWarning, match="would lose bits of its float32 weight"):
        assert nm.accelerate_(frozen(torch.float32), plan=Everything(), keep_dense=False).packed == []


@pytest.mark.usefixtures("engine")
def test_gradients_run_dense_with_a_warning_or_are_refused() -> None:
    model = frozen()
    nm.accelerate_(model, plan=Everything())
    with pytest.warns(UserWarning, match="called with gradients enabled"):
        model(some_input()).float().sum().backward()
    assert model.up.weight.grad is not None
    model = frozen()
    nm.accelerate_(model, plan=Everything(), keep_dense=False)
    with pytest.raises(RuntimeError, match=r"up: its dense weight was not kept .*inference_mode"):
        model(some_input().requires_grad_())


@pytest.mark.usefixtures("engine")
def test_a_bias_that_trains_alone_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing would record it: only the plain-torch reference of the op is seen by autograd."""
    model = frozen()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    nm.accelerate_(model, plan=Everything())
    monkeypatch.setattr("nmsparse.nn._packed.sparse_matmul", lambda *_: pytest.fail("a product without a backward pass"))
    with pytest.warns(UserWarning, match="called with gradients enabled"):
        model.up(some_input()).float().sum().backward()
    assert model.up.bias.grad is not None
    assert model.up.weight.grad is None


@pytest.mark.usefixtures("engine")
def test_changed_weight_is_noticed() -> None:
    model = frozen()
    nm.accelerate_(model, plan=Everything())
    with torch.no_grad():
        model.up.weight.mul_(2)
        with pytest.warns(UserWarning, match="changed after it was packed"):
            model(some_input())


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("keep_dense", [True, False])
def test_loading_or_moving_makes_plain_layers_again(keep_dense: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = Net().to(BF16)
    for load in (lambda m: m.load_state_dict(other.state_dict()), lambda m: nm.load(m, tmp_path)):
        nm.save(other, tmp_path)
        model = frozen()
        nm.accelerate_(model, plan=Everything(), keep_dense=keep_dense)
        load(model)
        assert type(model.up) is nn.Linear
        assert same(model, other)
    model = frozen()
    nm.accelerate_(model, plan=Everything(), keep_dense=keep_dense)
    model.to(BF16)  # nothing changes
    assert isinstance(model.up, PackedLinear)
    model.float()
    assert type(model.up) is nn.Linear
    assert same(model, frozen().float())


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("keep_dense", [True, False])
def test_packed_model_can_be_saved_and_copied(keep_dense: bool, tmp_path: Path) -> None:
    model, reference = frozen(), frozen()
    nm.accelerate_(model, plan=Everything(), keep_dense=keep_dense)
    nm.save(model, tmp_path, format="packed", pattern="2:4")
    assert {tensor.name for tensor in nm.verify(tmp_path).tensors} == {"up.weight", "down.weight"}
    plain = Net().to(BF16)
    assert same(nm.load(plain, tmp_path), reference)
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        assert torch.equal(twin(some_input()), model(some_input()))
    assert same(nm.densify_(twin), reference)


@pytest.mark.usefixtures("engine")
def test_compiled_model_has_one_graph() -> None:
    torch._dynamo.reset()
    model = frozen()
    nm.accelerate_(model, plan=Everything())
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(some_input()), model(some_input()), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("inputs", [64, 96])
def test_gpt2_layers_are_packed_as_they_are_stored(inputs: int) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer, x = Conv1D(128, inputs).to(BF16), torch.randn(3, 5, inputs).to(BF16)
    nm.sparsify_(layer, nm.ASP("2:4"), targets=[""])
    nm.freeze_(layer)
    with torch.inference_mode():
        expected = layer(x)
        handle = nm.accelerate_(layer, plan=Everything(), keep_dense=False)
        assert handle.packed == [""]
        torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # a class that no name leads to
            assert type(twin) is type(layer)
            assert torch.equal(twin(x), layer(x))
    assert layer.state_dict()["weight"].shape == (inputs, 128)
    handle.undo()
    assert type(layer) is Conv1D


class Named(nn.Linear):
    """A subclass that adds something, and leaves the product to torch."""

    def __init__(self, *args: Any, label: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.label = label


class Rebuilt(Named):
    """A subclass that copies itself by its constructor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebuilt:
        twin = type(self)(self.in_features, self.out_features, dtype=self.bias.dtype, label=self.label)
        with torch.no_grad():
            for own, copied in zip(self.parameters(), twin.parameters(), strict=True):
                copied.copy_(own)
        return twin


def frozen_layer(kind: type[Named]) -> Named:
    torch.manual_seed(0)
    layer = kind(64, 128, dtype=BF16, label="mine")
    nm.sparsify_(layer, nm.ASP("2:4"), targets=[""])
    return nm.freeze_(layer).eval()  # type: ignore[return-value]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("kind", [Named, Rebuilt])
def test_subclass_without_a_forward_of_its_own_is_packed_and_stays_what_it_is(kind: type[Named], keep_dense: bool) -> None:
    layer, reference, x = frozen_layer(kind), frozen_layer(kind), some_input()
    handle = nm.accelerate_(layer, plan=Everything(), keep_dense=keep_dense)
    assert handle.packed == [""]
    assert isinstance(layer, kind)
    assert same(layer, reference)  # keys and weights
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")  # as it would warn of running dense
        torch.testing.assert_close(layer(x), reference(x), rtol=2e-2, atol=2e-2)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(twin) is type(layer)
            assert twin.label == "mine"
            assert twin.weight.numel() == layer.weight.numel()
            assert torch.equal(twin(x), layer(x))
            assert same(nm.densify_(twin), reference)
    assert type(type(layer)(64, 128, label="another")) is kind
    handle.undo()
    assert type(layer) is kind
    assert same(layer, reference)
    assert not hasattr(layer, "_packed")


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.usefixtures("engine")
def test_subclasses_that_cannot_be_packed_say_why() -> None:
    layers: dict[str, nn.Module] = {
        "own": Doubled(64, 64),
        "replaced": Named(64, 64),
        "lazy": nn.LazyLinear(64),
        "computed": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
        "shifted": nn.utils.parametrize.register_parametrization(nn.Linear(64, 64), "bias", nn.Identity()),
    }
    add_hook_to_module(layers["replaced"], AlignDevicesHook())
    model = nn.ModuleDict(layers).to(BF16)
    with pytest.warns(UserWarning, match="left the model as it is"):
        handle = nm.accelerate_(model, plan=Everything())
    assert handle.layers == {
        "own": "Doubled may read its weight in ways of its own",
        "replaced": "its forward was replaced on the layer itself, as accelerate's hooks do",
        "lazy": "its weight has no size yet: run one forward pass first",
        "computed": "a parametrization computes its weight or its bias",
        "shifted": "a parametrization computes its weight or its bias",
    }


@pytest.mark.usefixtures("engine")
def test_encoder_layer_does_not_read_past_its_packed_linears() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0).to(BF16)
    nm.sparsify_(layer, nm.ASP("2:4"), targets=["linear1", "linear2"])
    nm.freeze_(layer).eval()
    with torch.inference_mode():
        expected = layer(some_input())
        handle = nm.accelerate_(layer, plan=Everything(), keep_dense=False)
        assert handle.packed == ["linear1", "linear2"]
        torch.testing.assert_close(layer(some_input()), expected, rtol=5e-2, atol=5e-2)
    assert "ways of its own" in handle.layers["self_attn.out_proj"]
    handle.undo()
    assert not layer.linear1._forward_pre_hooks


@pytest.mark.usefixtures("engine")
def test_shared_weight_is_not_dropped() -> None:
    model = frozen()
    model.twin = nn.Linear(64, 128).to(BF16)
    model.twin.weight = model.up.weight
    handle = nm.accelerate_(model, plan=Everything(), keep_dense=False)
    assert handle.packed == ["down"]
    assert "up.weight and twin.weight share" in handle.layers["up"]


@pytest.mark.usefixtures("engine")
def test_second_call_leaves_what_is_packed() -> None:
    model = frozen()
    nm.accelerate_(model, plan=Everything(but=["down"]))
    assert nm.accelerate_(model, plan=Everything()).packed == ["down"]
    assert isinstance(model.up, PackedLinear)


def test_wrong_input_gets_a_reason() -> None:
    model = Net()
    nm.sparsify_(model, nm.STE("2:4"))
    with pytest.raises(ValueError, match=r"up is still a training layer .*freeze_"):
        nm.accelerate_(model)
    with pytest.raises(ValueError, match="tokens counts"):
        nm.accelerate_(frozen(), tokens=0)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        nm.accelerate_(frozen(), dtype=torch.float32)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        nm.accelerate_("model")  # type: ignore[arg-type]


# ---- torch.export ----


@pytest.mark.parametrize("state", ["frozen", "sparsified"])
def test_exported_program_computes_what_the_model_does(state: str) -> None:
    """Of a frozen model, and of a sparsified one in evaluation mode, whose graph holds its projection."""
    torch.manual_seed(0)
    model = Net()
    nm.sparsify_(model, nm.STE("2:4"))
    model.eval()
    if state == "frozen":
        nm.freeze_(model)
    x = some_input(torch.float32)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        more = torch.cat([x, 2 * x, x])
        torch.testing.assert_close(program.module()(more), model(more))
    assert set(program.state_dict) == set(model.state_dict())


@pytest.mark.usefixtures("engine")
def test_exported_program_of_a_packed_model_calls_the_sparse_product() -> None:
    model = frozen()
    nm.accelerate_(model, plan=Everything())
    with torch.no_grad():
        program = torch.export.export(model, (some_input(),))
        assert "nmsparse.sparse_matmul" in program.graph_module.code
        torch.testing.assert_close(program.module()(some_input()), model(some_input()))


# ---- what is built on it ----


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bench_compares_the_same_computation(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nmsparse.workbench.bench import _inference, _records
    from nmsparse.workbench.bench._blocks import Shape
    from nmsparse.workbench.bench._timing import Side

    def alternate(sides: dict[str, Callable[[], object]], seconds: float, turns: int) -> dict[str, Side]:
        for call in sides.values():
            call()
        return {name: Side({"cublas": 3.0, "cublaslt": 2.0, "sparse": 1.0}[name], 0.0, None, None) for name in sides}

    monkeypatch.setattr(_inference, "alternate", alternate)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda library=None: library or "default")
    monkeypatch.setattr(nn.Module, "compile", lambda self, *a, **k: None)
    monkeypatch.setattr(
        "nmsparse.inference.time_products", lambda products, device: {p: Choice(1, 1, 0.5, 1.0, 0.0) for p in products}
    )
    monkeypatch.setattr("nmsparse.inference.serving_times", lambda *call: (1.0, 0.5))
    monkeypatch.setattr(_records.Recorder, "__post_init__", lambda self: setattr(self, "stamp", {}))
    record = _records.Recorder()
    for call in (_inference.Call("prefill", 2, 16), _inference.Call("decode", 3, 1)):
        _inference.compare_call(record, "tiny", Shape(family, 2, 64, 128, 4, 4, 32, 2), call, 0.1, 1, "cpu")
    for row in record.rows:
        assert row["speedup"] == 2.0, "against the faster library"
        assert row["blas"] == "cublaslt"
        assert row["packed"] == row["layers"] == (14 if family == "llama" else 8)
        assert row["weight_bytes"] == 0.5625
        assert row["difference"] < 0.02
        json.dumps(row)
    assert "tiny x2 decode 3 x 1" in _records.headline(record.rows[1])


def test_example_prunes_fine_tunes_and_serves(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "prune_finetune_serve.py"
    result = subprocess.run(
        [sys.executable, script, "--steps", "40", "--output", tmp_path / "model"], capture_output=True, text=True, check=True
    )
    words = [line.split(":")[0].strip() for line in result.stdout.splitlines()]
    assert words[:5] == ["dense", "pruned", "fine-tuned", "saved", "served"]
    assert nm.verify(tmp_path / "model").ok
