"""What all parties of an iteration compute alike: names for what is sealed and signed, the roster's root, the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from federated.secagg import keys
from federated.secagg.graph import regular_graph
from federated.secagg.messages import COMMITMENT_BYTES, DIGEST_BYTES, TAG_BYTES, Advertisement
from federated.secagg.settings import Plan

CHOSEN_BY_MOST: Final = 3
"""A client is chosen by at most so many times the degree, plus ``CHOSEN_SPARE`` (Bell et al. 2020, section 5)."""
CHOSEN_SPARE: Final = 40


@dataclass(frozen=True, slots=True)
class Context:
    """Which job and iteration everything is for."""

    job: str
    iteration: int

    def of(self, purpose: str, sender: str, receiver: str = "") -> bytes:
        """Bytes that only what is for this purpose, in this iteration, between these two, is bound to."""
        return keys.context(purpose, self.job, self.iteration, sender, receiver)

    def pair(self, purpose: str, one: str, other: str) -> bytes:
        """The same for both sides."""
        return keys.pair_context(purpose, self.job, self.iteration, one, other)


def advertised(context: Context, name: str, advertisement: Advertisement) -> bytes:
    """What a client signs with its keys."""
    return context.of("advertise", name) + advertisement.sealing + advertisement.masking


def leaf(context: Context, name: str, advertisement: Advertisement) -> bytes:
    """A client's line in the roster, 48 bytes: a tag of its name, by which a name that stands twice is seen, and the
    digest of all it advertised."""
    who = context.of("roster", name)
    tag = hashlib.blake2b(who, digest_size=TAG_BYTES).digest()
    return tag + hashlib.blake2b(who + advertisement.to_bytes(), digest_size=DIGEST_BYTES).digest()


def root_of(context: Context, leaves: Sequence[bytes]) -> bytes:
    """The digest of the whole roster, 32 bytes: what is sealed and signed later holds for this roster alone."""
    return hashlib.blake2b(context.of("root", "") + b"".join(leaves), digest_size=DIGEST_BYTES).digest()


def commitment(context: Context, name: str, seed: bytes) -> bytes:
    """What a client says of the seed of its own mask. The seed has 256 random bits: the digest tells nothing of it."""
    return hashlib.blake2b(context.of("seed", name) + seed, digest_size=COMMITMENT_BYTES).digest()


def agreed(context: Context, name: str, root: bytes, shared: bytes, survivors: bytes) -> bytes:
    """What a client signs about who survived."""
    return context.of("survivors", name) + root + len(shared).to_bytes(2, "little") + shared + survivors


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A client's neighbours, ascending: ``holders`` get its shares, ``origins`` gave it theirs, ``partners`` (all of
    them) share a mask with it."""

    holders: tuple[int, ...]
    origins: tuple[int, ...]

    @property
    def partners(self) -> tuple[int, ...]:
        """Holders and origins."""
        return self.holders if self.holders == self.origins else tuple(sorted({*self.holders, *self.origins}))


def complete(clients: int, position: int) -> Neighbourhood:
    """Everybody else."""
    others = tuple(other for other in range(clients) if other != position)
    return Neighbourhood(others, others)


def regular(plan: Plan, clients: int, root: bytes) -> list[tuple[int, ...]]:
    """The neighbours of each client in the graph that the roster's root draws."""
    degree = plan.degree_of(clients)
    if degree == clients - 1:
        return [complete(clients, position).holders for position in range(clients)]
    rows = regular_graph(clients, degree, hashlib.blake2b(b"graph" + root, digest_size=32).digest())
    return [tuple(sorted(row)) for row in rows.tolist()]


def chosen(choices: Mapping[int, Sequence[int]], clients: int) -> dict[int, Neighbourhood]:
    """The neighbourhoods of those who chose: what they chose, without those who vanished before they had chosen, and
    who chose them."""
    origins: dict[int, list[int]] = {position: [] for position in choices}
    for position in sorted(choices):
        for holder in choices[position]:
            if holder in origins:
                origins[holder].append(position)
    return {
        position: Neighbourhood(tuple(sorted(choices[position])), tuple(origins[position]))
        for position in choices
    }
