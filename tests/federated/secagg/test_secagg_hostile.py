"""A server that breaks the protocol is refused by name and learns nothing more; a client that does is named, and the
others go on where they can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.secagg import inputs, plain_sum, plan

from federated.secagg import messages as wire
from federated.secagg.client import Client, Identity, ServerCheats
from federated.secagg.keys import Registrar, SigningKey
from federated.secagg.local import Local, Outcome, enrol
from federated.secagg.messages import (
    Advertisement,
    Choice,
    Consent,
    Delivery,
    Message,
    Neighbours,
    Roster,
    RosterEntry,
    Sharing,
    Signatures,
    Survivors,
    Unmasking,
    bitmap,
    read_as,
    read_message,
)
from federated.secagg.roster import Context
from federated.secagg.settings import Plan
from federated.secagg.stages import Stage

CLIENTS = 9
VICTIM = "client-2"
Change = Callable[[Message], Message]


def of(protocol: str = "secagg", malicious: bool = False) -> Plan:
    if protocol == "secagg":
        return plan("secagg", malicious, clients=CLIENTS, length=6, threshold=5, colluding=0.2, dropouts=0.1)
    return plan(
        "secagg+",
        malicious,
        clients=CLIENTS,
        length=6,
        neighbours=6,
        threshold=5,
        colluding=0.0,
        dropouts=0.1,
    )


def cheat(
    on: Plan, kind: type[Message], change: Change, victims: tuple[str, ...] = (VICTIM,), gone: int = 0
) -> tuple[Outcome, Local]:
    """An iteration whose server changes what it sends to ``victims``."""

    def touch(client: str, stage: Stage, body: bytes) -> bytes:
        read = read_message(body)
        return change(read).to_bytes() if client in victims and isinstance(read, kind) else body

    given = inputs(on)
    gone_names = [name for name in reversed(given) if name not in victims][:gone]
    local = Local(on, given, dict.fromkeys(gone_names, Stage.MASKED), touch=touch, keep_messages=True)
    return local.run(), local


def entry_of(roster: Roster | Neighbours, position: int) -> RosterEntry:
    return next(entry for entry in roster.entries if entry.position == position)


def swapped(roster: Message, position: int, **changed: object) -> Message:
    """The roster with another advertisement at ``position``."""
    assert isinstance(roster, (Roster, Neighbours))
    entries = tuple(
        replace(entry, advertisement=replace(entry.advertisement, **changed))  # type: ignore[arg-type]
        if entry.position == position
        else entry
        for entry in roster.entries
    )
    return replace(roster, entries=entries)


def some_neighbour(roster: Message) -> int:
    assert isinstance(roster, (Roster, Neighbours))
    return next(entry.position for entry in roster.entries if entry.name != VICTIM)


FOREIGN = Registrar()


def self_certified(roster: Message) -> Message:
    key = SigningKey()
    assert isinstance(roster, Roster)
    name = entry_of(roster, 0).name
    certificate = FOREIGN.certify("local", name, key.public)
    return swapped(roster, 0, signing=key.public, certificate=certificate.signature)


def replayed(roster: Message) -> Message:
    """Another round's keys of the others, properly signed then."""
    assert isinstance(roster, Roster)
    entry = entry_of(roster, 0)
    registrar = Registrar()
    identity = enrol("local", {entry.name: 0}, registrar)[entry.name]
    before = Client(
        of(malicious=True), Context("local", 0), entry.name, identity, registrar.public
    ).advertise()
    old = read_as(Advertisement, before)
    return swapped(roster, 0, sealing=old.sealing, masking=old.masking)


def without(roster: Message, *positions: int) -> Message:
    assert isinstance(roster, (Roster, Neighbours))
    return replace(roster, entries=tuple(e for e in roster.entries if e.position not in positions))


def shrunk(roster: Message) -> Message:
    assert isinstance(roster, Roster)
    few = tuple(replace(e, position=p) for p, e in enumerate(roster.entries[:3]))
    return Roster(3, 2, (), few)


