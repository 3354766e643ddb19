"""Two small real tables that come with scikit-learn: handwritten digits and breast cancer (both UCI)."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import numpy as np

from federated.data import Table, split_test
from services.datasets.errors import DatasetUnavailable

DIGITS: Final = "digits"
BREAST_CANCER: Final = "breast-cancer"
_SIDE: Final = 8
_BRIGHTEST: Final = 16.0


def digits() -> Table:
    """1,797 images [N, 64] of 8 x 8 with values from 0 to 1, ten classes. Raises DatasetUnavailable."""
    read = _scikit(DIGITS).load_digits()
    inputs = (read.data / _BRIGHTEST).astype(np.float32)
    return _table(DIGITS, inputs, read.target.astype(np.int64), 10, (_SIDE, _SIDE))


def breast_cancer() -> Table:
    """569 rows of 30 features, standardised by the training rows; two classes. Raises DatasetUnavailable."""
    read = _scikit(BREAST_CANCER).load_breast_cancer()
    labels = read.target.astype(np.int64)
    training, _ = split_test(labels)
    scale = read.data[training].std(axis=0)
    inputs = ((read.data - read.data[training].mean(axis=0)) / scale).astype(np.float32)
    return _table(BREAST_CANCER, inputs, labels, 2, None)


def _scikit(name: str) -> ModuleType:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise DatasetUnavailable(
            f"{name} comes with scikit-learn, which is not installed: pip install 'headwater[datasets]'"
        ) from error
    found: ModuleType = sklearn.datasets
    return found


def _table(
    name: str,
    inputs: np.typing.NDArray[np.float32],
    labels: np.typing.NDArray[np.int64],
    classes: int,
    image: tuple[int, int] | None,
) -> Table:
    training, test = split_test(labels)
    return Table(
        name, inputs[training], labels[training], classes, inputs[test], labels[test], image, "scikit-learn"
    )
