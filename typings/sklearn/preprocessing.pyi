from typing import Any, Self

from numpy.typing import NDArray

class StandardScaler:
    def fit(self, rows: NDArray[Any], /) -> Self: ...
    def transform(self, rows: NDArray[Any], /) -> NDArray[Any]: ...
