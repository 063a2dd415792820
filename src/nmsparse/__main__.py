"""``python -m nmsparse``."""

from nmsparse.cli import main

main()
