"""Learning from data that may not move. What a device needs imports NumPy alone."""

from federated.device import (
    ControlVariates,
    Instructions,
    LocalTraining,
    Update,
    batch_schedule,
    device_generator,
    local_update,
)
from federated.layout import Field, Layout, layout_of
from federated.models import NextCharacter, Perceptron, make_model, softmax_regression
from federated.strategies import ServerState, Strategy, make_strategy, sum_for
from federated.sums import Bounds, Contribution, ContributionRefused, Sum, add_all, add_batch
from federated.weights import WeightsMismatch

__all__ = [
    "Bounds",
    "Contribution",
    "ContributionRefused",
    "ControlVariates",
    "Field",
    "Instructions",
    "Layout",
    "LocalTraining",
    "NextCharacter",
    "Perceptron",
    "ServerState",
    "Strategy",
    "Sum",
    "Update",
    "WeightsMismatch",
    "add_all",
    "add_batch",
    "batch_schedule",
    "device_generator",
    "layout_of",
    "local_update",
    "make_model",
    "make_strategy",
    "softmax_regression",
    "sum_for",
]
