"""ResNets for small images, in the two forms that papers train on CIFAR.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, arXiv:1512.03385.

resnet18    four stages of two blocks, 64 to 512 channels, 1 x 1 convolutions where the shape changes: the ImageNet network
            with a 3 x 3 stem and no pooling before the first stage
resnet32    the paper's own CIFAR network (6n + 2 layers, n = 5): three stages of five blocks, 16 to 64 channels; where the shape
            changes the shortcut takes every other pixel and fills new channels with zeros ("option A"), without parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from nmsparse.workbench.tasks import Facts


class ClassifierOutput(NamedTuple):
    """What transformers' classifiers return. A named tuple, because DDP, FSDP and accelerate look for tensors inside those."""

    loss: Tensor | None
    logits: Tensor


class PaddedShortcut(nn.Module):
    """Every ``stride``-th pixel, and zeros as further channels, half of them on either side."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """A shortcut that learns what the new channels hold."""
    convolution = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, learns_shortcut: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = (_projection if learns_shortcut else PaddedShortcut)(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """A 3 x 3 stem, stages of blocks that halve the image and double the channels, the mean over pixels, and a linear layer."""

    def __init__(self, facts: Facts, width: int, blocks: Sequence[int], learns_shortcut: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(facts.channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            wider = width * 2**stage
            first = BasicBlock(channels, wider, 1 if stage == 0 else 2, learns_shortcut)
            stages.append(nn.Sequential(first, *(BasicBlock(wider, wider, 1, learns_shortcut) for _ in range(count - 1))))
            channels = wider
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, facts.classes)
        self.apply(_init_he)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ClassifierOutput:
        features = self.stages(F.relu(self.norm(self.conv(pixel_values))))
        logits = self.classifier(features.mean((2, 3)))
        return ClassifierOutput(None if labels is None else F.cross_entropy(logits.float(), labels), logits)


def _init_he(module: nn.Module) -> None:
    """Variance 2 / fan: what a ReLU halves, the initialisation doubles (He et al. 2015, arXiv:1502.01852)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(facts: Facts, width: int) -> CifarResNet:
    return CifarResNet(facts, width, blocks=(2, 2, 2, 2), learns_shortcut=True)


def resnet32(facts: Facts, width: int) -> CifarResNet:
    return CifarResNet(facts, width, blocks=(5, 5, 5), learns_shortcut=False)
