"""The run folder of one data folder: who supervises it, with what children, since when.

A lock that the system releases however its holder dies decides who supervises; the state file beside it only
describes. So a stale file never claims that something runs.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil

from services.supervisor.places import Places

_CREATE_TIME_SLACK_S: Final = 1.0
_PLACES: Final = "regions.json"


class AlreadyRunning(Exception):
    """Another supervisor holds this data folder."""

    def __init__(self, folder: Path, pid: int | None) -> None:
        self.pid = pid
        who = f"process {pid}" if pid else "another process"
        super().__init__(f"{who} already runs Headwater on {folder}")


class PlacesUnreadable(Exception):
    """The file with the numbers and ports of regions is damaged."""


class ProcessId(msgspec.Struct, frozen=True):
    """A process id together with its start, since ids are used again."""

    pid: int
    created_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The running process with ``pid``, if there is one."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def process(self) -> psutil.Process | None:
        """The process, if it still runs and is not just another with the same id."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created_s) < _CREATE_TIME_SLACK_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class ChildState(msgspec.Struct, frozen=True):
    """One supervised process, as shown to people."""

    name: str
    service: str
    state: str
    """``starting``, ``ready``, ``waiting`` (to be restarted) or ``stopped``."""
    since_ms: int
    restarts: int = 0
    last_exit: int | None = None
    """How the last run ended: an exit code, or minus the signal."""
    address: str = ""
    process: ProcessId | None = None
    region: str = "home"


class SupervisorState(msgspec.Struct, frozen=True):
    """The supervisor and all that it runs."""

    process: ProcessId
    started_at_ms: int
    children: tuple[ChildState, ...] = ()


_decoder = msgspec.json.Decoder(SupervisorState)
_places_decoder = msgspec.json.Decoder(Places)


class RunFolder:
    """``<data>/run``: the lock, the state, the settings that the children read, and the logs."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "run"

    @property
    def settings_file(self) -> Path:
        """The settings as the supervisor resolved them."""
        return self.path / "settings.toml"

    def log_file(self, name: str) -> Path:
        """The log of the child called ``name``."""
        return self.path / f"{name}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises AlreadyRunning."""
        self.path.mkdir(parents=True, exist_ok=True)
        # Not inherited: a child that outlives the supervisor must not hold the lock for it.
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                state = self.state()
                raise AlreadyRunning(self.path.parent, state.process.pid if state else None) from None
            yield
        finally:
            os.close(descriptor)

    def held(self) -> bool:
        """Whether a supervisor holds the folder now."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def state(self) -> SupervisorState | None:
        """What the last supervisor wrote; it runs only if the folder is ``held``."""
        try:
            return _decoder.decode((self.path / "state.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_state(self, state: SupervisorState) -> None:
        self._write("state.json", msgspec.json.encode(state), 0o644)

    def places(self) -> Places:
        """What regions were given by former runs. Raises PlacesUnreadable: a region's number is not given again."""
        try:
            return _places_decoder.decode((self.path / _PLACES).read_bytes())
        except FileNotFoundError:
            return Places()
        except msgspec.DecodeError as error:
            raise PlacesUnreadable(f"{self.path / _PLACES} cannot be read: {error}") from error

    def write_places(self, places: Places) -> None:
        """Keep what regions were given."""
        self._write(_PLACES, msgspec.json.encode(places), 0o644)

    def forget_announced(self) -> None:
        """Drop the notes of processes that were killed before; what runs announces itself anew."""
        for file in self.path.glob("*.pid"):
            file.unlink(missing_ok=True)

    def write_settings(self, text: str) -> None:
        """Keep the children's settings. They may hold secrets, so nobody else may read them."""
        self._write(self.settings_file.name, text.encode(), 0o600)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=f".{name}-", delete=False) as file:
            file.write(data)
        os.chmod(file.name, mode)
        os.replace(file.name, self.path / name)
