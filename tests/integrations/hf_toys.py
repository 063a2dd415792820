"""Tiny transformers models with random weights, and data for them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import nmsparse as nm
from nmsparse.integrations.transformers import SparsityCallback, step_optimizer

gc.freeze()  # every Trainer collects garbage: most of a test's time, were the imported modules looked through each time

VOCABULARY, LENGTH, EXAMPLES = 32, 8, 16
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
    "hidden_dropout_prob": 0.1,
}


def make_model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=32, num_key_value_heads=2))
    if kind == "vit":
        sizes = {**small, "intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_labels": 2}
        del sizes["vocab_size"]
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    if kind == "gpt_oss":  # its experts are stored transposed, and have biases
        config = transformers.GptOssConfig(
            **small, intermediate_size=32, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2
        )
        return transformers.GptOssForCausalLM(config)
    assert kind == "mixtral"
    config = transformers.MixtralConfig(
        **small, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def make_examples(kind: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        images = torch.randn(EXAMPLES, 3, 8, 8, generator=generator)
        return [{"pixel_values": image, "labels": torch.tensor(int(image.mean() > 0))} for image in images]
    ids = torch.randint(1, VOCABULARY, (EXAMPLES, LENGTH), generator=generator)
    labels = ids[:, 0] % 2 if kind == "bert" else ids
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def make_arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def make_trainer(
    folder: Path, callback: TrainerCallback | None, kind: str = "bert", callbacks: tuple[Any, ...] = (), **options: Any
) -> Trainer:
    """A Trainer with the optimizer that the callback's recipe needs."""
    args = make_arguments(folder, **options)
    is_step = isinstance(callback, SparsityCallback) and isinstance(callback.recipe, nm.STEP)
    trainer = Trainer(
        model=make_model(kind),
        args=args,
        train_dataset=make_examples(kind),
        eval_dataset=make_examples(kind)[:4],
        callbacks=[*callbacks, *([callback] if callback is not None else [])],
        optimizer_cls_and_kwargs=step_optimizer(args) if is_step else None,
    )
    return trainer
