"""Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017) in idx files, gzipped or not."""

from __future__ import annotations

import struct
from pathlib import Path

from torch import Tensor

from nmsparse.workbench.datasets._files import Source, look_up, missing
from nmsparse.workbench.datasets._splits import Images, Splits, bytes_tensor

CLASSES = 10
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
NAMES = [f"{split}-{part}-ubyte" for split in ("train", "t10k") for part in ("images-idx3", "labels-idx1")]
LOOKED_FOR = (
    f"{', '.join(NAMES)} (or .gz) in fashion-mnist/, FashionMNIST/raw/ or the folder itself; without a folder in {DEBIAN} "
    "(apt-get install dataset-fashion-mnist)"
)


def fashion_mnist(root: Path | None) -> Splits[Images]:
    """60,000 training and 10,000 test images (here: for validation) of 28 x 28 grey pixels, 10 classes."""
    found = look_up(root, ("fashion-mnist", "FashionMNIST/raw", ""), NAMES) or look_up(DEBIAN, [""], NAMES)
    if found is None:
        raise missing("fashion-mnist", root, LOOKED_FOR)
    train_images, train_labels, test_images, test_labels = found
    return Splits(_images(train_images, train_labels), _images(test_images, test_labels))


def _images(images: Source, labels: Source) -> Images:
    pixels, classes = _idx(images, 3), _idx(labels, 1)
    if len(pixels) != len(classes):
        raise ValueError(f"{images.where} holds {len(pixels):,} images, but {labels.where} holds {len(classes):,} labels.")
    if len(classes) == 0 or int(classes.max()) >= CLASSES:
        raise ValueError(f"{labels.where}: labels are 0 .. {CLASSES - 1}, and there is at least one.")
    if pixels.shape[1] != pixels.shape[2]:
        raise ValueError(f"{images.where} holds images of {pixels.shape[1]} x {pixels.shape[2]} pixels; they should be square.")
    return Images(pixels.unsqueeze(1), classes)


def _idx(source: Source, dimensions: int) -> Tensor:
    """An idx file of bytes: two zeros, the type (8), the number of dimensions, each size as a big-endian integer, the data."""
    data = source.read()
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"{source.where} is not an idx file of bytes with {dimensions} dimension(s).")
    sizes = struct.unpack(f">{dimensions}I", data[4:start])
    tensor = bytes_tensor(data[start:])
    expected = 1
    for size in sizes:
        expected *= size
    if len(tensor) != expected:
        shape = " x ".join(map(str, sizes))
        raise ValueError(f"{source.where} declares {shape} bytes and holds {len(tensor):,}: it is damaged or incomplete.")
    return tensor.view(sizes)
