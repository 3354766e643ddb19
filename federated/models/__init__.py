"""Models that a device trains with NumPy alone, by name."""

from federated.models.catalogue import MODELS, make_model
from federated.models.model import Inputs, Labels, Metrics, Model
from federated.models.perceptron import Perceptron, softmax_regression
from federated.models.text import NextCharacter

__all__ = [
    "MODELS",
    "Inputs",
    "Labels",
    "Metrics",
    "Model",
    "NextCharacter",
    "Perceptron",
    "make_model",
    "softmax_regression",
]
