"""Models on disk: dense safetensors with exact zeros under stock keys, packed ones, a check of either, and ONNX."""

from nmsparse.checkpoint._convert import Converted, convert
from nmsparse.checkpoint._files import TensorFiles
from nmsparse.checkpoint._format import INDICES, VALUES, Layout, packed_config, unpack_tensor
from nmsparse.checkpoint._load import load
from nmsparse.checkpoint._onnx import OnnxReport, OnnxWeight, export_onnx
from nmsparse.checkpoint._own import unwrapped
from nmsparse.checkpoint._save import save
from nmsparse.checkpoint._verify import Checked, Report, verify

__all__ = [
    "INDICES",
    "VALUES",
    "Checked",
    "Converted",
    "Layout",
    "OnnxReport",
    "OnnxWeight",
    "Report",
    "TensorFiles",
    "convert",
    "export_onnx",
    "load",
    "packed_config",
    "save",
    "unpack_tensor",
    "unwrapped",
    "verify",
]
