"""Weights of experts in 3-D parameters: what their module sees, what reaches them, and that they stay the module's own."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from toys import CASES, case_id, make_optimizer, same

import nmsparse as nm
from nmsparse.functional import magnitude_mask, transposable_mask, violations
from nmsparse.nn import grouped_weights, sparse_modules

Case = tuple[str, dict[str, Any]]
FORMS = ("eager", "batched_mm", "grouped_mm")
"""Of transformers' forward."""
STACKS = ["gate_up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def make_experts(form: str = "eager", kind: str = "mixtral", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        config: Any = transformers.MixtralConfig(**SIZES, experts_implementation=form)
    else:  # stored (E, I, O), with biases
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        config = transformers.GptOssConfig(**SIZES, head_dim=8, experts_implementation=form)
    made = Experts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def make_model(form: str = "eager", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, experts_implementation=form))


def data(tokens: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts of each token, and their weights. Expert 3 gets no token."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 16, generator=generator)
    index = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(tokens)])
    return x, index, torch.rand(tokens, 2, generator=generator)


def words() -> Tensor:
    return torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses, ids = [], words()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def start(case: Case, total: int = 12) -> tuple[nn.Module, torch.optim.Optimizer, nm.Run]:
    model, recipe = make_model(), nm.recipe(case[0], "2:4", **case[1])
    run = nm.sparsify_(model, recipe)
    optimizer = make_optimizer(recipe, model)
    run.attach(optimizer, total_steps=total)
    return model, optimizer, run


def groups_dim(kind: str) -> int:
    return 2 if kind == "mixtral" else 1


# ---- what the module sees, and what reaches the parameter ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_module_of_experts_computes_with_pruned_weights(kind: str, form: str) -> None:
    sparse, pruned = make_experts(form, kind), make_experts(form, kind)
    nm.sparsify_(sparse, nm.STE("2:4"), STACKS)
    with torch.no_grad():
        for name in STACKS:
            weight = pruned.get_parameter(name)
            weight.mul_(magnitude_mask(weight, "2:4", groups_dim(kind)))
    found, expected = sparse(*data()), pruned(*data())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in pruned.named_parameters():  # straight through: the gradient of the pruned weight, pruned entries too
        torch.testing.assert_close(sparse.get_parameter(name).grad, parameter.grad, rtol=0, atol=0)
        if name in STACKS:
            assert (parameter.grad[parameter == 0] != 0).any()
            assert not parameter.grad[3].any(), "nobody chose this expert"


def test_the_effective_weight_is_asked_for_by_name() -> None:
    experts = make_experts()
    run = nm.sparsify_(experts, nm.SSTE("2:4", mvue=False), ["down_proj"])
    scale = run._layers["down_proj"].state["scale"]
    expected = nm.functional.soft_threshold(experts.down_proj.detach(), "2:4", 2) * scale
    torch.testing.assert_close(nm.effective_weight(experts, "down_proj"), expected)
    assert torch.equal(nm.effective_weight(experts, "gate_up_proj"), experts.gate_up_proj)
    with pytest.raises(TypeError, match="MixtralExperts has no weight to look at"):
        nm.effective_weight(experts)


def test_masks_of_fst_are_transposable_in_every_expert() -> None:
    experts = make_experts()
    nm.sparsify_(experts, nm.FST("2:4"), STACKS)
    for name in STACKS:
        seen, weight = nm.effective_weight(experts, name), experts.get_parameter(name).detach()
        for one, whole in zip(seen, weight, strict=True):
            assert torch.equal(one != 0, transposable_mask(whole, "2:4"))


def test_decay_is_added_to_pruned_weights_only() -> None:
    model = make_model()
    run = nm.sparsify_(model, nm.SRSTE("2:4", decay=0.5), STACKS)
    run.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    experts = model.model.layers[0].mlp.experts
    ids = words()
    model(input_ids=ids, labels=ids).loss.backward()
    before = {name: (experts.get_parameter(name).detach().clone(), experts.get_parameter(name).grad.clone()) for name in STACKS}
    run.optimizers[0].step()
    for name, (weight, grad) in before.items():
        mask = magnitude_mask(weight, "2:4", 2)
        expected = weight - (grad + torch.where(mask, 0, 0.5 * weight))
        torch.testing.assert_close(experts.get_parameter(name).detach(), expected)


