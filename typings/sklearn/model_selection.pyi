from typing import Any

from numpy.typing import NDArray

def train_test_split(
    *arrays: NDArray[Any], test_size: float, random_state: int, stratify: NDArray[Any] | None = None
) -> list[NDArray[Any]]: ...
