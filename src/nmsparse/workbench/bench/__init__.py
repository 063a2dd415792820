"""What 2:4 costs and gains on this GPU: kernels, products, one layer, whole training steps."""

from nmsparse.workbench.bench._records import Recorder
from nmsparse.workbench.bench._suites import MODELS, SUITES, run_suites

__all__ = ["MODELS", "SUITES", "Recorder", "run_suites"]