# ---- whole models, under every recipe ----


DENSE = [case for case in CASES if case[0] in ("dense", "sdgp") or case[1].get("precision")]
"""Of gradients, or of all three products, the experts' module shows nothing."""
NOT_SHOWN = {
    "bi-mask": ("grad_input",),
    "s-ste": ("grad_weight",),
    "fst": ("grad_weight",),
    "trio": ("grad_input", "grad_weight"),
}


@pytest.mark.parametrize("case", [case for case in CASES if case not in DENSE], ids=case_id)
def test_every_recipe_trains_a_mixture_and_freezes_it(case: Case) -> None:
    model, optimizer, run = start(case)
    losses = train(model, optimizer, 12)
    assert losses[-1] < losses[0]
    assert list(model.state_dict()) == list(make_model().state_dict())
    name = "model.layers.0.mlp.experts.down_proj"
    assert 0 < run.stats()["layers"][name]["density"] <= 1
    hidden = [product for product in NOT_SHOWN.get(case[0], ()) if product in run.recipe.sparse_products]
    assert {key for key in run.skipped if key.startswith(name)} == {f"{name} ({product})" for product in hidden}
    nm.freeze_(model)
    assert dict(grouped_weights(model))[name] == 2
    is_sparse = int(violations(model.get_parameter(name), "2:4", 2)) == 0
    assert is_sparse is not (nm.recipe_info(run.recipe).ends_dense and run.recipe.dense_tail > 0)


@pytest.mark.parametrize("case", DENSE, ids=case_id)
def test_other_recipes_leave_experts_dense_and_say_why(case: Case) -> None:
    run = nm.sparsify_(make_model(), nm.recipe(case[0], "2:4", **case[1]))
    assert not any("experts" in name for name in run.layers)
    reasons = {"dense": "dense prunes nothing", "sdgp": "sdgp prunes gradients, which the experts' module", "s-ste": "in no FP8"}
    assert reasons[case[0]] in run.skipped["model.layers.0.mlp.experts.down_proj"]


def test_undoing_the_conversion_leaves_the_same_model() -> None:
    model, plain = make_model(), make_model()
    run = nm.sparsify_(model, nm.SRSTE("2:4"))
    assert type(model.model.layers[0].mlp.experts).__name__ == "SparseMixtralExperts"
    nm.densify_(model)
    assert same(model, plain)
    assert type(model.model.layers[0].mlp.experts) is type(plain.model.layers[0].mlp.experts)
    assert "_nmsparse_stacks" not in vars(model.model.layers[0].mlp.experts)
    assert run.parameters() == []
    nm.sparsify_(model, nm.STE("2:4"))


@pytest.mark.parametrize("case", [("asp", {"start": 2}), ("fst", {"refresh": 3}), ("sr-ste", {"decay": 0.1})], ids=case_id)
def test_a_resumed_run_equals_the_uninterrupted_one(case: Case) -> None:
    whole = train(*start(case)[:2], 10)
    model, optimizer, run = start(case)
    first = train(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))
    model, optimizer, run = start(case)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    run.load_state_dict(saved[2])
    assert first + train(model, optimizer, 5) == whole


def test_checkpointing_changes_nothing() -> None:
    found = []
    for is_checkpointed in (False, True):
        model, optimizer, _ = start(("s-ste", {}))
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        found.append(train(model, optimizer, 4))
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])  # the loop over experts is no graph, dense or sparse
@pytest.mark.filterwarnings("ignore:.*Dynamo detected a call to a `functools.lru_cache`")
def test_the_compiled_graph_is_whole(form: str) -> None:
    torch._dynamo.reset()
    losses = []
    for is_compiled in (False, True):
        model = make_model(form).to(torch.bfloat16)
        recipe = nm.MaskDecay("2:4")
        run = nm.sparsify_(model, recipe)
        optimizer = make_optimizer(recipe, model)
        run.attach(optimizer, total_steps=6)
        with torch._dynamo.config.patch(error_on_recompile=True):
            forward = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
            losses.append(train(forward, optimizer, 4))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