def named_twice(roster: Message) -> Message:
    assert isinstance(roster, Roster)
    entries = list(roster.entries)
    entries[5] = replace(entries[5], name=entries[4].name)
    return replace(roster, entries=tuple(entries))


def moved(roster: Message) -> Message:
    assert isinstance(roster, Roster)
    return replace(roster, position=(roster.position + 1) % roster.clients)


def other_graph(roster: Message) -> Message:
    """Someone who is no neighbour in the place of one who is."""
    assert isinstance(roster, Roster)
    there = [entry.position for entry in roster.entries]
    stranger = next(p for p in range(roster.clients) if p not in (*there, roster.position))
    entries = [replace(roster.entries[0], position=stranger), *roster.entries[1:]]
    return replace(roster, entries=tuple(sorted(entries, key=lambda entry: entry.position)))


def chosen_by_server(roster: Message) -> Message:
    assert isinstance(roster, Roster)
    advertisement = Advertisement(bytes(32), bytes(range(32)), bytes(32), bytes(64), bytes(64))
    return replace(roster, entries=(RosterEntry(0, "client-0", advertisement),))


def without_leaf(roster: Message) -> Message:
    assert isinstance(roster, Roster)
    return replace(roster, leaves=())


def leaf_twice(roster: Message) -> Message:
    assert isinstance(roster, Roster)
    leaves = list(roster.leaves)
    leaves[0] = leaves[1]
    return replace(roster, leaves=tuple(leaves))


ROSTERS = [
    ("secagg", False, lambda r: swapped(r, r.position, sealing=bytes(range(32))), "own_key"),
    ("secagg", False, lambda r: swapped(r, 0, masking=bytes(32)), "bad_sealed"),
    ("secagg", False, lambda r: swapped(r, 0, sealing=bytes(32)), "bad_key"),
    ("secagg", False, lambda r: swapped(r, 0, masking=entry_of(r, 1).advertisement.masking), "duplicate_key"),
    ("secagg", False, lambda r: swapped(r, 0, sealing=entry_of(r, 0).advertisement.masking), "duplicate_key"),
    ("secagg", False, lambda r: swapped(r, 0, masking=bytes(range(32))), "bad_sealed"),
    ("secagg", False, named_twice, "duplicate_name"),
    ("secagg", False, shrunk, "roster_size"),
    ("secagg", False, lambda r: without(r, 0), "roster_size"),
    ("secagg", False, moved, "own_key"),
    ("secagg", True, lambda r: swapped(r, 0, masking=bytes(range(32))), "bad_signature"),
    ("secagg", True, replayed, "bad_signature"),
    ("secagg", True, self_certified, "bad_certificate"),
    ("secagg", True, lambda r: swapped(r, 0, signing=b"", certificate=b"", signature=b""), "unsigned_key"),
    ("secagg", True, lambda r: swapped(r, 0, signature=bytes(64)), "bad_signature"),
    ("secagg+", False, other_graph, "graph"),
    ("secagg+", False, lambda r: without(r, some_neighbour(r)), "graph"),
    ("secagg+", False, lambda r: swapped(r, some_neighbour(r), masking=bytes(range(32))), "changed_leaf"),
    ("secagg+", False, without_leaf, "roster_size"),
    ("secagg+", True, leaf_twice, "duplicate_name"),
    ("secagg+", True, chosen_by_server, "graph"),
    ("secagg+", True, moved, "own_key"),
]


@pytest.mark.parametrize(("protocol", "malicious", "change", "rule"), ROSTERS)
def test_a_changed_roster(protocol: str, malicious: bool, change: Change, rule: str) -> None:
    found, local = cheat(of(protocol, malicious), Roster, change)
    assert found.stopped[VICTIM] == rule
    # It has said nothing since it advertised; where nothing is signed, another roster than the others' is found out by
    # their shares, which are sealed for theirs.
    said = {stage for name, stage, _ in local.transcript.messages if name == VICTIM}
    assert said == ({Stage.ADVERTISE, Stage.SHARE} if rule == "bad_sealed" else {Stage.ADVERTISE})


