"""What can go wrong between two of our processes.

Exceptions::

    RpcError
    ├── MalformedMessage     the peer's fault: frames that are not a message of this format
    ├── MessageTooLarge      our fault: a message beyond the bounds that every reader enforces
    ├── NoAnswer             nothing came before the deadline
    ├── QueueFull            too much waits to be sent to that peer already; nothing was sent
    ├── KeysError            our keys cannot be used; the message names the file and the next step
    └── RemoteFailure        the peer answered with an error code
"""

from __future__ import annotations


class RpcError(Exception):
    """A call between processes failed."""


class MalformedMessage(RpcError):
    """The frames are not a message that this version reads."""


class MessageTooLarge(RpcError):
    """The message exceeds what any peer would accept."""


class NoAnswer(RpcError):
    """No reply before the deadline. Whether the peer acted is unknown."""


class QueueFull(RpcError):
    """The bound on messages waiting for the peer is reached."""


class KeysError(RpcError):
    """Keys are missing, damaged, or do not belong together."""


class RemoteFailure(RpcError):
    """The peer answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}")
