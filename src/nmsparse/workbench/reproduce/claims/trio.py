"""Trio (ours): all three products sparse, with real kernels, against time."""

from __future__ import annotations

from nmsparse.workbench.reproduce._claim import Advice, Chart, Claim, Contender, Experiment, Statement
from nmsparse.workbench.reproduce.claims._setups import BYTES_PER_TOKEN, FST, MARGIN, wide_gpt_setups

EXPERIMENT = Experiment(
    "gpt",
    "GPT of width 2048 on enwik8 (bytes), all linear layers 2:4 on sparse tensor cores, alone on the GPU",
    wide_gpt_setups(),
    (Contender("dense"), Contender("s-ste@2:4"), Contender(FST), Contender("trio@2:4")),
    is_timed=True,
)
RIVALS = {"dense": "dense", "s-ste@2:4": "s-ste", FST: "fst"}

CLAIM = Claim(
    "trio",
    "Trio: all three products sparse",
    "Ours; its parts are S-STE's forward, Bi-Mask's backward and MVUE's weight gradient.",
    "With all three products on sparse tensor cores, a given loss is reached sooner than with dense training, s-ste or fst.",
    (EXPERIMENT,),
    (
        *(
            Statement(
                "gpt",
                "trio@2:4",
                "below",
                rival,
                f"trio reaches a loss that both reach sooner than {name}",
                quantity="seconds_to_loss",
                is_claimed=False,
            )
            for rival, name in RIVALS.items()
        ),
        Statement(
            "gpt",
            "trio@2:4",
            "below",
            "dense",
            "a step of trio takes less time than a dense one",
            quantity="step_ms",
            is_claimed=False,
        ),
        Statement(
            "gpt",
            "trio@2:4",
            "not worse",
            "s-ste@2:4",
            "trio's loss is near that of s-ste (0.03 nats per token)",
            MARGIN / BYTES_PER_TOKEN,
            is_claimed=False,
        ),
    ),
    published_note="Nothing is published. Seconds count training: neither compilation nor validation.",
    charts=(
        Chart("gpt", "Validation loss against time, nats per byte", over="seconds"),
        Chart("gpt", "Validation loss against updates, nats per byte"),
    ),
    advice=(
        Advice(
            "The shortest time to a loss on a Hopper GPU, hidden size 2048 and more",
            "gpt",
            ("dense", "s-ste@2:4", FST, "trio@2:4"),
            by="seconds",
        ),
    ),
    deviations=(
        "The loss is far from converged, and later training may rank otherwise.",
        "On one GPU all contenders take one learning rate, and none searches for its own.",
    ),
)
