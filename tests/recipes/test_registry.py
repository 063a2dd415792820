"""The registry: facts, look-up by name, and room for third parties."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from toys import make_data, make_net, train

import nmsparse as nm
from nmsparse.recipes import Recipe, _registry

NAMES = ["dense", "ste", "sr-ste", "asp", "step", "s-ste", "fst", "bi-mask", "sdgp", "mask-decay", "structure-decay", "trio"]


def test_all_twelve_recipes_are_registered_with_their_classes() -> None:
    assert [info.name for info in nm.recipes()] == NAMES
    classes = [
        nm.Dense,
        nm.STE,
        nm.SRSTE,
        nm.ASP,
        nm.STEP,
        nm.SSTE,
        nm.FST,
        nm.BiMask,
        nm.SDGP,
        nm.MaskDecay,
        nm.StructureDecay,
        nm.Trio,
    ]
    assert [info.cls for info in nm.recipes()] == classes
    assert all(info.paper and info.summary and info.patterns for info in nm.recipes())


def test_listing_takes_a_glob() -> None:
    assert [info.name for info in nm.recipes("*-decay")] == ["mask-decay", "structure-decay"]


def test_recipe_by_name_takes_options() -> None:
    assert nm.recipe("sr-ste", "1:4", decay=1e-3) == nm.SRSTE("1:4", decay=1e-3)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 's-ste'"):
        nm.recipe("sste")


def test_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(TypeError, match="sr-ste has no option 'lam'; its options are: decay, decay_on"):
        nm.recipe("sr-ste", lam=1.0)


def test_recipes_are_frozen_hashable_values() -> None:
    recipe = nm.SSTE("2:4")
    with pytest.raises(FrozenInstanceError):
        recipe.mvue = False  # type: ignore[misc]
    assert hash(recipe) == hash(nm.SSTE("2:4"))
    assert recipe != nm.SSTE("1:4")
    assert repr(recipe) == 'SSTE(pattern=Pattern("2:4"), mvue=True, precision=None)'


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sr-ste", {"decay": -1.0}, "at least 0"),
        ("sr-ste", {"decay_on": "loss"}, '"grad" or "weight"'),
        ("asp", {"start": -1}, "start is a step"),
        ("asp", {"start": 5, "permute": True}, "needs start = 0"),
        ("step", {"switch": 0}, "leaves no dense phase"),
        ("step", {"switch": "soon"}, 'switch is "auto"'),
        ("step", {"statistic": "median"}, "statistic is one of"),
        ("step", {"earliest": 0.6, "latest": 0.5}, "in this order"),
        ("s-ste", {"mvue": "exact"}, "mvue is True, False"),
        ("s-ste", {"precision": "int8"}, "precision is None"),
        ("fst", {"refresh": 0}, "at least 1"),
        ("fst", {"dense_tail": 1.0}, "below 1"),
        ("bi-mask", {"candidates": 0}, "candidates must be at least 1"),
        ("bi-mask", {"permutation": "best"}, "permutation is"),
        ("sdgp", {"selector": "min"}, "selector is"),
        ("mask-decay", {"shape": "cosine"}, '"linear" or "exponential"'),
        ("mask-decay", {"reach": 0.95}, "must lie after dense"),
        ("mask-decay", {"dense": 0.6, "fixed": 0.5}, "leave nothing"),
        ("mask-decay", {"rate": 0.0}, "rate must be positive"),
        ("structure-decay", {"stages": ("3:4", "1:4")}, "is not the pattern"),
        ("structure-decay", {"widest": 0}, "at least 1"),
        ("trio", {"forward": "medium"}, "forward is"),
    ],
)
def test_senseless_options_are_refused_with_a_sentence(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nm.recipe(name, "2:4", **options)


def test_third_parties_register_their_own() -> None:
    @nm.register_recipe("halved", paper="none")
    @dataclass(frozen=True)
    class Halved(Recipe):
        """Every weight counts half."""

        def output_weight(self, weight: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
            return weight / 2

    try:
        model = make_net()
        run = nm.sparsify_(model, nm.recipe("halved"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(optimizer)
        losses = train(model, optimizer, 20, make_data())
        assert losses[-1] < losses[0]
        assert torch.equal(nm.effective_weight(model.embed), model.embed.weight / 2)
        with pytest.raises(ValueError, match="registered already"):

            @nm.register_recipe("halved", paper="none")
            @dataclass(frozen=True)
            class Other(Recipe):
                """Another one."""
    finally:
        del _registry._RECIPES["halved"]
