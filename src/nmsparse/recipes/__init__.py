"""One frozen dataclass per paper, and the registry that lists them."""

from nmsparse.recipes._base import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    PRODUCTS,
    Clock,
    Fit,
    LayerUpdate,
    Packing,
    PatternField,
    Recipe,
    State,
    Update,
    fit_sizes,
    masked,
    not_a_multiple,
    scalar,
)
from nmsparse.recipes._registry import RecipeInfo, recipe, recipe_info, recipes, register_recipe

# the order of these lines is the order of the registry: baselines, the papers, ours
from nmsparse.recipes.dense import Dense  # isort: skip
from nmsparse.recipes.ste import STE  # isort: skip
from nmsparse.recipes.srste import SRSTE  # isort: skip
from nmsparse.recipes.asp import ASP  # isort: skip
from nmsparse.recipes.step import STEP  # isort: skip
from nmsparse.recipes.sste import SSTE  # isort: skip
from nmsparse.recipes.fst import FST  # isort: skip
from nmsparse.recipes.bimask import BiMask  # isort: skip
from nmsparse.recipes.sdgp import SDGP  # isort: skip
from nmsparse.recipes.mask_decay import MaskDecay  # isort: skip
from nmsparse.recipes.structure_decay import StructureDecay  # isort: skip
from nmsparse.recipes.trio import Trio  # isort: skip

__all__ = [
    "ASP",
    "FST",
    "GRAD_INPUT",
    "GRAD_WEIGHT",
    "OUTPUT",
    "PRODUCTS",
    "SDGP",
    "SRSTE",
    "SSTE",
    "STE",
    "STEP",
    "BiMask",
    "Clock",
    "Dense",
    "Fit",
    "LayerUpdate",
    "MaskDecay",
    "Packing",
    "PatternField",
    "Recipe",
    "RecipeInfo",
    "State",
    "StructureDecay",
    "Trio",
    "Update",
    "fit_sizes",
    "masked",
    "not_a_multiple",
    "recipe",
    "recipe_info",
    "recipes",
    "register_recipe",
    "scalar",
]
