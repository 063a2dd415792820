"""Progressive gradient flow: decaying masks and tightening patterns against sr-ste at high sparsity."""

from __future__ import annotations

from nmsparse.workbench.reproduce._claim import Advice, Chart, Claim, Contender, Experiment, Published, Setup, Statement
from nmsparse.workbench.reproduce.claims._setups import ATTENTION, FULL, SMALL, TOY_GPT, TUNING_SHARE, toy, vit_setups

PATTERNS = ("2:4", "1:8", "1:16", "1:32")
RECIPES = ("sr-ste", "mask-decay", "structure-decay")
TUNED_AT = "1:16"


def contenders(patterns: tuple[str, ...], recipes: tuple[str, ...]) -> tuple[Contender, ...]:
    """Each recipe tunes its learning rate at 1:16."""
    return tuple(
        Contender(f"{recipe}@{pattern}", tuned_as="" if pattern == TUNED_AT else f"{recipe}@{TUNED_AT}")
        for pattern in patterns
        for recipe in recipes
    )


def longer(pattern: str) -> Contender:
    """sr-ste, trained for as many FLOPs as mask-decay spends."""
    return Contender(
        f"sr-ste@{pattern}", f"sr-ste@{pattern}, longer", tuned_as=f"sr-ste@{TUNED_AT}", spends_as=f"mask-decay@{pattern}"
    )


VIT = Experiment(
    "vit",
    "ViT on CIFAR-10, AdamW, feed-forward layers sparse",
    vit_setups(ATTENTION),
    (
        Contender("dense"),
        *contenders(PATTERNS, RECIPES),
        Contender("structure-decay@1:32:shape=geometric", tuned_as=f"structure-decay@{TUNED_AT}"),
        longer("1:16"),
        longer("1:32"),
        Contender("sr-ste@1:32", "sr-ste@1:32, rate of mask-decay", tuned_as=f"mask-decay@{TUNED_AT}"),
    ),
)
GPT_SMALL = {
    **SMALL, "task": "enwik8", "model": "gpt2", "width": 256, "layers": 4, "heads": 4, "length": 256, "batch": 32, "steps": 600,
    "weight_decay": 0.1, "beta2": 0.99, "exclude": ATTENTION,
}  # fmt: skip
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
"""Down to where sr-ste at high sparsity is best, and up to where dense is not any more."""
GPT_CPU = {**GPT_SMALL, "width": 128, "layers": 3, "length": 128, "steps": 320}
GPT_FULL = {
    **FULL, "task": "enwik8", "model": "gpt2", "width": 512, "layers": 12, "heads": 8, "length": 512, "batch": 64,
    "steps": 100_000, "weight_decay": 0.1, "exclude": ATTENTION, "eval_batches": 20,
}  # fmt: skip
GPT = Experiment(
    "gpt",
    "GPT on enwik8 (bytes), AdamW, feed-forward layers sparse",
    {
        "toy": toy({**TOY_GPT, "exclude": ATTENTION}),
        "cpu": Setup(GPT_CPU, RATES, size="0.6 M parameters and 1.3 M bytes"),
        "small": Setup(
            {**GPT_SMALL, "compile": True, "eval_every": 150}, RATES, TUNING_SHARE, size="3.2 M parameters and 4.9 M bytes"
        ),
        "full": Setup(GPT_FULL, (3e-4, 6e-4, 1e-3), tuning_share=0.1),
    },
    (Contender("dense"), *contenders(PATTERNS[1:], RECIPES)),
)


def above(pattern: str, recipe: str) -> Statement:
    """The paper's own stepwise structure decay is below sr-ste at 1:8."""
    text = f"{recipe} is above sr-ste at {pattern} (ViT)"
    is_claimed = (recipe, pattern) != ("structure-decay", "1:8")
    return Statement("vit", f"{recipe}@{pattern}", "better", f"sr-ste@{pattern}", text, is_claimed=is_claimed)


def at_equal_flops(pattern: str) -> Statement:
    text = f"mask-decay is above sr-ste at {pattern} with equal training FLOPs"
    return Statement("vit", f"mask-decay@{pattern}", "better", f"sr-ste@{pattern}, longer", text, is_claimed=False)


