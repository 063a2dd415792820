"""Result rows: JSON lines with the hardware and versions they were measured with."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import nmsparse as nm
from nmsparse.kernels import hardware
from nmsparse.workbench.provenance import commit


def versions() -> dict[str, Any]:
    """What a result depends on beside the code."""
    facts: dict[str, Any] = {"nmsparse": nm.__version__, "commit": commit(), "torch": torch.__version__}
    facts |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("triton", "transformers"):
        try:
            facts[package] = __import__(package).__version__
        except ImportError:
            facts[package] = None
    return facts


@dataclass
class Recorder:
    """Collects rows, appends them to a file, and tells each to a listener."""

    file: Path | None = None
    listen: Callable[[dict[str, Any]], None] = lambda row: None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stamp = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            **versions(),
            **hardware(torch.device("cuda", torch.cuda.current_device())),
        }

    def add(self, suite: str, **facts: Any) -> None:
        row = {"suite": suite, **facts, **self.stamp}
        self.rows.append(row)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self.listen(row)


def headline(row: dict[str, Any]) -> str:
    """A row in one line."""
    if row["suite"] == "kernels":
        return f"{row['kernel']:40} {row['tb_per_s']:6.2f} TB/s   copy {row['copy_tb_per_s']:.2f}"
    if row["suite"] == "products":
        what = f"{row['out_features']} x {row['in_features']} {row['product']}"
        if row["speedup"] is None:
            return f"{what:40} {row['why']}"
        fp8 = "" if row.get("fp8_speedup") is None else f"   dense fp8 {row['fp8_speedup']:.2f}x"
        rates = f"{row['dense_tflops']:.0f} -> {row['sparse_tflops']:.0f} TFLOP/s"
        return f"{what:40} {row['speedup']:6.2f}x   {rates}   error {row['error']:.1e}{fp8}"
    if row["suite"] == "layer":
        what = f"{row['out_features']} x {row['in_features']} {row['recipe']}"
        return f"{what:40} {row['speedup']:6.2f}x   {row['dense_ms']:.3f} -> {row['sparse_ms']:.3f} ms forward and backward"
    if row["suite"] == "inference":
        what = f"{row['model']} x{row['blocks']} {row['phase']} {row['batch']} x {row['length']}"
        times = f"{row['dense_ms']:.3f} -> {row['sparse_ms']:.3f} ms"
        return f"{what:40} {row['speedup']:6.2f}x   {times}   {row['packed']} of {row['layers']} layers sparse"
    what = f"{row['model']} x{row['blocks']} {row['recipe']}" + (", FSDP2" if row["suite"] == "sharded" else "")
    joules = "" if row["sparse_joules"] is None else f"   {row['dense_joules']:.1f} -> {row['sparse_joules']:.1f} J"
    times = f"{row['dense_ms']:.2f} -> {row['sparse_ms']:.2f} ms"
    memory = "" if row["memory"] is None else f"   memory {row['memory']:.3f}"
    return f"{what:40} {row['speedup']:6.2f}x   {times} per step{joules}{memory}"
