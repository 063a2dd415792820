"""Tests in this folder need a CUDA GPU; without one they say so."""

from pathlib import Path

import pytest
import torch

from nmsparse.kernels import SPARSE_MATMUL, select


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; run make test-gpu on a machine that has one"))


@pytest.fixture
def needs_sparse_tensor_cores() -> None:
    found = select(SPARSE_MATMUL, torch.bfloat16, torch.device("cuda"))
    if found.name is None:
        pytest.skip(found.reason)