def chosen_by_itself(read: Message) -> Message:
    assert isinstance(read, Neighbours)
    return replace(read, choosers=tuple(range(read.clients)))


NEIGHBOURS = [
    (chosen_by_itself, "graph"),
    (lambda r: replace(r, clients=r.clients + 1), "changed_roster"),
    (lambda r: without(r, some_neighbour(r)), "graph"),
    (lambda r: swapped(r, some_neighbour(r), sealing=bytes(range(32))), "changed_leaf"),
]


@pytest.mark.parametrize(("change", "rule"), NEIGHBOURS)
def test_changed_neighbours(change: Change, rule: str) -> None:
    found, _ = cheat(of("secagg+", True), Neighbours, change)
    assert found.stopped[VICTIM] == rule


def tampered(read: Message) -> Message:
    assert isinstance(read, Delivery)
    return replace(read, sealed=tuple(body[:-1] + bytes([body[-1] ^ 1]) for body in read.sealed))


def exchanged(read: Message) -> Message:
    assert isinstance(read, Delivery)
    return replace(read, sealed=(*read.sealed[1:], read.sealed[0]))


def set_of(read: Message, *positions: int) -> Message:
    bits = bitmap(positions, CLIENTS)
    if isinstance(read, Delivery):
        return replace(read, shared=bits)
    assert isinstance(read, Survivors)
    return Survivors(bits)


DELIVERIES = [
    (tampered, "bad_sealed"),
    (exchanged, "bad_sealed"),
    (lambda r: replace(r, sealed=r.sealed[1:]), "wrong_delivery"),
    (lambda r: set_of(r, 0, 2), "too_few_sharers"),
    (lambda r: set_of(r, *(p for p in range(CLIENTS) if p != 2)), "not_among_sharers"),
]


@pytest.mark.parametrize("malicious", [False, True])
@pytest.mark.parametrize(("change", "rule"), DELIVERIES)
def test_a_changed_delivery(malicious: bool, change: Change, rule: str) -> None:
    found, local = cheat(of(malicious=malicious), Delivery, change)
    assert found.stopped[VICTIM] == rule
    assert Stage.MASKED not in {stage for name, stage, _ in local.transcript.messages if name == VICTIM}


def test_a_device_is_not_told_that_its_neighbours_vanished_while_they_open_its_mask() -> None:
    """The victim is told that strangers alone have shared, so that its own mask would be the only one on its vector;
    its holders are told nothing of it, and their shares of that mask's seed come back as from every survivor's."""
    on = plan("secagg+", True, clients=40, length=6, neighbours=12, colluding=0.0, dropouts=0.0)
    holders = set[int]()

    def twist(client: str, stage: Stage, body: bytes) -> bytes:
        if client == VICTIM and stage is Stage.CHOOSE:
            holders.update(read_as(Choice, body).holders)
        return body

    def touch(client: str, stage: Stage, body: bytes) -> bytes:
        read = read_message(body)
        if client == VICTIM and isinstance(read, Neighbours):
            entries = tuple(entry for entry in read.entries if entry.position in holders)
            return replace(read, choosers=(), entries=entries).to_bytes()
        if client == VICTIM and isinstance(read, Delivery):
            strangers = set(range(on.most)) - holders
            assert len(strangers) >= on.least
            return Delivery(bitmap(sorted(strangers), on.most), ()).to_bytes()
        return body

    local = Local(on, inputs(on), touch=touch, twist=twist, keep_messages=True)
    found = local.run()
    assert found.stopped == {VICTIM: "too_few_holders"}
    assert Stage.MASKED not in {stage for name, stage, _ in local.transcript.messages if name == VICTIM}
    assert found.total is not None
    assert VICTIM not in found.survivors


SURVIVORS = [
    (lambda r: set_of(r, 0, 2), "too_few_survivors"),
    (lambda r: set_of(r, *(p for p in range(CLIENTS - 1) if p != 2)), "not_a_survivor"),
    (lambda r: set_of(r, *range(CLIENTS)), "survivor_never_shared"),
]


