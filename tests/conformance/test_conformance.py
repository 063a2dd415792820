"""One suite over the registry: what every recipe must do, whoever wrote it."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import CASES, STEPS, case_id, make_data, make_net, make_optimizer, same, start, train

import nmsparse as nm
from nmsparse.functional import violations
from nmsparse.nn import sparse_modules

Case = tuple[str, dict[str, Any]]
every_case = pytest.mark.parametrize("case", CASES, ids=case_id)


@every_case
def test_toy_task_is_learnt(case: Case) -> None:
    model, optimizer, _ = start(*case, total_steps=60)
    losses = train(model, optimizer, 60, make_data())
    assert losses[-1] < 0.8 * losses[0]


@every_case
def test_densify_restores_the_model_bit_for_bit(case: Case) -> None:
    dense = make_net()
    model = copy.deepcopy(dense)
    parameters = list(model.parameters())
    nm.sparsify_(model, nm.recipe(case[0], "2:4", **case[1]))
    assert isinstance(model.embed, nn.Linear)
    nm.densify_(model)
    assert same(model, dense)
    assert [type(m) for m in model.modules()] == [type(m) for m in dense.modules()]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert [set(m.__dict__) for m in model.modules()] == [set(m.__dict__) for m in dense.modules()]


@every_case
@pytest.mark.parametrize("cut", [1, 4, 5, 6, 10])
def test_resumed_run_equals_uninterrupted_run(case: Case, cut: int) -> None:
    data = make_data()
    whole, optimizer, whole_run = start(*case)
    train(whole, optimizer, STEPS, data)

    first, optimizer, run = start(*case)
    train(first, optimizer, cut, data)
    buffer = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    second, optimizer, run = start(*case)
    train(second, optimizer, 2, make_data(seed=5))  # a different past that loading must erase
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    run.load_state_dict(saved["run"])
    train(second, optimizer, STEPS - cut, data)
    assert same(second, whole)
    assert run.step == whole_run.step == STEPS


@every_case
def test_accumulation_over_micro_batches_equals_one_batch(case: Case) -> None:
    """Exactly for deterministic recipes; in expectation for random ones, whose draws differ from batch to batch."""
    recipe = nm.recipe(case[0], "2:4", **case[1])
    data = make_data(32, dtype=torch.float64)
    draws = 120 if recipe.is_random else 1
    one, many = (_mean_gradient(case, data, parts, draws) for parts in (1, 4))
    for (mean_one, error_one), (mean_many, error_many) in zip(one, many, strict=True):
        if not recipe.is_random:
            # FP8 takes its scale from each batch: equal only up to the rounding of the format
            tolerance = 0.2 if recipe.runs_in_fp8 else 1e-9
            assert (mean_one - mean_many).norm() <= tolerance * mean_one.norm()
            continue
        sigma = (error_one.square() + error_many.square()).sqrt()
        if recipe.runs_in_fp8:
            sigma = sigma + 0.05 * mean_one.abs().max()
        outside = ((mean_one - mean_many).abs() > 5 * sigma + 1e-9).float().mean()
        assert outside < 1e-3


def _mean_gradient(
    case: Case, data: tuple[torch.Tensor, torch.Tensor], parts: int, draws: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean and standard error over draws of each weight's gradient, as the optimizer would receive it."""
    model, optimizer, _ = start(*case, dtype=torch.float64)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    squares = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(draws):
        optimizer.zero_grad()
        for x, y in zip(data[0].chunk(parts), data[1].chunk(parts), strict=True):
            ((model(x) - y).square().mean() / parts).backward()
        for total, square, p in zip(sums, squares, model.parameters(), strict=True):
            total += p.grad
            square += p.grad.square()
    return [
        (s / draws, ((q / draws - (s / draws).square()).clamp(min=0) / draws).sqrt()) for s, q in zip(sums, squares, strict=True)
    ]


@every_case
@pytest.mark.parametrize("fused", [False, True])
def test_training_does_not_depend_on_the_loss_scale(case: Case, fused: bool) -> None:
    results = []
    for scale in (1.0, 1024.0):
        model = make_net()
        recipe = nm.recipe(case[0], "2:4", **case[1])
        run = nm.sparsify_(model, recipe)
        optimizer = make_optimizer(recipe, model, fused=fused)
        run.attach(optimizer, total_steps=STEPS)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        x, y = make_data()
        for _ in range(STEPS):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(model)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        # powers of two scale exactly; only the fused kernel divides in its own order
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6) if fused else torch.testing.assert_close(a, b, rtol=0, atol=0)


