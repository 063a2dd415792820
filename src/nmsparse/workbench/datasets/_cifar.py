"""CIFAR-10 (A. Krizhevsky, 2009): WebP sheets, the binary batches, or the Python batches, packed in their tar or not."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmsparse.workbench.datasets._files import Source, look_up, missing
from nmsparse.workbench.datasets._splits import Images, Splits, bytes_tensor
from nmsparse.workbench.extras import package

CLASSES, CHANNELS, SIDE = 10, 3, 32
PIXELS = CHANNELS * SIDE * SIDE
RECORDS = 10_000
"""Images in one batch file of the official distributions."""
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
LOOKED_FOR = (
    "cifar10/labels.npz with train_00.webp .. and test_00.webp .., cifar-10-batches-bin/, cifar-10-batches-py/, "
    "cifar-10-binary.tar.gz or cifar-10-python.tar.gz (also inside cifar10/)"
)


def cifar10(root: Path | None) -> Splits[Images]:
    """50,000 training and 10,000 test images (here: for validation) of 32 x 32 pixels in three colours, 10 classes."""
    if labels := look_up(root, ("cifar10", ""), ["labels.npz"]):
        return _sheets(labels[0])
    if batches := look_up(root, _places("cifar-10-batches-bin", "cifar-10-binary.tar.gz"), [f"{name}.bin" for name in BATCHES]):
        return _joined([_binary(source) for source in batches])
    if batches := look_up(root, _places("cifar-10-batches-py", "cifar-10-python.tar.gz"), BATCHES):
        return _joined([_pickled(source) for source in batches])
    raise missing("cifar10", root, LOOKED_FOR)


def _places(*inside: str) -> list[str]:
    return [*(f"{base}{name}" for base in ("cifar10/", "") for name in inside), "cifar10", ""]


def _joined(batches: list[Images]) -> Splits[Images]:
    *train, valid = batches
    pixels, labels = (torch.cat([getattr(batch, field) for batch in train]) for field in ("pixels", "labels"))
    return Splits(Images(pixels, labels), valid)


def _checked(where: str, pixels: Tensor, labels: Tensor) -> Images:
    if len(pixels) != len(labels):
        raise ValueError(f"{where}: {len(pixels):,} images and {len(labels):,} labels do not belong together.")
    if len(labels) == 0 or int(labels.max()) >= CLASSES:
        raise ValueError(f"{where}: labels are 0 .. {CLASSES - 1}, and there is at least one; this is no CIFAR-10 file.")
    return Images(pixels, labels)


def _sheets(labels: Source) -> Splits[Images]:
    """Sprite sheets: each a row-major grid of tiles."""
    numpy = package("numpy")
    try:
        with numpy.load(io.BytesIO(labels.read()), allow_pickle=False) as saved:
            known = [bytes_tensor(saved[name].astype(numpy.uint8).tobytes()) for name in ("y_train", "y_test")]
    except Exception as error:  # numpy raises whatever its parsers do
        raise ValueError(f"{labels.where} is not an npz file with y_train and y_test ({error}).") from error
    folder = labels.file.parent
    parts = [
        _checked(f"{folder} ({split}_*.webp)", torch.cat([_tiles(path) for path in _numbered(folder, split)]), part)
        for split, part in zip(("train", "test"), known, strict=True)
    ]
    return Splits(*parts)


def _numbered(folder: Path, split: str) -> list[Path]:
    found = sorted(folder.glob(f"{split}_[0-9][0-9].webp"))
    expected = [folder / f"{split}_{number:02d}.webp" for number in range(max(len(found), 1))]
    if found != expected:
        absent = next(path for path in expected if path not in found)
        raise ValueError(f"{absent} is missing: the sheets of a split are numbered without gaps, from 00.")
    return found


def _tiles(path: Path) -> Tensor:
    image_module = package("PIL.Image")
    try:
        image = image_module.open(io.BytesIO(path.read_bytes())).convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, its own errors, and what codecs raise
        raise ValueError(f"{path} cannot be decoded ({error}): it is damaged or incomplete.") from error
    columns, rows = image.width // SIDE, image.height // SIDE
    if (columns * SIDE, rows * SIDE) != image.size:
        raise ValueError(f"{path} measures {image.width} x {image.height}; a sheet is a grid of {SIDE} x {SIDE} tiles.")
    grid = bytes_tensor(image.tobytes()).view(rows, SIDE, columns, SIDE, CHANNELS)
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, CHANNELS, SIDE, SIDE)


def _binary(source: Source) -> Images:
    """Records of one label byte and 3,072 pixel bytes, channel by channel."""
    data = source.read()
    if len(data) != RECORDS * (1 + PIXELS):
        raise ValueError(
            f"{source.where} holds {len(data):,} bytes; {RECORDS:,} records of {1 + PIXELS:,} bytes are "
            f"{RECORDS * (1 + PIXELS):,}. It is incomplete, or no CIFAR-10 batch."
        )
    records = bytes_tensor(data).view(RECORDS, 1 + PIXELS)
    return _checked(source.where, records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), records[:, 0].clone())


def _pickled(source: Source) -> Images:
    """A pickled dictionary with "data", an array of bytes, and "labels", a list."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(source.read()), encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels, labels = fields["data"].to_tensor(), torch.tensor(fields["labels"], dtype=torch.uint8)
        if pixels.shape != (RECORDS, PIXELS):
            raise ValueError(f"its data has shape {tuple(pixels.shape)}, expected was {(RECORDS, PIXELS)}")
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{source.where} cannot be read as a CIFAR-10 batch ({type(error).__name__}: {error}).") from error
    return _checked(source.where, pixels.view(-1, CHANNELS, SIDE, SIDE), labels)


class _Array:
    """Stands in for a numpy array: keeps what the pickle says of it, and runs nothing."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_tensor(self) -> Tensor:
        _, shape, kind, is_fortran, data = self.state
        if not isinstance(kind, _Type) or kind.name not in (b"u1", "u1") or is_fortran or not isinstance(data, bytes):
            raise ValueError("its data is not an array of bytes in C order")
        return bytes_tensor(data).view(shape)


class _Type:
    """Stands in for a numpy dtype."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like mean nothing for bytes."""


def _latin1(text: str, encoding: str) -> bytes:
    """Stands in for the function by which Python 3 pickles bytes in the old protocols."""
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds arrays of bytes, lists and dictionaries; every other name in a pickle is refused, so no code in it can run."""

    ALLOWED = {  # noqa: RUF012 (typing.ClassVar says no more than the capitals)
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Type,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which a batch of images has no use for")
        return self.ALLOWED[module_name, global_name]
