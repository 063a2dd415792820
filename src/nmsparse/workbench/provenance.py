"""Which code a result was made with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit of this checkout, if it is one; a copy without its history can be told by NMSPARSE_COMMIT."""
    if named := os.environ.get("NMSPARSE_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