@pytest.mark.parametrize("malicious", [False, True])
@pytest.mark.parametrize(("change", "rule"), SURVIVORS)
def test_wrong_survivors(malicious: bool, change: Change, rule: str) -> None:
    on, given = of(malicious=malicious), inputs(of(malicious=malicious))

    def touch(client: str, stage: Stage, body: bytes) -> bytes:
        read = read_message(body)
        return change(read).to_bytes() if client == VICTIM and isinstance(read, Survivors) else body

    # client-8 never shares.
    local = Local(on, given, {"client-8": Stage.SHARE}, touch=touch, keep_messages=True)
    found = local.run()
    assert found.stopped[VICTIM] == rule
    last = max(stage for name, stage, _ in local.transcript.messages if name == VICTIM)
    assert last is Stage.MASKED


# Consistency: two groups are told different survivors.


def splits(
    on: Plan, told_otherwise: tuple[str, ...], forge: Callable[[Message], Message] | None = None
) -> Local:
    """The server says that client-0 dropped out, to some, and forwards the signatures that it has."""
    given = inputs(on)

    def touch(client: str, stage: Stage, body: bytes) -> bytes:
        read = read_message(body)
        if isinstance(read, Survivors) and client in told_otherwise:
            return Survivors(bitmap(range(1, CLIENTS), CLIENTS)).to_bytes()
        if isinstance(read, Signatures) and forge is not None:
            return forge(read).to_bytes()
        return body

    return Local(on, given, touch=touch, keep_messages=True)


def test_a_split_view_opens_no_share() -> None:
    on = of(malicious=True)
    names = list(inputs(on))
    local = splits(on, tuple(names[5:]))
    # The server checks signatures before it forwards them; a hostile one does not.
    local_desk = local.desk

    def lenient():  # type: ignore[no-untyped-def]
        desk = local_desk()
        filled = desk._filled

        def without_check(header):  # type: ignore[no-untyped-def]
            board = filled(header)
            board.check = lambda stage, position, body: None  # type: ignore[method-assign]
            return board

        desk._filled = without_check  # type: ignore[method-assign]
        return desk

    local.desk = lenient  # type: ignore[method-assign]
    found = local.run()
    assert found.total is None
    # client-0 signed, too, but is no survivor to some.
    assert set(found.stopped.values()) == {"changed_survivors", "foreign_signature"}
    assert set(found.stopped) == set(names)
    assert Stage.UNMASK not in {stage for _, stage, _ in local.transcript.messages}


def test_a_split_view_whose_other_half_is_left_out_lacks_signatures() -> None:
    on = of(malicious=True)
    names = list(inputs(on))
    local = splits(on, (), lambda s: replace(s, signatures=s.signatures[: on.threshold - 1]))
    found = local.run()
    assert set(found.stopped) == set(names)
    assert set(found.stopped.values()) == {"too_few_signatures"}


def test_forged_and_foreign_signatures() -> None:
    on = of(malicious=True)

    def forge(read: Message) -> Message:
        assert isinstance(read, Signatures)
        return Signatures(tuple((position, bytes(64)) for position, _ in read.signatures))

    assert set(splits(on, (), forge).run().stopped.values()) == {"changed_survivors"}

    def own(read: Message) -> Message:
        """Each reader's own name among those who vouch: of nine clients, it is the one who is missing."""
        assert isinstance(read, Signatures)
        missing = next(p for p in range(CLIENTS) if p not in {position for position, _ in read.signatures})
        return Signatures(tuple(sorted((*read.signatures, (missing, bytes(64))))))

    assert set(splits(on, (), own).run().stopped.values()) == {"foreign_signature"}


