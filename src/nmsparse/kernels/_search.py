"""Which algorithm computes a product fastest on this GPU: searched in a child process, remembered on disk.

A bad algorithm can poison the CUDA context or hang, so candidates run in a child, which reports each one before it starts
it; if the child dies or falls silent, that candidate is excluded and a new child goes on. A candidate may win only if its
result is right and the same twice. The winners, and what the dense product takes, are kept in one JSON file per GPU, driver
and library version; a file that cannot be read, or that speaks of another GPU, is ignored with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nmsparse.kernels._cusparselt import Product, version

logger = logging.getLogger("nmsparse")
FORMAT = 2
"""Of the file; raised when times are taken otherwise than before."""
CHILDREN = 12
"""Processes that may be lost on one product; after half of them only what was timed already is considered."""
START_S = 180
"""A child may take so long to import torch and to open the GPU."""
SILENCE_S = 60
"""A child that says nothing for so long is hung."""


@dataclass(frozen=True)
class Choice:
    """The fastest algorithm for a product, with the times it was chosen for."""

    algorithm: int
    split_k: int
    sparse_ms: float
    dense_ms: float
    error: float

    def __post_init__(self) -> None:
        numbers = all(isinstance(x, int | float) for x in (self.sparse_ms, self.dense_ms, self.error))
        if not (isinstance(self.algorithm, int) and isinstance(self.split_k, int) and numbers):
            raise TypeError(f"a choice is made of numbers, got {self}")


def cache_folder() -> Path:
    """Where choices are kept: $NMSPARSE_CACHE, else nmsparse/ in the user's cache folder."""
    chosen = os.environ.get("NMSPARSE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmsparse"


def hardware(device: int) -> dict[str, Any]:
    """What a choice depends on beside the product."""
    return {
        "format": FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "driver": _driver(device),
        "cusparselt": version(device),
    }


def _driver(device: int) -> str:
    """The driver's version, or the CUDA version that torch was built with where nvidia-smi is missing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
        if found:
            return found[0]
    return f"cuda {torch.version.cuda}"


def key_of(product: Product) -> str:
    """A product as text: file key, and what is sent to the child."""
    layout = "".join("T" if flag else "N" for flag in (product.m_major, product.b_transposed, product.d_transposed))
    return f"{product.m}x{product.n}x{product.k} {layout} {str(product.dtype).removeprefix('torch.')}"


def product_of(key: str) -> Product:
    sizes, layout, dtype = key.split()
    m, n, k = map(int, sizes.split("x"))
    return Product(m, n, k, *(flag == "T" for flag in layout), dtype=getattr(torch, dtype))


def _without_tokens(product: Product) -> tuple[Product, int]:
    """A product with its number of tokens set to 0, and that number: n of `output` and `grad_input`, k of `grad_weight`, m of a
    packed gradient."""
    if product.b_transposed and product.d_transposed:
        return product._replace(n=0), product.n
    if product.m_major:
        return product._replace(k=0), product.k
    return product._replace(m=0), product.m


class Choices:
    """Choices of one device: in memory, and in a file that processes may share."""

    def __init__(self, device: int, folder: Path | None = None) -> None:
        self.device = device
        self.hardware = hardware(device)
        digest = hashlib.sha256(json.dumps(self.hardware, sort_keys=True).encode()).hexdigest()[:16]
        self.file = (folder or cache_folder()) / f"algorithms-{digest}.json"
        self.found: dict[str, Choice] = self._read()
        self._cannot_search = False

    def _read(self) -> dict[str, Choice]:
        try:
            if not self.file.exists():
                return {}
            saved = json.loads(self.file.read_text())
            if saved["hardware"] != self.hardware:
                raise ValueError("it belongs to other hardware")
            return {key: Choice(**choice) for key, choice in saved["choices"].items() if product_of(key)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"{self.file} is ignored ({type(error).__name__}: {error}); algorithms are searched again and it is replaced.",
                stacklevel=2,
            )
            return {}

    def _write(self) -> None:
        """Replace the file in one step, with what other processes have found meanwhile."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once, when it was read first
            merged = {**self._read(), **self.found}
        text = json.dumps(
            {"hardware": self.hardware, "choices": {key: asdict(choice) for key, choice in merged.items()}}, indent=1
        )
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, suffix=".tmp", delete=False) as file:
                file.write(text)
            os.replace(file.name, self.file)
        except OSError as error:
            warnings.warn(f"the chosen algorithms could not be saved in {self.file} ({error}).", stacklevel=2)

    def near(self, product: Product) -> Choice | None:
        """The choice for this product, or for the nearest with up to half or twice as many tokens: their number varies from
        batch to batch, and that must not start a search each time."""
        exact = self.found.get(key_of(product))
        if exact is not None:
            return exact
        sizes, tokens = _without_tokens(product)
        found: list[tuple[float, Choice]] = []
        for key, choice in self.found.items():
            other_sizes, other_tokens = _without_tokens(product_of(key))
            if other_sizes == sizes:
                found.append((max(tokens, other_tokens) / min(tokens, other_tokens), choice))
        nearest = min(found, key=lambda pair: pair[0], default=None)
        return nearest[1] if nearest is not None and nearest[0] <= 2 else None

    def search(self, products: Iterable[Product]) -> dict[Product, Choice | None]:
        """The choices for these products, searched where they are not known. None: no algorithm of the library works."""
        wanted = {product: self.found.get(key_of(product)) for product in products}
        missing = [product for product, choice in wanted.items() if choice is None]
        if missing:
            logger.warning("nmsparse: timing algorithms for %d products, about a second each, once on this GPU.", len(missing))
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # the child needs memory on the same GPU
            try:
                for product in missing:
                    wanted[product] = choice = self._search_one(product)
                    if choice is not None:
                        self.found[key_of(product)] = choice
            finally:
                self._write()
        return wanted

    def _search_one(self, product: Product) -> Choice | None:
        if self._cannot_search:
            return None
        try:
            with _LOCK:
                return _searcher(self.device).search(product)
        except ChildFailedError as error:  # the library's own choice will do
            self._cannot_search = True  # starting a process for every new number of tokens would take seconds each
            warnings.warn(str(error), stacklevel=2)
            return None


