"""SM clock and power draw while something runs, sampled by nvidia-smi."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass, field

import torch

PERIOD_MS = 50


@dataclass
class Sample:
    when: float
    mhz: float
    watts: float


@dataclass
class PowerMeter:
    """Samples in the background; ``between`` averages a span of time. Without nvidia-smi there are no samples."""

    device: int = 0
    samples: list[Sample] = field(default_factory=list)

    def __enter__(self) -> PowerMeter:
        fields = "--query-gpu=clocks.sm,power.draw.instant"
        # by UUID: nvidia-smi does not know which devices are visible here
        uuid = str(torch.cuda.get_device_properties(self.device).uuid).removeprefix("GPU-")
        command = ["nvidia-smi", f"--id=GPU-{uuid}", fields, "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"]
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self.process = None
            return self
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    def _read(self) -> None:
        assert self.process is not None, "started"
        assert self.process.stdout is not None, "opened as a pipe"
        for line in self.process.stdout:
            cells = line.split(",")
            try:
                self.samples.append(Sample(time.perf_counter(), float(cells[0]), float(cells[1])))
            except (ValueError, IndexError):  # "[N/A]" on some machines
                continue

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def between(self, start: float, end: float) -> tuple[float | None, float | None]:
        """Mean MHz and watts of the samples taken in a span."""
        inside = [s for s in self.samples if start <= s.when <= end]
        if not inside:
            return None, None
        return sum(s.mhz for s in inside) / len(inside), sum(s.watts for s in inside) / len(inside)
