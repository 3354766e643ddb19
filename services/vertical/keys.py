"""A party's key pair: ``party.public``, which the others put into their files, and ``party.secret``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from services.rpc.errors import KeysError
from services.rpc.keys import read_key
from services.rpc.security import KeyPair

PUBLIC: Final = "party.public"
SECRET: Final = "party.secret"  # noqa: S105 - a file's name


def make_party_keys(folder: Path) -> KeyPair:
    """A new pair in ``folder``. Nothing is overwritten: raises KeysError where there is one."""
    pair = KeyPair.generate()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(folder / SECRET, pair.secret, 0o600)
        _write(folder / PUBLIC, pair.public, 0o644)
    except OSError as error:
        raise KeysError(
            f"{folder} gets no keys: {error.strerror}; keys are never overwritten, so choose another folder"
        ) from error
    return pair


def load_party_keys(folder: Path) -> KeyPair:
    """The pair in ``folder``. Raises KeysError naming the file, and the next step."""
    if not (folder / SECRET).exists():
        raise KeysError(f"{folder} has no {SECRET}; `headwater fl vertical keys {folder}` makes a pair")
    return KeyPair(read_key(folder / PUBLIC), read_key(folder / SECRET))


def _write(path: Path, key: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{key.hex()}\n")
        file.flush()
        os.fsync(file.fileno())
