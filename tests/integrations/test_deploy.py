"""The command lines for TensorRT and onnxruntime: right for the file they are written for, and explained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nmsparse as nm
from nmsparse.checkpoint import export_onnx
from nmsparse.integrations.deploy import onnxruntime_providers, sparse_layers, trtexec


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One exported file with a batch of any size, and one with a fixed one, in a folder with a space."""
    folder = tmp_path_factory.mktemp("some models")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    nm.sparsify_(model, nm.STE("2:4"))
    made = {"any": folder / "any.onnx", "fixed": folder / "fixed.onnx"}
    for name, path in made.items():
        export_onnx(model, path, (torch.randn(2, 16),), dynamic_batch=name == "any")
    return made


def test_command_enables_sparsity_and_gives_the_batch_a_range(files: dict[str, Path]) -> None:
    command = trtexec(files["any"], batches=(1, 4, 16))
    assert command.arguments[0] == "trtexec"
    assert "--sparsity=enable" in command.arguments
    assert f"--onnx={files['any']}" in command.arguments
    assert f"--saveEngine={files['any'].with_suffix('.engine')}" in command.arguments
    shapes = {a.partition("=")[0]: a.partition(":")[2] for a in command.arguments if "Shapes" in a}
    assert shapes == {"--minShapes": "1x16", "--optShapes": "4x16", "--maxShapes": "16x16"}


def test_fixed_sizes_need_no_range(files: dict[str, Path]) -> None:
    assert not any("Shapes" in argument for argument in trtexec(files["fixed"]).arguments)
    assert not any("profile" in name for name in onnxruntime_providers(files["fixed"]).options)


def test_shell_line_survives_a_shell(files: dict[str, Path]) -> None:
    command = trtexec(files["any"])
    assert shlex.split(command.shell.replace("\\\n", "")) == command.arguments


def test_every_flag_is_explained(files: dict[str, Path]) -> None:
    command = trtexec(files["any"], version=10)
    text = command.explain()
    assert all(f"{flag}\n    " in text and len(why) > 10 for flag, why in command.flags.items())
    providers = onnxruntime_providers(files["any"])
    assert providers.options.keys() == providers.reasons.keys()
    assert all(why in providers.explain() for why in providers.reasons.values())


def test_precision_is_a_flag_up_to_tensorrt_10_and_in_the_file_after() -> None:
    shapes = {"x": (1, 16)}
    assert "--fp16" in trtexec("m.onnx", shapes=shapes, version=10).arguments
    assert "--bf16" in trtexec("m.onnx", shapes=shapes, version=10, precision="bf16").arguments
    assert not {"--fp16", "--bf16"} & set(trtexec("m.onnx", shapes=shapes, version=11).arguments)
    assert "trt_fp16_enable" not in onnxruntime_providers("m.onnx", shapes=shapes, precision="fp32").options


