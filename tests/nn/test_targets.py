"""Which layers are converted, which stay dense, and what the errors say."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from toys import make_net, same

import nmsparse as nm


def converted(model: nn.Module, *args: object, **options: object) -> list[str]:
    return nm.sparsify_(model, nm.STE("2:4"), *args, **options).layers


def test_all_linear_leaves_the_output_head_dense_and_says_so() -> None:
    model = make_net()
    run = nm.sparsify_(model, nm.STE("2:4"))
    assert run.layers == ["embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert "output head" in run.skipped["head"]


def test_only_linear_layer_of_a_convolutional_net_is_its_head() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    with pytest.raises(ValueError, match='targets="all" takes convolutions'):
        converted(model)
    assert converted(model, targets="all") == ["0", "2"]


def test_all_takes_the_head_too() -> None:
    assert "head" in converted(make_net(), targets="all")


def test_suffixes_match_whole_parts_of_a_name() -> None:
    assert converted(make_net(), targets=["up"]) == ["blocks.0.up", "blocks.1.up"]
    assert converted(make_net(), targets=["0.up", "embed"]) == ["embed", "blocks.0.up"]


def test_a_string_is_a_regular_expression_for_the_whole_name() -> None:
    assert converted(make_net(), targets=r"blocks\.1\..*") == ["blocks.1.up", "blocks.1.down"]


def test_exclude_takes_the_same_words() -> None:
    assert converted(make_net(), exclude=["embed", "down"]) == ["blocks.0.up", "blocks.1.up"]
    assert converted(make_net(), exclude=r".*up") == ["embed", "blocks.0.down", "blocks.1.down"]


def test_a_model_that_is_one_linear_layer_is_converted() -> None:
    layer = nn.Linear(8, 8)
    assert converted(layer) == [""]
    assert isinstance(layer, nm.SparseLinear)


def test_indivisible_layer_in_a_sweep_stays_dense_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    run = nm.sparsify_(model, nm.STE("2:4"))
    assert run.layers == ["1"]
    assert run.skipped["0"] == 'in_features = 10 is not a multiple of 4, so pattern "2:4" does not fit along it'
    assert type(model[0]) is nn.Linear


def test_indivisible_outputs_leave_only_grad_input_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    run = nm.sparsify_(model, nm.BiMask("2:4"), targets=["0"])
    assert "out_features = 6" in run.skipped["0 (grad_input)"]
    assert run.layers == ["0"]


def test_named_layer_that_does_not_fit_is_an_error_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8))
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"1: in_features = 10 is not a multiple of 4.*exclude"):
        nm.sparsify_(model, nm.STE("2:4"), targets=["0", "1"])
    assert same(model, before)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["upp"], "Did you mean 'up'"),
        (["blocks"], r"blocks \(ModuleList\), which is no linear"),
        ("nothing.*", "matches no layer"),
        ("(", "not a valid regular expression"),
    ],
)
def test_targets_that_match_nothing_say_what_there_is(targets: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converted(make_net(), targets=targets)


def test_targets_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(TypeError, match="list of name suffixes"):
        converted(make_net(), targets=3)


def test_excluding_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match="selects no layer"):
        converted(make_net(), exclude=".*")


def test_tied_weight_stays_dense_and_says_why() -> None:
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    run = nm.sparsify_(model, nm.STE("2:4"))
    assert run.skipped["2"] == "its weight is tied to 0.weight"
    assert run.layers == ["1"]


def test_a_module_reached_by_two_names_is_one_layer() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4))
    assert converted(model) == ["0"]


def test_frozen_weight_stays_dense_and_says_why() -> None:
    model = make_net()
    model.embed.weight.requires_grad_(False)
    assert "requires_grad=False" in nm.sparsify_(model, nm.STE("2:4")).skipped["embed"]


def test_attention_that_reads_its_weights_itself_stays_dense() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    run = nm.sparsify_(model, nm.STE("2:4"), targets="all")
    assert run.layers == ["linear1", "linear2"]
    assert "nn.MultiheadAttention" in run.skipped["self_attn.out_proj"]
    assert "nn.MultiheadAttention" in run.skipped["self_attn.in_proj_weight"]


def test_unknown_subclass_stays_dense_and_says_why() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(Own(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    assert "Own is a subclass" in nm.sparsify_(model, nm.STE("2:4")).skipped["0"]


class Named(nn.Linear):
    """A subclass that adds something, and leaves the product to torch."""

    def __init__(self, *args: Any, label: str = "") -> None:
        super().__init__(*args)
        self.label = label

    def extra_repr(self) -> str:
        return f"{self.label}: {super().extra_repr()}"


class NamedConv(nn.Conv2d):
    pass


def test_subclass_without_a_forward_of_its_own_is_sparse_and_stays_what_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(NamedConv(8, 8, 1), nn.Flatten(), Named(32, 16, label="mine"), nn.Linear(16, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = nm.sparsify_(model, nm.STE("2:4"), targets=["0", "2"])
    assert run.layers == ["0", "2"]
    assert isinstance(model[0], NamedConv)
    assert isinstance(model[2], Named)
    assert "mine: in_features=32" in repr(model[2])
    x = torch.randn(3, 8, 2, 2)
    expected = nn.functional.linear(model[1](model[0](x)), nm.effective_weight(model[2]), model[2].bias)
    torch.testing.assert_close(model[2](model[1](model[0](x))), expected)
    assert nm.functional.violations(nm.effective_weight(model[2]), "2:4") == 0

    torch.save(model, tmp_path / "model.pt")  # the user's own way; a class made on demand must be found again
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert type(twin[2]) is type(model[2])
        assert torch.equal(twin(x), model(x))
    nm.densify_(model)
    assert (type(model[0]), type(model[2])) == (NamedConv, Named)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Rebuilt(Named):
    """A subclass that copies itself by calling its constructor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebuilt:
        twin = type(self)(self.in_features, self.out_features, label=self.label)
        twin.load_state_dict(self.state_dict())
        return twin.train(self.training)


