"""cuSPARSELt through ctypes: cached plans for one sparse times dense product.

The library comes with torch's CUDA wheel and is loaded by its soname, so neither a compiler nor a path is needed. Its
structures are opaque and their size has changed between versions; each gets 16 KiB, zeroed and aligned, and lives as long
as the plan that refers to it.

    D (m x n) = A (m x k, 2:4 along k) @ B (k x n)

A is packed K-major (stored (m, k)) or M-major (stored (k, m)); B is stored (n, k) or (k, n); D is stored (n, m) or (m, n).
The three products of a linear layer need no transposition of anything.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

SONAME = "libcusparseLt.so.0"
TESTED = (800,)
"""Versions of the library that this engine was measured with; others run behind the same self-test."""
STRUCT_BYTES, ALIGNMENT = 16 * 1024, 64
ROW, COLUMN = 2, 1
PLAIN, TRANSPOSED = 0, 1
SPARSITY_50 = 0
COMPUTE_32F = 2
DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2}
ALG_CONFIG_ID, ALG_CONFIG_MAX_ID, SPLIT_K = 0, 1, 3
BIAS_POINTER = 8


class CusparseLtError(RuntimeError):
    """A call of the library failed; the message names the call and the library's own word for it."""


class Product(NamedTuple):
    """One product: everything that a plan depends on, except the device."""

    m: int
    n: int
    k: int
    m_major: bool
    """A is stored (k, m)."""
    b_transposed: bool
    """B is stored (n, k)."""
    d_transposed: bool
    """D is stored (n, m)."""
    dtype: torch.dtype
    has_bias: bool = False
    """Adds a vector of m entries to every column of D."""


class Algorithm(NamedTuple):
    """How the library is told to compute a product; -1 leaves the choice to it."""

    id: int = -1
    split_k: int = 1


DEFAULT = Algorithm()


class _Struct:
    """Zeroed, aligned memory for one opaque structure."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(STRUCT_BYTES + ALIGNMENT)
        address = ctypes.addressof(self.memory)
        self.pointer = c_void_p(-(-address // ALIGNMENT) * ALIGNMENT)


class _Library:
    """The functions in use, each checked for its status."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(SONAME)
        self._library.cusparseLtGetErrorString.restype = ctypes.c_char_p
        self.matmul = self._library.cusparseLtMatmul
        self.matmul.argtypes = [c_void_p] * 10 + [c_int32]
        self.matmul.restype = c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, status: int) -> None:
        if status:
            word = self._library.cusparseLtGetErrorString(status).decode()
            raise CusparseLtError(f"{name} failed with status {status}: {word}.")


@cache
def library() -> _Library:
    """The loaded library; raises OSError where torch brings none."""
    return _Library()


_HANDLES: dict[int, _Struct] = {}
_LOCK = threading.Lock()


def _handle(device: int) -> _Struct:
    """One handle per device, made on first use."""
    with _LOCK:
        if device not in _HANDLES:
            handle = _Struct()
            with torch.cuda.device(device):
                library()("cusparseLtInit", handle.pointer)
            _HANDLES[device] = handle
        return _HANDLES[device]


def version(device: int = 0) -> int:
    """The library's version as one number: 800 is 0.8.0."""
    found = c_int()
    library()("cusparseLtGetVersion", _handle(device).pointer, byref(found))
    return found.value


