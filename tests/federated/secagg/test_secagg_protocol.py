"""The revealed sum is the plain sum of the survivors' inputs, bit for bit, whoever drops out and whenever."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secagg import VARIANTS, inputs, plain_sum, plan

from federated.rounds.store import MemoryStore
from federated.secagg.client import Client
from federated.secagg.desk import SecAggDesk
from federated.secagg.keys import Registrar
from federated.secagg.local import Local, enrol, run
from federated.secagg.masks import add_masks
from federated.secagg.roster import Context
from federated.secagg.server import SumLost
from federated.secagg.session import Refused, Session, Taken, Waiting
from federated.secagg.settings import Plan
from federated.secagg.stages import Stage


def crowd_plan(protocol: str, malicious: bool) -> Plan:
    """Of 20 a graph is sparse."""
    return plan(protocol, malicious, clients=20 if protocol == "secagg+" else 10)


@pytest.mark.parametrize(
    ("protocol", "malicious", "stage"),
    [(*variant, stage) for variant in VARIANTS for stage in crowd_plan(*variant).stages],
)
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_sum_of_the_survivors(protocol: str, malicious: bool, share: float, stage: Stage) -> None:
    of = crowd_plan(protocol, malicious)
    given = inputs(of)
    gone = dict.fromkeys(list(given)[1::3][: round(share * of.most)], stage)
    assert len(gone) == round(share * of.most)
    found = run(of, given, gone)
    assert found.reason == ""
    assert found.total is not None
    expected = [name for name in given if gone.get(name, Stage.DONE) > Stage.MASKED]
    assert sorted(found.survivors) == sorted(expected)
    assert (found.total == plain_sum(given, expected)).all()


@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
def test_nobody_drops_out(protocol: str, malicious: bool) -> None:
    of = crowd_plan(protocol, malicious)
    given = inputs(of)
    found = run(of, given)
    assert found.total is not None
    assert (found.total == plain_sum(given, given)).all()
    assert found.transcript.expansions == of.most  # one mask each: no pair's is left
    assert found.transcript.agreements == 0


@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
def test_who_vanished_after_its_upload_is_not_waited_for_once_every_secret_is_there(
    protocol: str, malicious: bool
) -> None:
    of = crowd_plan(protocol, malicious)
    given = inputs(of)
    local = Local(of, given)
    local.desk().create(0.0, of.most)
    for name in given:
        local._begin(name)
    for stage in of.stages[:-1]:
        local.answer(stage)
    names, window, waits = list(given), of.stage_window_s, dict[str, float | None]()
    for name in names[:-1]:  # the last one is dead
        desk = local.desk()
        answer = local._answer_of(desk, name, Stage.UNMASK)
        assert answer is not None
        assert desk.receive(name, Stage.UNMASK, answer, 1.0) == Taken()
        waits[name] = local.session.deadline(desk.header())
    assert waits[names[0]] == window  # one alone gives no secret
    assert waits[names[-2]] == pytest.approx(1.0 + window / 30)
    assert local.desk().tick(1.0 + window / 40).stage is Stage.UNMASK
    assert local.desk().tick(1.0 + window / 20).stage is Stage.REVEAL
    found = local.close()
    assert found.total is not None
    assert (found.total == plain_sum(given, given)).all()


@pytest.mark.parametrize("bits", [20, 32, 33, 47])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_two_extreme_sums(bits: int, sign: int) -> None:
    of = plan(clients=5, clip=float(2 ** (bits - 15)), step_bits=10, max_weight=1)
    assert of.ring.bits == bits - 1
    limit = sign * of.bound * of.max_weight
    found = run(of, {name: np.full(of.length, limit) for name in "abcde"})
    assert found.total is not None
    assert (found.total == 5 * limit).all()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
def test_any_pattern_of_dropouts_ends_right_or_not_at_all(protocol: str, malicious: bool, seed: int) -> None:
    draws = np.random.default_rng(seed)
    of = plan(protocol, malicious, clients=int(draws.integers(4, 9)), length=7, dropouts=0.2, colluding=0.0)
    given = inputs(of, seed=seed)
    rate = draws.choice([0.1, 0.3, 0.6])
    gone = {name: Stage(int(draws.integers(0, 6))) for name in given if draws.random() < rate}
    found = run(of, given, gone)
    if found.total is None:
        assert found.reason
        assert gone
    else:
        assert (found.total == plain_sum(given, found.survivors)).all()
        assert len(found.survivors) >= of.least


# Threshold, exactly.


@pytest.mark.parametrize(
    ("malicious", "last"), [(False, Stage.UNMASK), (True, Stage.UNMASK), (True, Stage.CONSISTENT)]
)
def test_the_threshold_is_enough_and_one_less_is_not(malicious: bool, last: Stage) -> None:
    of = plan(malicious=malicious, clients=8, threshold=6 if malicious else 4, dropouts=0.1)
    given = inputs(of)
    for remaining, enough in ((of.threshold + 1, True), (of.threshold, False)):
        gone = dict.fromkeys(list(given)[remaining:], last)
        found = run(of, given, gone)
        assert (found.total is not None) is enough
        if enough:
            assert (found.total == plain_sum(given, given)).all()
        else:
            assert f"{of.threshold + 1} are needed" in found.reason


@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
def test_a_sum_that_many_must_be_in_is_opened_by_fewer(protocol: str, malicious: bool) -> None:
    of = replace(crowd_plan(protocol, malicious), least=crowd_plan(protocol, malicious).most)
    given = inputs(of)
    last = Stage.CONSISTENT if malicious else Stage.UNMASK
    found = run(of, given, {next(iter(given)): last})
    assert found.total is not None, found.reason
    assert (found.total == plain_sum(given, given)).all()
    found = run(of, given, {next(iter(given)): Stage.MASKED})
    assert found.total is None
    assert found.reason == f"{of.most - 1} clients answered MASKED, {of.most} are needed"


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASKED])
def test_too_few_in_a_stage(stage: Stage) -> None:
    of = plan(clients=8, threshold=4, dropouts=0.1)
    given = inputs(of)
    found = run(of, given, dict.fromkeys(list(given)[4:], stage))
    assert found.total is None
    assert found.reason == f"4 clients answered {stage.name}, 5 are needed"


def test_a_sparse_graph_that_lost_a_neighbourhood_gives_no_sum() -> None:
    of = plan("secagg+", clients=12, neighbours=4, threshold=4, colluding=0.0, dropouts=0.0)
    local = Local(of, inputs(of), {"client-3": Stage.UNMASK})
    found = local.run()
    assert found.total is None
    assert "12 are needed" in found.reason or "no 4 of them give it" in found.reason


# Messages late, repeated, lost, in any order, through any server.


@dataclass
class Crowd:
    """Clients that answer when told to, each message through a server of its own."""

    of: Plan
    seed: int = 0
    own_uploads: bool = True
    store: MemoryStore = field(default_factory=MemoryStore)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.context = Context("job", 3)
        self.given = inputs(self.of, seed=self.seed)
        registrar = Registrar()
        identities = enrol("job", self.given, registrar)
        self.clients = {
            name: Client(self.of, self.context, name, identities[name], registrar.public)
            for name in self.given
        }
        self.registrar = registrar.public
        self.desk().create(self.now, len(self.given))
        self.bodies: dict[tuple[str, Stage], bytes] = {}

    def desk(self) -> SecAggDesk:
        return SecAggDesk(self.store, Session(self.of, self.own_uploads), self.context, self.registrar)

    def body(self, name: str, stage: Stage) -> bytes:
        """What the client answers: the same when asked again."""
        if (name, stage) not in self.bodies:
            client = self.clients[name]
            if stage is Stage.ADVERTISE:
                answer: bytes | None = client.advertise()
            else:
                message = self.desk().download(name, stage, self.now)
                assert isinstance(message, bytes), message
                answer = client.receive(message)
                assert client.receive(message) == answer
                if stage is Stage.MASKED:
                    answer = client.mask(self.given[name])
            assert answer is not None
            self.bodies[name, stage] = answer
        return self.bodies[name, stage]

    def send(self, name: str, stage: Stage) -> object:
        return self.desk().receive(name, stage, self.body(name, stage), self.now)

    def window_ends(self) -> None:
        self.now += self.of.stage_window_s + 1
        self.desk().tick(self.now)

    def reveal(self) -> np.ndarray:
        desk, ring = self.desk(), self.of.ring
        total = ring.zeros(self.of.length)
        for name in desk.survivors():
            ring.add_into(total, ring.unpack(desk.masked(name), self.of.length))
        return ring.signed(desk.reveal(total).words)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize(("protocol", "malicious"), VARIANTS)
def test_any_order_of_late_repeated_and_lost_messages(protocol: str, malicious: bool, seed: int) -> None:
    draws = np.random.default_rng(seed)
    crowd = Crowd(plan(protocol, malicious, clients=7, length=5, dropouts=0.2, colluding=0.0), seed)
    there = list(crowd.given)
    sent: list[tuple[str, Stage]] = []
    for stage in crowd.of.stages:
        late = [name for name in there if draws.random() < 0.08]
        for name in draws.permutation(there):
            if name in late:
                crowd.body(name, stage)
                continue
            assert crowd.send(name, stage) == Taken()
            sent.append((name, stage))
            if draws.random() < 0.4:
                again = sent[int(draws.integers(len(sent)))]
                assert crowd.send(*again) == Taken(repeated=True)
        if late:
            crowd.window_ends()
        header = crowd.desk().header()
        if header.stage is Stage.FAILED:
            assert len(there) - len(late) < crowd.of.least
            return
        for name in late:
            reply = crowd.send(name, stage)
            assert isinstance(reply, Refused)
            assert reply.code == "late"
            there.remove(name)
    header = crowd.desk().header()
    assert header.stage is Stage.REVEAL
    try:
        total = crowd.reveal()
    except SumLost:
        assert len(there) < len(crowd.given)
        return
    assert (total == plain_sum(crowd.given, crowd.desk().survivors())).all()


def test_a_stage_waits_for_the_one_before() -> None:
    crowd = Crowd(plan(clients=6))
    assert crowd.desk().download("client-0", Stage.SHARE, 0.0) == Waiting(Stage.ADVERTISE, 60.0)
    for name in crowd.given:
        crowd.send(name, Stage.ADVERTISE)
    reply = crowd.desk().download("client-0", Stage.MASKED, 20.0)
    assert reply == Waiting(Stage.SHARE, 40.0)
    assert isinstance(crowd.desk().receive("client-0", Stage.UNMASK, b"", 0.0), Waiting)


def test_other_bytes_for_a_stage_are_refused() -> None:
    crowd = Crowd(plan(clients=6))
    crowd.send("client-0", Stage.ADVERTISE)
    other = Client(crowd.of, crowd.context, "client-0").advertise()
    reply = crowd.desk().receive("client-0", Stage.ADVERTISE, other, 0.0)
    assert reply == Refused("different_body", "answered ADVERTISE differently")


def test_strangers_and_late_comers_are_told() -> None:
    crowd = Crowd(plan(clients=6, threshold=3, dropouts=0.1))
    for name in list(crowd.given)[:5]:
        crowd.send(name, Stage.ADVERTISE)
    crowd.window_ends()
    assert crowd.desk().download("client-5", Stage.SHARE, crowd.now) == Refused(
        "not_in_roster", "this client has not advertised its keys"
    )
    for name in list(crowd.given)[:4]:
        crowd.send(name, Stage.SHARE)
    crowd.window_ends()
    late = crowd.desk().download("client-4", Stage.MASKED, crowd.now)
    assert late == Refused("dropped", "SHARE ended without this client")
    assert crowd.desk().shared("client-3")
    assert not crowd.desk().shared("client-4")
    assert not crowd.desk().shared("client-5")
    assert crowd.desk().receive("a\nb", Stage.SHARE, b"", 0.0) == Refused(
        "not_in_roster", "not the id of a client"
    )


def test_one_more_than_planned_is_refused() -> None:
    crowd = Crowd(plan(clients=6, threshold=3))
    desk = SecAggDesk(MemoryStore(), Session(crowd.of), crowd.context)
    desk.create(0.0)
    for number in range(7):
        client = Client(crowd.of, crowd.context, f"c{number}")
        reply = desk.receive(f"c{number}", Stage.ADVERTISE, client.advertise(), 0.0)
    assert isinstance(reply, Refused)
    assert reply.code == "late"  # the roster closed with the sixth


def test_a_server_that_dies_between_blob_and_count_leaves_nothing_behind() -> None:
    crowd = Crowd(plan(clients=6))
    for name in crowd.given:
        crowd.send(name, Stage.ADVERTISE)
    before = crowd.desk().header()

    class Dies(MemoryStore):
        def transact(self, keys, step):  # type: ignore[no-untyped-def]
            if len(keys) > 2 or (any("entry" in key for key in keys) and self.dying):
                raise ConnectionError("the server dies here")
            return crowd.store.transact(keys, step)

        dying = False

        def put_blob(self, key: str, body: bytes) -> None:
            self.dying = True
            crowd.store.put_blob(key, body)

        get_blob = crowd.store.get_blob

    body = crowd.body("client-0", Stage.SHARE)
    dies = SecAggDesk(Dies(), Session(crowd.of, True), crowd.context)
    dies._board = crowd.desk()._filled(before)  # it had read the roster
    with pytest.raises(ConnectionError):
        dies.receive("client-0", Stage.SHARE, body, 0.0)
    assert crowd.desk().header() == before
    assert crowd.send("client-0", Stage.SHARE) == Taken()


def test_many_servers_share_the_expansions() -> None:
    crowd = Crowd(plan(clients=9, threshold=4, dropouts=0.3))
    for stage in crowd.of.stages:
        for name in list(crowd.given)[: 9 if stage < Stage.MASKED else 7]:
            crowd.send(name, stage)
        crowd.window_ends() if stage is Stage.MASKED else None
    ring = crowd.of.ring
    seeds = crowd.desk().masks().seeds
    assert len(seeds) == 7 + 2 * 7
    parts = [ring.zeros(crowd.of.length) for _ in range(3)]
    for number, part in enumerate(parts):
        add_masks(part, seeds[number::3], ring)  # three servers
        for name in crowd.desk().survivors()[number::3]:
            ring.add_into(part, ring.unpack(crowd.desk().masked(name), crowd.of.length))
    for part in parts[1:]:
        ring.add_into(parts[0], part)
    assert (ring.signed(parts[0]) == crowd.reveal()).all()
    assert (crowd.reveal() == plain_sum(crowd.given, list(crowd.given)[:7])).all()


# Uploads that the rounds count.


def upto_masked(crowd: Crowd, sharing: int) -> None:
    for stage, count in ((Stage.ADVERTISE, len(crowd.given)), (Stage.SHARE, sharing)):
        for name in list(crowd.given)[:count]:
            crowd.send(name, stage)
    if sharing < len(crowd.given):
        crowd.window_ends()


def test_a_server_that_lost_its_lease_stops_in_the_midst_of_agreements() -> None:
    of = plan(clients=6)
    local = Local(of, inputs(of), {"client-5": Stage.MASKED})
    assert local.run().total is not None
    header = local.desk().header()._replace(stage=Stage.REVEAL)
    local.store.transact([], lambda values: ({local.desk()._header: header.to_bytes()}, None))
    calls = 0

    def hold() -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise InterruptedError("another server has taken it")

    with pytest.raises(InterruptedError):  # six secrets, then the dropped client's agreements
        local.desk().masks(hold=hold)
    assert len(local.desk().masks().seeds) == 10


def test_the_rounds_say_whose_vectors_are_in_the_sum() -> None:
    crowd = Crowd(plan(clients=8, threshold=4, dropouts=0.3), own_uploads=False)
    upto_masked(crowd, 8)
    ring, counted = crowd.of.ring, list(crowd.given)[:6]
    total = ring.zeros(crowd.of.length)
    for name in crowd.given:
        body = crowd.body(name, Stage.MASKED)
        if name in counted:
            ring.add_into(total, ring.unpack(body, crowd.of.length))
    crowd.now += 10_000  # the stage has no window here
    assert crowd.desk().tick(crowd.now).stage is Stage.MASKED
    assert isinstance(crowd.desk().receive("client-0", Stage.MASKED, body, crowd.now), Refused)
    for _ in range(2):  # said twice, it changes nothing
        assert crowd.desk().close_masked(counted, crowd.now).stage is Stage.UNMASK
    assert crowd.desk().survivors() == tuple(counted)
    for name in counted:
        assert crowd.send(name, Stage.UNMASK) == Taken()
    revealed = crowd.desk().reveal(total)
    assert (ring.signed(revealed.words) == plain_sum(crowd.given, counted)).all()
    assert crowd.desk().finish(crowd.now).stage is Stage.DONE


def test_a_vector_of_one_who_never_shared_cannot_be_in_the_sum() -> None:
    crowd = Crowd(plan(clients=8, threshold=4, dropouts=0.3), own_uploads=False)
    upto_masked(crowd, 7)
    with pytest.raises(ValueError, match="shared no secrets"):
        crowd.desk().close_masked(crowd.given, crowd.now)
    with pytest.raises(ValueError, match="have no part"):
        crowd.desk().close_masked(["stranger"], crowd.now)
    assert crowd.desk().close_masked(list(crowd.given)[:3], crowd.now).stage is Stage.FAILED


def test_the_window_opens_when_it_is_known_who_was_admitted() -> None:
    crowd = Crowd(plan(clients=8, threshold=4, dropouts=0.3), own_uploads=False)
    desk = SecAggDesk(MemoryStore(), Session(crowd.of), crowd.context)
    assert desk.create(0.0)
    assert not desk.create(0.0)
    for name in list(crowd.given)[:5]:
        desk.receive(name, Stage.ADVERTISE, crowd.clients[name].advertise(), 1.0)
    assert desk.tick(1e6).stage is Stage.ADVERTISE
    assert desk.expect(7, 1e6).stage is Stage.ADVERTISE
    assert desk.tick(1e6 + 59).stage is Stage.ADVERTISE
    assert desk.tick(1e6 + 61).stage is Stage.SHARE
    # A clock that is behind opens and closes nothing.
    assert desk.tick(5.0).clock == 1e6 + 61


def test_a_failed_iteration_tells_everybody_why() -> None:
    crowd = Crowd(plan(clients=6))
    crowd.desk().fail("the job was stopped", 0.0)
    assert crowd.desk().download("client-0", Stage.SHARE, 0.0) == Refused("failed", "the job was stopped")
    with pytest.raises(SumLost, match="the job was stopped"):
        crowd.desk().reveal(crowd.of.ring.zeros(crowd.of.length))
    assert crowd.desk().fail("again", 1.0).reason == "the job was stopped"


def test_masking_twice_or_too_early_is_refused() -> None:
    crowd = Crowd(plan(clients=6))
    client = crowd.clients["client-0"]
    with pytest.raises(RuntimeError, match="have not arrived"):
        client.mask(crowd.given["client-0"])
    upto_masked(crowd, 6)
    crowd.body("client-0", Stage.MASKED)
    with pytest.raises(RuntimeError, match="masked already"):
        client.mask(crowd.given["client-0"])


def test_secrets_are_gone_when_all_is_said() -> None:
    crowd = Crowd(plan(clients=6))
    for stage in crowd.of.stages:
        for name in crowd.given:
            crowd.send(name, stage)
    for client in crowd.clients.values():
        assert client.stage is Stage.DONE
        assert client._secrets is None
    survivors = crowd.desk().download("client-0", Stage.UNMASK, crowd.now)
    assert isinstance(survivors, Refused)


def test_the_clients_stage_follows_the_plan() -> None:
    crowd = Crowd(plan("secagg+", True, clients=6))
    client, seen = crowd.clients["client-0"], []
    for stage in crowd.of.stages:
        if stage is not Stage.ADVERTISE:
            seen.append(client.stage)
        for name in crowd.given:
            crowd.send(name, stage)
    assert seen == list(crowd.of.stages[1:])
