"""The process that times algorithms: reads products from stdin, answers on stdout, one JSON object a line.

It says which candidate it tries before it tries it, so that its parent knows what broke it.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from nmsparse.kernels._cusparselt import Algorithm, CusparseLtError, Plan, Product
from nmsparse.kernels._layout import decompress, random_packed
from nmsparse.kernels._search import Choice, device_milliseconds, milliseconds, product_of

IDLE_S = 15
"""After so long without a question it goes away and frees its memory."""
ERROR = 4e-3
"""Largest relative error against the dense product in the same 16-bit type: both round their results once."""
FINALISTS = 3
LAUNCH_MS = 0.2
"""Calls that take less may take as long to launch (33 us each on an H200's host when nothing else runs there), so they are timed
on the device alone."""


def call_milliseconds(call: Callable[[], object], at_least_ms: float) -> float:
    """Mean time of a call, without its launch where that could be what takes long."""
    took = milliseconds(call, at_least_ms)
    return took if took > LAUNCH_MS else device_milliseconds(call, at_least_ms)


def dense_product(product: Product, stored: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The same product with a dense operand, in the same layouts."""
    a = stored.t() if product.m_major else stored
    other = b.t() if product.b_transposed else b
    if product.d_transposed:
        torch.mm(other.t(), a.t(), out=out)
    else:
        torch.mm(a, other, out=out)


def time_algorithms(
    product: Product, excluded: list[list[int]], known: list[list[float]], finish: bool, device: int, say: Any
) -> Choice | None:
    """Time every algorithm, check the fastest, and time those again beside the dense product.

    ``known`` are times of a child that was lost later; with ``finish`` nothing else is tried.
    """
    where = torch.device("cuda", device)
    packed = random_packed(product.m, product.k, product.dtype, where)
    b = torch.randn((product.n, product.k) if product.b_transposed else (product.k, product.n), device=where).to(product.dtype)
    shape = (product.n, product.m) if product.d_transposed else (product.m, product.n)
    out, expected = torch.empty(shape, device=where, dtype=product.dtype), torch.empty(shape, device=where, dtype=product.dtype)
    dense_product(product, decompress(packed, product.m, product.k, "m" if product.m_major else "k"), b, expected)
    norm = expected.float().norm()
    # split-K is left at 1: on SM90 the library refuses any other number ("must be either 1 or -1"), and -1 may hang
    candidates = [Algorithm(i) for i in range(-1, Plan(product, device).algorithm_count)]
    timed = [(ms, Algorithm(int(number), int(parts))) for number, parts, ms in known if [number, parts] not in excluded]
    done = {algorithm for _, algorithm in timed}
    for algorithm in () if finish else candidates:
        if list(algorithm) in excluded or algorithm in done:
            continue
        say({"trying": list(algorithm)})
        try:
            plan = Plan(product, device, algorithm)
            timed.append((call_milliseconds(lambda plan=plan: plan.run(packed, b, out), 3), algorithm))
        except CusparseLtError:
            torch.cuda.synchronize(device)  # refused is fine; a broken context raises here, and ends this process
            continue
        say({"timed": [*algorithm, timed[-1][0]]})
    right: list[tuple[Algorithm, float]] = []
    for _, algorithm in sorted(timed):
        say({"trying": list(algorithm)})
        plan = Plan(product, device, algorithm)
        results = []
        for _ in range(2):
            out.fill_(torch.nan)
            plan.run(packed, b, out)
            results.append(out.clone())
        device_milliseconds(lambda plan=plan: plan.run(packed, b, out), 0.1, 1)  # whatever cannot be captured ends this process
        error = float((results[0].float() - expected.float()).norm() / norm)
        if error <= ERROR and torch.equal(results[0], results[1]):
            right.append((algorithm, error))
        if len(right) == FINALISTS:
            break
    if not right:
        return None
    stored = torch.randn((product.k, product.m) if product.m_major else (product.m, product.k), device=where).to(product.dtype)
    dense_ms = call_milliseconds(lambda: dense_product(product, stored, b, expected), 20)
    again = []
    for algorithm, error in right:
        say({"trying": list(algorithm)})
        plan = Plan(product, device, algorithm)
        again.append((call_milliseconds(lambda plan=plan: plan.run(packed, b, out), 20), algorithm, error))
    sparse_ms, algorithm, error = min(again)
    dense_ms = (dense_ms + call_milliseconds(lambda: dense_product(product, stored, b, expected), 20)) / 2
    return Choice(algorithm.id, algorithm.split_k, round(sparse_ms, 5), round(dense_ms, 5), round(error, 6))


def main() -> None:
    """Answer questions from stdin until there are none for a while."""
    device = int(sys.argv[1])
    torch.cuda.set_device(device)
    channel = sys.stdout
    sys.stdout = sys.stderr

    def say(answer: dict[str, Any]) -> None:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()

    last = time.monotonic()
    while time.monotonic() - last < IDLE_S:
        if not select.select([sys.stdin], [], [], 1.0)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        question = json.loads(line)
        try:
            known, finish = question.get("timed", []), question.get("finish", False)
            found = time_algorithms(product_of(question["key"]), question["excluded"], known, finish, device, say)
            say({"result": None if found is None else asdict(found)})
        except CusparseLtError as error:
            say({"result": None, "why": str(error)})
        except torch.OutOfMemoryError:
            say({"result": None, "why": "the GPU has too little free memory to time it"})
        torch.cuda.empty_cache()
        last = time.monotonic()


if __name__ == "__main__":
    main()