CLAIM = Claim(
    "progressive",
    "Progressive gradient flow: mask decay and structure decay",
    "Bambhaniya et al.: Progressive Gradient Flow for Robust N:M Sparsity Training in Transformers. CPAL 2025, arXiv:2402.04744.",
    "At high sparsity masks that fade in keep gradients less noisy and end above sr-ste; at low sparsity they are equal; also "
    "at equal training FLOPs.",
    (VIT, GPT),
    (
        Statement("vit", "mask-decay@2:4", "equal", "sr-ste@2:4", "mask-decay and sr-ste are equal at 2:4 (one point)", 0.01),
        Statement(
            "vit", "structure-decay@2:4", "equal", "sr-ste@2:4", "structure-decay and sr-ste are equal at 2:4 (one point)", 0.01
        ),
        *(above(pattern, recipe) for pattern in ("1:8", "1:16", "1:32") for recipe in ("mask-decay", "structure-decay")),
        at_equal_flops("1:16"),
        at_equal_flops("1:32"),
        *(
            Statement(
                "gpt",
                f"{recipe}@{pattern}",
                "better",
                f"sr-ste@{pattern}",
                f"{recipe} has a lower loss than sr-ste at {pattern} (GPT)",
            )
            for pattern in PATTERNS[1:]
            for recipe in ("mask-decay", "structure-decay")
        ),
        Statement(
            "vit",
            "mask-decay@1:32",
            "below",
            "sr-ste@1:32, rate of mask-decay",
            "gradients of mask-decay are less noisy than those of sr-ste at 1:32 and the same learning rate",
            quantity="gradient_noise_mean",
            is_claimed=False,
        ),
    ),
    (
        Published("ViT-B, ImageNet, 2:4", {"sr-ste": 77.761, "mask-decay": 76.381, "structure-decay": 77.081}),
        Published("ViT-B, ImageNet, 1:8", {"sr-ste": 77.869, "mask-decay": 78.009, "structure-decay": 77.025}),
        Published("ViT-B, ImageNet, 1:16", {"sr-ste": 75.637, "mask-decay": 77.325, "structure-decay": 75.923}),
        Published("ViT-B, ImageNet, 1:32", {"sr-ste": 73.056, "mask-decay": 76.068, "structure-decay": 74.394}),
    ),
    "Top-1 accuracy in percent (dense 76.389), single seeds; mask-decay is the exponential form, structure-decay the stepwise.",
    charts=(
        Chart(
            "vit", "Validation accuracy at 1:32", contenders=("dense", "sr-ste@1:32", "mask-decay@1:32", "structure-decay@1:32")
        ),
        Chart(
            "vit",
            "Share of Adam's second moment that is noise",
            "gradient_noise",
            ("dense", "sr-ste@1:32", "mask-decay@1:32", "structure-decay@1:32"),
        ),
        Chart(
            "gpt",
            "Validation loss on enwik8 at 1:32, nats per byte",
            contenders=("dense", "sr-ste@1:32", "mask-decay@1:32", "structure-decay@1:32"),
        ),
    ),
    advice=(
        Advice(
            "A transformer at 1:8",
            "vit",
            ("sr-ste@1:8", "mask-decay@1:8", "structure-decay@1:8"),
            "mask-decay trains densely for 70 % of the run",
        ),
        Advice(
            "A transformer at 1:32",
            "vit",
            ("sr-ste@1:32", "mask-decay@1:32", "structure-decay@1:32", "structure-decay@1:32:shape=geometric"),
        ),
        Advice("A language model at 1:16", "gpt", ("sr-ste@1:16", "mask-decay@1:16", "structure-decay@1:16")),
    ),
    deviations=(
        "Noise is the share of Adam's second moment that is no squared mean; the paper shows the variance over its entries.",
        "A small ViT on CIFAR-10 for 1.3 epochs or less; the paper trains ViT-B on ImageNet for 350.",
        "5 % of the run dense and 10 % fixed, rates calibrated to arrive at 70 %, in place of the paper's hand-set rates.",
    ),
)
