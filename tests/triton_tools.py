"""Triton kernels without a GPU: interpreted, and compiled for Hopper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import triton
import triton.experimental.gluon  # the interpreter imports it, which must not happen in a patched language
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import mangle_type


class Interpreted(InterpretedFunction):
    """A function that kernels call. Triton's own wrapper patches the language at each call, and never takes that back."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Iterator[None]:
    """Interpret the kernels and helpers of modules, and what of Triton's library is written in Triton; undone with the patch."""
    for module in (*modules, tl):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, Interpreted(function.fn))
    patched = _patch_lang(tl.standard.sum.fn)  # what tl.sum and tl.zeros call
    with np.errstate(all="ignore"):
        yield
    patched.restore()


def compiled_for_hopper(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, call: Callable[[], Any]) -> Any:
    """Compile a kernel for Hopper with the arguments that a call launches it with."""
    kernel = getattr(module, name)
    launches = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launches.append((args, options))

    monkeypatch.setattr(module, name, Launch())
    call()
    ((args, constants),) = launches
    options = {name: constants.pop(name) for name in set(constants) - set(kernel.arg_names)}
    types = [*map(mangle_type, args), *["constexpr"] * len(constants)]
    signature = dict(zip(kernel.arg_names, types, strict=True))
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, places), GPUTarget("cuda", 90, 32), options)
