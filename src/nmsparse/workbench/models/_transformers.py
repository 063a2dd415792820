"""Models of transformers: built from a configuration with the sizes of a task, or read from a folder for fine-tuning.

Nothing is downloaded. Token ids that a task does not use are left out, since the defaults of transformers lie outside a small
vocabulary; ``use_cache`` is off, since training has no use for keys and values of earlier tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nmsparse.workbench.extras import package
from nmsparse.workbench.tasks import Facts

CLASSES = {
    "language": "AutoModelForCausalLM",
    "images": "AutoModelForImageClassification",
    "sentences": "AutoModelForSequenceClassification",
    "translation": "AutoModelForSeq2SeqLM",
}
"""The class of transformers that serves a kind of task."""


# ---- language ----


LARGE_VOCABULARY = 4096
"""From so many tokens on, the head is a good part of a language model's time."""


def head_size(facts: Facts) -> int:
    """Rows of a language model's head: a large vocabulary is filled up to a multiple of 64 with tokens that never come, because
    products of odd sizes take several times as long on a GPU (50,257 columns: 4.1 ms in place of under 1, on an H200)."""
    return facts.vocabulary if facts.vocabulary < LARGE_VOCABULARY else -(-facts.vocabulary // 64) * 64


def gpt2(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    lib = package("transformers")
    config = lib.GPT2Config(
        vocab_size=head_size(facts),
        n_positions=facts.length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return _with_loss(lib.GPT2LMHeadModel(config))


def llama(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    if width // heads % 2:
        raise ValueError(
            f"llama rotates pairs of entries, so width / heads must be even, got {width} / {heads} = {width // heads}; "
            "choose another width or number of heads."
        )
    lib = package("transformers")
    config = lib.LlamaConfig(
        vocab_size=head_size(facts),
        max_position_embeddings=facts.length,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 48) * 16,  # 8/3 of the width, as LLaMA has it, up to a multiple of 16
        num_hidden_layers=layers,
        num_attention_heads=heads,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return lib.LlamaForCausalLM(config)


def _with_loss(model: Any) -> nn.Module:
    """Say which loss a language model has: transformers finds none by the name of GPT-2's class, and logs that at every run."""
    if model.loss_type is None:
        model.loss_type = "ForCausalLM"
    return model


# ---- images ----


def vit(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    lib = package("transformers")
    return lib.ViTForImageClassification(lib.ViTConfig(**_vision(facts, width, layers, heads, dropout)))


def deit(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    lib = package("transformers")
    return lib.DeiTForImageClassification(lib.DeiTConfig(**_vision(facts, width, layers, heads, dropout)))


def _vision(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> dict[str, Any]:
    return {
        **_labels(facts),
        "image_size": facts.side,
        "num_channels": facts.channels,
        "patch_size": patch_side(facts.side),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def patch_side(side: int) -> int:
    """The divisor of an image's side nearest to an eighth of it, at most 16: 4 for 28 and 32, 8 for 64, 16 for 224."""
    wanted = min(side / 8, 16)
    return min((size for size in range(1, side + 1) if side % size == 0), key=lambda size: abs(size - wanted))


def resnet(facts: Facts, width: int) -> nn.Module:
    lib = package("transformers")
    config = lib.ResNetConfig(
        **_labels(facts),
        num_channels=facts.channels,
        embedding_size=width,
        hidden_sizes=[width, 2 * width, 4 * width, 8 * width],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    )
    return lib.ResNetForImageClassification(config)


# ---- sentences and translation ----


def bert(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    lib = package("transformers")
    config = lib.BertConfig(
        **_labels(facts),
        vocab_size=facts.vocabulary,
        max_position_embeddings=facts.length,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=facts.padding,
        use_cache=False,
    )
    return lib.BertForSequenceClassification(config)


def marian(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    lib = package("transformers")
    config = lib.MarianConfig(
        vocab_size=facts.vocabulary,
        max_position_embeddings=facts.length,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        activation_function="relu",
        scale_embedding=True,  # as in the paper: embeddings would drown in the positions otherwise
        dropout=dropout,
        pad_token_id=facts.padding,
        eos_token_id=facts.end,
        forced_eos_token_id=facts.end,
        decoder_start_token_id=facts.begin,
        use_cache=False,
    )
    return lib.MarianMTModel(config)


def t5(facts: Facts, width: int, layers: int, heads: int, dropout: float) -> nn.Module:
    lib = package("transformers")
    config = lib.T5Config(
        vocab_size=facts.vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=dropout,
        pad_token_id=facts.padding,
        eos_token_id=facts.end,
        decoder_start_token_id=facts.begin,
        use_cache=False,
    )
    return lib.T5ForConditionalGeneration(config)


def _labels(facts: Facts) -> dict[str, Any]:
    """What a classifier's loss needs to know; without a problem type transformers guesses one from the first batch."""
    return {
        "num_labels": facts.classes,
        "problem_type": "regression" if facts.classes == 1 else "single_label_classification",
    }


# ---- from a folder ----


def load_pretrained(path: str | Path, facts: Facts) -> nn.Module:
    """A model to fine-tune, from a folder that ``save_pretrained`` wrote; its head is new where the number of classes differs.

    Only safetensors are read. A model that cannot take the task's tokens or images is refused.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; give a folder that save_pretrained of transformers wrote.")
    _check_not_packed(folder)
    lib = package("transformers")
    try:
        config = lib.AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_config(config, facts)
        # settings of the task go into the configuration: as arguments, models that lack one would not take them
        config.use_cache = False
        settings = _labels(facts) if facts.kind in ("images", "sentences") else {}
        for name, value in settings.items():
            setattr(config, name, value)
        kind = getattr(lib, CLASSES[facts.kind])
        model = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=bool(settings),
            dtype=torch.float32,  # of a checkpoint in 16 bit too: master weights and Adam's moments need the digits
        )
        return _with_loss(model) if facts.kind == "language" else model
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder} cannot be read as a model for {facts.kind}: {reason}") from error


def _check_not_packed(folder: Path) -> None:
    described = folder / "sparsity.json"
    if not described.is_file():
        return
    try:
        saved = json.loads(described.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{described} cannot be read as JSON ({error}).") from error
    if isinstance(saved, dict) and saved.get("format") == "packed":
        raise ValueError(
            f"{folder} holds packed weights, which transformers does not read; write it as dense first: "
            f"nmsparse export {folder} TARGET --format dense."
        )


def _check_config(config: Any, facts: Facts) -> None:
    """The task's tokens and images must fit the model; weights say nothing about that until an index is out of range."""
    made_by = getattr(config, "architectures", None) or []
    if facts.kind == "language" and made_by and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in made_by):
        raise ValueError(f"it is a {', '.join(made_by)}, which does not predict the next token.")
    if facts.vocabulary > (getattr(config, "vocab_size", None) or facts.vocabulary):
        raise ValueError(f"the task has {facts.vocabulary} tokens, the model {config.vocab_size}.")
    if facts.length > (getattr(config, "max_position_embeddings", None) or facts.length):
        raise ValueError(f"the task's sequences have {facts.length} tokens, the model takes {config.max_position_embeddings}.")
    if facts.kind == "images":
        if facts.channels != getattr(config, "num_channels", facts.channels):
            raise ValueError(f"the task's images have {facts.channels} channels, the model's {config.num_channels}.")
        side = getattr(config, "image_size", facts.side)
        if side not in (facts.side, [facts.side] * 2, (facts.side,) * 2):
            raise ValueError(f"the task's images are {facts.side} pixels wide, the model's {side}.")
