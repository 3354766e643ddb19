from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.pld import common as common
from dp_accounting.pld import privacy_loss_distribution as privacy_loss_distribution

class PLDAccountant:
    def __init__(
        self,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval: float = 1e-4,
    ) -> None: ...
    def compose(self, event: DpEvent, count: int = 1) -> PLDAccountant: ...
    def get_epsilon(self, target_delta: float) -> float: ...
