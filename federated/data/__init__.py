"""Clients' data in memory."""

from federated.data.augmentation import Augmentation
from federated.data.build import Table, federate, federate_augmented, federate_owned, split_test
from federated.data.federation import ClientData, Federation, Padded, Shares

__all__ = [
    "Augmentation",
    "ClientData",
    "Federation",
    "Padded",
    "Shares",
    "Table",
    "federate",
    "federate_augmented",
    "federate_owned",
    "split_test",
]
