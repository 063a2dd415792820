"""Image classification, with the usual augmentation: random crops after padding, and horizontal flips."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nmsparse.workbench.datasets import Images, Splits
from nmsparse.workbench.tasks._facts import Facts
from nmsparse.workbench.tasks._task import Batch, Outputs, Task, classified, mean


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel over a training set, for pixels between 0 and 1."""

    mean: Tensor
    std: Tensor

    @staticmethod
    def of(pixels: Tensor) -> Normalization:
        """From how often each of the 256 values occurs: as floats, 50,000 images would take a gigabyte."""
        counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in pixels.unbind(1)]).double()
        values = torch.arange(256, dtype=torch.float64) / 255
        count = counts.sum(1)
        mean = counts @ values / count
        std = (counts @ values.square() / count - mean.square()).clamp_min(0).sqrt()
        # a channel without any variation is left as it is
        return Normalization(mean.float(), torch.where(std > 0, std, 1).float())

    def __call__(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)

    @property
    def black(self) -> Tensor:
        """What black becomes, for each channel."""
        return -self.mean / self.std


class ImageExamples:
    """Images kept as bytes and normalised a batch at a time."""

    def __init__(self, images: Images, normalize: Normalization, limit: int | None) -> None:
        self._pixels, self._labels = images.pixels[:limit], images.labels[:limit]
        self._normalize = normalize

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        return {"pixel_values": self._normalize(self._pixels[chosen]), "labels": self._labels[chosen].long()}


class ImageTask(Task):
    """Compared by accuracy. ``margin`` is how many black pixels surround an image before it is cropped to its size again."""

    unit = "images"
    headline = "accuracy"
    higher_is_better = True

    def __init__(
        self, name: str, images: Splits[Images], classes: int, limit: int | None, margin: int = 0, is_flipped: bool = False
    ) -> None:
        normalize = Normalization.of(images.train.pixels)
        train, valid = (ImageExamples(part, normalize, limit) for part in (images.train, images.valid))
        _, channels, _, side = images.train.pixels.shape
        super().__init__(name, Facts("images", classes=classes, channels=channels, side=side), train, valid)
        self._black, self._margin, self._is_flipped = normalize.black, margin, is_flipped

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        pixels = batch["pixel_values"]
        if self._margin:
            pixels = random_crop(pixels, self._margin, self._black, generator)
        if self._is_flipped:
            pixels = random_flip(pixels, generator)
        return {**batch, "pixel_values": pixels}

    def measure(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        return classified(outputs, batch["labels"])

    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": mean(totals, "loss"), "accuracy": mean(totals, "correct")}

    def tokens(self, batch: Batch) -> int:
        return len(batch["labels"])


def sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it does just now."""
    return values if device.type != "cuda" else values.pin_memory().to(device, non_blocking=True)


def random_crop(images: Tensor, margin: int, fill: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to ``margin`` pixels along both axes, ``fill`` (one value a channel) where nothing was."""
    count, channels, height, width = images.shape
    shifts = sent(torch.randint(2 * margin + 1, (2, count), generator=generator), images.device)
    background = sent(fill, images.device).to(images).view(1, channels, 1, 1)
    padded = background.repeat(count, 1, height + 2 * margin, width + 2 * margin)
    padded[:, :, margin : margin + height, margin : margin + width] = images
    rows = shifts[0, :, None] + torch.arange(height, device=images.device)
    columns = shifts[1, :, None] + torch.arange(width, device=images.device)
    image = torch.arange(count, device=images.device)
    cropped = padded.permute(0, 2, 3, 1)[image[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored left to right, or not."""
    is_mirrored = sent(torch.randint(2, (len(images),), generator=generator).bool(), images.device)
    return torch.where(is_mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