def test_both_shares_are_never_given() -> None:
    """Whatever a server asks after the first set of survivors, the client answers the same or stops."""
    for malicious in (False, True):
        on = of(malicious=malicious)
        local = Local(on, inputs(on), {"client-8": Stage.MASKED})
        local.run()
        # All have answered, and all secrets are gone.
        client = local.clients[VICTIM]
        first = client._answers[Survivors][1]
        assert client.receive(Survivors(bitmap(range(8), CLIENTS)).to_bytes()) == first
        with pytest.raises(ServerCheats, match="changed_request"):
            client.receive(Survivors(bitmap(range(7), CLIENTS)).to_bytes())


@pytest.mark.parametrize(
    "message",
    [
        Survivors(bitmap(range(CLIENTS), CLIENTS)),
        Signatures(()),
        Delivery(bitmap(range(CLIENTS), CLIENTS), ()),
        Neighbours(CLIENTS, (), ()),
        Unmasking(()),
    ],
)
def test_messages_out_of_order(message: Message) -> None:
    on = of()
    client = Client(on, Context("local", 1), VICTIM)
    client.advertise()
    with pytest.raises(ServerCheats, match="out_of_order"):
        client.receive(message.to_bytes())
    assert client.stage is Stage.FAILED
    with pytest.raises(RuntimeError, match="its secrets are gone"):
        client.mask(np.zeros(on.length, np.int64))


def test_survivors_before_the_vector_was_sent() -> None:
    on = of()
    local = Local(on, inputs(on))
    local.desk().create(0.0, CLIENTS)
    for name in local.inputs:
        local._begin(name)
    for stage in (Stage.ADVERTISE, Stage.SHARE):
        local.answer(stage)
    delivery = local.desk().download(VICTIM, Stage.MASKED, 0.0)
    assert isinstance(delivery, bytes)
    client = local.clients[VICTIM]
    assert client.receive(delivery) is None
    with pytest.raises(ServerCheats, match="out_of_order"):
        client.receive(Survivors(bitmap(range(CLIENTS), CLIENTS)).to_bytes())


def test_another_rounds_messages_open_nothing() -> None:
    """What was sealed in another iteration, between the same clients with the same keys."""
    on, given = of(), inputs(of())

    def fixed(name: str) -> Callable[[int], bytes]:
        draws = np.random.default_rng(list(given).index(name))
        return lambda count: draws.bytes(count)

    kept: dict[str, bytes] = {}

    def keep(client: str, stage: Stage, body: bytes) -> bytes:
        if stage is Stage.MASKED:
            kept[client] = body
        return body

    draws = {name: fixed(name) for name in given}
    assert Local(on, given, context=Context("job", 1), draws=draws, touch=keep).run().total is not None

    def replay(client: str, stage: Stage, body: bytes) -> bytes:
        return kept[client] if stage is Stage.MASKED else body

    draws = {name: fixed(name) for name in given}
    found = Local(on, given, context=Context("job", 2), draws=draws, touch=replay).run()
    assert set(found.stopped.values()) == {"bad_sealed"}


@pytest.mark.parametrize("protocol", ["secagg", "secagg+"])
def test_a_model_that_one_client_alone_was_given_leaves_the_masks_on(protocol: str) -> None:
    """A server that knows what the others send for a model of its choice would read the victim's values from the sum;
    it learns nothing, whichever model it takes the masks of the dropped for."""
    on = of(protocol, True)
    given = inputs(on)
    victims = given[VICTIM].copy()
    for name in given:
        given[name] = victims if name == VICTIM else np.zeros_like(victims)
    gone = {"client-7": Stage.MASKED} if protocol == "secagg" else {}
    for one, reads in ((b"same", True), (b"other", False)):
        local = Local(on, given, gone)
        local.desk().create(0.0, on.most)
        for name in given:
            local._begin(name)
        for name, client in local.clients.items():
            about = one if name == VICTIM else b"same"
            client.mask = partial(client.mask, about=about)  # type: ignore[method-assign]
        for stage in on.stages:
            local.answer(stage)
        desk, total = local.desk(), on.ring.zeros(on.length)
        for name in desk.survivors():
            on.ring.add_into(total, on.ring.unpack(desk.masked(name), on.length))
        found = [on.ring.signed(desk.reveal(total, about=about).words) for about in (b"same", b"other")]
        assert (found[0] == victims).all() == reads
        assert reads or not (found[1] == victims).any()


