import pytest
import torch

import nmsparse.functional as F

from .oracles import samples

KEPT, SIZES = [3, 2, 1], [4, 4, 8]
SPECS = ["3:4", "2:4", "1:8"]


def staged(x, progress):
    return F.staged_mask(x, torch.tensor(progress, dtype=torch.float64), KEPT, SIZES)


@pytest.mark.parametrize(
    ("progress", "stage"),
    [(0.0, 0), (0.2, 0), (0.333, 0), (1 / 3, 1), (0.5, 1), (0.666, 1), (2 / 3, 2), (0.9, 2), (1.0, 2), (5.0, 2)],
)
def test_equal_stages_follow_each_other(progress, stage):
    x = samples("gaussian", 5, 16)
    assert torch.equal(staged(x, progress), F.magnitude_mask(x, SPECS[stage]))


@pytest.mark.parametrize("updates", [3, 6, 30, 90, 300, 3_000_000])
def test_a_stage_starts_on_its_update_whatever_the_rounding(updates):
    x = samples("gaussian", 2, 8)
    for stage in range(3):
        first = stage * updates // 3
        assert torch.equal(staged(x, first / updates), F.magnitude_mask(x, SPECS[stage]))
        if stage:
            assert torch.equal(staged(x, (first - 1) / updates), F.magnitude_mask(x, SPECS[stage - 1]))


def test_rounding_does_not_delay_a_stage():
    # 22 * (15 / 22) is below 15 in float64
    x, kept = samples("gaussian", 1, 22), list(range(22, 0, -1))
    for stage in range(22):
        mask = F.staged_mask(x, torch.tensor(stage / 22, dtype=torch.float64), kept, [22] * 22)
        assert mask.sum() == kept[stage]


def test_float32_progress_is_read_too():
    x = samples("gaussian", 2, 8)
    assert torch.equal(F.staged_mask(x, torch.tensor(0.5), KEPT, SIZES), F.magnitude_mask(x, "2:4"))


@pytest.mark.parametrize("progress", [-1.0, -1e-6])
def test_below_zero_everything_is_kept(progress):
    mask = staged(samples("gaussian", 3, 8), progress)
    assert mask.dtype == torch.bool
    assert mask.all()


def test_below_zero_no_size_is_refused():
    assert staged(torch.ones(2, 5), -1.0).all()


def test_one_stage_lasts_for_ever():
    x = samples("gaussian", 2, 8)
    for progress in (0.0, 0.5, 1.0):
        assert torch.equal(F.staged_mask(x, torch.tensor(progress), [2], [4]), F.magnitude_mask(x, "2:4"))


def test_masks_are_contiguous_for_every_layout():
    x = samples("gaussian", 16, 8).t()
    for progress in (-1.0, 0.0, 0.9):
        mask = staged(x, progress)
        assert mask.is_contiguous()
        assert mask.shape == x.shape
    assert torch.equal(staged(x, 0.0), staged(x.contiguous(), 0.0))


@pytest.mark.parametrize("progress", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_the_op_obeys_the_rules_of_torch_library(progress, layout):
    x = samples("gaussian", 8, 8)
    x = x if layout == "contiguous" else x.t()
    torch.library.opcheck(F.staged_mask, (x, torch.tensor(progress), KEPT, SIZES))


def test_the_stage_changes_without_recompiling():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def pruned(x, progress):
        return torch.where(F.staged_mask(x, progress, KEPT, SIZES), x, 0)

    x = samples("gaussian", 4, 8)
    progress = torch.tensor(-1.0)
    for value, spec in [(-1.0, "4:4"), (0.0, "3:4"), (0.5, "2:4"), (0.9, "1:8")]:
        progress.fill_(value)
        assert torch.equal(pruned(x, progress), torch.where(F.magnitude_mask(x, spec), x, 0))
    assert len(graphs) == 1


def test_a_stage_that_does_not_fit_names_size_and_pattern():
    with pytest.raises(ValueError, match=r'size 12 of dim 1 \(shape \(2, 12\)\) is not a multiple of 8, so pattern "1:8"'):
        staged(torch.ones(2, 12), 1.0)
