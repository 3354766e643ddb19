"""Fewer bytes between clients and server: uploads by schemes of steps, downloads as differences on a grid."""

from federated.compression.errors import BodyRefused, UnsoundScheme
from federated.compression.scheme import Encoded, Scheme, draw_shared, make_scheme
from federated.compression.sketch import CountSketch
from federated.compression.step import Dice, Step

__all__ = [
    "BodyRefused",
    "CountSketch",
    "Dice",
    "Encoded",
    "Scheme",
    "Step",
    "UnsoundScheme",
    "draw_shared",
    "make_scheme",
]
