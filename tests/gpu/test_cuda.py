"""The same answers on the GPU as on the CPU, and training under the conditions GPUs are used in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from toys import CASES, STEPS, case_id, make_data, make_net, make_optimizer, train

import nmsparse as nm
import nmsparse.functional as nmf

Case = tuple[str, dict[str, Any]]
PATTERNS = ["1:2", "2:4", "1:4", "4:8", "1:16", "8:16", "3:5"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rounded to few values, so that ties abound."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([x, (4 * x).round() / 4]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dim", [0, 1])
def test_masks_and_thresholds_are_bit_equal_to_the_cpu(pattern: str, dtype: torch.dtype, dim: int) -> None:
    x = sample((240, 240), dtype)
    on_gpu = x.cuda()
    assert torch.equal(nmf.magnitude_mask(on_gpu, pattern, dim).cpu(), nmf.magnitude_mask(x, pattern, dim))
    assert torch.equal(nmf.soft_threshold(on_gpu, pattern, dim).cpu(), nmf.soft_threshold(x, pattern, dim))
    assert torch.equal(nmf.magnitude_mask(on_gpu.t(), pattern, 1 - dim).cpu(), nmf.magnitude_mask(x.t(), pattern, 1 - dim))


@pytest.mark.parametrize("pattern", ["1:4", "2:4", "4:8"])
def test_transposable_masks_are_equal_on_both_devices(pattern: str) -> None:
    x = sample((64, 128), torch.float32)
    a, b = nmf.transposable_mask(x.cuda(), pattern).cpu(), nmf.transposable_mask(x, pattern)
    if pattern != "4:8":
        assert torch.equal(a, b)
    # the entropic projection rounds differently; its result must be as good
    assert (x.abs() * a).sum() >= 0.999 * (x.abs() * b).sum()
    assert (a.unflatten(1, (-1, int(pattern[2]))).sum(-1) == int(pattern[0])).all()


def test_counter_based_numbers_are_bit_equal_to_the_cpu() -> None:
    for stream, counter in ((0, 0), (-5, 7), (2**31 - 1, -(2**31))):
        a = nmf.counter_uniform((1000, 33), stream, counter, "cuda")
        assert torch.equal(a.cpu(), nmf.counter_uniform((1000, 33), stream, counter))


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "4:8", "3:16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mvue_keeps_the_same_entries_as_on_the_cpu(pattern: str, dtype: torch.dtype) -> None:
    x = sample((240, 256), dtype)
    m = nm.Pattern(pattern).m
    uniform = nmf.counter_uniform((x.shape[0] // m, 1, 256), 3, 4)
    a = nmf.mvue(x.cuda(), pattern, 0, uniform=uniform.cuda()).cpu()
    b = nmf.mvue(x, pattern, 0, uniform=uniform)
    differs = (a != 0) != (b != 0)
    assert differs.float().mean() < 1e-3  # division rounds differently in the last bit, and a draw may fall between
    torch.testing.assert_close(a[~differs], b[~differs], rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_recipe_trains_compiled_in_bf16(case: Case) -> None:
    torch._dynamo.reset()
    model = make_net(blocks=1)
    recipe = nm.recipe(case[0], "2:4", **case[1])
    run = nm.sparsify_(model, recipe)
    model.cuda()  # after the conversion: masks and scales must follow
    optimizer = make_optimizer(recipe, model, fused=True)
    run.attach(optimizer, total_steps=60)
    compiled = torch.compile(model, fullgraph=True)
    x, y = (t.cuda() for t in make_data())
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", torch.bfloat16):
            loss = (compiled(x).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    model.eval()
    if not nm.recipe_info(recipe).ends_dense:
        assert nmf.violations(nm.effective_weight(model.embed), "2:4") == 0


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_training_on_the_gpu_follows_the_cpu(case: Case) -> None:
    """Eager fp32: the same masks and draws, so losses agree to rounding.

    Emulated on both: by the default rule a small layer's backward products stay dense on a GPU, with unpruned operands.
    """
    results = []
    for device in ("cpu", "cuda"):
        model = make_net().to(device)
        recipe = nm.recipe(case[0], "2:4", **case[1])
        run = nm.sparsify_(model, recipe, emulate=True)
        optimizer = make_optimizer(recipe, model)
        run.attach(optimizer, total_steps=STEPS)
        data = tuple(t.to(device) for t in make_data())
        results.append(train(model, optimizer, STEPS, data))
    # FP8 rounds coarsely: a last-bit difference of a sum moves a value by a whole step of the format
    assert results[0] == pytest.approx(results[1], rel=5e-2 if case[1].get("precision") else 5e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_under_a_grad_scaler_changes_nothing(fused: bool) -> None:
    model = make_net().cuda()
    recipe = nm.SRSTE("2:4", decay=0.1)
    run = nm.sparsify_(model, recipe)
    optimizer = make_optimizer(recipe, model, fused=fused)
    run.attach(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    x, y = (t.cuda() for t in make_data())
    for overflow in (False, True):
        before = copy.deepcopy(model.state_dict())
        loss = (model(x) - y).square().mean() * (float("inf") if overflow else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert moved is not overflow
    assert run.step == 1


def test_fused_frozen_step_equals_the_plain_one() -> None:
    results = []
    for fused in (False, True):
        model = make_net().cuda()
        run = nm.sparsify_(model, nm.STEP("2:4", switch=4))
        optimizer = nm.StepAdamW(model.parameters(), lr=3e-3, fused=fused)
        run.attach(optimizer, total_steps=STEPS)
        train(model, optimizer, STEPS, tuple(t.cuda() for t in make_data()))
        results.append(model)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_fp8_output_runs_on_tensor_cores_and_agrees_with_the_emulation() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 tensor cores")
    a = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(128, 32, device="cuda", dtype=torch.bfloat16)
    fast = nmf.matmul_fp8(a, b, torch.float8_e4m3fn)
    slow = nmf.matmul_fp8(a.cpu(), b.cpu(), torch.float8_e4m3fn)
    assert (fast.cpu().float() - slow.float()).norm() < 1e-2 * slow.float().norm()
    exact = a.float() @ b.float()
    assert (fast.float() - exact).norm() < 0.06 * exact.norm()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_recipe_waits_for_the_gpu_in_forward_or_backward() -> None:
    """Synchronisation inside the products would stall every layer of every micro-batch."""
    for name, options in CASES:
        model = make_net().cuda()
        recipe = nm.recipe(name, "2:4", **options)
        run = nm.sparsify_(model, recipe)
        run.attach(make_optimizer(recipe, model), total_steps=STEPS)
        x = make_data()[0].cuda()
        model(x).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).sum().backward()  # raises where something waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert model.embed.weight.grad is not None


def test_convolutions_in_channels_last_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)
    )
    model = model.cuda().to(memory_format=torch.channels_last)
    run = nm.sparsify_(model, nm.BiMask("2:4"), targets=["0", "2"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.attach(optimizer)
    x, target = (
        torch.randn(16, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last),
        torch.arange(16, device="cuda") % 2,
    )
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("wait", [True, None])
def test_broken_gradient_is_named_before_the_update_or_one_later_without_waiting(wait: bool | None) -> None:
    model = make_net().cuda()
    run = nm.sparsify_(model, nm.STE("2:4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(optimizer, check_finite=wait)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.blocks[0].up.weight.grad[0, 0] = float("nan")
    if wait is None:
        optimizer.step()
        message = r"blocks\.0\.up: its gradient holds NaN or Inf at update 0, and was applied"
    else:
        message = r"blocks\.0\.up: its gradient holds NaN or Inf at update 0, and nothing was changed"
    with pytest.raises(FloatingPointError, match=message):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_inside_a_captured_graph_is_refused() -> None:
    """A replay would not move the clock: the same random numbers for ever, and no schedule."""
    model = nn.Linear(64, 64).cuda()
    run = nm.sparsify_(model, nm.SRSTE("2:4"), targets="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(optimizer)
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture forward and backward pass only"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.step()
    assert run.step == 2
