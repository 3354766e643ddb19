"""MNIST's file format (idx, gzipped or not): http://yann.lecun.com/exdb/mnist, and all that copied it."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.data import Table
from services.datasets.errors import DatasetDamaged, DatasetError

_PARTS: Final = ("train-images", "train-labels", "t10k-images", "t10k-labels")
_KINDS: Final = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}
_MAX_BYTES: Final = 2 * 2**30
_UNSIGNED_BYTE: Final = 0x08


def is_mnist(folder: Path) -> bool:
    """Whether the folder seems to be meant as one: its training images are there."""
    return _find(folder, "train-images") is not None


def read_mnist(folder: Path) -> Table:
    """Images [N, F] with values from 0 to 1. Raises DatasetError, DatasetDamaged."""
    train_images, train_labels, test_images, test_labels = (_read(folder, part) for part in _PARTS)
    for images, labels, part in ((train_images, train_labels, "train"), (test_images, test_labels, "t10k")):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or len(labels) == 0:
            raise DatasetDamaged(
                f"{folder}: {part} has images {images.shape} and labels {labels.shape}; "
                "needs [N, height, width] and [N]"
            )
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DatasetDamaged(f"{folder}: training and test images differ in size")
    height, width = train_images.shape[1:]
    return Table(
        folder.name,
        _scaled(train_images),
        train_labels.astype(np.int64),
        int(max(train_labels.max(), test_labels.max())) + 1,
        _scaled(test_images),
        test_labels.astype(np.int64),
        (height, width),
        str(folder),
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of bytes in one file. Raises DatasetDamaged, DatasetError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UNSIGNED_BYTE or not 1 <= head[3] <= 4:
                raise DatasetDamaged(f"{path} does not begin like an idx file of bytes")
            sizes = file.read(4 * head[3])
            if len(sizes) < 4 * head[3]:
                raise DatasetDamaged(f"{path} ends within its header")
            shape = struct.unpack(f">{head[3]}I", sizes)
            # In Python's integers: a product of four sizes would wrap in NumPy's.
            total = 1
            for size in shape:
                total *= size
            if total > _MAX_BYTES:
                raise DatasetDamaged(f"{path} announces {total} bytes; at most {_MAX_BYTES} are read")
            body = file.read(total + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    if len(body) != total:
        raise DatasetDamaged(
            f"{path} announces {total} bytes, but holds {'more' if len(body) > total else len(body)}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read(folder: Path, part: str) -> npt.NDArray[np.uint8]:
    path = _find(folder, part)
    if path is None:
        kind = _KINDS[part.partition("-")[2]]
        raise DatasetError(f"{folder} lacks {part}-{kind} (or .gz); the four files of MNIST belong together")
    return read_idx(path)


def _find(folder: Path, part: str) -> Path | None:
    kind = _KINDS[part.partition("-")[2]]
    # Both spellings are in use: train-images-idx3-ubyte and train-images.idx3-ubyte.
    for between in "-.":
        for suffix in ("", ".gz"):
            path = folder / f"{part}{between}{kind}{suffix}"
            if path.is_file():
                return path
    return None


def _scaled(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    scaled = images.reshape(len(images), -1).astype(np.float32)
    scaled /= 255.0
    return scaled
