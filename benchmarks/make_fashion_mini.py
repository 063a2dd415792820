"""Make src/nmsparse/workbench/data/fashion-mini.xz from Fashion-MNIST's four idx files.

    python benchmarks/make_fashion_mini.py [folder with the idx files] [file to write]

Kept are the first 500 images of each class of the training set and the first 100 of each class of the test set, in the
official order. The file is one xz stream of bytes: 5,000 + 1,000 labels, then 5,000 + 1,000 images of 28 x 28 pixels.
"""

from __future__ import annotations

import gzip
import lzma
import sys
from collections import Counter
from pathlib import Path

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # apt-get install dataset-fashion-mnist
TARGET = Path(__file__).parent.parent / "src/nmsparse/workbench/data/fashion-mini.xz"
PIXELS, CLASSES = 28 * 28, 10


def first_of_each_class(folder: Path, split: str, count: int) -> tuple[bytes, bytes]:
    """Labels and images of the first ``count`` examples of each class."""
    labels = gzip.decompress((folder / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
    images = gzip.decompress((folder / f"{split}-images-idx3-ubyte.gz").read_bytes())[16:]
    seen: Counter[int] = Counter()
    kept = []
    for index, label in enumerate(labels):
        if seen[label] < count:
            seen[label] += 1
            kept.append(index)
    assert seen == dict.fromkeys(range(CLASSES), count)
    return bytes(labels[i] for i in kept), b"".join(images[i * PIXELS : (i + 1) * PIXELS] for i in kept)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEBIAN
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else TARGET
    train_labels, train_images = first_of_each_class(folder, "train", 500)
    test_labels, test_images = first_of_each_class(folder, "t10k", 100)
    packed = lzma.compress(train_labels + test_labels + train_images + test_images, preset=9 | lzma.PRESET_EXTREME)
    target.write_bytes(packed)
    print(f"{target}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
