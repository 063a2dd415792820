"""One run of a comparison, in a process of its own: trains as config.json in the given folder says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nmsparse.workbench.training import DivergenceError, TrainConfig, train


def main(folder: Path) -> None:
    config = TrainConfig.from_dict(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))
    try:
        train(config, folder, resume=True)
    except DivergenceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
