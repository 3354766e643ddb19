"""Tickets: proof that a client was admitted to an iteration, checked without asking the store; and coins, which decide
who may be."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

TICKET_BYTES = 16
_COIN = b"\xff\xffcoin"  # no job's name is as long as these bytes would say


@dataclass(frozen=True, slots=True)
class Tickets:
    """HMAC-SHA256 (RFC 2104), cut to 16 bytes, over (job, iteration, client) under the job's ``key``.

    ``key``: at least 32 bytes from the operating system, shared by the job's servers and nobody else.
    Raises ValueError on a shorter one.
    """

    job: str
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 32:
            raise ValueError(f"a job's key has at least 32 bytes, not {len(self.key)}")

    def issue(self, client: str, iteration: int) -> bytes:
        """The ticket of ``client`` for ``iteration``: the same each time."""
        # The lengths stand before the texts, so no two pairs of texts give one message.
        return self._digest(b"", client, iteration)[:TICKET_BYTES]

    def valid(self, ticket: bytes, client: str, iteration: int) -> bool:
        """Whether this job issued ``ticket`` for that client and iteration; compared in constant time."""
        if not 0 <= iteration < 2**63:
            return False
        return hmac.compare_digest(ticket, self.issue(client, iteration))

    def coin(self, client: str, iteration: int) -> float:
        """A number in [0, 1), a multiple of 2**-53, for ``client`` in ``iteration``: the same each time, and to whoever
        lacks the key uniform and independent of all others."""
        word = int.from_bytes(self._digest(_COIN, client, iteration)[:8], "little")
        return (word >> 11) * 2.0**-53

    def _digest(self, purpose: bytes, client: str, iteration: int) -> bytes:
        job = self.job.encode()
        message = len(job).to_bytes(2, "little") + job + iteration.to_bytes(8, "little") + client.encode()
        return hmac.digest(self.key, purpose + message, "sha256")
