"""One connection through a link: two sockets, and in each direction bytes that are read, held and written on.

Sockets are used directly and not as asyncio's transports: what is read is bounded before it is read, and a
connection can be broken as a network breaks it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from services.wan.shaper import End, Shaper

_TURNS: Final = 32
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Clock(Protocol):
    """The link's own time: it stands still while nothing passes."""

    loop: asyncio.AbstractEventLoop
    partitioned: bool

    def now_s(self) -> float: ...

    def call_at(self, when_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle: ...


class Direction:
    """One direction of a link: when its bytes pass, and who waits for room in it."""

    def __init__(self, clock: Clock, shaper: Shaper) -> None:
        self.clock, self.shaper = clock, shaper
        self.waiting: deque[Half] = deque()
        self._giving = False

    def give_turns(self) -> None:
        """Let those that wait for room send in turn, while there is room."""
        if self._giving or self.clock.partitioned:
            return
        self._giving = True
        try:
            for _ in range(_TURNS):
                if not self.waiting or self.shaper.full:
                    return
                self.waiting.popleft().take_turn()
        finally:
            self._giving = False
        # The rest after the other connections' events.
        self.clock.loop.call_soon(self.give_turns)


class Half:
    """The bytes from one end to the other: ``source`` is read, ``sink`` written. Both are non-blocking."""

    def __init__(
        self, connection: Connection, direction: Direction, source: socket.socket, sink: socket.socket
    ) -> None:
        self._connection, self._direction = connection, direction
        self._clock, self._loop = direction.clock, direction.clock.loop
        self._source, self._sink = source, sink
        self._flow = direction.shaper.open()
        self._arrived: deque[bytes | memoryview | End] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._reading = self._writing = self._congested = False
        self._read_all = self._closed = False
        self.done = False
        """Whether the end of its bytes was passed on."""

    def start(self) -> None:
        """Begin to pass bytes; also after ``suspend``."""
        if self._closed:
            return
        self._write()
        self._arm()
        self._congested = self._congested and self._flow.congested
        if not (self._read_all or self._closed or self._congested or self in self._direction.waiting):
            self._read_when_ready()

    def suspend(self) -> None:
        """Pass nothing until ``start``; what is held stays."""
        self._stop_reading()
        self._stop_writing()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take_turn(self) -> None:
        """Take in what the source has, a quantum at most, if there is room."""
        if self._closed or self._read_all:
            return
        shaper = self._direction.shaper
        if self._flow.congested:
            self._stop_reading()
            self._congested = True
            return
        if shaper.full:
            self._wait_for_room()
            return
        try:
            received = self._source.recv(shaper.conditions.quantum_bytes)
        except BlockingIOError:
            self._read_when_ready()
            return
        except OSError:
            self.broke()
            return
        if not received:
            self._stop_reading()
            self._read_all = True
            self._send(End.EOF)
            return
        self._send(received)
        if self._direction.waiting:
            self._wait_for_room()
        else:
            self._read_when_ready()

    def broke(self) -> None:
        """The source is gone, not ended: its bytes end with a reset."""
        if self._closed:
            return
        self._stop_reading()
        self._read_all = True
        self._send(End.RESET)

    def _wait_for_room(self) -> None:
        self._stop_reading()
        if not self._closed and not self._read_all:
            self._direction.waiting.append(self)
            self._direction.give_turns()

    def _send(self, load: bytes | End) -> None:
        release_s = self._flow.send(load, self._clock.now_s())
        if self._timer is None:
            if release_s <= self._clock.now_s():
                self._arrive()
            else:
                self._arm()

    def _arm(self) -> None:
        due_s = self._flow.next_release_s
        if self._timer is None and due_s is not None and not self._closed:
            self._timer = self._clock.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._arrive()

    def _arrive(self) -> None:
        """Pass on what is due."""
        self._arrived.extend(self._flow.take(self._clock.now_s()))
        if not self._writing:
            self._write()
        self._arm()
        self._direction.give_turns()

    def _write(self) -> None:
        while self._arrived and not self._closed:
            load = self._arrived[0]
            if isinstance(load, End):
                self._arrived.popleft()
                self._pass_on(load)
                continue
            try:
                sent = self._sink.send(load)
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._sink, self._on_writable)
                return
            except OSError:
                self._connection.sink_broke(self)
                return
            self._flow.read(sent)
            if sent == len(load):
                self._arrived.popleft()
            else:
                self._arrived[0] = memoryview(load)[sent:]
        self._stop_writing()

    def _on_writable(self) -> None:
        self._write()
        if self._congested and not self._flow.congested:
            self._congested = False
            self._wait_for_room()
        self._direction.give_turns()

    def _pass_on(self, end: End) -> None:
        if end is End.RESET:
            self._connection.abort()
            return
        # Who is gone already needs no end.
        with suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        self.done = True
        self._connection.half_done()

    def _read_when_ready(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._source, self.take_turn)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._source)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sink)

    def close(self) -> None:
        """Give up what is held. The sockets are the connection's."""
        if not self._closed:
            self._closed = True
            self.suspend()
            self._arrived.clear()
            self._flow.close()
            with suppress(ValueError):
                self._direction.waiting.remove(self)
            if self._direction.waiting:
                self._loop.call_soon(self._direction.give_turns)


class Connection:
    """Both directions between ``client`` and ``target``; ``closed`` is called once."""

    def __init__(
        self,
        forward: Direction,
        back: Direction,
        client: socket.socket,
        target: socket.socket,
        closed: Callable[[Connection], None],
    ) -> None:
        self._sockets, self._on_closed, self._closed = (client, target), closed, False
        self._forward = Half(self, forward, client, target)
        self._back = Half(self, back, target, client)

    def start(self) -> None:
        """Begin, or after ``suspend`` go on, to pass bytes."""
        self._forward.start()
        self._back.start()

    def suspend(self) -> None:
        """Pass nothing, in neither direction, and notice nothing."""
        self._forward.suspend()
        self._back.suspend()

    def half_done(self) -> None:
        """The end of one direction's bytes was passed on."""
        if self._forward.done and self._back.done:
            self._close()

    def sink_broke(self, half: Half) -> None:
        """Whom ``half`` writes to is gone: its source is told, after the way back."""
        half.close()
        (self._back if half is self._forward else self._forward).broke()

    def abort(self) -> None:
        """Break it: both ends see a reset, and what is under way is lost."""
        if self._closed:
            return
        for one in self._sockets:
            reset_on_close(one)
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._forward.close()
        self._back.close()
        for one in self._sockets:
            one.close()
        self._on_closed(self)


def reset_on_close(sock: socket.socket) -> None:
    """Have ``close`` send a reset (RST) rather than an orderly end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
