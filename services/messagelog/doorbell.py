"""Waking readers of a file that another process wrote, without polling it.

A writer rings after its commit; every listener of that bell, in any process of the machine, wakes at once.
A bell is a file of one byte: ringing writes it, and Linux reports that write (inotify) to whoever watches.
Where the kernel does not, listeners look every millisecond instead. A ring may be lost when its process is
killed between commit and ring, so listeners are also woken every ``RECHECK_S``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

RECHECK_S: Final = 0.1
_LOOK_S: Final = 0.001
_IN_MODIFY: Final = 0x00000002


class Doorbell:
    """The writer's end. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def ring(self) -> None:
        """Wake every listener. Never raises: a listener finds the news at its next recheck anyway."""
        with contextlib.suppress(OSError):  # a full disk must not turn a finished commit into an error
            os.pwrite(self._fd, b"\x00", 0)

    def close(self) -> None:
        os.close(self._fd)


def _watch(paths: Iterable[Path]) -> int | None:
    """A descriptor that turns readable when one of ``paths`` is written, or None if the system has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None
    fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        return None
    for path in paths:
        if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
            os.close(fd)
            return None
    return fd


class Listener:
    """The reader's end, for one thread: ``clear``, look for news, and ``wait`` if there was none.

    A ring between ``clear`` and ``wait`` ends the wait at once, so nothing is missed between look and sleep.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._fd = _watch(paths)
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLIN)

    def clear(self) -> None:
        """Forget the rings heard so far."""
        if self._fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 65_536)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a ring, at most ``timeout_s`` and at most ``RECHECK_S``."""
        if self._fd is None:
            time.sleep(max(0.0, min(timeout_s, _LOOK_S)))
        else:
            self._poll.poll(max(0.0, min(timeout_s, RECHECK_S)) * 1_000)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
