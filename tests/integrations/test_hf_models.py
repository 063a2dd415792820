"""The architectures that users bring: which of their layers become sparse, and that they train and freeze."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_toys import make_model, make_trainer
from torch import Tensor, nn
from toys import same

import nmsparse as nm
from nmsparse.checkpoint import TensorFiles
from nmsparse.functional import violations
from nmsparse.integrations.transformers import SparsityCallback
from nmsparse.nn import grouped_weights

SPARSE = {
    "bert": ["query", "key", "value", "dense"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "vit": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
}


@pytest.mark.parametrize("kind", SPARSE)
def test_architecture_trains_and_obeys_the_pattern(tmp_path: Path, kind: str) -> None:
    callback = SparsityCallback(nm.SRSTE("2:4"))
    trainer = make_trainer(tmp_path, callback, kind, max_steps=16, warmup_steps=0)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert {name.rpartition(".")[2] for name in callback.run.layers} == set(SPARSE[kind])
    nm.freeze_(trainer.model)
    dims = dict(grouped_weights(trainer.model))
    for name in callback.run.layers:
        key = name if "experts" in name else f"{name}.weight"
        weight = trainer.model.get_parameter(key)
        assert dims[key] == {"gpt2": 0, "gpt_oss": 1}.get(kind, weight.ndim - 1)
        assert int(violations(weight, "2:4", dims[key])) == 0


@pytest.mark.parametrize("kind", SPARSE)
def test_state_dict_keys_stay_those_of_the_architecture(kind: str) -> None:
    model, plain = make_model(kind), make_model(kind)
    nm.sparsify_(model, nm.SRSTE("2:4"))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert same(nm.densify_(model), plain)


class Experts(nn.Module):
    """Somebody's own, of whose forward nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.einsum("bi,eio->bo", x, self.up))


def test_experts_of_unknown_modules_stay_dense_and_say_why() -> None:
    run = nm.sparsify_(nn.Sequential(Experts(), nn.Linear(8, 4)), nm.SRSTE("2:4"))
    assert run.skipped["0.up"].startswith("a stack of 4 matrices (experts) that Experts multiplies itself")
    with pytest.raises(ValueError, match=r"It matches 0\.up, a stack of 4 .* cannot be sparse yet"):
        nm.sparsify_(nn.Sequential(Experts(), nn.Linear(8, 4)), nm.SRSTE("2:4"), targets=["mix", "up"])


def test_expert_parameters_are_chosen_and_excluded_by_name() -> None:
    run = nm.sparsify_(make_model("mixtral"), nm.SRSTE("2:4"), exclude=["gate_up_proj", "lm_head"])
    assert run.skipped == {}
    assert [name for name in run.layers if "experts" in name] == ["model.layers.0.mlp.experts.down_proj"]
    run = nm.sparsify_(make_model("mixtral"), nm.SRSTE("2:4"), targets=["gate_up_proj"])
    assert run.layers == ["model.layers.0.mlp.experts.gate_up_proj"]


def test_position_embeddings_and_convolutions_are_not_taken_for_experts() -> None:
    assert list(nm.sparsify_(make_model("vit"), nm.SRSTE("2:4")).skipped) == ["classifier"]
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 4))
    assert list(nm.sparsify_(model, nm.SRSTE("2:4")).skipped) == ["3"]


def test_tied_head_is_stored_once(tmp_path: Path) -> None:
    model = make_model("gpt2")
    nm.sparsify_(model, nm.STE("2:4"))
    nm.save(model, tmp_path, format="packed")
    with TensorFiles(tmp_path) as files:
        assert files.shared == {"lm_head.weight": "transformer.wte.weight"}
