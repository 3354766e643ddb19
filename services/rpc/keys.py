"""A deployment's keys as files, made by ``headwater keys create FOLDER``::

    server.public          what clients expect of every server
    server.secret          only where servers run
    client.public          who this machine's processes are when they call
    client.secret
    allowed/NAME.public    the clients that servers let in

Each file is one key, 64 hexadecimal digits. A server reads ``allowed`` anew when it changes, so clients come and
go without a restart (an open connection stays until it breaks). The server's own key changes by a new folder.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Final

from services.rpc.errors import KeysError
from services.rpc.security import KEY_BYTES, KeyPair, Security

SERVER: Final = "server"
CLIENT: Final = "client"
ALLOWED: Final = "allowed"
PUBLIC: Final = ".public"
PRIVATE: Final = ".secret"
MAX_ALLOWED: Final = 4_096
"""Clients that a folder may name."""
_SETTLED_S: Final = 2.0
"""A folder that changed less than this before it was read may change again under the same time stamp."""
_MAX_FILE: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_log = logging.getLogger(__name__)


def create_keys(folder: Path, server_public: str | None = None) -> None:
    """Make ``folder`` with new keys, whole or not at all. Nothing is ever overwritten.

    With ``server_public`` (hexadecimal) it is a client's: for a machine that calls servers elsewhere. Raises
    KeysError where something is there already.
    """
    expected = None if server_public is None else _parse(server_public, "the server's public key")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
            made = Path(beside) / "keys"
            made.mkdir(mode=0o700)
            _fill(made, expected)
            # Fails where there are files already: of two processes that make the same folder, one does.
            made.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise KeysError(
            f"{folder} cannot be made: {error.strerror}; keys are never overwritten, so choose another folder"
        ) from error


def _fill(folder: Path, server_public: bytes | None) -> None:
    client = KeyPair.generate()
    _write_pair(folder, CLIENT, client)
    if server_public is None:
        _write_pair(folder, SERVER, KeyPair.generate())
        (folder / ALLOWED).mkdir(mode=0o700)
        _write(folder / ALLOWED / f"{CLIENT}{PUBLIC}", client.public, 0o644)
        _sync(folder / ALLOWED)
    else:
        _write(folder / f"{SERVER}{PUBLIC}", server_public, 0o644)
    _sync(folder)


def load_security(folder: Path) -> Security:
    """The keys in ``folder``. Raises KeysError naming the file that is missing, wrong or open to others."""
    server_public = read_key(folder / f"{SERVER}{PUBLIC}")
    client = _read_pair(folder, CLIENT)
    if not (folder / f"{SERVER}{PRIVATE}").exists():
        return Security(server_public, client)
    return Security(server_public, client, _read_pair(folder, SERVER), AllowedFolder(folder / ALLOWED))


def ensure_security(folder: Path) -> Security:
    """``load_security``, after making the folder if it is not there. Several processes may do so at once."""
    if not folder.exists():
        try:
            create_keys(folder)
            _log.info("made the keys of this deployment in %s", folder)
        except KeysError:
            if not folder.exists():
                raise
    return load_security(folder)


def allowed_keys(folder: Path) -> dict[str, bytes]:
    """The clients that ``folder`` allows: name and public key. Raises KeysError."""
    return _read_allowed(folder / ALLOWED)


def allow(folder: Path, name: str, public: str) -> None:
    """Let the client with ``public`` (hexadecimal) in, as ``name``. Raises KeysError; nothing is overwritten."""
    key = _parse(public, "the client's public key")
    known = allowed_keys(folder)
    if same := [other for other, found in known.items() if found == key]:
        raise KeysError(f"this key is allowed already, as {same[0]}")
    if len(known) >= MAX_ALLOWED:
        raise KeysError(f"{folder} allows {MAX_ALLOWED} clients already; remove one first")
    path = _allowed_path(folder, name)
    try:
        _write(path, key, 0o644)
    except FileExistsError:
        raise KeysError(f"{path} exists; remove it first, or choose another name") from None
    _sync(path.parent)


def forbid(folder: Path, name: str) -> None:
    """Let the client ``name`` in no more. Raises KeysError if it is not allowed anyway."""
    path = _allowed_path(folder, name)
    try:
        path.unlink()
    except FileNotFoundError:
        raise KeysError(
            f"{path} does not exist; `headwater keys list {folder}` shows who is allowed"
        ) from None
    _sync(path.parent)


class AllowedFolder(Container[bytes]):
    """The public keys in a folder, read anew when it changes. What cannot be read lets nobody in."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        """Raises KeysError where the folder cannot be read now."""
        self._folder, self._now_s = folder, now_s
        self._changed_ns, self._settled = 0, False
        self._keys: frozenset[bytes] = frozenset()
        self._read()

    def __contains__(self, key: object) -> bool:
        try:
            if not self._settled or self._folder.stat().st_mtime_ns != self._changed_ns:
                self._read()
        except (KeysError, OSError) as error:
            # Told once: whoever knocks decides how often this is reached.
            if self._keys or self._settled:
                _log.error("no client is let in: %s", error)
            self._keys, self._settled = frozenset(), False
        return key in self._keys

    def _read(self) -> None:
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError as error:
            raise KeysError(f"{self._folder} cannot be read: {error.strerror}") from error
        self._keys = frozenset(_read_allowed(self._folder).values())
        self._changed_ns = changed_ns
        self._settled = self._now_s() - changed_ns / 1e9 > _SETTLED_S


def read_key(path: Path) -> bytes:
    """The key in ``path`` [32 bytes]. Raises KeysError; for a secret also where others may read the file."""
    try:
        with path.open("rb") as file:
            if path.suffix == PRIVATE and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
                raise KeysError(f"{path} is open to every user of this machine; `chmod 600 {path}`")
            text = file.read(_MAX_FILE + 1).decode("ascii")
    except UnicodeDecodeError:
        raise KeysError(f"{path} does not hold a key") from None
    except OSError as error:
        step = f"make keys with `headwater keys create {path.parent}`"
        raise KeysError(f"{path} cannot be read: {error.strerror}; {step}") from error
    return _parse(text.strip(), str(path))


def _read_pair(folder: Path, name: str) -> KeyPair:
    public, secret = read_key(folder / f"{name}{PUBLIC}"), read_key(folder / f"{name}{PRIVATE}")
    try:
        return KeyPair(public, secret)
    except KeysError:
        raise KeysError(f"{folder / name}{PUBLIC} and {PRIVATE} do not belong together") from None


def _read_allowed(folder: Path) -> dict[str, bytes]:
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.suffix == PUBLIC)
    except OSError as error:
        raise KeysError(f"{folder} cannot be read: {error.strerror}") from error
    if len(files) > MAX_ALLOWED:
        raise KeysError(f"{folder} has {len(files)} keys; at most {MAX_ALLOWED} are read")
    return {file.stem: read_key(file) for file in files}


def _allowed_path(folder: Path, name: str) -> Path:
    if _NAME.fullmatch(name) is None:
        raise KeysError(f"{name!r} is not a name for a key: letters, digits, dots, dashes, at most 64")
    return folder / ALLOWED / f"{name}{PUBLIC}"


def _parse(text: str, what: str) -> bytes:
    # The text is not shown: it may be a secret in the wrong place.
    if _HEX.fullmatch(text) is None:
        raise KeysError(f"{what} is not a key: {2 * KEY_BYTES} lower-case hexadecimal digits")
    return bytes.fromhex(text)


def _write_pair(folder: Path, name: str, pair: KeyPair) -> None:
    _write(folder / f"{name}{PUBLIC}", pair.public, 0o644)
    _write(folder / f"{name}{PRIVATE}", pair.secret, 0o600)


def _write(path: Path, key: bytes, mode: int) -> None:
    # Not "open, then chmod": nobody may read a secret in between.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{key.hex()}\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shown(keys: Mapping[str, bytes]) -> dict[str, str]:
    """Public keys as people see them, by name."""
    return {name: key.hex() for name, key in keys.items()}
