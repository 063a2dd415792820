"""Dense: the null recipe, so that comparisons need no special case."""

from dataclasses import dataclass

from nmsparse.recipes._base import Recipe
from nmsparse.recipes._registry import register_recipe


@register_recipe("dense", paper="-", patterns="ignored", ends_dense=True)
@dataclass(frozen=True)
class Dense(Recipe):
    """Ordinary dense training through the same layers."""

    @property
    def masks_rows(self) -> bool:
        return True
