"""How much each peer may ask over all runs and processes of this party: on disk before an answer leaves."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from federated.psi.limits import Ledger
from services.psi.kept import KeptFolder
from services.vertical.store import StateDamaged

ASKED: Final = "asked"


class FileBudget:
    """At most ``most`` ids of each peer. ``keys``: each peer's public key (hexadecimal), which counts are kept by: a
    peer that goes by another name has no new budget.

    A count is on disk before ``spend`` returns; a process that is killed after that has spent it.
    """

    def __init__(self, folder: Path, most: int, keys: Mapping[str, str]) -> None:
        self._kept, self._lock = KeptFolder(folder), folder / f"{ASKED}.lock"
        self._path, self._most, self._keys = folder / ASKED, most, dict(keys)

    def spend(self, peer: str, count: int) -> None:
        """See ``Budget``. Raises PeerFault, StateDamaged, StateNotKept."""
        with self._alone():
            spent = self._read()
            ledger = self._ledger(spent, peer)
            ledger.spend(peer, count)
            spent[self._keys[peer]] = ledger.as_mapping()[peer]
            self._kept.write(ASKED, json.dumps(spent, sort_keys=True).encode())

    def left(self) -> dict[str, int]:
        """How many more ids each peer may ask; nothing is written. Raises StateDamaged."""
        spent = self._read()
        return {peer: self._ledger(spent, peer).left(peer) for peer in self._keys}

    def _ledger(self, spent: Mapping[str, int], peer: str) -> Ledger:
        return Ledger(self._most, {peer: spent.get(self._keys[peer], 0)})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Another process of this party may serve the same peer in another job.
        self._kept.made()
        with self._lock.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, int]:
        try:
            held = self._kept.read(ASKED)
            spent = json.loads(held) if held else {}
        except (StateDamaged, ValueError) as error:
            raise StateDamaged(
                f"{self._path} is damaged, so that it is not known what peers asked: put a copy of it there (without "
                "it every peer has its whole budget again)"
            ) from error
        return {str(key): int(count) for key, count in spent.items()}
