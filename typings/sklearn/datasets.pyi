from typing import Any

import numpy as np
from numpy.typing import NDArray

class Bunch:
    data: NDArray[np.float64]
    target: NDArray[Any]
    feature_names: NDArray[np.str_]

def load_digits() -> Bunch: ...
def load_breast_cancer() -> Bunch: ...
