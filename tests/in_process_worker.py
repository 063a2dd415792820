"""A worker of studies that trains in this process, without the seconds that a process takes to start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from nmsparse.workbench.training import TrainConfig, train


class InProcessWorker:
    """Stands for nmsparse.workbench._workers.Worker."""

    given: ClassVar[list[TrainConfig]] = []
    """To all of them."""
    stop_after: int | None = None
    """Runs, after which it is interrupted."""
    is_alive = is_idle = True
    exit_code: int | None = None

    def __init__(self, environment: Any, folder: Path) -> None:
        self.give(folder)

    def give(self, folder: Path) -> bool:
        if len(self.given) == self.stop_after:
            raise KeyboardInterrupt
        config = TrainConfig.from_dict(json.loads((folder / "config.json").read_text()))
        self.given.append(config)
        train(config, folder, resume=True)
        return True

    def works_on(self, folder: Path) -> bool:
        return False

    def nothing(self) -> None:
        """It has no process to end."""

    dismiss = terminate = wait = nothing
