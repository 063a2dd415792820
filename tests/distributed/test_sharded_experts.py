"""Mixtures of experts under FSDP2: three experts on two ranks, one of which holds two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from ranks import Ranks
from test_registry_sharded import Case, check_equal, results
from torch.distributed.fsdp import fully_shard
from toys import case_id, make_optimizer

import nmsparse as nm

STEPS = 6
CASES: list[Case] = [
    ("sr-ste", {"decay": 0.1}),
    ("s-ste", {}),
    ("fst", {"refresh": 3, "decay": 0.1}),
    ("asp", {"start": 2}),
    ("step", {"switch": 3, "decay": 0.1}),
    ("structure-decay", {"shape": "geometric"}),
]


def train(rank: int, world: int, case: Case, is_sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).double()
    experts = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    recipe = nm.recipe(case[0], "2:4", **case[1])
    run = nm.sparsify_(model, recipe, experts)
    if is_sharded:
        fully_shard(model.model.layers[0])
        fully_shard(model)
    optimizer = make_optimizer(recipe, model, lr=1e-2)
    run.attach(optimizer, total_steps=STEPS, stats_every=2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 16, (4, 8), generator=generator)
        parts = ids.chunk(world)
        optimizer.zero_grad()
        for part in [parts[rank]] if is_sharded else parts:
            (model(input_ids=part, labels=part).loss / (1 if is_sharded else world)).backward()
        optimizer.step()
    return results(model, run)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sharded_experts_train_as_whole_ones(case: Case, two_ranks: Ranks) -> None:
    check_equal(two_ranks.run(train, case, True), train(0, 2, case, False))
