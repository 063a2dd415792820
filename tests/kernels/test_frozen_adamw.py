"""The Triton step under a frozen variance against the plain-torch one, in Triton's interpreter: no GPU needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nmsparse import StepAdamW
from nmsparse.kernels import frozen_adamw_kernel

pytest.importorskip("triton", reason="Triton is not installed, so there is no kernel to check")
from triton.runtime.interpreter import InterpretedFunction

from nmsparse.kernels import _frozen_adamw

CLOSE = {"rtol": 1e-6, "atol": 1e-7}
BLOCK = _frozen_adamw.BLOCK


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Interpret this one kernel; TRITON_INTERPRET would have to be set before anything imports Triton."""
    if not isinstance(_frozen_adamw._kernel, InterpretedFunction):
        monkeypatch.setattr(_frozen_adamw, "_kernel", InterpretedFunction(_frozen_adamw._kernel.fn))


def frozen(shape: Any, dtype: torch.dtype = torch.float32, steps: int = 3, **options: Any) -> tuple[nn.Parameter, StepAdamW]:
    """A parameter some steps into training, with its variance frozen."""
    torch.manual_seed(0)
    weight = shape if isinstance(shape, Tensor) else torch.randn(shape)
    p = nn.Parameter(weight.to(dtype))
    optimizer = StepAdamW([p], **{"lr": 1e-2, "fused": True, **options})
    for _ in range(steps):
        p.grad = torch.randn_like(p)
        optimizer.step()
    optimizer.freeze_variance([p])
    p.grad = torch.randn_like(p)
    return p, optimizer


