"""This party's own side of its intersections: the folders of ``[psi]`` in its file, and ids beyond memory.

Below ``disk``, in a folder of the job's fingerprint that one process holds: ``ids`` (the set, sorted into buckets) and
``tags``. All of it goes when the job is done.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.psi.ids import IdRule
from federated.psi.members import Members, spool
from federated.psi.own import Own
from federated.vertical.kinds import Kind
from services.psi.budget import FileBudget
from services.psi.disk import DiskFolder
from services.psi.files import read_ids
from services.psi.kept import FileCache, KeptFolder
from services.vertical.config import DataSection, PsiSection
from services.vertical.pulse import Pulse
from services.vertical.store import HeldFolder

_log = logging.getLogger(__name__)
_ROWS_A_BEAT: Final = 10_000


@dataclass(frozen=True, slots=True)
class OwnSets:
    """``peers``: public keys (hexadecimal) by name. ``folder``: on disk, of this job; None where sets are in memory.
    ``streamed``: the file's ids are read as they are needed, and there is no table in memory."""

    section: PsiSection
    data: DataSection | None
    peers: Mapping[str, str]
    pulse: Pulse
    folder: Path | None = None
    streamed: bool = False

    def own(self) -> Own:
        """What the roles of an intersection are given."""
        keep, most = self.section.keep, self.section.most_ids_of_a_peer
        budget = None
        if keep is not None and most is not None:
            budget = FileBudget(keep, most, self.peers)
        return Own(
            spool=self._spool if self.streamed else None,
            folder=None if self.folder is None else self._tags,
            kept=None if keep is None else KeptFolder(keep),
            cache=None if keep is None else FileCache(keep),
            budget=budget,
        )

    def psi(self, kind: Kind[Any]) -> Kind[Any]:
        """``kind``, which is PSI's, with this party's own side of it."""
        from federated.psi.kind import make

        return replace(kind, make=partial(make, own=self.own()))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the folder on disk alone; it goes where all went well. Raises StateInUse, StateNotKept."""
        if self.folder is None:
            yield
            return
        held = HeldFolder(self.folder)
        try:
            yield
            shutil.rmtree(self.folder)
        finally:
            held.close()

    def texts(self) -> Iterator[str]:
        """The ids of the file, one after the other. Raises TableRefused."""
        assert self.data is not None
        return self.pulse.watched(read_ids(self.data.path, self.data.id), _ROWS_A_BEAT)

    def fingerprint(self) -> bytes:
        """32 bytes that are equal for the same ids in the same order. Raises TableRefused."""
        hashed = hashlib.sha256()
        for text in self.texts():
            encoded = text.encode(errors="surrogatepass")
            hashed.update(len(encoded).to_bytes(4, "little") + encoded)
        return hashed.digest()

    def ids_at(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """The ids that stand in ``rows`` [n] of the file, in that order."""
        wanted = dict.fromkeys(rows.tolist(), "")
        for row, text in enumerate(self.texts()):
            if row in wanted:
                wanted[row] = text
        return [wanted[row] for row in rows.tolist()]

    def _spool(self, rule: IdRule, key: bytes) -> Members:
        folder = self._emptied("ids")
        made = spool(self.texts(), rule, folder, key)
        if made.complaint:
            _log.info("%s", made.complaint)
        return made

    def _tags(self, anew: bool) -> DiskFolder:
        assert self.folder is not None
        return self._emptied("tags") if anew else DiskFolder(self.folder / "tags")

    def _emptied(self, name: str) -> DiskFolder:
        assert self.folder is not None
        found = DiskFolder(self.folder / name)
        found.empty()
        return found
