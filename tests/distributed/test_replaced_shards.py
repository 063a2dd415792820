"""Parameters that are replaced after compressed_all_gather travel whole again, and say so."""

from __future__ import annotations

import warnings

import torch
from ranks import Ranks
from test_compressed_all_gather import make_layers
from test_registry_sharded import batches, whole
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nmsparse.integrations.fsdp import PackedShard, compressed_all_gather


def forward(rank: int, world: int, is_replaced: bool) -> tuple[Tensor, list[str]]:
    model, _ = make_layers(("ste", {}))
    compressed_all_gather(model)
    fully_shard(model.embed)
    fully_shard(model)
    if is_replaced:  # as accelerate fills a model that was sharded on the meta device
        state = {name: plain(value) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            output = model(batches(1, 0, torch.float32)[0][0])
    return whole(output.detach()), [str(w.message) for w in caught if "travel whole" in str(w.message)]


def plain(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor) or not isinstance(value._local_tensor, PackedShard):
        return value
    local = value._local_tensor.plain.clone()
    return DTensor.from_local(local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())


def test_replaced_parameters_travel_whole_and_say_so_once(two_ranks: Ranks) -> None:
    for kept, replaced in zip(two_ranks.run(forward, False), two_ranks.run(forward, True), strict=True):
        assert torch.equal(kept[0], replaced[0])
        assert kept[1] == []
        (message,) = replaced[1]
        assert "fsdp_cpu_ram_efficient_loading" in message