class RebuiltConv(nn.Conv2d):
    def __deepcopy__(self, memo: dict[int, Any]) -> RebuiltConv:
        twin = self.__class__(self.in_channels, self.out_channels, self.kernel_size)
        twin.weight, twin.bias = copy.deepcopy((self.weight, self.bias), memo)
        return twin.train(self.training)


def test_subclass_that_copies_itself_by_its_constructor_stays_sparse_in_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(RebuiltConv(8, 8, 2), nn.Flatten(), Rebuilt(8, 8, label="mine"), nn.Linear(8, 4))
    nm.sparsify_(model, nm.ASP("2:4"), targets=["0", "2"])
    model.eval()[2]._nmsparse.state["mask"].logical_not_()  # not what a copy would find in the weight
    x = torch.randn(3, 8, 2, 2)
    twin, expected = copy.deepcopy(model), model(x)
    assert [type(layer) for layer in twin] == [type(layer) for layer in model]
    assert twin[2].label == "mine"
    assert torch.equal(twin(x), expected)
    nm.densify_(twin)
    assert (type(twin[0]), type(twin[2])) == (RebuiltConv, Rebuilt)
    assert torch.equal(model(x), expected)


def test_copy_of_one_reordered_layer_that_copies_itself_has_a_record_of_its_own() -> None:
    """The record of a layer knows the model whose channels were reordered, which holds the layer."""
    model = nn.Sequential(nn.Linear(8, 8), Rebuilt(8, 8), nn.Linear(8, 4))
    nm.sparsify_(model, nm.ASP("2:4", permute=True), targets=["0", "1"])
    twin = copy.deepcopy(model[1])
    copied = twin._nmsparse.permuted.model
    assert copied is not model
    assert copied[1] is twin


def test_the_class_of_a_sparse_layer_builds_dense_layers() -> None:
    """Code that knows nothing of the conversion makes another layer of the same kind."""
    model = nn.Sequential(nn.Linear(8, 8), Named(8, 8), nn.Linear(8, 4))
    converted(model)
    made = [type(model[0])(8, 8), type(model[1])(8, 8, label="another")]
    assert [type(layer) for layer in made] == [nn.Linear, Named]
    assert made[1].label == "another"
    assert converted(nn.Sequential(*made, nn.Linear(8, 4))) == ["0", "1"]