def test_a_malicious_plan_needs_identities() -> None:
    with pytest.raises(ValueError, match="needs its identity"):
        Client(of(malicious=True), Context("local", 1), VICTIM)


# Hostile clients.


def misbehaves(
    on: Plan, stage: Stage, change: Callable[[bytes], bytes], who: str = VICTIM
) -> tuple[Outcome, Local]:
    def twist(client: str, at: Stage, body: bytes) -> bytes:
        return change(body) if (client, at) == (who, stage) else body

    local = Local(on, inputs(on), twist=twist)
    return local.run(), local


def refused(local: Local, who: str = VICTIM) -> str:
    reply = local.refused[who]
    assert reply.code == "bad_message"
    return reply.reason.split(":")[0]


def changed(kind: type[Message], change: Change) -> Callable[[bytes], bytes]:
    return lambda body: change(read_as(kind, body)).to_bytes()


BAD = [
    (False, Stage.ADVERTISE, lambda body: body[:-1], "malformed"),
    (False, Stage.ADVERTISE, changed(Advertisement, lambda a: replace(a, masking=bytes(32))), "bad_key"),
    (False, Stage.ADVERTISE, changed(Advertisement, lambda a: replace(a, masking=a.sealing)), "bad_key"),
    (True, Stage.ADVERTISE, changed(Advertisement, lambda a: Advertisement(a.sealing, a.masking)), "signed"),
    (
        True,
        Stage.ADVERTISE,
        changed(Advertisement, lambda a: replace(a, signature=bytes(64))),
        "bad_signature",
    ),
    (
        True,
        Stage.ADVERTISE,
        changed(Advertisement, lambda a: replace(a, certificate=bytes(64))),
        "bad_signature",
    ),
    (False, Stage.SHARE, changed(Sharing, lambda s: replace(s, sealed=s.sealed[1:])), "holders"),
    (False, Stage.SHARE, lambda body: Consent(bytes(64)).to_bytes(), "malformed"),
    (False, Stage.MASKED, lambda body: body + b"\0", "malformed"),
    (False, Stage.MASKED, lambda body: body[:-1], "malformed"),
    (True, Stage.CONSISTENT, changed(Consent, lambda c: Consent(bytes(64))), "bad_signature"),
    (False, Stage.UNMASK, changed(Unmasking, lambda u: Unmasking(u.shares[1:])), "shares"),
    (False, Stage.UNMASK, changed(Unmasking, lambda u: Unmasking((b"\xfe" * 33, *u.shares[1:]))), "shares"),
]


@pytest.mark.parametrize(("malicious", "stage", "change", "rule"), BAD)
def test_a_wrong_message_is_refused_and_the_rest_goes_on(
    malicious: bool, stage: Stage, change: Callable[[bytes], bytes], rule: str
) -> None:
    found, local = misbehaves(of(malicious=malicious), stage, change)
    assert refused(local) == rule
    assert found.total is not None
    assert found.stopped == {}
    assert (VICTIM in found.survivors) is (stage > Stage.MASKED)
    assert (found.total == plain_sum(local.inputs, found.survivors)).all()


@pytest.mark.parametrize(
    "holders", [(0, 1, 3, 4, 5), (0, 1, 2, 3, 4, 5), (0, 1, 3, 4, 5, 9), (0, 1, 3, 4, 5, 6, 7)]
)
def test_a_choice_is_of_as_many_others_as_planned(holders: tuple[int, ...]) -> None:
    found, local = misbehaves(of("secagg+", True), Stage.CHOOSE, lambda body: Choice(holders).to_bytes())
    assert refused(local) == "choice"
    assert VICTIM not in found.survivors


