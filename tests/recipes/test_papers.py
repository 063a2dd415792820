"""Acceptance tests of each recipe, as its paper (and our reading of it) demands."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from toys import STEPS, make_data, make_net, start, train

import nmsparse as nm
from nmsparse.functional import flip_rate, magnitude_mask, soft_threshold, soft_threshold_scale, transposable_mask, violations
from nmsparse.recipes import Clock
from nmsparse.recipes.bimask import eligible_blocks
from nmsparse.recipes.structure_decay import geometric_stages, stepwise_stages


def patterns(stages: tuple[nm.Pattern, ...]) -> list[str]:
    return [str(stage) for stage in stages]


class TestSSTE:
    def test_scale_is_fixed_at_conversion_and_never_moves(self) -> None:
        model, optimizer, run = start("s-ste", {})
        expected = soft_threshold_scale(make_net().embed.weight, "2:4")
        train(model, optimizer, 10, make_data())
        assert torch.equal(run._layers["embed"].state["scale"], expected)

    @pytest.mark.parametrize("name", ["s-ste", "trio"])
    def test_fine_tuning_keeps_the_scale_of_the_run_before(self, name: str) -> None:
        model, optimizer, run = start(name, {})
        train(model, optimizer, STEPS, make_data())
        saved = run.state_dict()
        again = make_net()
        again.load_state_dict(model.state_dict())
        other = nm.sparsify_(again, nm.recipe(name))
        other.load_layers(saved)
        other.attach(torch.optim.AdamW(again.parameters(), lr=1e-3), total_steps=STEPS)
        assert torch.equal(nm.effective_weight(again.embed), nm.effective_weight(model.embed))
        train(again, other.optimizers[0], 3, make_data())
        for key, value in saved["layers"]["embed"].items():
            if "scale" in key:
                assert torch.equal(other._layers["embed"].state[key], value)

    def test_forward_sees_the_scaled_soft_threshold(self) -> None:
        model, _, run = start("s-ste", {})
        weight = model.embed.weight
        expected = soft_threshold(weight, "2:4") * run._layers["embed"].state["scale"]
        assert torch.equal(nm.effective_weight(model.embed), expected)

    def test_gradient_has_no_factor_and_no_mask(self) -> None:
        torch.manual_seed(0)
        dense = nn.Linear(8, 8)
        sparse = nn.Linear(8, 8)
        sparse.load_state_dict(dense.state_dict())
        nm.sparsify_(sparse, nm.SSTE("2:4", mvue=False))
        x, grad = torch.randn(5, 8), torch.randn(5, 8)
        dense(x).backward(grad)
        sparse(x).backward(grad)
        assert torch.equal(dense.weight.grad, sparse.weight.grad)

    def test_masks_move_from_the_first_step(self) -> None:
        model, optimizer, run = start("s-ste", {})
        train(model, optimizer, 1, make_data())
        assert run.stats()["total"]["flip_rate"] > 0

    @pytest.mark.parametrize(
        ("draw", "beta"), [(torch.randn, 1.483), (lambda *s: torch.rand(*s) * 2 - 1, 1.750)], ids=["gaussian", "uniform"]
    )
    def test_scale_of_fresh_layers(self, draw, beta: float) -> None:
        torch.manual_seed(0)
        assert float(soft_threshold_scale(draw(1024, 1024), "2:4")) == pytest.approx(beta, abs=0.01)


@pytest.mark.parametrize("name", ["s-ste", "fst", "trio"])
def test_sampling_the_weight_gradient_leaves_the_data_gradient_as_it_is(name: str) -> None:
    x, grad = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)), torch.ones(12, 8)
    found = []
    for mvue in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(16, 8)
        nm.sparsify_(layer, nm.recipe(name, "2:4", mvue=mvue)).attach(torch.optim.SGD(layer.parameters(), lr=0.1), 10)
        inputs = x.clone().requires_grad_()
        layer(inputs).backward(grad)
        found.append(inputs.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["s-ste", "fst"])
def test_the_data_gradient_goes_through_the_weight_of_the_forward_product(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    nm.sparsify_(layer, nm.recipe(name)).attach(torch.optim.SGD(layer.parameters(), lr=0.1), 10)
    x, grad = torch.randn(12, 16, requires_grad=True), torch.randn(12, 8)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ nm.effective_weight(layer))


class TestSRSTE:
    def test_zero_decay_is_ste(self) -> None:
        a, first, _ = start("sr-ste", {"decay": 0.0})
        b, second, _ = start("ste", {})
        assert train(a, first, 10, make_data()) == train(b, second, 10, make_data())

    def test_strong_decay_lowers_the_flip_rate(self) -> None:
        rates = []
        for name, options in (("ste", {}), ("sr-ste", {"decay": 2e-2})):
            model, attached, run = start(name, options)
            run.detach(attached)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            run.attach(optimizer, stats_every=1)
            total = 0.0
            for _ in range(80):
                train(model, optimizer, 1, make_data())
                total += run.stats()["total"]["flip_rate"]
            rates.append(total)
        assert rates[1] < rates[0]


class TestASP:
    def test_pruned_weights_stay_zero_under_momentum_and_weight_decay(self) -> None:
        torch.manual_seed(0)
        model = make_net()
        run = nm.sparsify_(model, nm.ASP("2:4"))
        masks = {name: handle.state["mask"].clone() for name, handle in run._layers.items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        run.attach(optimizer)
        train(model, optimizer, 100, make_data())
        for name, handle in run._layers.items():
            assert torch.equal(handle.state["mask"], masks[name])
            assert (handle.weight[~masks[name]] == 0).all()
            assert (handle.weight[masks[name]] != 0).all()

    def test_dense_before_start_then_fixed(self) -> None:
        model, optimizer, run = start("asp", {"start": 3})
        for step in range(6):
            is_dense = violations(nm.effective_weight(model.embed), "2:4") > 0
            assert is_dense == (step < 3)
            train(model, optimizer, 1, make_data())
        assert run.stats()["total"]["flip_rate"] == 0

    def test_a_new_clock_begins_dense_again_or_keeps_the_mask_that_was_there_from_the_start(self) -> None:
        model, optimizer, run = start("asp", {"start": 3})
        train(model, optimizer, 5, make_data())
        run.detach(optimizer)
        again = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.attach(again, total_steps=STEPS)
        assert run._layers["embed"].state["mask"].all()
        train(model, again, 2, make_data())
        assert violations(model.embed.weight, "2:4") > 0
        train(model, again, 1, make_data())
        assert violations(nm.effective_weight(model.embed), "2:4") == 0

        model, optimizer, run = start("asp", {})
        train(model, optimizer, 2, make_data())
        before = run._layers["embed"].state["mask"].clone()
        run.detach(optimizer)
        with torch.no_grad():
            model.embed.weight.copy_(torch.randn_like(model.embed.weight))  # of which another mask would keep more
        run.attach(torch.optim.AdamW(model.parameters(), lr=1e-2), total_steps=STEPS)
        assert torch.equal(run._layers["embed"].state["mask"], before)

    def test_mask_follows_the_module_to_another_dtype(self) -> None:
        model, _, run = start("asp", {})
        before = run._layers["embed"].state["mask"].clone()
        model.double()
        assert torch.equal(run._layers["embed"].state["mask"], before)


class TestFST:
    def test_mask_changes_only_at_multiples_of_refresh(self) -> None:
        model, optimizer, run = start("fst", {"refresh": 4, "dense_tail": 0.0})
        changes = []
        for _ in range(12):
            before = run._layers["embed"].state["mask"].clone()
            train(model, optimizer, 1, make_data())
            changes.append(bool((run._layers["embed"].state["mask"] != before).any()))
        assert not any(changed for step, changed in enumerate(changes, 1) if step % 4)
        assert any(changes)

    def test_weight_is_sparse_both_ways_until_the_dense_tail(self) -> None:
        model, optimizer, run = start("fst", {"refresh": 1})
        for step in range(12):
            weight = nm.effective_weight(model.embed)
            is_sparse = violations(weight, "2:4") == 0 and violations(weight, "2:4", dim=0) == 0
            assert is_sparse == (step < 10)
            train(model, optimizer, 1, make_data())
        assert torch.equal(nm.effective_weight(model.embed), model.embed.weight)
        assert run.stats()["total"]["density"] == 1.0

    @pytest.mark.parametrize("total", [30, 60, 90, 330, 990])
    def test_the_tail_begins_exactly_where_its_share_says(self, total: int) -> None:
        recipe = nm.FST("2:4", dense_tail=1 / 3)
        assert [recipe.in_tail(Clock(step, total)) for step in (2 * total // 3 - 1, 2 * total // 3)] == [False, True]

    def test_weight_gradient_is_exact_in_the_tail(self) -> None:
        model, optimizer, _ = start("fst", {})
        train(model, optimizer, 11, make_data())
        grads = []
        for _ in range(2):
            model.zero_grad()
            (model(make_data()[0]) - make_data()[1]).square().mean().backward()
            grads.append(model.embed.weight.grad.clone())
        assert torch.equal(*grads)

    def test_decay_ends_with_the_sparse_phase(self) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, bias=False)
        run = nm.sparsify_(layer, nm.FST("2:4", decay=0.5, dense_tail=0.5, mvue=False))
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        run.attach(optimizer, total_steps=2)
        mask = transposable_mask(layer.weight, "2:4")
        for is_decayed in (True, False):
            before = layer.weight.detach().clone()
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
            expected = torch.where(mask, before, before * 0.5) if is_decayed else before
            torch.testing.assert_close(layer.weight.detach(), expected)

    def test_smallest_change_of_a_transposable_block_flips_four_bits(self) -> None:
        a = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()
        b = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]]).bool()
        assert round(float(flip_rate(a, b)) * 16) == 4

    def test_layers_that_fit_one_way_only_stay_dense(self) -> None:
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        run = nm.sparsify_(model, nm.FST("2:4"))
        assert "out_features = 6" in run.skipped["0"]
        assert run.layers == ["2"]


class TestBiMask:
    def test_search_is_never_worse_than_the_natural_order(self) -> None:
        survivors = []
        for seed in range(4):
            torch.manual_seed(seed)
            layer = nn.Linear(64, 64, bias=False)
            nn.init.normal_(layer.weight)
            run = nm.sparsify_(layer, nm.BiMask("2:4"), seed=seed)
            run.attach(torch.optim.SGD(layer.parameters(), lr=0.1))
            mask = magnitude_mask(layer.weight, "2:4")
            order = run._layers[""].state["permutation"]
            assert sorted(order.tolist()) == list(range(64))
            assert eligible_blocks(mask[order], nm.Pattern("2:4")) >= eligible_blocks(mask, nm.Pattern("2:4"))
            survivors.append(float(nm.functional.backward_mask(layer.weight, "2:4", order).sum() / mask.sum()))
        assert sum(survivors) / 4 >= 0.82

    def test_order_changes_only_at_multiples_of_refresh(self) -> None:
        model, optimizer, run = start("bi-mask", {"permutation": "random", "refresh": 3})
        changes = []
        for _ in range(9):
            before = run._layers["embed"].state["permutation"].clone()
            train(model, optimizer, 1, make_data())
            changes.append(bool((run._layers["embed"].state["permutation"] != before).any()))
        assert [step for step, changed in enumerate(changes, 1) if changed] == [3, 6, 9]

    def test_rows_of_a_grouped_convolution_keep_their_order(self) -> None:
        conv = nn.Conv2d(16, 32, 3, groups=4)
        run = nm.sparsify_(conv, nm.BiMask("2:4"), targets="all")
        assert "permutation" not in run._layers[""].state


class TestSDGP:
    def test_rescaling_factor_on_gaussian_gradients(self) -> None:
        grad = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
        kept = nm.functional.sdgp(grad, "2:4", rescale=False)
        scaled = nm.functional.sdgp(grad, "2:4")
        factor = (scaled.abs().sum() / kept.abs().sum()).item()
        assert factor == pytest.approx(1.343, abs=0.01)
        assert ((scaled - grad).square().sum() / grad.square().sum()).item() == pytest.approx(0.234, abs=0.005)

    @pytest.mark.parametrize(("rescale", "mean"), [(False, 0.5), (True, 1.0)])
    def test_random_selector_is_biased_unless_rescaled(self, rescale: bool, mean: float) -> None:
        recipe = nm.SDGP("2:4", selector="random", rescale=rescale)
        grad = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
        state = {"stream": torch.tensor(1, dtype=torch.int32)}
        pruned = recipe.grad_input_grad(grad, state, torch.tensor(2, dtype=torch.int32))
        assert violations(pruned, "2:4") == 0
        assert ((pruned * grad).sum() / grad.square().sum()).item() == pytest.approx(mean, abs=0.01)
        if rescale:
            assert ((pruned - grad).square().sum() / grad.square().sum()).item() == pytest.approx(1.0, abs=0.01)

    def test_mvue_selector_has_the_least_variance(self) -> None:
        recipe = nm.SDGP("2:4", selector="mvue")
        grad = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
        pruned = recipe.grad_input_grad(grad, {"stream": torch.tensor(1, dtype=torch.int32)}, torch.tensor(2, dtype=torch.int32))
        assert ((pruned - grad).square().sum() / grad.square().sum()).item() == pytest.approx(0.474, abs=0.01)


class TestMaskDecay:
    def test_calibrated_rates_and_published_half_life(self) -> None:
        total = 109_200
        linear = nm.MaskDecay("1:8", shape="linear", dense=0.0, fixed=0.0, eps=1e-9)
        assert 1 - linear.factor(Clock(1, total)) == pytest.approx(1.308e-5, rel=1e-3)
        exponential = nm.MaskDecay("1:8", dense=0.0, fixed=0.0)
        assert -math.log(exponential.factor(Clock(1, total))) == pytest.approx(9.04e-5, rel=1e-3)
        published = nm.MaskDecay("1:8", dense=0.0, fixed=0.0, eps=1e-6, rate=1e-4)
        assert published.factor(Clock(6931, total)) == pytest.approx(0.5, abs=1e-4)
        assert published.factor(Clock(46052, total)) == pytest.approx(0.01, abs=1e-5)
        assert published.factor(Clock(76440, total)) == pytest.approx(4.79e-4, rel=1e-3)

    @pytest.mark.parametrize("shape", ["linear", "exponential"])
    def test_factor_starts_at_one_and_is_exactly_zero_from_reach_on(self, shape: str) -> None:
        recipe = nm.MaskDecay("2:4", shape=shape)
        factors = [recipe.factor(Clock(step, 1000)) for step in range(1001)]
        assert factors[:51] == [1.0] * 51
        assert 0 < factors[51] < 1
        assert factors[699] > 0
        assert factors[700] == (0.0 if shape == "linear" else pytest.approx(1e-3))
        assert set(factors[701:]) == {0.0}
        assert factors == sorted(factors, reverse=True)

    def test_phases_end_exactly_where_their_shares_say(self) -> None:
        """0.55 * 100 is above 55 in floating point, and so is (1 - 0.45) * 100."""
        late = nm.MaskDecay("2:4", dense=0.55)
        assert [late.factor(Clock(step, 100)) for step in (54, 55)] == [1.0, 1.0]
        assert late.factor(Clock(56, 100)) < 1
        early = nm.MaskDecay("2:4", dense=0.0, fixed=0.45, reach=0.55)
        assert [early.factor(Clock(step, 100)) > 0 for step in (54, 55)] == [True, False]

    def test_scaled_gradient_fades_for_pruned_weights_only(self) -> None:
        weight = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
        recipe = nm.MaskDecay("2:4", pruned_grad="scaled")
        grad = torch.ones(1, 4)
        assert recipe.weight_grad(grad, weight, {"keep": torch.tensor(0.25)}).tolist() == [[1, 1, 0.25, 0.25]]
        assert recipe.weight_grad(grad, weight, {"keep": torch.tensor(0.0)}).tolist() == [[1, 1, 0, 0]]
        assert nm.MaskDecay("2:4").weight_grad(grad, weight, {"keep": torch.tensor(0.25)}) is grad

    def test_factor_one_is_dense_and_zero_is_ste(self) -> None:
        weight = torch.randn(8, 16)
        recipe = nm.MaskDecay("2:4")
        assert torch.equal(recipe.output_weight(weight, {"keep": torch.tensor(1.0)}), weight)
        assert torch.equal(recipe.output_weight(weight, {"keep": torch.tensor(0.0)}), nm.STE("2:4").output_weight(weight, {}))


class TestStructureDecay:
    @pytest.mark.parametrize(
        ("pattern", "stages"),
        [
            ("2:4", ["3:4", "2:4"]),
            ("1:4", ["3:4", "2:4", "1:4"]),
            ("1:8", ["7:8", "4:8", "2:8", "1:8"]),
            ("1:16", ["15:16", "8:16", "4:16", "2:16", "1:16"]),
            ("1:32", ["31:32", "16:32", "8:32", "4:32", "2:32", "1:32"]),
            ("1:2", ["1:2"]),
            ("4:4", ["4:4"]),
        ],
    )
    def test_stepwise_stages(self, pattern: str, stages: list[str]) -> None:
        assert patterns(stepwise_stages(nm.Pattern(pattern))) == stages

    def test_stepwise_refuses_what_halving_cannot_reach(self) -> None:
        with pytest.raises(ValueError, match=r'"3:8" needs an explicit stages'):
            nm.StructureDecay("3:8")
        assert nm.StructureDecay("3:8", stages=("6:8", "3:8")).stages_for(64)[0] == nm.Pattern("6:8")

    @pytest.mark.parametrize(
        ("pattern", "size", "first"), [("1:8", 768, "16:128"), ("1:32", 768, "8:256"), ("1:128", 768, "2:256")]
    )
    def test_geometric_factor_shrinks_to_fit_the_layer(self, pattern: str, size: int, first: str) -> None:
        stages = patterns(geometric_stages(nm.Pattern(pattern), size, 16))
        assert stages[0] == first
        assert stages[-1] == pattern

    @pytest.mark.parametrize(("pattern", "epochs"), [("1:16", [0, 70, 140, 210, 280]), ("1:32", [0, 58, 116, 175, 233, 291])])
    def test_stages_switch_at_the_published_epochs(self, pattern: str, epochs: list[int]) -> None:
        recipe = nm.StructureDecay(pattern, dense=0.0, fixed=0.0)
        steps = 312
        weight = torch.randn(1, 32)
        counts = []
        for epoch in range(350):
            # the switch falls inside the epoch that the floor names
            progress = torch.tensor(recipe.progress(Clock((epoch + 1) * steps - 1, 350 * steps)), dtype=torch.float64)
            counts.append(int(recipe.mask(weight, {"progress": progress}).sum()))
        switches = [0, *(epoch for epoch in range(1, 350) if counts[epoch] != counts[epoch - 1])]
        assert switches == epochs

    def test_phases_end_exactly_where_their_shares_say(self) -> None:
        late = nm.StructureDecay("2:4", dense=0.55)
        assert [late.progress(Clock(step, 100)) for step in (54, 55)] == [-1.0, 0.0]
        early = nm.StructureDecay("2:4", dense=0.0, fixed=0.45)
        assert [early.progress(Clock(step, 100)) == 1 for step in (54, 55)] == [False, True]

    def test_density_of_each_stage_is_seen_by_the_forward_pass(self) -> None:
        model = nn.Linear(64, 8)
        run = nm.sparsify_(model, nm.StructureDecay("1:8", dense=0.0, fixed=0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.attach(optimizer, total_steps=8)
        densities = []
        for _ in range(8):
            densities.append(run.stats()["total"]["density"])
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        assert densities == [7 / 8, 7 / 8, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8]


class TestTrio:
    def test_backward_weight_loses_little_and_is_sparse_along_outputs(self) -> None:
        weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
        recipe = nm.Trio("2:4")
        state = recipe.init_state(weight)
        forward, backward = recipe.output_weight(weight, state), recipe.grad_input_weight(weight, state)
        assert violations(forward, "2:4") == 0
        assert violations(backward, "2:4", dim=0) == 0
        assert not ((backward != 0) & (forward == 0)).any()
        assert ((backward != 0).sum() / (forward != 0).sum()).item() == pytest.approx(0.8125, abs=0.002)
        assert (1 - backward.square().sum() / forward.square().sum()).item() == pytest.approx(0.035, abs=0.001)

    def test_output_equals_s_ste(self) -> None:
        weight = torch.randn(64, 64)
        trio, sste = nm.Trio("2:4"), nm.SSTE("2:4")
        assert torch.equal(
            trio.output_weight(weight, trio.init_state(weight)), sste.output_weight(weight, sste.init_state(weight))
        )

    def test_double_soft_is_sparse_both_ways_and_continuous(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(1024, 1024, generator=generator)
        recipe = nm.Trio("2:4", forward="double-soft")
        state = recipe.init_state(weight)
        seen = recipe.output_weight(weight, state)
        assert violations(seen, "2:4") == 0
        assert violations(seen, "2:4", dim=0) == 0
        assert torch.equal(recipe.grad_input_weight(weight, state), seen)
        assert float(state["scale"]) == pytest.approx(1.583, abs=0.01)
        assert ((weight - seen).square().sum() / weight.square().sum()).item() == pytest.approx(0.357, abs=0.003)
        assert ((seen != 0).float().mean()).item() == pytest.approx(0.406, abs=0.002)
        shift = 0.01 * torch.randn(64, 64, generator=generator)
        small = weight[:64, :64]
        moved = recipe._project(small + shift) - recipe._project(small)
        assert moved.abs().max() <= 4 * shift.abs().max() + 1e-6
