"""Pre-train a GPT-2 with S-STE in a plain PyTorch loop: 2:4 weights from the first step to the shipped file.

    python examples/pretrain_gpt_sste.py --toy          # seconds, on a CPU
    python examples/pretrain_gpt_sste.py                # a small model; minutes on a CPU, faster on a GPU

The text is tiny Shakespeare by characters, which ships with the package: pip install "nmsparse[workbench]".
"""

import argparse
import math
from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import nmsparse as nm
from nmsparse.workbench.tasks import Task, load_task


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    length: int
    batch: int
    steps: int


SMALL = Sizes(width=256, layers=4, length=128, batch=32, steps=1000)
TOY = Sizes(width=32, layers=1, length=32, batch=8, steps=20)


def build_gpt(vocabulary: int, sizes: Sizes) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=sizes.length,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=4,
        bos_token_id=None,  # the defaults lie outside a vocabulary of characters
        eos_token_id=None,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers does not derive it from this class's name
    return model


def learning_rate(step: int, steps: int, peak: float = 1e-3) -> float:
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def validate(model: torch.nn.Module, task: Task, batch: int, device: str, batches: int = 20) -> float:
    """Loss of the weights that would be shipped: in evaluation mode layers obey their final pattern."""
    model.eval()
    losses = []
    for start in range(0, min(batches * batch, len(task.valid)), batch):
        examples = task.valid.__getitems__(list(range(start, min(start + batch, len(task.valid)))))
        losses.append(model(**{name: tensor.to(device) for name, tensor in examples.items()}).loss)
    model.train()
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny model for a few steps")
    parser.add_argument("--output", default="gpt-sste", help="folder for the finished model")
    arguments = parser.parse_args()
    sizes = TOY if arguments.toy else SMALL
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    task = load_task("shakespeare", length=sizes.length)
    model = build_gpt(task.facts.vocabulary, sizes).to(device)

    run = nm.sparsify_(model, nm.SSTE("2:4"))  # every linear layer but the head, which is tied to the embedding
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    run.attach(optimizer, total_steps=sizes.steps)
    print(f"{run}; {sum(p.numel() for p in model.parameters()):,} parameters on {device}")

    model.train()
    for step in range(sizes.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, sizes.steps)
        batch = task.train.__getitems__(torch.randint(len(task.train), (sizes.batch,)).tolist())
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, sizes.steps // 10) == 0:
            flips = run.stats()["total"]["flip_rate"]
            print(f"update {step + 1:5d}  training loss {loss.item():.3f}  flip rate {flips:.4f}")

    loss = validate(model, task, sizes.batch, device)
    nm.freeze_(model)  # exact zeros; plain transformers modules again
    nm.save(model, arguments.output, pattern="2:4")
    model.config.save_pretrained(arguments.output)
    report = nm.verify(arguments.output)
    density = sum(tensor.density for tensor in report.tensors) / len(report.tensors)
    print(f"validation loss {loss:.3f} nats per character, perplexity {math.exp(loss):.2f}")
    layers = f"{len(report.tensors)} of {len(run.layers)} sparse layers"
    print(f"density {density:.3f} in {layers}; verified: {report.ok}; model in {arguments.output}")


if __name__ == "__main__":
    main()
