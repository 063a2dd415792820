"""ONNX files: zeros and patterns as they are stored, outputs beside torch's, and exports that are refused."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.checkpoint import OnnxReport, export_onnx
from nmsparse.nn import SparseMixin
from nmsparse.workbench.models import build_model
from nmsparse.workbench.tasks import Facts


def sparse(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 4)).to(dtype)
    nm.sparsify_(net, nm.STE("2:4"))
    return net


def stored(path: Path) -> dict[str, Tensor]:
    arrays = {entry.name: onnx.numpy_helper.to_array(entry) for entry in onnx.load(str(path)).graph.initializer}
    return {name: torch.from_numpy(array.astype("float32")) for name, array in arrays.items()}


def run(path: Path, **inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])


def check_zeros(report: OnnxReport) -> None:
    """What the report says is what the file holds."""
    tensors = stored(Path(report.path))
    assert report.weights
    for weight in report.weights:
        tensor = tensors[weight.initializer]
        assert int(nm.functional.violations(tensor, weight.pattern, weight.dim)) == 0
        assert weight.density == nm.Pattern(weight.pattern).density == float((tensor != 0).float().mean())
        assert not torch.signbit(tensor[tensor == 0]).any()


# ---- what is written ----


def test_a_model_is_written_as_freezing_would_leave_it_and_is_not_changed(tmp_path: Path) -> None:
    net, x = sparse().train(), torch.randn(3, 32)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    report = export_onnx(net, tmp_path / "deep/model.onnx", (x,))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert net.training
    assert isinstance(net[0], SparseMixin)
    check_zeros(report)
    assert [(weight.name, weight.initializer, weight.dim) for weight in report.weights] == [
        ("0.weight", "0.weight", 1),
        ("2.weight", "2.weight", 1),
    ]
    assert report.checked
    assert report.difference is not None
    assert report.difference < 1e-5
    assert report.opset >= 20
    assert report.bytes == (tmp_path / "deep/model.onnx").stat().st_size
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["model.onnx"]
    frozen = nm.freeze_(net).eval()
    assert torch.equal(stored(tmp_path / "deep/model.onnx")["0.weight"], frozen[0].weight.detach())
    for size in (1, 3, 8):  # the batch is not fixed
        y = torch.randn(size, 32)
        torch.testing.assert_close(run(tmp_path / "deep/model.onnx", input=y), frozen(y).detach())


def test_the_pattern_is_found_in_weights_that_the_exporter_transposed(tmp_path: Path) -> None:
    report = export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(1, 5, 32),))
    check_zeros(report)
    assert [(weight.initializer, weight.shape, weight.dim) for weight in report.weights] == [
        ("0.weight_transposed", (32, 64), 0),
        ("2.weight_transposed", (64, 32), 0),
    ]


def test_zeros_stay_positive_where_a_batch_norm_of_negative_scale_is_folded_in(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4))
    nn.init.uniform_(net[1].weight, -2, -1)
    nm.sparsify_(net, nm.STE("1:4"), targets=["0"])
    report = export_onnx(net, tmp_path / "model.onnx", (torch.randn(2, 8, 6, 6),))
    check_zeros(report)
    assert not any(node.op_type == "BatchNormalization" for node in onnx.load(str(tmp_path / "model.onnx")).graph.node)
    assert [(weight.name, weight.dim) for weight in report.weights] == [("0.weight", 1)]


def test_equal_layers_may_share_one_stored_weight(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    net[2].load_state_dict(net[0].state_dict())
    nm.sparsify_(net, nm.STE("2:4"))
    report = export_onnx(net, tmp_path / "model.onnx", (torch.randn(2, 3, 32),))
    check_zeros(report)
    assert [weight.name for weight in report.weights] == ["0.weight", "2.weight"]
    assert report.missing == []


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_transformers_are_exported_by_their_logits(name: str, tmp_path: Path) -> None:
    kind: Any = "language" if name == "gpt2" else "translation"
    facts = Facts(kind, vocabulary=17, length=6, padding=0, begin=1, end=2)
    torch.manual_seed(0)
    model = build_model(name, facts, width=16, layers=1, heads=2)
    nm.sparsify_(model, nm.SRSTE("2:4"))
    tokens = torch.randint(3, 17, (1, 6))
    example = {"input_ids": tokens} if name == "gpt2" else {"input_ids": tokens, "decoder_input_ids": tokens}
    report = export_onnx(model, tmp_path / "model.onnx", example)
    check_zeros(report)
    assert {weight.dim for weight in report.weights} == {0}  # GPT-2 stores (in, out) itself, T5's are transposed
    assert model.config._attn_implementation != "eager"  # only the copy's is
    graph = onnx.load(str(tmp_path / "model.onnx")).graph
    assert [entry.name for entry in graph.input] == list(example)
    assert [entry.name for entry in graph.output] == ["logits"]
    assert run(tmp_path / "model.onnx", **{key: tokens.repeat(3, 1) for key in example}).shape == (3, 6, 17)


def test_outputs_keep_their_names(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"sum": self.a(x) + y, "other": self.b(y)}

    net = Two()
    nm.sparsify_(net, nm.STE("2:4"), targets=["a", "b"])
    export_onnx(net, tmp_path / "model.onnx", {"y": torch.randn(2, 8), "x": torch.randn(2, 8)})
    graph = onnx.load(str(tmp_path / "model.onnx")).graph
    assert [entry.name for entry in graph.output] == ["sum", "other"]
    assert sorted(entry.name for entry in graph.input) == ["x", "y"]


def test_a_frozen_model_is_checked_by_its_pattern(tmp_path: Path) -> None:
    net = nm.freeze_(sparse())
    assert export_onnx(net, tmp_path / "model.onnx", (torch.randn(2, 32),)).weights == []
    report = export_onnx(net, tmp_path / "model.onnx", (torch.randn(2, 32),), pattern="2:4")
    check_zeros(report)
    assert [weight.name for weight in report.weights] == ["0.weight", "2.weight"]


def test_shapes_can_be_fixed(tmp_path: Path) -> None:
    export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(3, 32),), dynamic_batch=False)
    (entry,) = onnx.load(str(tmp_path / "model.onnx")).graph.input
    assert [dim.dim_value for dim in entry.type.tensor_type.shape.dim] == [3, 32]


def test_large_models_keep_their_weights_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    x = torch.randn(2, 32)
    report = export_onnx(sparse(), tmp_path / "model.onnx", (x,))
    check_zeros(report)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["model.onnx", "model.onnx.data"]
    assert report.bytes == sum(file.stat().st_size for file in files)
    torch.testing.assert_close(run(tmp_path / "model.onnx", input=x), nm.freeze_(sparse()).eval()(x).detach())
    monkeypatch.undo()
    export_onnx(sparse(), tmp_path / "model.onnx", (x,))
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


# ---- what could not be checked ----


def test_without_onnxruntime_the_report_says_that_nothing_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with caplog.at_level(logging.WARNING, "nmsparse"):
        report = export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(2, 32),))
    assert (report.checked, report.difference) == (False, None)
    assert report.why_unchecked == 'onnxruntime is not installed (pip install "nmsparse[onnx]")'
    assert "was not compared with torch: onnxruntime is not installed" in caplog.text
    assert report.to_dict()["checked"] is False
    check_zeros(report)


def test_bfloat16_is_written_but_not_run(tmp_path: Path) -> None:
    report = export_onnx(sparse(torch.bfloat16), tmp_path / "model.onnx", (torch.randn(2, 32).bfloat16(),))
    assert not report.checked
    assert report.why_unchecked is not None
    assert "bfloat16" in report.why_unchecked
    check_zeros(report)


def test_layers_that_the_example_does_not_reach_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    net = Spare()
    nm.sparsify_(net, nm.STE("2:4"), targets=["used", "unused"])
    with caplog.at_level(logging.WARNING, "nmsparse"):
        report = export_onnx(net, tmp_path / "model.onnx", (torch.randn(2, 16),))
    assert [weight.name for weight in report.weights] == ["used.weight"]
    assert report.missing == ["unused.weight"]
    assert "lacks unused.weight: the example did not reach these layers" in caplog.text


# ---- what is refused ----


def test_a_difference_above_the_tolerance_is_an_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("old")
    with pytest.raises(RuntimeError, match=r"differs from torch by [0-9.e-]+, more than the tolerance of -1"):
        export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(2, 32),), tolerance=-1)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "old"


def test_outputs_that_are_not_a_number_on_one_side_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_nan(*_: Any) -> list[Tensor]:
        return [torch.full((2, 4), torch.nan)]

    monkeypatch.setattr("nmsparse.checkpoint._onnx_example._run_file", with_nan)
    with pytest.raises(RuntimeError, match="differs from torch by nan"):
        export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(2, 32),), dynamic_batch=False)


def test_the_opset_can_be_chosen_and_one_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(2, 32),), opset=18).opset == 18
    with pytest.raises(RuntimeError, match=r"torch could not write opset 99; leave opset out"):
        export_onnx(sparse(), tmp_path / "other.onnx", (torch.randn(2, 32),), opset=99)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_a_model_that_torch_cannot_export_is_named_with_the_reason(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum() > 0 else x

    with pytest.raises(RuntimeError, match=r"torch cannot export this Branches as ONNX: .*data-dependent"):
        export_onnx(Branches(), tmp_path / "model.onnx", (torch.ones(2, 16),))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((), "got a tuple"),
        ([torch.ones(2, 32)], "got a list"),
        ({"input": 3}, "got a dict of int"),
        ((torch.ones(2, 32), torch.ones(3)), r"inputs of shapes \(2, 32\), \(3,\) do not share a first dim"),
        ((torch.ones(()),), r"inputs of shapes \(\) do not share a first dim"),
    ],
)
def test_examples_that_make_no_sense_are_refused(example: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(sparse(), tmp_path / "model.onnx", example)


def test_a_folder_is_no_file_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder; give a file name, such as .*model\.onnx"):
        export_onnx(sparse(), tmp_path, (torch.randn(2, 32),))


@pytest.mark.parametrize("name", ["onnx", "onnxscript"])
def test_without_its_packages_the_extra_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'needs the package {name}, which is not installed: pip install "nmsparse\[onnx\]"'):
        export_onnx(sparse(), tmp_path / "model.onnx", (torch.randn(2, 32),))


def test_a_layer_that_breaks_its_own_pattern_is_named(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Forgetful(nm.STE):
        def output_weight(self, weight: Tensor, state: Any) -> Tensor:
            return weight

    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    nm.sparsify_(net, Forgetful("2:4"), targets="all")
    with pytest.raises(ValueError, match=r"0.weight: 512 groups of its final weight have more non-zeros than 2:4 keeps"):
        export_onnx(net, tmp_path / "model.onnx", (torch.randn(2, 32),))
    assert not (tmp_path / "model.onnx").exists()