def test_another_clients_id_needs_its_certificate() -> None:
    on = of(malicious=True)
    given, registrar = inputs(on), Registrar()
    identities = enrol("local", given, registrar)
    identities[VICTIM] = identities["client-3"]  # client-3 under client-2's name
    local = Local(on, given, identities=identities, registrar=registrar.public)
    found = local.run()
    assert refused(local) == "bad_signature"
    assert found.total is not None
    # A certificate of its own for another name does not help either.
    mine = SigningKey()
    other = Identity(mine, registrar.certify("local", "mallory", mine.public))
    identities[VICTIM] = other
    local = Local(on, given, identities=identities, registrar=registrar.public)
    local.run()
    assert refused(local) == "bad_signature"


def test_keys_of_another_client_are_refused() -> None:
    on = of()
    first: list[bytes] = []

    def twist(client: str, stage: Stage, body: bytes) -> bytes:
        if stage is Stage.ADVERTISE:
            first.append(body)
            return first[0] if client == VICTIM else body
        return body

    local = Local(on, inputs(on), twist=twist)
    found = local.run()
    assert local.refused[VICTIM].code == "duplicate_key"
    assert found.total is not None
    assert len(found.survivors) == CLIENTS - 1


def wrong_shares(body: bytes) -> bytes:
    shares = read_as(Unmasking, body).shares
    return Unmasking(tuple(bytes(32) + bytes([number]) for number, _ in enumerate(shares))).to_bytes()


@pytest.mark.parametrize("protocol", ["secagg", "secagg+"])
@pytest.mark.parametrize("gone", [False, True])
def test_wrong_shares_are_found_out_and_named(protocol: str, gone: bool) -> None:
    on = of(protocol)
    dropouts = {"client-8": Stage.MASKED} if gone and protocol == "secagg" else {}
    liars = ("client-0", "client-4") if protocol == "secagg" else ("client-4",)

    def twist(client: str, stage: Stage, body: bytes) -> bytes:
        return wrong_shares(body) if stage is Stage.UNMASK and client in liars else body

    local = Local(on, inputs(on), dropouts, twist=twist)
    found = local.run()
    assert found.total is not None
    assert found.liars == liars
    assert (found.total == plain_sum(local.inputs, found.survivors)).all()


def test_many_liars_together_cost_nothing_but_time() -> None:
    """Hardly a set of shares is free of them: the shares are decoded."""
    on = plan("secagg", False, clients=30, length=4, colluding=0.1, dropouts=0.1, threshold=17)
    liars = tuple(f"client-{number}" for number in range(0, 30, 5))
    assert len(liars) == (on.degree - on.threshold) // 2

    def twist(client: str, stage: Stage, body: bytes) -> bytes:
        if stage is not Stage.UNMASK or client not in liars:
            return body
        return Unmasking(
            tuple(bytes([0, share[1] ^ 1]) + share[2:] for share in read_as(Unmasking, body).shares)
        ).to_bytes()

    given = inputs(on)
    found = Local(on, given, twist=twist).run()
    assert found.total is not None
    assert (found.total == plain_sum(given, given)).all()
    assert sorted(found.liars) == sorted(liars)


def test_a_client_that_dealt_wrong_shares_is_named_when_the_sum_is_lost() -> None:
    on = of()
    local = Local(on, inputs(on), draws={})
    local.twist = lambda client, stage, body: (
        changed(Sharing, lambda s: replace(s, commitment=bytes(32)))(body)
        if (client, stage) == (VICTIM, Stage.SHARE)
        else body
    )
    found = local.run()
    assert found.total is None
    assert found.reason.startswith(f"8 shares of {VICTIM}'s secret came back of 8")


def test_rubbish_sealed_for_a_few_neighbours_is_passed_over() -> None:
    on = of()
    assert on.colluding == 1

    def rubbish(read: Message) -> Message:
        assert isinstance(read, Sharing)
        return replace(read, sealed=(bytes(wire.SEALED_BYTES),) * 2 + read.sealed[2:])

    found, local = misbehaves(on, Stage.SHARE, changed(Sharing, rubbish))
    assert found.stopped == {}
    assert found.total is not None
    assert (found.total == plain_sum(local.inputs, local.inputs)).all()
    assert found.unread == (VICTIM,)
