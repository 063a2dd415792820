"""What 2:4 costs and gains on this GPU: kernels, products, one layer, whole training steps."""

from nmsparse.workbench.bench._blocks import MODELS, meta_model
from nmsparse.workbench.bench._inference import bench_inference
from nmsparse.workbench.bench._records import Recorder, headline
from nmsparse.workbench.bench._suites import SUITES, run_suites

__all__ = ["MODELS", "SUITES", "Recorder", "bench_inference", "headline", "meta_model", "run_suites"]
