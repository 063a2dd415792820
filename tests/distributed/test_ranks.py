"""The pool of ranks itself: what a test sees of an exception, of a process that is killed, and of one that is killed again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks import KilledError, RankError, RankKilledWarning, Ranks, ranks


def raise_on_one(rank: int, world: int) -> int:
    if rank == 1:
        raise ValueError("not today")
    return rank


def die(rank: int, world: int, folder: str, times: int) -> int:
    """Rank 1 kills itself at the first ``times`` calls."""
    calls = Path(folder) / str(rank)
    made = int(calls.read_text()) if calls.exists() else 0
    calls.write_text(str(made + 1))
    if rank == 1 and made < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return made


def test_exception_is_told_with_its_rank_and_not_tried_again(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1: [\s\S]*not today") as caught:
        two_ranks.run(raise_on_one)
    assert not isinstance(caught.value, KilledError)


def test_killed_rank_is_tried_once_more_with_a_warning(tmp_path: Path) -> None:
    with ranks(2) as pool, pytest.warns(RankKilledWarning, match="die runs again: rank 1 was killed by SIGKILL"):
        assert pool.run(die, str(tmp_path), 1)[1] == 1


def test_rank_that_is_killed_twice_fails(tmp_path: Path) -> None:
    with ranks(2) as pool, pytest.warns(RankKilledWarning), pytest.raises(KilledError, match="rank 1 was killed by SIGKILL"):
        pool.run(die, str(tmp_path), 2)
