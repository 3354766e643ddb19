"""How many values two parties have in common, as the last step of a longer run: Diffie-Hellman for a count alone.

It has no checkpoints of its own: others who take part in the longer run could not know where they are. After a restart
it begins anew, with other masks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from federated.psi.ecdh import ecdh
from federated.psi.ids import Ids, Named
from federated.psi.members import MemoryMembers
from federated.psi.terms import Found, Terms
from federated.vertical.parties import Checkpoint, Draw, Effect, Incoming, Role, Workers


def count_common(
    peer: str, values: Sequence[bytes], terms: Terms, *, first: bool, draw: Draw, workers: Workers
) -> Generator[Effect, Incoming | None, int | None]:
    """How many of ``values`` (different) the peer has, too; None for a party that does not learn it. Raises PeerFault.

    ``terms``: of the run that this ends, whose budget was spent before.
    """
    none = Named(0, ())
    ids = Ids(list(values), np.arange(len(values)), none, none)
    inner = replace(terms, wants="count", budget=None)
    role = ecdh(peer, partial(MemoryMembers, ids), inner, first=first, draw=draw, workers=workers)
    found = yield from _without_checkpoints(role)
    return found.count


def _without_checkpoints(role: Role[Found]) -> Role[Found]:
    answer: Incoming | None = None
    try:
        while True:
            effect = role.send(answer)
            answer = None if isinstance(effect, Checkpoint) else (yield effect)
    except StopIteration as end:
        found: Found = end.value
        return found
    finally:
        role.close()