# ---- the module stays the user's ----


def test_copies_and_pickles_have_stacks_of_their_own() -> None:
    experts = make_experts()
    nm.sparsify_(experts, nm.STE("2:4"), STACKS)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert {name: module.holder for name, module in sparse_modules(twin)} == dict.fromkeys(STACKS, twin)
        with torch.no_grad():
            twin.down_proj.zero_()
        assert not twin(*data()).any()
        assert experts(*data()).any()


def test_a_forward_that_fails_leaves_the_parameters_in_sight() -> None:
    experts = make_experts()
    nm.sparsify_(experts, nm.STE("2:4"), STACKS)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        experts(torch.ones(12, 5), *data()[1:])
    assert isinstance(experts.down_proj, nn.Parameter)


def test_one_stack_of_a_module_may_stay_dense() -> None:
    experts = make_experts()
    run = nm.sparsify_(experts, nm.STE("2:4"), ["down_proj"])
    assert run.layers == ["down_proj"]
    with pytest.raises(ValueError, match=r"down_proj is sparse already \(ste 2:4\)"):
        nm.sparsify_(experts, nm.STE("2:4"), STACKS)
    more = nm.sparsify_(experts, nm.STE("1:4"), ["gate_up_proj"])
    assert more.layers == ["gate_up_proj"]
    assert "gate_up_proj: ste 1:4" in repr(experts)


def test_sizes_that_the_pattern_does_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"in_features = 16 is not a multiple of 32"):
        nm.sparsify_(make_experts(), nm.STE("1:32"), ["gate_up_proj"])


def test_a_run_without_attach_is_refused_before_it_trains() -> None:
    experts = make_experts()
    nm.sparsify_(experts, nm.SRSTE("2:4"), STACKS)
    with pytest.raises(RuntimeError, match="was sparsified with sr-ste"):
        experts(*data())


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_saved_experts_obey_the_pattern_and_load_bit_for_bit(format: str, tmp_path: Path) -> None:
    model = make_model()
    nm.sparsify_(model, nm.STE("2:4"))
    nm.save(model, tmp_path / "sparse", format=format)
    nm.freeze_(model)
    nm.save(model, tmp_path / "frozen", format=format, pattern="2:4")
    for folder in ("sparse", "frozen"):
        report = nm.verify(tmp_path / folder)
        names = {tensor.name.rpartition(".")[2]: tensor for tensor in report.tensors}
        assert report.ok
        assert {names[key].dim for key in STACKS} == {2}
        assert same(nm.load(make_model(seed=1), tmp_path / folder), model)


def test_a_forward_that_was_replaced_is_told() -> None:
    """As accelerate's hooks do for offloaded weights: nobody would show the module projected ones."""
    experts = make_experts()
    experts.forward = lambda *args: args[0]
    with pytest.raises(ValueError, match="down_proj: its forward was replaced on the layer itself"):
        nm.sparsify_(experts, nm.STE("2:4"), ["down_proj"])


def test_threads_see_pruned_weights_only() -> None:
    experts = make_experts()
    nm.sparsify_(experts, nm.STE("2:4"), STACKS)
    experts.eval()
    with torch.no_grad():
        expected = experts(*data())
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: experts(*data()), range(60)))
    assert all(torch.equal(each, expected) for each in found)


def test_states_move_with_the_module() -> None:
    experts = make_experts()
    run = nm.sparsify_(experts, nm.FST("2:4"), STACKS)
    experts.to("meta")
    assert run._layers["down_proj"].state["mask"].is_meta