def test_providers_enable_sparsity_and_fall_back(files: dict[str, Path]) -> None:
    first, *rest = onnxruntime_providers(files["any"], cache="engines").providers
    name, options = first
    assert name == "TensorrtExecutionProvider"
    assert options["trt_sparsity_enable"] is True
    assert options["trt_fp16_enable"] is True
    assert options["trt_engine_cache_path"] == "engines"
    assert options["trt_profile_max_shapes"].endswith(":32x16")
    assert rest == ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_open_sizes_must_be_given(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    entry = helper.make_tensor_value_info("ids", TensorProto.FLOAT, ["batch", "length"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length"])
    graph = helper.make_graph([helper.make_node("Identity", ["ids"], ["y"])], "g", [entry], [out])
    onnx.save(helper.make_model(graph), str(tmp_path / "m.onnx"))
    with pytest.raises(ValueError, match=r"dim 1 of input ids is open: give shapes"):
        trtexec(tmp_path / "m.onnx")
    command = trtexec(tmp_path / "m.onnx", shapes={"ids": (1, 128)})
    assert "--optShapes=ids:8x128" in command.arguments
    with pytest.raises(ValueError, match=r"no input 'idz'; its inputs are ids"):
        trtexec(tmp_path / "m.onnx", shapes={"ids": (1, 128), "idz": (1, 2)})
    with pytest.raises(ValueError, match="has 2 dims, shapes gives it 1"):
        trtexec(tmp_path / "m.onnx", shapes={"ids": (1,)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give shapes="),
        ({"precision": "int3"}, "precision is"),
        ({"batches": (4, 2, 8)}, "smallest, usual and largest"),
        ({"version": 8}, "TensorRT 10 and 11"),
    ],
)
def test_wrong_input_gets_a_reason(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trtexec("missing.onnx", **options)


def test_bf16_in_onnxruntime_says_which_version_it_takes() -> None:
    shapes = {"x": (1, 16)}
    assert "onnxruntime 1.23" in onnxruntime_providers("m.onnx", shapes=shapes, precision="bf16").reasons["trt_bf16_enable"]
    assert not any("1.23" in why for why in onnxruntime_providers("m.onnx", shapes=shapes).reasons.values())


OLDER = """[08/05/2024-12:06:52] [I] [TRT] Total Activation Memory: 7864832
[08/05/2024-12:06:54] [I] [TRT] (Sparsity) Layers eligible for sparse math: MatMul_401, Conv_619 + Relu_620, Conv_626
[08/05/2024-12:06:54] [I] [TRT] (Sparsity) TRT inference plan picked sparse implementation for layers: Conv_619 + Relu_620
[08/05/2024-12:06:54] [I] [TRT] [MemUsageChange] TensorRT-managed allocation in building engine: CPU +0, GPU +512
"""
NEWER = """[02/11/2026-10:02:31] [V] [TRT] Builder timing cache: created 0 entries, 214 hit(s)
[02/11/2026-10:02:31] [V] [TRT] (Sparsity) Found 3 layer(s) eligible to use sparse tactics: /q/MatMul, /k/MatMul, /up/MatMul
[02/11/2026-10:02:31] [V] [TRT] (Sparsity) Chose 2 layer(s) using sparse tactics: /q/MatMul, /up/MatMul
[02/11/2026-10:02:31] [I] [TRT] Engine generation completed in 31.1935 seconds.
"""
COUNTED = """[V] [TRT] (Sparsity) Found 39 layer(s) eligible to use sparse tactics
[V] [TRT] (Sparsity) Chose 0 layer(s) using sparse tactics
"""


def test_older_log_tells_which_layers_run_sparse() -> None:
    found = sparse_layers(OLDER)
    assert found.eligible == ["MatMul_401", "Conv_619 + Relu_620", "Conv_626"]
    assert found.chosen == ["Conv_619 + Relu_620"]
    assert (found.eligible_count, found.chosen_count) == (3, 1)


def test_newer_log_tells_which_layers_run_sparse() -> None:
    found = sparse_layers(NEWER.replace("\n", "\r\n"))
    assert found.eligible == ["/q/MatMul", "/k/MatMul", "/up/MatMul"]
    assert found.chosen == ["/q/MatMul", "/up/MatMul"]
    assert (found.eligible_count, found.chosen_count) == (3, 2)


def test_log_without_names_tells_how_many_layers_run_sparse() -> None:
    found = sparse_layers(COUNTED)
    assert found.eligible == found.chosen == []
    assert (found.eligible_count, found.chosen_count) == (39, 0)


def test_log_that_names_no_layer_after_its_heading_chose_none() -> None:
    none = sparse_layers("(Sparsity) TRT inference plan picked sparse implementation for layers:\n[I] next line")
    assert none.chosen == []
    assert none.chosen_count == 0
    assert none.eligible_count is None  # this log does not say


def test_last_report_of_a_log_is_that_of_the_engine() -> None:
    """TensorRT reports once per pass over the algorithms."""
    assert sparse_layers(COUNTED + NEWER).chosen_count == 2
    assert sparse_layers(NEWER + COUNTED).eligible == []
    assert sparse_layers(NEWER + OLDER).chosen == ["Conv_619 + Relu_620"]


def test_log_that_is_silent_about_sparsity_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not say which layers run sparse.*--sparsity=enable --verbose"):
        sparse_layers("[I] [TRT] Engine generation completed in 31.1935 seconds.\n&&&& PASSED TensorRT.trtexec\n")
    with pytest.raises(ValueError, match=r"words that this does not know: '\(Sparsity\) 4 of 9 layers'"):
        sparse_layers("[V] [TRT] (Sparsity) 4 of 9 layers\n[I] done")
