"""The stages of secure aggregation, in order."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Where an iteration stands: what clients are to send, or what servers do. Numbers are those of records."""

    ADVERTISE = 0  # keys
    CHOOSE = 1  # neighbours, chosen by the clients
    SHARE = 2  # sealed shares of the two secrets
    MASKED = 3  # the masked vector
    CONSISTENT = 4  # a signature over who survived
    UNMASK = 5  # shares of the survivors' and of the dropped clients' secrets
    REVEAL = 6  # servers take the masks off the sum
    DONE = 7
    FAILED = 8

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self in (Stage.DONE, Stage.FAILED)
