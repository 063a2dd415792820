"""Settings for all tests: reproducible property tests, and one thread per worker (small tensors gain nothing from two)."""

import pytest
import torch
from hypothesis import settings

from nmsparse.kernels import _dispatch

settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)


@pytest.fixture
def reference_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference serve sparse products on the CPU, and let every size pay."""
    monkeypatch.setattr(_dispatch, "TABLE", [_dispatch.REFERENCE])
    monkeypatch.setattr("nmsparse._tensor_cores.Rule.unprofitable", lambda *_: None)
