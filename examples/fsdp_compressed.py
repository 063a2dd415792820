# run: torchrun --nproc-per-node 2 examples/fsdp_compressed.py --toy
"""Train a sharded model whose weights travel packed: FSDP2 gathers 9/16 of the bytes in bf16.

    torchrun --nproc-per-node 2 examples/fsdp_compressed.py --toy     # two processes on a CPU, seconds
    torchrun --nproc-per-node 8 examples/fsdp_compressed.py           # eight GPUs

Each rank prunes and packs its rows of a weight before the all-gather, and unpacks what it receives. Master weights, gradients and
the optimizer stay dense and sharded, so the training is that of plain FSDP2.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nmsparse as nm
from nmsparse.integrations.fsdp import compressed_all_gather

PATTERN = "2:4"


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))).square())


def build(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)  # every rank starts from the same weights
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, width))


def make_batch(width: int, size: int, step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A task without data: a fixed random mixing of the inputs. Every rank sees other examples."""
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) / width**0.5
    x = torch.randn(size, width, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x.to(device), torch.tanh(x @ mixing).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    is_toy = parser.parse_args().toy
    width, depth, size, steps = (64, 2, 128, 30) if is_toy else (4096, 8, 8192, 1000)

    is_cuda = torch.cuda.is_available() and not is_toy
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rank = dist.get_rank()

    # 1. convert, 2. say how the weights travel, 3. shard, 4. attach the optimizer
    model = build(width, depth).to(device)
    run = nm.sparsify_(model, nm.SRSTE(PATTERN))
    dtype = torch.bfloat16
    compressed_all_gather(model, dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model[:-1]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if is_toy else 3e-4)
    run.attach(optimizer, total_steps=steps)

    for step in range(steps):
        x, target = make_batch(width, size, step, rank, device)
        loss = (model(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % (steps // 3) == 0:
            print(f"step {step}: loss {loss.item():.4f}, flip rate {run.stats()['total']['flip_rate']:.4f}")

    # every rank bakes its part; one gathers the whole and writes it
    nm.freeze_(model)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        whole = build(width, depth)
        whole.load_state_dict(weights)
        nm.save(whole, "sharded-run", format="packed", pattern=PATTERN)
        report = nm.verify("sharded-run")
        print(f"saved sharded-run; verified: {report.ok}")
    if not is_cuda:
        time.sleep(0.2)  # gloo's threads let go of their last tensors; doing so while Python shuts down aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
