"""What an edge hands to its parent: the sum of some uploads, and whose they are.

On the wire and in the store: the header's length (u32), the header (JSON), the sum's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from federated.rounds import Keys, Store, UploadRequest
from federated.sums import Sum, SumMismatch
from federated.wire import digest_of
from services.federation.hosted import HostedJob

MOST_MEMBERS: Final = 1_024
_MOST_HEADER: Final = MOST_MEMBERS * 600
_FORMAT: Final = 1


@dataclass(frozen=True)
class Batch:
    """A sum and the requests of those whose uploads are in it, all of one iteration. Their digest is the batch's."""

    members: tuple[UploadRequest, ...]
    total: Sum

    @property
    def iteration(self) -> int:
        """That its members started in."""
        return self.members[0].iteration

    @property
    def clients(self) -> tuple[str, ...]:
        """Who is in it, in the order of their slots."""
        return tuple(member.client for member in self.members)


def encode_batch(members: Sequence[UploadRequest], total: Sum) -> bytes:
    """The body of a batch."""
    rows = [[m.client, m.iteration, m.ticket.hex(), m.examples, m.steps, m.loss] for m in members]
    header = json.dumps({"format": _FORMAT, "members": rows}, separators=(",", ":")).encode()
    return len(header).to_bytes(4, "little") + header + total.to_bytes()


def decode_batch(body: bytes, job: HostedJob) -> Batch:
    """The batch in ``body``. Raises SumMismatch on anything that ``encode_batch`` does not make for this job."""
    length = int.from_bytes(body[:4], "little")
    if len(body) < 4 or length > _MOST_HEADER or 4 + length > len(body):
        raise SumMismatch("the batch is cut short")
    digest = digest_of(body)
    try:
        header = json.loads(body[4 : 4 + length])
        members = tuple(
            UploadRequest(
                str(client),
                int(iteration),
                bytes.fromhex(ticket),
                digest,
                int(examples),
                int(steps),
                float(loss),
            )
            for client, iteration, ticket, examples, steps, loss in header["members"]
        )
        if header["format"] != _FORMAT:
            raise SumMismatch(f"the batch is not of format {_FORMAT}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SumMismatch(f"the batch's header cannot be read: {error}") from None
    total = Sum.from_bytes(body[4 + length :], job.layout.size, job.bounds, job.vectors)
    batch = Batch(members, total)
    if not 1 <= len(members) <= MOST_MEMBERS or len(set(batch.clients)) != len(members):
        raise SumMismatch(
            f"{len(members)} members, or some twice: 1 to {MOST_MEMBERS} different ones were expected"
        )
    if len({member.iteration for member in members}) != 1:
        raise SumMismatch("the members are of different iterations")
    # Under a mechanism of privacy each counts as one, whatever it claimed: nobody's claim voids the others' sum.
    private = job.protection.section.mechanism != "none"
    examples = len(members) if private else sum(m.examples for m in members)
    if total.clients != len(members) or total.scalars["examples"] != examples:
        raise SumMismatch(
            f"a sum of {total.clients} uploads for {len(members)} members, or of other examples"
        )
    return batch


def batch_key(keys: Keys, started: int, digest: bytes) -> str:
    """Where a batch is kept."""
    return f"{keys.iteration(started)}sum/{digest.hex()}"


def load_batch(store: Store, job: HostedJob, started: int, digest: bytes) -> Batch | None:
    """A stored batch, None when there is none. Raises SumMismatch and StoreUnavailable."""
    body = store.get_blob(batch_key(job.keys, started, digest))
    return None if body is None else decode_batch(body, job)
