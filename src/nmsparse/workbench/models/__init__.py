"""Models by name: architectures of transformers by configuration, and the ResNets that papers train on CIFAR."""

from nmsparse.workbench.models._cifar_resnet import CifarResNet, ClassifierOutput
from nmsparse.workbench.models._registry import ModelInfo, build_model, model_info, models
from nmsparse.workbench.models._transformers import load_pretrained

__all__ = ["CifarResNet", "ClassifierOutput", "ModelInfo", "build_model", "load_pretrained", "model_info", "models"]
