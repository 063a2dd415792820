"""Two sides in turn, each long enough to reach the power cap: short runs flatter whoever draws less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nmsparse.workbench.bench._power import PowerMeter

Call = Callable[[], object]
BLAS = ("cublas", "cublaslt")
TRIALS = 5
"""Calls of the dense side under each library."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison, averaged over its turns."""

    ms: float
    spread: float
    """(slowest - fastest turn) / mean."""
    mhz: float | None
    watts: float | None

    @property
    def joules(self) -> float | None:
        """Per call."""
        return None if self.watts is None else self.watts * self.ms / 1e3


def replayed(call: Call, calls: int) -> Call:
    """So many calls as one CUDA graph, for kernels that take no longer than their launch."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def _turn(call: Call, count: int) -> tuple[float, float, float]:
    """Mean milliseconds of ``count`` calls, and when the turn began and ended."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return 1e3 * (end - start) / count, start, end


@contextmanager
def fastest_blas(dense: Call) -> Iterator[str]:
    """Both sides of a comparison under the library that serves the dense one best, so that dense gets its fair chance."""
    before = torch.backends.cuda.preferred_blas_library()
    times: dict[str, float] = {}
    try:
        for library in BLAS:
            torch.backends.cuda.preferred_blas_library(library)
            dense()
            times[library] = _turn(dense, TRIALS)[0]
        best = min(BLAS, key=lambda library: times[library])
        torch.backends.cuda.preferred_blas_library(best)
        yield best
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def alternate(sides: dict[str, Call], seconds: float, turns: int) -> dict[str, Side]:
    """Run each side for ``seconds``, in turn, ``turns`` times; the first tenth of a second of a turn is not measured."""
    counts = {}
    for name, call in sides.items():
        call()
        counts[name] = max(1, int(1e3 * seconds / max(_turn(call, 2)[0], 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with PowerMeter(torch.cuda.current_device()) as meter:
        for _ in range(turns):
            for name, call in sides.items():
                _turn(call, max(1, counts[name] // 10))
                took, start, end = _turn(call, counts[name])
                times[name].append(took)
                spans[name].append((start, end))
        time.sleep(0.1)
    result = {}
    for name, own in times.items():
        mean = sum(own) / len(own)
        power = [meter.between(*span) for span in spans[name]]
        mhz = [m for m, _ in power if m is not None]
        watts = [w for _, w in power if w is not None]
        result[name] = Side(
            mean, (max(own) - min(own)) / mean, sum(mhz) / len(mhz) if mhz else None, sum(watts) / len(watts) if watts else None
        )
    return result


def side_facts(name: str, side: Side) -> dict[str, float | None]:
    """A side as columns of a result row."""
    facts = {"ms": side.ms, "spread": side.spread, "sm_mhz": side.mhz, "watts": side.watts, "joules": side.joules}
    return {f"{name}_{key}": None if value is None else round(value, 5) for key, value in facts.items()}
