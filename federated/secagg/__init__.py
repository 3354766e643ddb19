"""Secure aggregation: the sum of what clients send is learnt, and nothing else of it.

What stands here needs NumPy alone. ``federated.secagg.masks`` and ``federated.secagg.keys`` need the package
`cryptography` and are imported by those who mask, seal or sign.
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
