"""How much a peer may ask. Each answer tells it whether one id is in the set: without a limit it asks for all ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from federated.vertical.parties import PeerFault


class Budget(Protocol):
    """How much each peer may ask over all runs; ``Ledger`` in memory, ``services.psi.budget`` on disk."""

    def spend(self, peer: str, count: int) -> None:
        """Note ``count`` queries, for good before it returns. Raises PeerFault beyond the limit."""
        ...


@dataclass(slots=True)
class Ledger:
    """At most ``most`` queries of each peer, over all runs: ``spent`` (by peer) is kept by whoever makes the ledger."""

    most: int
    spent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.most < 0 or any(count < 0 for count in self.spent.values()):
            raise ValueError("counts of queries are not negative")

    def left(self, peer: str) -> int:
        """How many more ``peer`` may ask."""
        return max(0, self.most - self.spent.get(peer, 0))

    def spend(self, peer: str, count: int) -> None:
        """Note ``count`` queries before they are answered. Raises PeerFault beyond the limit, and then notes none."""
        if count > self.left(peer):
            raise PeerFault(peer, "limit", f"asks {count} more; {self.left(peer)} of {self.most} are left")
        self.spent[peer] = self.spent.get(peer, 0) + count

    def as_mapping(self) -> Mapping[str, int]:
        """``spent``, to be kept."""
        return dict(self.spent)
