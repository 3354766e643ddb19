from collections.abc import Iterable

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

class FedAvg:
    def __init__(
        self, *, fraction_evaluate: float, min_train_nodes: int, min_available_nodes: int
    ) -> None: ...
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: object, grid: Grid
    ) -> Iterable[Message]: ...
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]: ...
    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int) -> object: ...
