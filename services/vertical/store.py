"""A party's checkpoints and result on its own disk: each a file that is there whole, or not at all.

    checkpoint-LABEL-RUN   magic, SHA-256 of whose file it is and of the rest, the state
    result                 the same of the part's result
    table                  the digest of the table that they belong to
    traffic                what was sent and received until the last checkpoint
    settled                the run whose result all parties have

A file of another party, job or label is so as good as a damaged one. Checkpoints of one label that were made in
different runs (one folder came back from a backup) do not fit together: so the run is in the name.

Only the last ``KEEP`` checkpoints are kept, and none once all parties have their results; the runner never runs further
ahead of a peer than that. One process may hold a folder at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from pathlib import Path
from typing import IO, Final

import numpy as np

from federated.vertical.parties import MOST_BODY, PartResult, PeerFault
from federated.vertical.wire import Arr, Bytes, Int, Text, pack, unpack
from services.vertical.traffic import Traffic, read_traffic

KEEP: Final = 4
_MAGIC: Final = b"HWV2"
_NAME: Final = re.compile(r"checkpoint-(\d{1,18})(?:-([0-9a-f]{1,64}))?")


class StateDamaged(Exception):
    """A file of a party's state cannot be used; the message says which, and the next step."""


class StateInUse(Exception):
    """Another process of this party holds the folder."""


class StateNotKept(Exception):
    """A party's state cannot be written: no room, no rights; the message says where, and the next step."""


class HeldFolder:
    """A folder that one process at a time has. Raises StateInUse, StateNotKept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock: IO[bytes] = (folder / "lock").open("wb")
        except OSError as error:
            raise StateNotKept(
                f"{folder} cannot be made or written to: {error.strerror}; mend that, or name another folder"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StateInUse(f"{folder} is held by another process of this party; stop it first") from None

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()


class StateFolder(HeldFolder):
    """The state of one party in one job. ``of`` tells whose it is: nobody else's files are taken for its own."""

    def __init__(self, folder: Path, of: str = "") -> None:
        super().__init__(folder)
        self._of = of

    def labels(self) -> list[int]:
        """The labels of the checkpoints that are here, rising."""
        return sorted(self.runs())

    def runs(self) -> dict[int, str]:
        """The run in which each checkpoint that is here was made, by label; empty where it was not said."""
        return {label: run for label, run, _ in self._checkpoints()}

    def _checkpoints(self) -> list[tuple[int, str, str]]:
        """Label, run and file's name of each checkpoint, rising."""
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted((int(match[1]), match[2] or "", match[0]) for match in found if match)

    def keep(self, label: int, state: bytes, run: str = "") -> None:
        """Put the checkpoint on disk, and drop all but the last ``KEEP``. ``run``: hexadecimal, the same at all parties
        whose checkpoints of this label fit together."""
        written = f"checkpoint-{label}-{run}" if run else f"checkpoint-{label}"
        self._write(written, state)
        last = self.labels()[-KEEP:]
        for old, _, name in self._checkpoints():
            if old not in last or (old == label and name != written):
                (self.folder / name).unlink(missing_ok=True)

    def state(self, label: int) -> bytes:
        """The state kept at ``label``. Raises StateDamaged."""
        names = {found: name for found, _, name in self._checkpoints()}
        return self._read(names.get(label, f"checkpoint-{label}"))

    def drop_damaged(self) -> list[StateDamaged]:
        """Remove the checkpoints that cannot be used, so that all go on from an older one; what was wrong with each."""
        found: list[StateDamaged] = []
        for _, _, name in self._checkpoints():
            try:
                self._read(name)
            except StateDamaged as error:
                found.append(error)
                (self.folder / name).unlink()
        return found

    def _write(self, name: str, body: bytes) -> None:
        write_whole(self.folder / name, body, f"{self._of}/{name}")

    def _read(self, name: str) -> bytes:
        return read_whole(self.folder / name, f"{self._of}/{name}")

    def forget_after(self, label: int) -> None:
        """Drop what lies beyond ``label``: a run that went on from there makes its own."""
        for later, _, name in self._checkpoints():
            if later > label:
                (self.folder / name).unlink(missing_ok=True)
        for name in ("result", "settled"):
            (self.folder / name).unlink(missing_ok=True)

    def keep_result(self, result: PartResult) -> None:
        """Put the part's result on disk."""
        self._write("result", result_bytes(result))

    def result(self) -> PartResult | None:
        """The result, where there is one. Raises StateDamaged."""
        return read_result(self._read("result")) if (self.folder / "result").exists() else None

    def settle(self, run: str) -> None:
        """Note that all parties have the result of ``run``. Checkpoints go: nobody needs them, and they hold secrets
        of the run."""
        self._write("settled", run.encode())
        for _, _, name in self._checkpoints():
            (self.folder / name).unlink(missing_ok=True)

    def settled(self, run: str) -> bool:
        """Whether all parties have the result of ``run``, as far as is known here. Raises StateDamaged."""
        return (self.folder / "settled").exists() and self._read("settled") == run.encode()

    def keep_traffic(self, traffic: Traffic, seconds: float) -> None:
        """Put on disk what was sent and received until now; this process took ``seconds``."""
        self._write("traffic", traffic.dump(seconds))

    def traffic(self) -> Traffic:
        """What this party sent and received in this job before. Raises StateDamaged."""
        path = self.folder / "traffic"
        if not path.exists():
            return Traffic()
        try:
            return read_traffic(self._read("traffic"))
        except (ValueError, KeyError, TypeError) as error:
            raise StateDamaged(
                f"{path} is of another version; remove it, and counting begins anew"
            ) from error

    def clear(self) -> None:
        """Forget all of it: the job begins anew."""
        for _, _, name in self._checkpoints():
            (self.folder / name).unlink(missing_ok=True)
        for name in ("result", "settled", "table", "traffic"):
            (self.folder / name).unlink(missing_ok=True)

    def belongs_to(self, table: bytes) -> None:
        """What is kept here is of the table with this digest. Raises StateDamaged where it is of another: positions of
        rows would mean other people."""
        if (self.folder / "table").exists() and self._read("table") != table:
            raise StateDamaged(
                f"{self.folder} is of another table than the one there is now; --fresh begins the job anew"
            )
        self._write("table", table)


