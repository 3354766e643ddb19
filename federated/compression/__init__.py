"""Fewer bytes between clients and server: uploads by schemes of steps, downloads as differences on a grid."""

from federated.compression.download import DownloadChain, Grid, Held, difference, receive, snap
from federated.compression.errors import BaseUnknown, BodyRefused, UnsoundScheme
from federated.compression.scheme import Encoded, Scheme, draw_shared, make_scheme
from federated.compression.sketch import CountSketch
from federated.compression.step import Dice, Step

__all__ = [
    "BaseUnknown",
    "BodyRefused",
    "CountSketch",
    "Dice",
    "DownloadChain",
    "Encoded",
    "Grid",
    "Held",
    "Scheme",
    "Step",
    "UnsoundScheme",
    "difference",
    "draw_shared",
    "make_scheme",
    "receive",
    "snap",
]
