"""SDGP: pruning the data gradient while weights stay dense."""

from __future__ import annotations

from nmsparse.workbench.reproduce._claim import Advice, Chart, Claim, Contender, Experiment, Published, Setup, Statement
from nmsparse.workbench.reproduce.claims._setups import (
    FULL,
    RESNET18,
    RESNET18_CPU,
    TOY_RESNET18,
    TUNING_SHARE,
    epochs,
    toy,
    vit_setups,
    wide_gpt_setups,
)

CONTENDERS = (
    Contender("dense"),
    Contender("sdgp@2:4"),
    Contender("sdgp@2:4:rescale=false", tuned_as="sdgp@2:4"),
    Contender("sdgp@2:4:selector=random,rescale=false"),
)
UNBIASED = Contender("sdgp@2:4:selector=mvue", tuned_as="sdgp@2:4")
"""On linear layers only: drawing from the large gradients of a convolution takes most of a step."""
SGD = {"optimizer": "sgd", "weight_decay": 5e-4, "clip": 0.0}
RESNET_FULL = {
    **FULL, **SGD, "task": "cifar10", "model": "resnet18", "width": 64, "batch": 512, "steps": epochs(150, 512),
}  # fmt: skip

EXPERIMENTS = (
    Experiment(
        "resnet",
        "ResNet-18 on CIFAR-10, SGD, the data gradient of all convolutions pruned",
        {
            "toy": toy({**TOY_RESNET18, **SGD}, (0.05, 0.1)),
            "cpu": Setup({**RESNET18_CPU, **SGD}, (0.0125, 0.025, 0.05, 0.1, 0.2), size="0.7 M parameters, 30,720 images"),
            "small": Setup({**RESNET18, **SGD}, (0.05, 0.1, 0.2), TUNING_SHARE, size="2.8 M parameters, 51,200 images"),
            "full": Setup(RESNET_FULL, (0.25, 0.5, 1.0), tuning_share=0.1),
        },
        CONTENDERS,
    ),
    Experiment(
        "vit", "ViT on CIFAR-10, AdamW, the data gradient of all linear layers pruned", vit_setups([]), (*CONTENDERS, UNBIASED)
    ),
    Experiment(
        "speed",
        "GPT of width 2048 on enwik8 with sparse tensor cores, alone on the GPU",
        wide_gpt_setups(),
        (Contender("dense"), Contender("sdgp@2:4", tuned_as="dense")),
        is_timed=True,
    ),
)
RANDOM = "sdgp@2:4:selector=random,rescale=false"

CLAIM = Claim(
    "sdgp",
    "SDGP: structured pruning of the data gradient",
    "McDanel, Dinh, Magallanes: Accelerating DNN Training with Structured Data Gradient Pruning. ICPR 2022, arXiv:2202.00774.",
    "Keeping the 2 largest of 4 entries of the data gradient, rescaled, costs no accuracy, random pruning does, and with "
    "hardware for 2:4 training takes 15 to 25 % less time.",
    EXPERIMENTS,
    (
        Statement("resnet", "sdgp@2:4", "not worse", "dense", "sdgp costs no accuracy (one point, ResNet-18)", 0.01),
        Statement("resnet", "sdgp@2:4", "better", RANDOM, "random pruning costs accuracy (ResNet-18)"),
        Statement(
            "resnet",
            "sdgp@2:4",
            "equal",
            "sdgp@2:4:rescale=false",
            "with and without rescaling are equal (one point, ResNet-18)",
            0.01,
        ),
        Statement("vit", "sdgp@2:4", "not worse", "dense", "sdgp costs no accuracy (one point, ViT)", 0.01),
        Statement("vit", "sdgp@2:4", "better", RANDOM, "random pruning costs accuracy (ViT)"),
        Statement(
            "vit",
            "sdgp@2:4",
            "better",
            "sdgp@2:4:selector=mvue",
            "sdgp is above an unbiased sample of the gradient (ViT)",
            is_claimed=False,
        ),
        Statement("speed", "sdgp@2:4", "below", "dense", "a step takes less time than a dense one (H200)", quantity="step_ms"),
    ),
    (
        Published("CIFAR-10, small ResNet", {"dense": 95.3, "random": 94.5, "magnitude": 95.2, "rescaled magnitude": 95.2}),
        Published("ImageNet, ResNet-50", {"dense": 78.1, "random": 70.3, "magnitude": 77.7, "rescaled magnitude": 77.6}),
    ),
    "Top-1 accuracy in percent at 2:4, single runs. The authors' ResNet-18 row is left out: dense and pruned runs differed in "
    "more than pruning. Their 15 to 25 % is a model, not a measurement.",
    charts=(
        Chart("resnet", "Validation accuracy, ResNet-18"),
        Chart("vit", "Validation accuracy, ViT"),
    ),
    advice=(
        Advice(
            "Weights must stay dense",
            "vit",
            ("sdgp@2:4", "sdgp@2:4:rescale=false", "sdgp@2:4:selector=mvue"),
            "one of three products is sparse, the model that is shipped is dense",
        ),
    ),
    deviations=(
        "A narrow ResNet-18 for one epoch or less; the authors train a ResNet-9 for 150.",
        "No label smoothing, no cutout, no flipped copies at test time: accuracies do not compare with theirs, differences do.",
        "A linear layer has no pixels: there the rescaling is per token.",
        "Where time is measured, both sides take one learning rate.",
    ),
)
