"""What a party has of its own for its intersections: folders for large sets, what one run leaves to the next, a budget.

Nothing of it is agreed on with the others, and nothing of it is sent. Everything is optional: without it keys are new
in each run, sets lie in memory, and what a peer may ask is bounded in each run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from federated.psi import unbalanced
from federated.psi.filters import HashFilter
from federated.psi.ids import IdRule, Ids
from federated.psi.limits import Budget
from federated.psi.members import Folder, Members
from federated.psi.rsa import PrivateKey, generate, private_key
from federated.psi.signatures import SignatureCache

Spool = Callable[[IdRule, bytes], Members]
"""Makes the members of ids that are read anew each time, in the order of a secret key of 32 bytes."""


class Kept(Protocol):
    """Bytes by name that outlive a run: as secret as the ids."""

    def read(self, name: str) -> bytes:
        """What was written last; empty where nothing was."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Keep ``data`` in the place of what was there."""
        ...


@dataclass(frozen=True, slots=True)
class Own:
    """``spool``: ids beyond memory, in the place of a table's. ``folder``: opens where tags lie, empty for True, else
    as it was left. ``kept``: for the signer's keys, the prepared set and peers' filters. ``cache``: of the signer's
    signatures. ``budget``: how much each peer may ask over all runs."""

    spool: Spool | None = None
    folder: Callable[[bool], Folder] | None = None
    kept: Kept | None = None
    cache: SignatureCache | None = None
    budget: Budget | None = None

    @property
    def on_disk(self) -> bool:
        """Whether sets are to lie on disk."""
        return self.spool is not None or self.folder is not None

    def signing_key(self, bits: int) -> PrivateKey | None:
        """The signer's key of ``bits`` for all runs, made where there is none; None where nothing is kept."""
        if self.kept is None:
            return None
        name = f"signer-{bits}"
        if held := self.kept.read(name):
            return private_key(held)
        key = generate(bits)
        self.kept.write(name, key.to_bytes())
        return key

    def prepared(self, ids: Ids, bits: int) -> unbalanced.Prepared | None:
        """The large side of the unbalanced mode; None where none is kept, or where the ids are others now."""
        held = b"" if self.kept is None else self.kept.read(f"prepared-{bits}")
        found = unbalanced.Prepared.from_bytes(held) if held else None
        return found if found is not None and found.fits(ids) else None

    def keep_prepared(self, made: unbalanced.Prepared) -> None:
        """Keep what ``prepared`` gives the next run."""
        if self.kept is not None:
            self.kept.write(f"prepared-{made.bits}", made.to_bytes())

    def filter_of(self, peer: str) -> HashFilter | None:
        """The filter that ``peer`` sent in an earlier run: while its set is the same it need not travel again."""
        held = b"" if self.kept is None else self.kept.read(f"filter-{peer}")
        return HashFilter.from_bytes(held) if held else None

    def keep_filter(self, peer: str, found: HashFilter) -> None:
        """Keep what ``filter_of`` gives the next run."""
        if self.kept is not None:
            self.kept.write(f"filter-{peer}", found.to_bytes())
