"""Two and four gloo ranks, shared by all tests of a session."""

from collections.abc import Iterator

import pytest
from ranks import Ranks, ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with ranks(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with ranks(4) as pool:
        yield pool
