"""What ``nmsparse export`` reads: the folder of a run, a transformers folder, or any safetensors checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nmsparse as nm
from nmsparse.checkpoint import Converted, OnnxReport, convert, export_onnx
from nmsparse.workbench.extras import package
from nmsparse.workbench.records import RESULT, RUN, RunRecord
from nmsparse.workbench.training import TrainConfig, make_model, open_task

EXAMPLE_TOKENS = 8


def weights_of(source: Path) -> Path:
    """The checkpoint itself: a run keeps it in a folder of its own."""
    if not (source / RUN).exists():
        return source
    if not (source / "model").is_dir():
        raise ValueError(f"{source} is a run that {_why_no_model(source)}.")
    return source / "model"


def _why_no_model(run: Path) -> str:
    if not (run / RESULT).exists():
        return "has not finished: resume it first"
    if (RunRecord(run).result or {}).get("status") == "diverged":
        return "diverged, and so has no model: train it again with a lower learning rate"
    return "kept no model (--no-save, or weights spread over processes)"


def export_weights(source: Path, target: Path, format: Any, pattern: str | None) -> Converted:
    """Dense or packed safetensors."""
    return convert(weights_of(source), target, format, pattern)


def export_graph(source: Path, target: Path, pattern: str | None, opset: int | None) -> OnnxReport:
    """ONNX, from the model that the source describes."""
    model, example = _from_run(source) if (source / RUN).exists() else _from_transformers(source)
    file = target if target.suffix == ".onnx" else target / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    return export_onnx(model, file, example, pattern=pattern or _pattern(weights_of(source)), opset=opset)


def _pattern(folder: Path) -> str | None:
    """The pattern that sparsity.json gives most tensors, if it is there."""
    file = folder / "sparsity.json"
    entries = json.loads(file.read_text()).get("tensors", {}) if file.exists() else {}
    patterns = [entry["pattern"] for entry in entries.values()]
    return max(set(patterns), key=patterns.count) if patterns else None


def _from_run(source: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run, with two examples of its own task."""
    config = TrainConfig.from_dict(RunRecord(source).settings, str(source / RUN))
    task = open_task(config)
    model, _, _ = make_model(config, task)
    nm.load(model, weights_of(source))
    batch = task.valid.__getitems__([0, min(1, len(task.valid) - 1)])
    labels = batch.pop("labels")
    if task.facts.kind == "translation":
        batch["decoder_input_ids"] = labels.clamp(min=0)
    return model, batch


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _loaded(kind: Any, configuration: Any, source: Path) -> nn.Module:
    """The model with its weights. Without a sparsity.json they were written by transformers, which keeps tied weights once and
    gives some tensors other names on disk than in the model: it alone knows how to read them."""
    is_ours = (source / "sparsity.json").exists()
    lacking: list[str] = []
    try:
        if is_ours:
            model = kind(configuration)
        else:
            model, report = kind.from_pretrained(
                source, config=configuration, local_files_only=True, use_safetensors=True, dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
            lacking = sorted(report["missing_keys"])
    except Exception as error:
        raise ValueError(f"{source} does not make a {kind.__name__}: {_first_line(error)}") from error
    if lacking:  # transformers would go on with random numbers
        raise ValueError(f"{source} lacks weights of a {kind.__name__}, such as {lacking[0]}: export a complete folder.")
    return nm.load(model, source) if is_ours else model


def _from_transformers(source: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that config.json names, with an example made up from its sizes."""
    lib = package("transformers")
    if not (source / "config.json").exists():
        raise ValueError(f"{source} has neither {RUN} nor config.json, so nobody knows which model it is; ONNX needs the model.")
    try:
        configuration = lib.AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:  # anybody may have written it, and its errors have no base class of their own
        raise ValueError(f"{source / 'config.json'} is not a configuration of transformers: {_first_line(error)}") from error
    name = next(iter(configuration.architectures or []), None)
    kind = getattr(lib, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, lib.PreTrainedModel)):
        raise ValueError(f"{source / 'config.json'} names no architecture that transformers has ({name!r}).")
    model = _loaded(kind, configuration, source)
    generator = torch.Generator().manual_seed(0)
    if getattr(model, "main_input_name", "") == "pixel_values":
        side = configuration.image_size if hasattr(configuration, "image_size") else 224
        return model, {"pixel_values": torch.randn(2, configuration.num_channels, side, side, generator=generator)}
    if getattr(model, "main_input_name", "") != "input_ids" or not hasattr(configuration, "vocab_size"):
        raise ValueError(f"no example can be made up for a {name}, which takes neither images nor tokens.")
    tokens = torch.randint(configuration.vocab_size, (2, EXAMPLE_TOKENS), generator=generator)
    example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return model, example | ({"decoder_input_ids": tokens} if configuration.is_encoder_decoder else {})