def result_bytes(result: PartResult) -> bytes:
    """``result`` as bytes."""
    figures = json.dumps(dict(result.figures), allow_nan=False)
    rows = np.empty(0, np.int64) if result.rows is None else result.rows
    scores = np.empty((0, 0)) if result.scores is None else result.scores.reshape(len(result.scores), -1)
    shape = 0 if result.scores is None else result.scores.ndim
    return pack(
        {
            "figures": figures,
            "curves": json.dumps({name: list(values) for name, values in result.curves.items()}),
            "has_model": int(result.model is not None),
            "model": result.model or b"",
            "has_rows": int(result.rows is not None),
            "rows": rows,
            "scores_ndim": shape,
            "scores": scores,
            "has_test": int(result.test is not None),
            "test": np.empty(0, np.int64) if result.test is None else result.test,
        }
    )


def read_result(body: bytes) -> PartResult:
    """What ``result_bytes`` wrote. Raises StateDamaged."""
    try:
        found = unpack(
            body,
            "this file",
            {
                "figures": Text(2**20),
                "curves": Text(2**24),
                "has_model": Int(0, 1),
                "model": Bytes(MOST_BODY),
                "has_rows": Int(0, 1),
                "rows": Arr("<i8", (None,)),
                "scores_ndim": Int(0, 2),
                "scores": Arr("<f8", (None, None)),
                "has_test": Int(0, 1),
                "test": Arr("<i8", (None,)),
            },
        )
    except PeerFault as fault:
        raise StateDamaged(str(fault)) from fault
    scores = found["scores"] if found["scores_ndim"] == 2 else found["scores"].reshape(-1)
    return PartResult(
        json.loads(found["figures"]),
        found["model"] if found["has_model"] else None,
        found["rows"] if found["has_rows"] else None,
        scores if found["scores_ndim"] else None,
        found["test"] if found["has_test"] else None,
        json.loads(found["curves"]),
    )


def write_whole(path: Path, body: bytes, of: str = "") -> None:
    """Write ``body`` with its digest to ``path``, which afterwards is on disk, for its owner alone.

    ``of``: whose file it is, see ``read_whole``. Raises StateNotKept, and then an older file is as it was.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + _digest(body, of))
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        # A half of it would take the room that is missing.
        beside.unlink(missing_ok=True)
        raise StateNotKept(
            f"{path} cannot be written: {error.strerror}; make room for {len(body)} bytes or mend its folder, and "
            "start again: all go on from the last checkpoint"
        ) from error


def sync_folder(folder: Path) -> None:
    """Write the folder's entries through to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(body: bytes, of: str) -> bytes:
    named = of.encode()
    return hashlib.sha256(len(named).to_bytes(4, "little") + named + body).digest()


def read_whole(path: Path, of: str = "") -> bytes:
    """The body that ``write_whole`` wrote with the same ``of``. Raises StateDamaged."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StateDamaged(f"{path} cannot be read: {error.strerror}") from error
    body = text[len(_MAGIC) + 32 :]
    if not text.startswith(_MAGIC) or text[len(_MAGIC) : len(_MAGIC) + 32] != _digest(body, of):
        raise StateDamaged(f"{path} is damaged, or of another job; remove it")
    return body
