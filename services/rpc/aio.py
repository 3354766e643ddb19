"""The asyncio client, for one event loop."""

from __future__ import annotations

import asyncio
from typing import Final

import zmq
import zmq.asyncio

from services.rpc.calls import Calls, ClientCounts, Outgoing
from services.rpc.client import MAX_PEERS, SEND_QUEUE, configure
from services.rpc.codec import Buffer, Failure, Reply
from services.rpc.connections import Refusal
from services.rpc.errors import NoAnswer, QueueFull, RemoteFailure
from services.rpc.security import Security

_CLOSED: Final = "the connection was closed"


class _Peer:
    """One connection, the task that reads from it, and the calls that wait for it."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, calls: Calls, security: Security | None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        configure(self.socket, security)
        self.refusal = Refusal(context, self.socket, address)
        self.socket.connect(f"tcp://{address}")
        self.waiting: dict[int, asyncio.Future[Reply | Failure]] = {}
        self._address, self._calls = address, calls
        self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"rpc-{address}")

    async def _read(self) -> None:
        while True:
            received = await self.socket.recv_multipart(copy=False)
            frames: list[Buffer] = [frame.buffer for frame in received]
            answer = self._calls.receive(self._address, frames)
            waiting = None if answer is None else self.waiting.pop(answer.id, None)
            if answer is not None and waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def close(self) -> None:
        self._reader.cancel()
        self.refusal.close()
        self.socket.close()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(NoAnswer(f"{self._address}: {_CLOSED}"))
        self.waiting.clear()


class AsyncRpcClient:
    """Asyncio calls to any number of peers, addressed as ``HOST:PORT``; several may be open to one.

    Without ``security`` calls travel in the clear, and reach only servers that ask for no keys.
    """

    def __init__(self, security: Security | None = None) -> None:
        self._security = security
        self._calls = Calls()
        self._context = zmq.asyncio.Context()
        self._peers: dict[str, _Peer] = {}

    @property
    def counts(self) -> ClientCounts:
        """What was sent, answered, late and malformed so far."""
        return self._calls.counts

    async def call(self, address: str, outgoing: Outgoing, timeout_s: float) -> Reply:
        """The reply to ``outgoing`` from ``address``.

        Raises NoAnswer after ``timeout_s`` or when the connection is closed, RemoteFailure if the peer
        answered with an error, QueueFull if too much waits for it, MessageTooLarge.
        """
        peer = self._peer(address)
        call, frames = self._calls.begin(address, outgoing, timeout_s)
        future: asyncio.Future[Reply | Failure] = asyncio.get_running_loop().create_future()
        peer.waiting[call] = future
        try:
            async with asyncio.timeout(timeout_s):
                await peer.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                answer = await future
        except TimeoutError:
            why = peer.refusal.why()
            raise NoAnswer(f"{address}: {why or f'no answer within {timeout_s:g} s'}") from None
        except zmq.Again as error:
            raise QueueFull(f"{address}: {SEND_QUEUE} messages wait to be sent") from error
        finally:
            self._calls.give_up(call)
            peer.waiting.pop(call, None)
        if isinstance(answer, Failure):
            raise RemoteFailure(answer.code, answer.message)
        return answer

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.pop(address, None)
        if peer is None:
            while len(self._peers) >= MAX_PEERS:
                self._peers.pop(next(iter(self._peers))).close()
            peer = _Peer(self._context, address, self._calls, self._security)
        self._peers[address] = peer
        return peer

    def forget(self, address: str) -> None:
        """Close the connection to ``address``; calls that wait for it end with NoAnswer."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Close all connections; open calls end with NoAnswer."""
        while self._peers:
            self._peers.popitem()[1].close()
        self._context.term()
