"""Packages that single tests meet and nothing here needs. ``make test`` installs them aside, because in the environment itself
transformers, accelerate and PEFT would find and import them in every test."""

import sys
from pathlib import Path

OTHERS = Path(sys.prefix) / "others"
