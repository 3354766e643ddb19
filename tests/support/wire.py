"""A network between two processes or threads that is cut, stands still, or hands on a few bytes at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final

_READ: Final = 65_536


class Wire:
    """A TCP port that hands all on to ``to`` on this machine, as long as it is whole.

    ``hold``: connections stay open and carry nothing, as behind a firewall that forgot them. ``cut``: they end, and
    new ones end at once. ``mend`` ends both. ``piece``: bytes that are handed on at once.
    """

    def __init__(self, to: int, piece: int = _READ) -> None:
        self.piece, self._to = piece, to
        self._open, self._whole, self._stop = threading.Event(), True, threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._open.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()
        for thread in list(self._threads):
            thread.join()

    def hold(self) -> None:
        self._open.clear()

    def cut(self) -> None:
        self._whole = False
        self._end_all()

    def mend(self) -> None:
        self._whole = True
        self._open.set()

    def _end_all(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if not self._whole:
                    raise ConnectionError("the wire is cut")
                far = socket.create_connection(("127.0.0.1", self._to), 5)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends += [near, far]
            left = [2]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(one, other, left), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ):
                self._open.wait()
                for place in range(0, len(data), self.piece):
                    sink.sendall(data[place : place + self.piece])
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            last = not left[0]
        if last:
            source.close()
            sink.close()
