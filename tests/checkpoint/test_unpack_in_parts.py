"""Large tensors are unpacked part by part; what comes out does not depend on where parts end."""

from __future__ import annotations

import pytest
import torch

from nmsparse.checkpoint import Layout, _format, unpack_tensor
from nmsparse.functional import magnitude_mask
from nmsparse.pattern import Pattern


@pytest.mark.parametrize("pattern", ["2:4", "1:3", "3:5", "4:16", "1:2"])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_join_bit_for_bit(monkeypatch: pytest.MonkeyPatch, pattern: str, rows: int, dim: int) -> None:
    monkeypatch.setattr(_format, "AT_ONCE", 1)
    m = Pattern(pattern).m
    shape = (rows, 3 * m) if dim else (3 * m, rows)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = torch.where(magnitude_mask(x, pattern, dim), x, 0)
    layout = Layout.of(x, Pattern(pattern), dim)
    values, indices = _format.pack_tensor(x, layout)
    assert torch.equal(unpack_tensor(values, indices, layout, "x"), x)


@pytest.mark.parametrize("shape", [(0, 8), (1 << 20, 0)])
def test_empty_tensor_takes_no_time(shape: tuple[int, int]) -> None:
    layout = Layout("2:4", 1, shape, "float32")
    empty = unpack_tensor(torch.empty(0), torch.empty(0, dtype=torch.uint8), layout, "x")
    assert empty.shape == shape
