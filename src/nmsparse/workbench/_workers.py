"""Processes that train one run after another: what takes seconds (torch, the GPU, data) is taken once and not for every run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LOG = "log.txt"
"""In a run's folder: what its process wrote while it trained."""
STOP_SECONDS = 10
PARENT = "NMSPARSE_PARENT"
"""The process that a worker was started by, in the worker's environment."""
PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


def die_with_parent() -> None:
    """Called by a worker: on Linux it is killed when its parent dies, however that happens. It would hold its folder and the GPU.

    The signal comes when the thread ends that started the worker; that thread waits for it, unless it is killed with its process.
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # a C library without prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the process that started this one is gone")  # it died before it was asked for


def _line(folder: Path) -> bytes:
    """How a folder is named on the pipes."""
    return os.fsencode(folder.absolute()) + b"\n"


class Worker:
    """A process that is given folders of runs, one at a time, and answers each by its name. One that fails ends with its run."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        """Start with a first run; what goes wrong before it begins is in its log too."""
        with (folder / LOG).open("ab") as log:
            command = [sys.executable, "-m", "nmsparse.workbench.training"]
            own = {**environment, PARENT: str(os.getpid())}
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=own)
        assert self._process.stdout is not None, "opened as a pipe"
        os.set_blocking(self._process.stdout.fileno(), False)
        self._folder: Path | None = None
        self._heard = b""
        self.give(folder)

    def give(self, folder: Path) -> bool:
        """Train in this folder; False if the process is not there any more."""
        assert self._process.stdin is not None, "opened as a pipe"
        self._folder, self._heard = folder, b""
        (folder / LOG).write_bytes(b"")
        try:
            self._process.stdin.write(_line(folder))
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def works_on(self, folder: Path) -> bool:
        """Whether it trains there now."""
        self._hear()
        return self._folder == folder and self.is_alive

    @property
    def is_idle(self) -> bool:
        self._hear()
        return self._folder is None and self.is_alive

    def _hear(self) -> None:
        """An answer means that the run has ended; anything else on the pipe was printed by some library."""
        assert self._process.stdout is not None, "opened as a pipe"
        if self._folder is not None and not self._process.stdout.closed:
            self._heard += self._process.stdout.read() or b""
            if self._heard.endswith(_line(self._folder)):
                self._folder = None

    def dismiss(self) -> None:
        """Let it end by itself."""
        assert self._process.stdin is not None, "opened as a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        """Until it is gone; one that does not go by itself is killed."""
        assert self._process.stdout is not None, "opened as a pipe"
        self.dismiss()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
