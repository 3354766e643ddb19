"""What a device keeps between rounds, as files that are always whole: a crash leaves the old one or the new one.

``held``     the model that it downloaded last, from which the server sends differences
``pending``  an update that is trained and not yet accepted, with the memory that it leaves when it is
``memory``   what error feedback has not sent yet, and SCAFFOLD's control
``signing-key`` and ``certificate``   who this device is, to the others of a job that does not trust its servers
``agreed``   the file of a job that protected the device when it first joined
``reports``  how many reports that are private by themselves have left the device, and under which terms of privacy

An update is accepted by writing its memory, then forgetting it. A crash between the two sends it again; the server says
that it had it, and the same memory is written again: nothing is counted or remembered twice.

A report is counted before it is kept, so before it can leave; a crash between the two counts one that nobody got, never
one too few. A count that cannot be read is not forgotten like the rest: the device takes no further part.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from federated.packing import BodyMalformed, pack, unpack
from federated.weights import Array

_MEMORY = b"HWm1"
_PENDING = b"HWp1"
_VECTOR = "vector/"
_BODY = "body"
_LEDGER = b"HWr2"
_CHECK_BYTES = 8
_REPORTS = struct.Struct("<4sQ16s8s")


@dataclass(frozen=True)
class Memory:
    """``residuals`` of error feedback and ``control`` of SCAFFOLD, [D] each; ``iteration`` that last changed it."""

    iteration: int = 0
    residuals: Mapping[str, Array] = field(default_factory=dict)
    control: Array | None = None


@dataclass(frozen=True)
class Pending:
    """An update that waits to be accepted, and the memory after it."""

    iteration: int
    ticket: bytes
    examples: int
    steps: int
    loss: float
    body: bytes
    after: Memory


@dataclass(frozen=True, slots=True)
class Ledger:
    """How many ``reports`` have left, or may have, and the mark of the ``terms`` (``budget.terms_of``) of them all."""

    reports: int = 0
    terms: bytes = b""


class LedgerUnreadable(ValueError):
    """The count of reports is there and cannot be read: how much of the budget is left is not known."""


class DeviceFolder:
    """A device's state for one job in ``folder``. What cannot be read is forgotten: the device begins anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def place(self, name: str) -> Path:
        """Where ``name`` is kept."""
        return self._folder / name

    def held(self) -> bytes | None:
        """The download kept last."""
        return self._read("held")

    def keep_held(self, body: bytes | None) -> None:
        """Keep a whole model, or none."""
        self._write("held", body)

    def memory(self) -> Memory:
        """What the device remembers; nothing at first."""
        found = self._unpacked("memory", _MEMORY)
        return Memory() if found is None else _memory(*found)

    def pending(self) -> Pending | None:
        """The update that is not accepted yet."""
        found = self._unpacked("pending", _PENDING)
        if found is None:
            return None
        values, vectors = found
        try:
            body = vectors.pop(_BODY)
            length, after = int(values["bytes"]), _memory(values["after"], vectors)
            return Pending(
                int(values["iteration"]), bytes.fromhex(values["ticket"]), int(values["examples"]),
                int(values["steps"]), float(values["loss"]), body.tobytes()[:length], after,
            )  # fmt: skip
        except (KeyError, ValueError, TypeError):
            return None

    def keep_pending(self, pending: Pending) -> None:
        """Keep an update until it is accepted or dropped."""
        # Vectors of whole float32 alone can be packed: the body is filled up, its length stands in the values.
        padded = pending.body + bytes(-len(pending.body) % 4)
        values = {
            "iteration": pending.iteration, "ticket": pending.ticket.hex(), "examples": pending.examples,
            "steps": pending.steps, "loss": pending.loss, "bytes": len(pending.body),
            "after": {"iteration": pending.after.iteration},
        }  # fmt: skip
        vectors = {_BODY: np.frombuffer(padded, "<f4"), **_vectors(pending.after)}
        self._write("pending", pack(_PENDING, values, vectors))

    def accept(self, pending: Pending) -> None:
        """The server has counted ``pending``."""
        self.keep_memory(pending.after)
        self.drop_pending()

    def keep_memory(self, memory: Memory) -> None:
        """Keep what the device remembers."""
        self._write("memory", pack(_MEMORY, {"iteration": memory.iteration}, _vectors(memory)))

    def drop_pending(self) -> None:
        """Forget the update; the memory stays as it was before it."""
        self._write("pending", None)

    def ledger(self) -> Ledger:
        """What has left. Raises LedgerUnreadable."""
        body = self._read("reports")
        if body is None:
            return Ledger()
        if len(body) == _REPORTS.size:
            magic, count, terms, check = _REPORTS.unpack(body)
            if magic == _LEDGER and check == _check(body):
                return Ledger(int(count), terms)
        raise LedgerUnreadable(f"{self._folder / 'reports'} is damaged: what was spent is not known")

    def count_report(self, terms: bytes, most: int | None = None) -> bool:
        """One more report may leave from now on, under ``terms`` [16] as all before it; False where ``most`` have, or
        others left under other terms: then it must not. Another process of this device may count at the same time.
        Raises LedgerUnreadable."""
        with self._alone():
            ledger = self.ledger()
            if (most is not None and ledger.reports >= most) or (ledger.reports and ledger.terms != terms):
                return False
            body = _REPORTS.pack(_LEDGER, ledger.reports + 1, terms, b"")
            self._write("reports", body[:-_CHECK_BYTES] + _check(body))
            return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else counts meanwhile, where the system has locks that end with their process."""
        if sys.platform == "win32":
            yield
            return
        import fcntl

        with open(self._folder / "lock", "ab", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def agreed(self) -> str | None:
        """The job's file (TOML) as the device agreed to it."""
        body = self._read("agreed")
        return None if body is None else body.decode(errors="replace")

    def keep_agreed(self, text: str) -> None:
        """Keep it."""
        self._write("agreed", text.encode())

    def signing_seed(self) -> bytes | None:
        """The secret that this device's signing key is made of."""
        return self._read("signing-key")

    def keep_signing_seed(self, seed: bytes) -> None:
        """Keep it, for this user alone."""
        self._write("signing-key", seed)

    def certificate(self) -> bytes | None:
        """The certificate of the signing key, and the registrar's public key."""
        return self._read("certificate")

    def keep_certificate(self, body: bytes) -> None:
        """Keep them."""
        self._write("certificate", body)

    def _unpacked(self, name: str, magic: bytes) -> tuple[dict[str, Any], dict[str, Array]] | None:
        body = self._read(name)
        if body is None:
            return None
        try:
            return unpack(magic, body)
        except BodyMalformed:
            return None

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, name: str, body: bytes | None) -> None:
        path = self._folder / name
        if body is None:
            path.unlink(missing_ok=True)
            return
        part = path.with_suffix(".part")
        # Updates, memories and keys are this device's own.
        with open(part, "wb", opener=_private) as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        # Not every system lets a folder be opened; there the rename is as durable as the system makes it.
        with contextlib.suppress(PermissionError):
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body[:-_CHECK_BYTES], digest_size=_CHECK_BYTES).digest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _vectors(memory: Memory) -> dict[str, Array]:
    vectors = {_VECTOR + name: vector for name, vector in memory.residuals.items()}
    return vectors if memory.control is None else {**vectors, "control": memory.control}


def _memory(values: Mapping[str, Any], vectors: Mapping[str, Array]) -> Memory:
    residuals = {name.removeprefix(_VECTOR): v for name, v in vectors.items() if name.startswith(_VECTOR)}
    return Memory(int(values["iteration"]), residuals, vectors.get("control"))
