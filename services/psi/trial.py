"""An intersection of files on one machine, for a trial: every party's role, and the cores of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from federated.psi import unbalanced
from federated.psi.ecdh import ecdh
from federated.psi.ids import IdRule, normalise
from federated.psi.kind import PsiOptions
from federated.psi.members import Members, MemoryMembers, spool
from federated.psi.own import Own
from federated.psi.rsa import generate
from federated.psi.several import several
from federated.psi.signatures import asker, asks, signer
from federated.psi.terms import Found
from federated.psi.transfers import transfers
from federated.vertical.parties import Effect, Incoming, Progress, Role, Workers, run_local
from services.psi.disk import DiskFolder
from services.psi.files import read_ids
from services.psi.kept import FileCache, KeptFolder
from services.vertical.workers import workers as workers_on

MOST_FILES: Final = 32


@dataclass(frozen=True, slots=True)
class Trial:
    """``found``: every party's result by name. ``sent``: bytes by (sender, receiver, kind). ``complaints``: of rows."""

    protocol: str
    found: Mapping[str, Found]
    sent: Mapping[tuple[str, str, str], int]
    complaints: Mapping[str, str]
    seconds: float


def intersect(
    files: Mapping[str, Path],
    options: PsiOptions,
    *,
    column: str = "id",
    cores: int = 1,
    disk: Path | None = None,
    keep: Path | None = None,
    progress: Callable[[str, Progress], None] = lambda name, step: None,
) -> Trial:
    """Intersect ``files`` (by party's name; the first is the guest, or the leader of several).

    ``disk``: an empty folder where sets, tags and buckets lie instead of in memory (Diffie-Hellman alone). ``keep``: a
    folder for what one run leaves to the next: the signer's key and signatures, or the prepared large set. Raises
    ValueError for what does not fit, IdsRefused, TableRefused.
    """
    names = tuple(files)
    protocol = options.protocol
    if protocol == "auto":
        protocol = "ecdh" if len(names) == 2 else "several"
    if not 2 <= len(names) <= MOST_FILES or (protocol == "several") != (len(names) > 2):
        raise ValueError(f"{protocol} with {len(names)} files: two, or with several three to {MOST_FILES}")
    if disk is not None and (protocol != "ecdh" or (disk.exists() and any(disk.iterdir()))):
        raise ValueError("a folder on disk is for ecdh, and empty at the beginning")
    own = Own() if keep is None else Own(kept=KeptFolder(keep), cache=FileCache(keep))
    began_s = time.perf_counter()
    with workers_on(cores) as workers:
        parties = _Parties(names, files, options, protocol, column, workers, disk, own)
        roles = {name: _watched(parties.role(name), partial(progress, name)) for name in names}
        outcome = run_local(roles)
    sent = {key: size for key, (_, size) in outcome.transcript.counts().items()}
    return Trial(protocol, outcome.results, sent, parties.complaints, time.perf_counter() - began_s)


class _Parties:
    def __init__(
        self,
        names: Sequence[str],
        files: Mapping[str, Path],
        options: PsiOptions,
        protocol: str,
        column: str,
        workers: Workers,
        disk: Path | None,
        own: Own,
    ) -> None:
        self._names, self._files, self._options, self._protocol = names, files, options, protocol
        self._column, self._workers, self._disk, self._own = column, workers, disk, own
        self.complaints: dict[str, str] = {}

    def role(self, name: str) -> Role[Found]:
        terms, first, workers = self._options.terms(), name == self._names[0], self._workers
        peer = self._names[1] if first else self._names[0]
        if self._disk is not None:
            folder = DiskFolder(self._disk / f"{self._names.index(name)}-tags")
            spooled = partial(self._spooled, name)
            return ecdh(peer, spooled, terms, first=first, workers=workers, folder=folder)
        ids = normalise(read_ids(self._files[name], self._column), terms.rule)
        self.complaints[name] = ids.complaint
        arrange = partial(MemoryMembers, ids)
        if self._protocol == "ecdh":
            return ecdh(peer, arrange, terms, first=first, workers=workers)
        if self._protocol == "several":
            return several(name, self._names, arrange, terms, workers=workers)
        if self._protocol == "ot":
            return transfers(peer, arrange, terms, first=first)
        if self._protocol == "rsa":
            if asks(first, terms):
                bits = self._options.bits
                return asker(peer, arrange, terms, first=first, least_bits=bits, workers=workers)
            key = self._own.signing_key(self._options.bits) or generate(self._options.bits)
            return signer(peer, arrange, terms, key, first=first, cache=self._own.cache, workers=workers)
        bits = self._options.filter_bits
        if asks(first, terms):
            asking = unbalanced.asker(peer, arrange, terms, first=first, least_bits=bits, workers=workers)
            return _only_found(asking)
        prepared, ready = self._own.prepared(ids, bits), self._own.keep_prepared
        return unbalanced.owner(
            peer, ids, prepared, terms, first=first, bits=bits, ready=ready, workers=workers
        )

    def _spooled(self, name: str, key: bytes) -> Members:
        assert self._disk is not None
        folder = DiskFolder(self._disk / f"{self._names.index(name)}-ids")
        rule: IdRule = self._options.terms().rule
        made = spool(read_ids(self._files[name], self._column), rule, folder, key)
        self.complaints[name] = made.complaint
        return made


def _only_found(role: Role[tuple[Found, Any]]) -> Role[Found]:
    found, _ = yield from role
    return found


def _watched(
    role: Role[Any], progress: Callable[[Progress], None]
) -> Generator[Effect, Incoming | None, Any]:
    """``role``, whose progress is told as it comes."""
    answer: Incoming | None = None
    try:
        while True:
            effect = role.send(answer)
            if isinstance(effect, Progress):
                progress(effect)
            answer = yield effect
    except StopIteration as end:
        return end.value
    finally:
        role.close()
