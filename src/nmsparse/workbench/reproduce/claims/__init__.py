"""One file per claim."""

from nmsparse.workbench.reproduce._claim import Claim
from nmsparse.workbench.reproduce.claims import bi_mask, progressive, s_ste, sdgp, step, trio

CLAIMS: dict[str, Claim] = {module.CLAIM.name: module.CLAIM for module in (s_ste, step, bi_mask, sdgp, progressive, trio)}

__all__ = ["CLAIMS"]
