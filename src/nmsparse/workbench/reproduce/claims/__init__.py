"""One file per claim."""

from nmsparse.workbench.reproduce._claim import Claim, Scale
from nmsparse.workbench.reproduce.claims import bi_mask, progressive, s_ste, sdgp, step, trio

CLAIMS: dict[str, Claim] = {module.CLAIM.name: module.CLAIM for module in (s_ste, step, bi_mask, sdgp, progressive, trio)}


def claims_at(scale: Scale) -> list[str]:
    """Claims that have something to run at a scale."""
    return [name for name, claim in CLAIMS.items() if any(scale in experiment.setups for experiment in claim.experiments)]


__all__ = ["CLAIMS", "claims_at"]
