"""Settings for all tests: reproducible property tests, and one thread per worker (small tensors gain nothing from two)."""

import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)
