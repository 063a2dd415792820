"""nmsparse: train PyTorch models with N:M structured sparsity.

    run = nmsparse.sparsify_(model, nmsparse.SSTE("2:4"))
    run.attach(optimizer, total_steps=10_000)

``"N:M"`` always means: keep N of every M consecutive entries along the reduction axis.
"""

from nmsparse import functional
from nmsparse.checkpoint import load, save, verify
from nmsparse.inference import Accelerated, accelerate_
from nmsparse.nn import SparseConv2d, SparseLinear, densify_, effective_weight, freeze_
from nmsparse.optim import StepAdamW
from nmsparse.pattern import Pattern
from nmsparse.plan import Plan, plan
from nmsparse.recipes import (
    ASP,
    FST,
    SDGP,
    SRSTE,
    SSTE,
    STE,
    STEP,
    BiMask,
    Dense,
    MaskDecay,
    Recipe,
    RecipeInfo,
    StructureDecay,
    Trio,
    recipe,
    recipe_info,
    recipes,
    register_recipe,
)
from nmsparse.run import Run, sparsify_

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "FST",
    "SDGP",
    "SRSTE",
    "SSTE",
    "STE",
    "STEP",
    "Accelerated",
    "BiMask",
    "Dense",
    "MaskDecay",
    "Pattern",
    "Plan",
    "Recipe",
    "RecipeInfo",
    "Run",
    "SparseConv2d",
    "SparseLinear",
    "StepAdamW",
    "StructureDecay",
    "Trio",
    "accelerate_",
    "densify_",
    "effective_weight",
    "freeze_",
    "functional",
    "load",
    "plan",
    "recipe",
    "recipe_info",
    "recipes",
    "register_recipe",
    "save",
    "sparsify_",
    "verify",
]