@dataclass(eq=False)
class Plan:
    """A product, an algorithm and a device, ready to run."""

    product: Product
    device: int
    algorithm: Algorithm = DEFAULT

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._lib, self._handle = library(), _handle(self.device)
        p, kind = self.product, DATA_TYPES[self.product.dtype]
        self._a, self._b, self._d = _Struct(), _Struct(), _Struct()
        self._product, self._selection, self._plan = _Struct(), _Struct(), _Struct()
        rows, columns = (p.k, p.m) if p.m_major else (p.m, p.k)
        self._call("StructuredDescriptorInit", self._a.pointer, *_matrix(rows, columns, kind, ROW), c_int(SPARSITY_50))
        rows, columns = (p.n, p.k) if p.b_transposed else (p.k, p.n)
        self._call("DenseDescriptorInit", self._b.pointer, *_matrix(rows, columns, kind, ROW))
        self._call("DenseDescriptorInit", self._d.pointer, *_matrix(p.m, p.n, kind, COLUMN if p.d_transposed else ROW))
        self._call(
            "MatmulDescriptorInit",
            self._product.pointer,
            c_int(TRANSPOSED if p.m_major else PLAIN),
            c_int(TRANSPOSED if p.b_transposed else PLAIN),
            self._a.pointer,
            self._b.pointer,
            self._d.pointer,
            self._d.pointer,
            c_int(COMPUTE_32F),
        )
        self._bias = c_void_p()
        if p.has_bias:  # the epilogue is chosen with the plan; the address may move later
            self._point_to_bias(_stand_in().data_ptr())
        self._call("MatmulAlgSelectionInit", self._selection.pointer, self._product.pointer, c_int(0))
        if self.algorithm.id >= 0:
            self._set(ALG_CONFIG_ID, self.algorithm.id)
        if self.algorithm.split_k != 1:
            self._set(SPLIT_K, self.algorithm.split_k)
        self._call("MatmulPlanInit", self._plan.pointer, self._product.pointer, self._selection.pointer)
        size = c_size_t()
        self._call("MatmulGetWorkspace", self._plan.pointer, byref(size))
        self.workspace_bytes = size.value
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._constants = ctypes.addressof(self._one), ctypes.addressof(self._zero)

    def _call(self, name: str, *arguments: Any) -> None:
        self._lib(f"cusparseLt{name}", self._handle.pointer, *arguments)

    def _set(self, attribute: int, value: int) -> None:
        number = c_int(value)
        size = c_size_t(ctypes.sizeof(number))
        self._call("MatmulAlgSetAttribute", self._selection.pointer, c_int(attribute), byref(number), size)

    @property
    def algorithm_count(self) -> int:
        """Algorithm ids are 0 .. this number - 1."""
        number = c_int()
        size = c_size_t(ctypes.sizeof(number))
        self._call("MatmulAlgGetAttribute", self._selection.pointer, c_int(ALG_CONFIG_MAX_ID), byref(number), size)
        return number.value

    def run(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Compute on the current stream. The caller has checked shapes; memory of the workspace is torch's."""
        with self._lock:  # the bias is part of the plan, which layers of one shape share
            if bias is not None:
                self._point_to_bias(bias.data_ptr())
            self._launch(a, b, out)

    def _launch(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=out.device)
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        target = out.data_ptr()
        status = self._lib.matmul(
            self._handle.pointer, self._plan.pointer, self._constants[0], a.data_ptr(), b.data_ptr(), self._constants[1],
            target, target, workspace.data_ptr(), ctypes.addressof(stream), 1,
        )  # fmt: skip
        self._lib.check("cusparseLtMatmul", status)

    def _point_to_bias(self, address: int) -> None:
        if self._bias.value != address:
            self._bias = c_void_p(address)
            size = c_size_t(ctypes.sizeof(self._bias))
            self._call("MatmulDescSetAttribute", self._product.pointer, c_int(BIAS_POINTER), byref(self._bias), size)

    def close(self) -> None:
        """Give back what the library holds; work on the device must be done."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
            self._lib("cusparseLtMatmulPlanDestroy", self._plan.pointer)

    def compress(self, stored: Tensor) -> Tensor:
        """The library's own compression of a stored operand A: slow, and the judge of ours."""
        size, buffer_size = c_size_t(), c_size_t()
        self._call("SpMMACompressedSize", self._plan.pointer, byref(size), byref(buffer_size))
        packed = torch.zeros(size.value // stored.element_size(), dtype=stored.dtype, device=stored.device)
        buffer = torch.empty(max(buffer_size.value, 1), dtype=torch.uint8, device=stored.device)
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        pointers = [c_void_p(t.data_ptr()) for t in (stored, packed, buffer)]
        with torch.cuda.device(self.device):  # a default stream has no device of its own
            self._call("SpMMACompress", self._plan.pointer, *pointers, stream)
        return packed


@cache
def _stand_in() -> Tensor:
    """Memory whose address stands for a bias that is not there yet. On the host, where GPUs can read it too: a plan may be made
    while torch allocates from the pool of a CUDA graph, in which nothing may live on."""
    return torch.zeros(16, dtype=torch.bfloat16, device="cpu", pin_memory=True)


def _matrix(rows: int, columns: int, kind: int, order: int) -> tuple[Any, ...]:
    leading = columns if order == ROW else rows
    return c_int64(rows), c_int64(columns), c_int64(leading), c_uint32(16), c_int(kind), c_int(order)