def kernel_step(p: nn.Parameter, optimizer: StepAdamW, **amp: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The kernel's step, on copies of weight and state."""
    weight = p.detach().clone()
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
    variance = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    scaling = amp.get("grad_scale"), amp.get("found_inf")
    _frozen_adamw.frozen_adamw(weight, p.grad, state, variance, optimizer.param_groups[0], *scaling)
    return weight, state


def torch_step(p: nn.Parameter, optimizer: StepAdamW, **amp: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The plain-torch step, in place."""
    for name, value in amp.items():
        setattr(optimizer, name, value)
    optimizer.step()
    return p.detach(), optimizer.state[p]


def assert_agree(p: nn.Parameter, optimizer: StepAdamW, **amp: Tensor) -> None:
    before = p.detach().clone()
    ours, our_state = kernel_step(p, optimizer, **amp)
    theirs, their_state = torch_step(p, optimizer, **amp)
    assert (theirs != before).any()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(our_state["exp_avg"], their_state["exp_avg"], **CLOSE)
    assert torch.equal(our_state["exp_avg_sq"], their_state["exp_avg_sq"])
    assert our_state["step"] == their_state["step"]


@pytest.mark.parametrize("shape", [(), 1, 7, (3, 5), BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, (37, 64), (4, 8, 5, 5)])
def test_kernel_equals_plain_torch_at_any_size(shape):
    assert_agree(*frozen(shape))


@pytest.mark.parametrize(
    "options",
    [
        {"eps_inside": True, "eps": 1e-3},
        {"eps_inside": False, "eps": 1e-3},
        {"freeze": "raw"},
        {"freeze": "corrected", "betas": (0.9, 0.95)},
        {"weight_decay": 0.0},
        {"weight_decay": 0.5},
        {"maximize": True},
        {"amsgrad": True},
        {"max_update": 0.3},
        {"floor_quantile": 0.5},
        {"lr": torch.tensor(1e-2)},
    ],
    ids=str,
)
def test_kernel_equals_plain_torch_with_every_option(options):
    assert_agree(*frozen((40, 36), **options))


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.95, 0.99, 0.999])
def test_kernel_weighs_the_gradient_into_the_momentum_exactly(beta1):
    p, optimizer = frozen(100, betas=(beta1, 0.999))
    p.grad.fill_(1.0)
    optimizer.state[p]["exp_avg"].zero_()
    _, state = kernel_step(p, optimizer)
    torch.testing.assert_close(state["exp_avg"], torch.full((100,), 1 - beta1), rtol=1e-7, atol=0)


@pytest.mark.parametrize("steps", [1, 2, 20, 300])
def test_kernel_corrects_the_momentum_as_plain_torch_at_any_age(steps):
    assert_agree(*frozen(50, steps=steps))


def test_several_kernel_steps_stay_with_plain_torch():
    p, optimizer = frozen((33, 32), lr=1e-3)
    weight = p.detach().clone()
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
    for _ in range(10):
        p.grad = torch.randn_like(p)
        _frozen_adamw.frozen_adamw(weight, p.grad, state, state["exp_avg_sq"], optimizer.param_groups[0], None, None)
        optimizer.step()
    torch.testing.assert_close(weight, p.detach(), rtol=1e-6, atol=1e-6)
    assert state["step"] == optimizer.state[p]["step"] == 13


def test_kernel_divides_by_the_loss_scale():
    p, optimizer = frozen(BLOCK + 10)
    unscaled, _ = kernel_step(p, optimizer)
    p.grad *= 2.0**10
    scaled, _ = kernel_step(p, optimizer, grad_scale=torch.tensor(2.0**10), found_inf=torch.tensor(0.0))
    assert torch.equal(scaled, unscaled)
    assert_agree(p, optimizer, grad_scale=torch.tensor(2.0**10), found_inf=torch.tensor(0.0))


@pytest.mark.parametrize("found_inf", [1.0, 2.0], ids=["one device", "summed over two devices"])
def test_an_overflow_changes_nothing_not_even_the_step_count(found_inf):
    p, optimizer = frozen(BLOCK + 10)
    p.grad[3] = torch.inf
    weight, state = kernel_step(p, optimizer, grad_scale=torch.tensor(4.0), found_inf=torch.tensor(found_inf))
    assert torch.equal(weight, p)
    for key, value in optimizer.state[p].items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


def test_max_update_bounds_an_entry_without_variance():
    p, optimizer = frozen(8, max_update=2.0, eps_inside=False, weight_decay=0.0)
    optimizer.state[p]["exp_avg_sq"][::2] = 0
    p.grad = torch.tensor([1.0, 0.0, -1.0, 0.0, 1e-3, 0.0, -1e-3, 0.0]) * 100
    weight, _ = kernel_step(p, optimizer)
    moved = ((weight - p.detach()) / 1e-2)[::2]
    torch.testing.assert_close(moved, torch.tensor([-2.0, 2.0, moved[2].sign() * 2, moved[3].sign() * 2]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", [{}, {"maximize": True, "max_update": 0.5}, {"amsgrad": True}], ids=str)
def test_bf16_is_computed_in_fp32_and_rounded_once(options):
    p, optimizer = frozen((40, 36), torch.bfloat16, **options)
    ours, state = kernel_step(p, optimizer, grad_scale=torch.tensor(4.0), found_inf=torch.tensor(0.0))
    wide = nn.Parameter(p.detach().float())
    wide.grad = p.grad.float()
    reference = StepAdamW([wide], lr=1e-2, fused=True, **options)
    reference.state[wide] = {
        key: value.float() if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()
    }
    theirs, their_state = torch_step(wide, reference, grad_scale=torch.tensor(4.0), found_inf=torch.tensor(0.0))
    assert ours.dtype == state["exp_avg"].dtype == torch.bfloat16
    one_place = {"rtol": 2**-7, "atol": 1e-7}  # the interpreter cuts off where a GPU rounds to nearest
    torch.testing.assert_close(ours.float(), theirs, **one_place)
    torch.testing.assert_close(state["exp_avg"].float(), their_state["exp_avg"], **one_place)


# ---- memory layouts ----


def test_a_gradient_with_other_strides_is_read_in_the_parameters_order():
    p, optimizer = frozen((24, 40))
    p.grad = torch.randn(40, 24).t()
    assert p.grad.stride() != p.stride()
    assert_agree(p, optimizer)
    p.grad = torch.tensor(0.5).expand(24, 40)
    assert_agree(p, optimizer)


@pytest.mark.parametrize("gradient_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_parameters_are_walked_in_memory_order(gradient_format):
    p, optimizer = frozen(torch.randn(6, 8, 3, 3).to(memory_format=torch.channels_last))
    assert not p.is_contiguous()
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    p.grad = p.grad.contiguous(memory_format=gradient_format)
    assert_agree(p, optimizer)
    assert kernel_step(p, optimizer)[0].stride() == p.stride()


@pytest.mark.parametrize(
    "weight",
    [torch.randn(16, 24).t(), torch.randn(4, 6, 5).permute(2, 0, 1), torch.randn(1, 24).t(), torch.randn(24, 1).t()],
    ids=["transposed", "permuted", "column", "row"],
)
def test_a_parameter_in_one_block_of_memory_may_have_any_order(weight):
    assert_agree(*frozen(weight))


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(8, 16)[:, ::2], torch.zeros(8, 16)[:, :8], torch.zeros(8, 1).expand(8, 4)],
    ids=["strided", "part", "expanded"],
)
def test_a_parameter_with_gaps_or_overlaps_is_refused_with_the_way_out(weight):
    p, optimizer = frozen((8, weight.shape[1]))
    state = optimizer.state[p]
    with pytest.raises(ValueError, match=r"shape \(8, \d\) with strides .*use fused=False"):
        _frozen_adamw.frozen_adamw(weight, p.grad, state, state["exp_avg_sq"], optimizer.param_groups[0], None, None)
    assert state["step"] == 3, "a refused step must change nothing"


def test_a_momentum_in_another_order_than_its_parameter_is_refused():
    p, optimizer = frozen((8, 12))
    state = optimizer.state[p]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    with pytest.raises(ValueError, match="use fused=False"):
        kernel_step_in_place(p, optimizer)


def kernel_step_in_place(p: nn.Parameter, optimizer: StepAdamW) -> None:
    state = optimizer.state[p]
    _frozen_adamw.frozen_adamw(p.detach(), p.grad, state, state["exp_avg_sq"], optimizer.param_groups[0], None, None)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_are_updated_shard_by_shard(mesh):
    def shard(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor.clone(), mesh, [Shard(0)])

    p, optimizer = frozen((24, 40))
    expected, _ = kernel_step(p, optimizer)
    sharded = nn.Parameter(shard(p.detach()))
    sharded.grad = shard(p.grad)
    state = optimizer.state[p]
    optimizer.state[sharded] = {key: shard(value) if key.startswith("exp") else value for key, value in state.items()}
    kernel_step_in_place(sharded, optimizer)
    assert torch.equal(sharded.to_local(), expected)


# ---- the door ----


def test_the_door_hands_out_the_kernel():
    assert frozen_adamw_kernel() is _frozen_adamw.frozen_adamw


def test_without_triton_there_is_no_kernel_and_no_error(monkeypatch):
    frozen_adamw_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "nmsparse.kernels._frozen_adamw")
    try:
        assert frozen_adamw_kernel() is None
    finally:
        frozen_adamw_kernel.cache_clear()
