"""Learning from data that may not move. What a device needs imports NumPy alone."""

from federated.device import LocalTraining, Update, local_update
from federated.perceptron import Perceptron
from federated.strategies import FedAvg, ServerState
from federated.weights import WeightsMismatch

__all__ = [
    "FedAvg",
    "LocalTraining",
    "Perceptron",
    "ServerState",
    "Update",
    "WeightsMismatch",
    "local_update",
]
