"""Worker processes that stay alive between tests: starting torch four times per test would take longer than all of them.

def gather_something(rank: int, world: int, ...) -> Any: ...        at module level, so that workers can import it
two_ranks.run(gather_something, ...)                                one result per rank
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

SECONDS, GRACE = 100.0, 2.0
"""Until a call that hangs is given up, and until the other ranks are once one has failed."""

DEAD = (False, "the process died")


class RankError(AssertionError):
    """What went wrong on the ranks."""


class KilledError(RankError):
    """A rank's process was killed by a signal."""


class RankKilledWarning(UserWarning):
    """A rank's process was killed by a signal, and the call made once more."""


class Ranks:
    """A process group of gloo workers."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, world, *args)`` on every rank; raises what any of them raised.

        torch 2.13's gloo backend corrupts its heap now and then (about one in fifty passes of the FSDP2 tests on two busy cores
        ended with "malloc(): unaligned tcache chunk detected" in gloo's own thread; never under valgrind). A rank that a signal
        kills is no failure of a test, so the call is made once more, with a warning that tells of it.
        """
        try:
            return self._run(function, *args)
        except KilledError as error:
            warnings.warn(f"{function.__name__} runs again: {error}", RankKilledWarning, stacklevel=2)
            return self._run(function, *args)

    def _run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            has_failed = not all(is_fine for is_fine, _ in answers.values())
            ready = wait(list(waiting), GRACE if has_failed else SECONDS)
            if not ready:  # the others may wait for a rank that will not come
                break
            for pipe in ready:
                answers[waiting[pipe]] = _receive(pipe)  # pyrefly: ignore
        wrong = [f"rank {rank}: {text}" for rank, (is_fine, text) in sorted(answers.items()) if not is_fine]
        if wrong or len(answers) < self.world:
            killed = self._killed([rank for rank, answer in answers.items() if answer == DEAD])
            self.close()
            raise (KilledError if killed else RankError)(
                "\n".join(killed + wrong) or f"ranks hang; only {sorted(answers)} answered"
            )
        return [answers[rank][1] for rank in range(self.world)]

    def _killed(self, dead: list[int]) -> list[str]:
        """What killed those whose pipes broke."""
        for rank in dead:
            self._processes[rank].join(GRACE)  # a pipe closes a moment before its process has an exit code
        codes = {rank: self._processes[rank].exitcode or 0 for rank in dead}
        return [f"rank {rank} was killed by {signal.Signals(-code).name}" for rank, code in codes.items() if code < 0]

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, port, theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes, self._pipes = [], []


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return DEAD
    return answer


def _work(rank: int, world: int, port: int, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    faulthandler.enable()  # a process that dies says where
    # what a launcher such as torchrun sets
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(rank, world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))  # by value: torch's own way to send would move tensors to shared memory


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    pool = Ranks(world)
    try:
        yield pool
    finally:
        pool.close()
