"""Who our processes are to each other: CURVE key pairs, and how a socket takes them.

CURVE (CurveZMQ, ZMTP 3.1) encrypts a connection and proves both ends: a client names the server's public key
beforehand, a server asks for each client's public key whether it may come in (``gate.py``).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils import z85

from services.rpc.errors import KeysError

KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """A Curve25519 key pair, 32 bytes each. The secret is never shown."""

    public: bytes
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES or public_of(self.secret) != self.public:
            raise KeysError("a public and a secret key do not belong together")

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.hex()}, secret=**********)"

    @classmethod
    def generate(cls) -> KeyPair:
        """A new pair, from the system's randomness."""
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))


def public_of(secret: bytes) -> bytes:
    """The public key of ``secret`` [32 bytes]."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


@dataclass(frozen=True, slots=True)
class Security:
    """The keys of one deployment, as one process has them.

    ``server_public`` is what clients expect of every server; ``server`` is there only where servers run.
    ``allowed`` are the public keys of the clients that a server lets in.
    """

    server_public: bytes
    client: KeyPair
    server: KeyPair | None = None
    allowed: Container[bytes] = frozenset()

    def __post_init__(self) -> None:
        if self.server is not None and self.server.public != self.server_public:
            raise KeysError("the server's key pair is not the one that clients expect")

    def to_server(self, socket: zmq.Socket[Any]) -> None:
        """Make a listening ``socket`` prove itself and ask for proof. Raises KeysError without a key pair."""
        if self.server is None:
            raise KeysError("these keys are a client's alone: a server needs server.secret beside them")
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)

    def to_client(self, socket: zmq.Socket[Any]) -> None:
        """Make a ``socket`` that will connect prove itself and expect our servers."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)
