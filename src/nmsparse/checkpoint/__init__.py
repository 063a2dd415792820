"""Models on disk: dense safetensors with exact zeros under stock keys, packed ones, and a check of either."""

from nmsparse.checkpoint._files import TensorFiles
from nmsparse.checkpoint._load import load
from nmsparse.checkpoint._save import save
from nmsparse.checkpoint._verify import Checked, Report, verify

__all__ = ["Checked", "Report", "TensorFiles", "load", "save", "verify"]
