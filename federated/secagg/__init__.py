"""Secure aggregation: the sum of what clients send is learnt, and nothing else of it.

What stands here, the plan (``settings``), the fixed point (``quantise``) and the messages need NumPy alone. Those who
mask, seal or sign need the package `cryptography` and are imported lazily: ``masks``, ``keys``, ``roster``, ``client``,
``server``, ``desk`` and ``local``.
"""

from federated.secagg.graph import Degree, DegreeRefused, choose, complete, regular_graph, smallest_group
from federated.secagg.ring import Ring, RingRefused, Words
from federated.secagg.shamir import PRIME, SHARE_BYTES, Reconstructor, ShareRefused, split, split_many

__all__ = [
    "PRIME",
    "SHARE_BYTES",
    "Degree",
    "DegreeRefused",
    "Reconstructor",
    "Ring",
    "RingRefused",
    "ShareRefused",
    "Words",
    "choose",
    "complete",
    "regular_graph",
    "smallest_group",
    "split",
    "split_many",
]
