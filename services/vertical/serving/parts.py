"""A party's part of the model while it answers: the newest run's, and that of the run before.

A new training run leaves a new ``part.model`` at every party, at each in its own moment. Parts of two runs do not fit
together, so a host keeps the run before as well, and a guest asks with the newest run that all hosts say they have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.vertical.failures import EXPECTED

KEPT: Final = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """``part``: a ``HostPart`` or ``GuestPart``, of ``run``."""

    run: str
    part: Any


class Parts:
    """The last ``KEPT`` runs' parts. Written by one thread, read by any."""

    def __init__(self, first: Loaded) -> None:
        self._parts: tuple[Loaded, ...] = (first,)

    @property
    def newest(self) -> Loaded:
        """The part of the newest run."""
        return self._parts[0]

    @property
    def runs(self) -> tuple[str, ...]:
        """All runs that are here, the newest first."""
        return tuple(one.run for one in self._parts)

    def put(self, loaded: Loaded) -> None:
        """A newer run's part, which also takes the place of one of the same run."""
        others = tuple(one for one in self._parts if one.run != loaded.run)
        self._parts = (loaded, *others)[:KEPT]

    def of(self, run: str) -> Loaded | None:
        """The part of ``run``; None where that is not here."""
        return next((one for one in self._parts if one.run == run), None)

    def common(self, others: Iterable[Collection[str]]) -> Loaded:
        """The newest part whose run is in all of ``others``; the newest of all where none is."""
        there = list(others)
        return next((one for one in self._parts if all(one.run in runs for runs in there)), self._parts[0])


class Renewal:
    """Looks whether ``path`` was replaced, and loads it then. A file that cannot be used is named once and left."""

    def __init__(self, path: Path, load: Callable[[], Loaded], parts: Parts) -> None:
        self._path, self._load, self._parts = path, load, parts
        self._seen = self._state()

    def _state(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_ino

    def look(self) -> None:
        """Look now."""
        state = self._state()
        if state == self._seen or state == (0, 0):
            return
        self._seen = state
        try:
            loaded = self._load()
        except (*EXPECTED, OSError) as error:
            _log.error("%s is not used, the run before answers on: %s", self._path, error)
            return
        if loaded.run != self._parts.newest.run:
            _log.info("answers are of run %s from now on", loaded.run)
            self._parts.put(loaded)

    def follow(self, stop: threading.Event, every_s: float) -> None:
        """Look again and again until ``stop`` is set. For a thread of its own: loading takes its time."""
        while not stop.wait(every_s):
            self.look()
