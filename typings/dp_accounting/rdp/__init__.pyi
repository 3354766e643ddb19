from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dp_accounting import DpEvent, NeighboringRelation

class RdpAccountant:
    def __init__(
        self,
        orders: Sequence[float] | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> None: ...
    def compose(self, event: DpEvent, count: int = 1) -> RdpAccountant: ...
    def get_epsilon(self, target_delta: float) -> float: ...
    @property
    def rdp(self) -> npt.NDArray[np.float64]: ...
    @property
    def orders(self) -> npt.NDArray[np.float64]: ...

def compute_epsilon(
    orders: npt.NDArray[np.float64], rdp: npt.NDArray[np.float64], delta: float
) -> tuple[float, float]: ...
