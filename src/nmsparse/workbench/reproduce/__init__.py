"""Do the papers' claims hold? Declarative claims, the runs that test them, and what they say.

claims/         one file per claim: task, model, contenders, statements, the paper's numbers
_study          a claim as runs; learning rates chosen on a seed of their own
_runner         trains what is missing
_ledger         the book of finished runs
_verdicts       statements tested on the book, pair by pair (_statistics)
_results        RESULTS.md, plots and the decision table
"""

from nmsparse.workbench.reproduce._claim import SCALES, Claim, Scale
from nmsparse.workbench.reproduce._ledger import Ledger, device_name
from nmsparse.workbench.reproduce._outcome import judge_all, to_dict
from nmsparse.workbench.reproduce._results import Place, decision_table, places, write_results
from nmsparse.workbench.reproduce._runner import Progress, reproduce
from nmsparse.workbench.reproduce._screen import plan, print_outcome, print_plan
from nmsparse.workbench.reproduce._study import Study
from nmsparse.workbench.reproduce.claims import CLAIMS, claims_at

__all__ = [
    "CLAIMS",
    "SCALES",
    "Claim",
    "Ledger",
    "Place",
    "Progress",
    "Scale",
    "Study",
    "claims_at",
    "decision_table",
    "device_name",
    "judge_all",
    "places",
    "plan",
    "print_outcome",
    "print_plan",
    "reproduce",
    "to_dict",
    "write_results",
]
