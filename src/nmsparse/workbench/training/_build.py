"""What a run is built from: accelerate, the task, the model, the optimizer, and the lock on its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import time
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

import nmsparse as nm
from nmsparse.workbench.extras import package
from nmsparse.workbench.models import build_model, load_pretrained, model_info, models
from nmsparse.workbench.provenance import commit
from nmsparse.workbench.tasks import Task, load_task, tasks
from nmsparse.workbench.training._config import TrainConfig

GLOO_PAUSE = 0.2
"""Seconds in which gloo's threads let go of their last tensors. They need Python for that, and where Python is shutting down
already, torch 2.13 aborts the process ("terminate called without an active exception")."""


def make_accelerator(config: TrainConfig, folder: Path) -> Any:
    accelerate = package("accelerate")
    available = [str(getattr(name, "value", name)) for name in accelerate.tracking.get_available_trackers()]
    for name in config.tracker:
        if name not in available:
            raise ValueError(f"tracker {name!r} is not installed here; installed are: {', '.join(available) or 'none'}.")
    _forget_accelerator()
    return accelerate.Accelerator(
        mixed_precision="no" if config.precision == "fp32" else config.precision,
        gradient_accumulation_steps=config.accumulate,
        log_with=list(config.tracker) or None,
        project_dir=folder / "trackers" if config.tracker else None,
        cpu=not torch.cuda.is_available(),
    )


def end_accelerator(accelerator: Any) -> None:
    """Close trackers and process groups; a tracker that fails at the end does not take the finished run with it."""
    with contextlib.suppress(Exception):
        accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        time.sleep(GLOO_PAUSE)
    _forget_accelerator()


def _forget_accelerator() -> None:
    """accelerate keeps one state per process; a second run with another precision would be refused."""
    accelerate = package("accelerate")
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def locked(folder: Path) -> IO[str]:
    """A file that stays locked while it is open, also by a process that is killed: one run at a time in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is training in {folder}: wait for it, or choose another folder.") from None
    except OSError:
        pass  # a file system without locks
    return file


def open_task(config: TrainConfig) -> Task:
    """The task of a run; a pretrained encoder brings its own vocabulary."""
    info = next((info for info in tasks() if info.name == config.task.partition(":")[0]), None)
    folder = Path(config.pretrained) if config.pretrained is not None and info and info.kind == "sentences" else None
    has_words = folder is not None and any((folder / name).exists() for name in ("tokenizer.json", "vocab.txt"))
    data_dir = config.data_dir or os.environ.get("NMSPARSE_DATA")
    return _task(config.task, data_dir, config.length, config.limit, str(folder) if has_words else None)


@lru_cache(maxsize=8)
def _task(name: str, data_dir: str | None, length: int | None, limit: int | None, vocabulary: str | None) -> Task:
    """Kept: a process that trains run after run reads the same data again and again."""
    return load_task(name, data_dir, length=length, limit=limit, vocabulary=vocabulary)


def model_name(config: TrainConfig, task: Task) -> str:
    return config.model or next(info.name for info in models() if task.facts.kind in info.kinds)


def make_model(config: TrainConfig, task: Task) -> tuple[nn.Module, str | list[str], list[str] | None]:
    """The model, which of its layers to make sparse, and which not."""
    if config.pretrained is not None:
        given = [name for name in ("model", "width", "layers", "heads", "dropout") if getattr(config, name) is not None]
        if given:
            raise ValueError(f"a pretrained model is as its folder says: leave out {' and '.join(given)}.")
        model, targets, exclude = load_pretrained(config.pretrained, task.facts), "all-linear", None
        if not any(isinstance(module, nn.Linear) for name, module in model.named_modules() if "classifier" not in name):
            targets, exclude = "all", ["classifier.1"]  # a ResNet: its only linear layer is the head
    else:
        info = model_info(model_name(config, task))
        sizes = {"width": config.width, "layers": config.layers, "heads": config.heads, "dropout": config.dropout}
        model, targets, exclude = build_model(info.name, task.facts, **sizes), info.targets, list(info.exclude) or None  # pyrefly: ignore
    if config.targets:
        is_keyword = len(config.targets) == 1 and config.targets[0] in ("all", "all-linear")
        return model, config.targets[0] if is_keyword else config.targets, config.exclude or None
    return model, targets, config.exclude or exclude


def compile_(model: nn.Module) -> None:
    """Compile the blocks of a stack, which share one graph, and not the model around them: that would take as many times longer
    as there are blocks. A model without such a stack is compiled whole."""
    for part in _repeated_blocks(model) or [model]:
        part.compile()


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Of all lists of at least two modules of one class; what such blocks hold belongs to them."""
    if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
        return list(module)
    return [block for child in module.children() for block in _repeated_blocks(child)]


def make_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Weight decay acts on matrices and filters, not on biases and norms."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.chosen_optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.peak_lr, momentum=config.momentum)
    kind = nm.StepAdamW if config.chosen_optimizer == "step-adamw" else torch.optim.AdamW
    return kind(groups, lr=config.peak_lr, betas=(0.9, config.beta2), fused=device.type == "cuda")


def memory_of(device: torch.device) -> int:
    """Most bytes that this process has held, on the device it trains on."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def environment_of(accelerator: Any) -> dict[str, Any]:
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    versions = {name: package(name).__version__ for name in ("accelerate", "transformers")}
    return {
        "nmsparse": nm.__version__,
        "torch": torch.__version__,
        **versions,
        "python": platform.python_version(),
        "device": name,
        "commit": commit(),
        "processes": accelerator.num_processes,
        "cpu_threads": torch.get_num_threads(),
    }