class Registered(nn.Linear):
    """A class that keeps a list of its subclasses and wants a key for each."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Registered.known[key] = cls


class Plain(Registered, key="plain"):
    pass


def test_what_a_class_demands_of_its_subclasses_is_not_for_ours() -> None:
    model = nn.Sequential(Plain(8, 8), nn.Linear(8, 4))
    assert converted(model) == ["0"]
    assert isinstance(model[0], Plain)
    assert Registered.known == {"plain": Plain}
    nm.densify_(model)
    assert type(model[0]) is Plain


def test_lazy_layer_stays_dense_and_says_why() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8), nn.Linear(8, 4))
    assert "run one forward pass" in nm.sparsify_(model, nm.STE("2:4")).skipped["0"]


def test_parametrized_weight_stays_dense() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 4))
    assert "parametrization" in nm.sparsify_(model, nm.STE("2:4")).skipped["0"]


def test_three_channel_stem_is_reported_and_not_straddled() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    run = nm.sparsify_(model, nm.SRSTE("2:4"), targets="all", exclude=["3"])
    assert run.layers == ["1"]
    assert "in_features = 3" in run.skipped["0"]


def test_nothing_to_convert_is_an_error_with_reasons() -> None:
    with pytest.raises(ValueError, match=r"no layer of this Linear can be made sparse.*the model itself: in_features = 7"):
        converted(nn.Linear(7, 8))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_named(value: float) -> None:
    model = make_net()
    with torch.no_grad():
        model.blocks[0].down.weight[1, 2] = value
    with pytest.raises(ValueError, match=r"blocks\.0\.down: its \(32, 64\) weight holds NaN or Inf"):
        converted(model)
    assert type(model.embed) is nn.Linear


def test_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = make_net()
    with pytest.raises(ValueError, match=r"embed\.weight is on the meta device"):
        converted(model)


def test_converting_twice_is_refused_and_names_the_layer() -> None:
    model = make_net()
    converted(model)
    with pytest.raises(ValueError, match=r"embed is sparse already \(ste 2:4\)"):
        converted(model)


def test_compiled_model_must_be_converted_first() -> None:
    with pytest.raises(ValueError, match=r"wrapped by torch\.compile already"):
        converted(torch.compile(make_net()))


def test_two_recipes_share_a_model() -> None:
    model = make_net()
    first = nm.sparsify_(model, nm.STE("2:4"), targets=["up"])
    second = nm.sparsify_(model, nm.SSTE("1:4"), targets=["down"])
    assert (len(first.layers), len(second.layers)) == (2, 2)


def test_recipe_must_be_a_recipe() -> None:
    with pytest.raises(TypeError, match=r'nmsparse\.SSTE\("2:4"\)'):
        nm.sparsify_(make_net(), "s-ste")  # type: ignore[arg-type]


class TestTransformers:
    """Models as users have them; configurations only, no download."""

    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def test_gpt2_conv1d_is_grouped_along_its_inputs(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
        run = nm.sparsify_(model, nm.STE("2:4"))
        assert run.layers == [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
        assert "output head" in run.skipped["lm_head"]
        weight = nm.effective_weight(model.transformer.h[0].mlp.c_fc)
        assert weight.shape == (16, 64)
        assert nm.functional.violations(weight, "2:4", dim=0) == 0
        assert nm.functional.violations(weight, "2:4", dim=1) > 0
        ids = torch.arange(16).view(1, 16)
        model(ids, labels=ids).loss.backward()
        assert (model.transformer.h[0].mlp.c_fc.weight.grad != 0).all()

    def test_gpt2_trains_as_dense_when_all_is_kept(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        dense = GPT2LMHeadModel(
            GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
        )
        model = copy.deepcopy(dense)
        nm.sparsify_(model, nm.STE("4:4"))
        ids = torch.arange(16).view(1, 16)
        for m in (dense, model):
            m(ids, labels=ids).loss.backward()
        for a, b in zip(dense.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-8)

    def test_classifier_outside_the_base_model_is_a_head(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=32)
        run = nm.sparsify_(BertForSequenceClassification(config), nm.STE("2:4"))
        assert "classifier" in run.skipped
        assert "bert.encoder.layer.0.intermediate.dense" in run.layers

    def test_sparse_gpt2_survives_pickling(self) -> None:
        import io

        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)).eval()
        nm.sparsify_(model, nm.SSTE("2:4"))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        ids = torch.arange(16).view(1, 16)
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_layer_whose_forward_was_replaced_stays_dense_and_says_so() -> None:
    """accelerate's hooks for several devices call the forward that they found, which is the dense one."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    add_hook_to_module(model[0], AlignDevicesHook())
    run = nm.sparsify_(model, nm.STE("2:4"))
    assert "accelerate's hooks" in run.skipped["0"]
    assert list(run.layers) == ["1"]


def test_a_module_registered_twice_is_chosen_and_excluded_by_either_name() -> None:
    def make() -> nn.Module:
        block = nn.Linear(16, 16)
        return nn.ModuleDict({"first": block, "second": block, "other": nn.Linear(16, 16)})

    assert nm.sparsify_(make(), nm.STE("2:4"), targets=["second"]).layers == ["first"]
    assert nm.sparsify_(make(), nm.STE("2:4"), targets="all", exclude=["second"]).layers == ["other"]
    with pytest.raises(ValueError, match="'third' matches no layer"):
        nm.sparsify_(make(), nm.STE("2:4"), targets=["third"])