@every_case
@pytest.mark.parametrize("fused", [False, True])
def test_overflowing_step_moves_nothing(case: Case, fused: bool) -> None:
    model = make_net()
    recipe = nm.recipe(case[0], "2:4", **case[1])
    run = nm.sparsify_(model, recipe)
    optimizer = make_optimizer(recipe, model, fused=fused)
    run.attach(optimizer, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    x, y = make_data()
    for overflow in (False, True):
        before = copy.deepcopy(model.state_dict())
        step = run.step
        loss = (model(x) - y).square().mean() * (math.inf if overflow else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert moved is not overflow
        assert run.step == step + (not overflow)


@every_case
def test_compiled_training_equals_eager_and_never_recompiles(case: Case) -> None:
    data = make_data()
    eager, optimizer, _ = start(*case, blocks=1)
    train(eager, optimizer, STEPS, data)
    torch._dynamo.reset()
    compiled, optimizer, _ = start(*case, blocks=1)
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(compiled, backend=counter, fullgraph=True)
    train(forward, optimizer, 1, data)
    first = counter.frame_count  # 2 where the tracer starts over once, before anything runs
    train(forward, optimizer, STEPS - 1, data)
    assert counter.frame_count == first <= 2
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        # the compiler may reassociate sums; Adam's division makes the most of one bit
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every_case
def test_activation_checkpointing_equals_plain_training(case: Case) -> None:
    data = make_data()
    plain, optimizer, _ = start(*case)
    train(plain, optimizer, STEPS, data)
    checkpointed, optimizer, _ = start(*case, checkpointing=True)
    train(checkpointed, optimizer, STEPS, data)
    assert same(plain, checkpointed)


@every_case
def test_state_dict_is_that_of_the_dense_model(case: Case) -> None:
    dense = make_net()
    model, optimizer, _ = start(*case)
    train(model, optimizer, 2, make_data())
    assert list(model.state_dict()) == list(dense.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in dense.named_parameters()]
    assert not list(model.named_buffers())
    dense.load_state_dict(model.state_dict())


@every_case
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "1:8"])
def test_final_weights_obey_the_pattern(case: Case, pattern: str) -> None:
    if case[1].get("mvue") == "approximate" and not pattern.startswith("2:"):
        pytest.skip("the approximate estimator is defined for N = 2")
    model, optimizer, run = start(*case, pattern=pattern)
    train(model, optimizer, STEPS, make_data())
    ends_dense = nm.recipe_info(run.recipe).ends_dense and case[1].get("dense_tail") != 0
    model.eval()
    expected = {name: nm.effective_weight(module) for name, module in sparse_modules(model)}
    assert expected
    output = model(make_data()[0])
    nm.freeze_(model)
    for name, weight in expected.items():
        frozen = model.get_submodule(name).weight
        assert torch.equal(frozen, weight)
        assert not (torch.signbit(frozen) & (frozen == 0)).any()
        assert (int(violations(frozen, pattern)) == 0) is not ends_dense
    torch.testing.assert_close(
        model(make_data()[0]), output, rtol=0.2 if run.recipe.runs_in_fp8 else 0, atol=0.2 if run.recipe.runs_in_fp8 else 0
    )


@every_case
def test_keeping_all_of_the_weights_is_dense_training(case: Case) -> None:
    recipe = nm.recipe(case[0], "4:4", **case[1]) if case[1].get("mvue") != "approximate" else None
    if recipe is None or recipe.runs_in_fp8 or nm.recipe_info(recipe).needs:
        pytest.skip("another number format, estimator or optimizer is not dense AdamW")
    data = make_data()
    dense = make_net()
    train(dense, make_optimizer(recipe, dense), STEPS, data)
    model, optimizer, _ = start(*case, pattern="4:4")
    train(model, optimizer, STEPS, data)
    assert same(model, dense)


@every_case
def test_needs_are_enforced_before_training(case: Case) -> None:
    recipe = nm.recipe(case[0], "2:4", **case[1])
    model = make_net()
    run = nm.sparsify_(model, recipe)
    if recipe.needs_clock:
        with pytest.raises(RuntimeError, match=r"run\.attach"):
            model(make_data()[0])
    with torch.no_grad():
        model(make_data()[0])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if nm.recipe_info(recipe).needs:
        with pytest.raises(TypeError, match="StepAdamW"):
            run.attach(sgd, total_steps=STEPS)
    elif recipe.needs_total_steps:
        with pytest.raises(ValueError, match="total_steps"):
            run.attach(sgd)
    else:
        run.attach(sgd)


@every_case
def test_autocast_keeps_master_weights_and_trains(case: Case) -> None:
    model, optimizer, _ = start(*case)
    x, y = make_data()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            loss = (output.float() - y).square().mean()
        assert output.dtype == torch.bfloat16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("info", nm.recipes(), ids=lambda info: info.name)
def test_declared_products_are_the_sparse_ones(info: nm.RecipeInfo) -> None:
    """A product is declared exactly if some update of the run sees an N:M operand in it."""
    model, optimizer, run = start(info.name, {})
    seen: set[str] = set()
    for _ in range(STEPS):
        for _, module in sparse_modules(model):
            seen |= _sparse_operands(module, run.recipe)
        train(model, optimizer, 1, make_data())
    assert seen == set(info.products) == set(run.recipe.sparse_products)


def _sparse_operands(module: Any, recipe: nm.Recipe) -> set[str]:
    state, weight, pattern = module._nmsparse.state, module.weight.detach(), recipe.pattern
    grad = torch.randn(32, weight.shape[0], generator=torch.Generator().manual_seed(0))
    counter = state.get("counter")
    found = set()
    if not violations(recipe.output_weight(weight, state), pattern):
        found.add("output")
    backward = recipe.grad_input_weight(weight, state)
    backward = backward[state["permutation"]] if "permutation" in state else backward
    if not violations(backward, pattern, 0) or not violations(recipe.grad_input_grad(grad, state, counter), pattern):
        found.add("grad_input")
    if not violations(recipe.grad_weight_grad(grad, state, counter), pattern, 0):
        found.add("grad_weight")
    return found