# ---- parent: a child that answers questions ----


class ChildFailedError(RuntimeError):
    """The process that times algorithms could not be started."""


class Searcher:
    """A child process that times algorithms, and what is known to break it."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.child: subprocess.Popen[bytes] | None = None
        self.excluded: dict[str, list[list[int]]] = {}

    def search(self, product: Product) -> Choice | None:
        key = key_of(product)
        family = key.partition(" ")[2]  # an algorithm that breaks does so for all sizes of a layout and type
        timed: list[list[float]] = []
        for lost in range(CHILDREN):  # each loss excludes one more candidate; what was timed before stays known
            question = {
                "key": key,
                "excluded": self.excluded.get(family, []),
                "timed": timed,
                "finish": bool(timed) and lost >= CHILDREN // 2,
            }
            current: list[int] | None = None
            for answer in self._ask(question):
                if "why" in answer:
                    logger.warning("nmsparse: %s is not searched: %s.", key, answer["why"])
                if "result" in answer:
                    return None if answer["result"] is None else Choice(**answer["result"])
                if "timed" in answer:
                    timed.append(answer["timed"])
                current = answer.get("trying", current)
            if current is None:
                status = self._stop()
                if status == 0:  # it went away just when it was asked, having waited long enough
                    continue
                raise ChildFailedError(
                    f"the process that times algorithms ended before it began (exit status {status}), so nothing is timed: run "
                    f"python -m nmsparse.kernels._search_child {self.device} to see why."
                )
            logger.warning("nmsparse: algorithm %s broke or hung on %s and is excluded.", current, key)
            self.excluded.setdefault(family, []).append(current)
            self._stop()
        return None

    def _ask(self, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Lines of the child's answer, until it is complete, the child is gone, or it falls silent."""
        if self.child is None or self.child.poll() is not None:
            self._stop()
            self.child = self._start()
        assert self.child.stdin is not None, "opened as a pipe"
        assert self.child.stdout is not None, "opened as a pipe"
        try:
            self.child.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:  # it went away this very moment, having waited long enough
            self._stop()
            yield from self._ask(question)
            return
        buffer, patience = b"", START_S
        while select.select([self.child.stdout], [], [], patience)[0]:
            patience = SILENCE_S
            read = os.read(self.child.stdout.fileno(), 1 << 16)
            if not read:
                return
            *lines, buffer = (buffer + read).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                yield answer
                if "result" in answer:
                    return

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nmsparse.kernels._search_child", str(self.device)]
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment)

    def _stop(self) -> int | None:
        if self.child is None:
            return None
        child, self.child = self.child, None
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        return child.wait()


_SEARCHERS: dict[int, Searcher] = {}
_LOCK = threading.Lock()


def _searcher(device: int) -> Searcher:
    if device not in _SEARCHERS:
        _SEARCHERS[device] = Searcher(device)
        atexit.register(_SEARCHERS[device]._stop)
    return _SEARCHERS[device]


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Torch's own belongs to the device that was captured on first. One for all captures: cuBLAS keeps a workspace for every
    stream that it has met."""
    return torch.cuda.Stream(device)


def device_milliseconds(call: Any, at_least_ms: float, calls: int = 8) -> float:
    """Mean time of a short call on the device alone: captured in a CUDA graph, because launching takes longer."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_capture_stream(torch.cuda.current_device()), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return milliseconds(graph.replay, at_least_ms) / calls


def milliseconds(call: Any, at_least_ms: float) -> float:
    """Mean time of a call over a run of about ``at_least_ms``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    count = 2
    while True:
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end)
        if took >= at_least_ms or count >= 4096:
            return took / count
        count = min(4096, max(2 * count, int(1.2 * count * at_least_ms / max(took, 1e-3))))
