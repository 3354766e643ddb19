"""How parties begin, and begin again: sessions against each other through links that lose, repeat and reorder."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from federated.vertical.parties import PeerAborted, PeerFault
from services.vertical.channel import UNIT_BYTES, Channel, ChannelLimits, Unit
from services.vertical.session import Attempt, Frame, Session, difference, job_text
from services.vertical.store import KEEP

JOB = {"job": {"what": "sums", "seed": 0}}
NAMES = ("a", "b", "c")


def session(
    me: str, *, job: dict[str, object] = JOB, labels: Sequence[int] = (), done: bytes = b""
) -> Session:  # type: ignore[assignment]
    return Session([name for name in NAMES if name != me], job, labels=labels, me=me, done=done)


def tell(sessions: dict[str, Session], sender: str, receiver: str, units: bool = True) -> None:
    frame, data, _ = sessions[sender].frame(receiver, units=units)
    sessions[receiver].hear(sender, frame, data, 0.0)


def meet(sessions: dict[str, Session], rounds: int = 4) -> dict[str, Attempt]:
    """Everybody tells everybody, until all agree."""
    found: dict[str, Attempt] = {}
    for _ in range(rounds):
        for sender in NAMES:
            for receiver in NAMES:
                if sender != receiver:
                    tell(sessions, sender, receiver)
        for name, one in sessions.items():
            attempt = one.agreed()
            if attempt is not None:
                found[name] = attempt
    return found


def test_all_go_on_from_the_largest_label_that_all_have() -> None:
    sessions = {
        "a": session("a", labels=[1, 2, 3]),
        "b": session("b", labels=[2, 3, 4]),
        "c": session("c", labels=[1, 2, 4]),
    }
    found = meet(sessions)
    assert {attempt.label for attempt in found.values()} == {2}
    assert len({attempt.view for attempt in found.values()}) == 1


def test_checkpoints_of_different_runs_are_none_that_all_have() -> None:
    runs = {
        "a": {1: "aa", 2: "aa", 3: "bb"},
        "b": {1: "aa", 2: "aa", 3: "cc"},
        "c": {1: "aa", 2: "aa", 3: "bb"},
    }
    sessions = {name: session(name) for name in NAMES}
    for name, one in sessions.items():
        one.begin([1, 2, 3], runs[name])
    assert {attempt.label for attempt in meet(sessions).values()} == {2}


def test_nobody_begins_before_everybody_is_there() -> None:
    sessions = {name: session(name) for name in NAMES}
    for _ in range(3):
        tell(sessions, "a", "b")
        tell(sessions, "b", "a")
    assert sessions["a"].agreed() is None
    assert meet(sessions).keys() == set(NAMES)


def test_a_party_that_comes_back_makes_all_begin_anew() -> None:
    sessions = {name: session(name) for name in NAMES}
    first = meet(sessions)
    sessions["a"].put("b", "x", b"of the first attempt")
    sessions["c"] = session("c", labels=[])
    for name in ("a", "b"):
        tell(sessions, "c", name)
        assert sessions[name].interrupted
        sessions[name].begin([5] if name == "a" else [])
    second = meet(sessions)
    assert second.keys() == set(NAMES)
    assert second["a"].view != first["a"].view
    assert sessions["b"].channel("a").pop() is None


def test_a_message_of_another_attempt_is_not_taken() -> None:
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    sessions["a"].put("b", "x", b"1")
    frame, data, _ = sessions["a"].frame("b", units=True)
    sessions["b"].hear("a", Frame(frame.status, b"another", 0, frame.units), data, 0.0)
    assert sessions["b"].channel("a").pop() is None
    sessions["b"].hear("a", frame, data, 0.0)
    message = sessions["b"].channel("a").pop()
    assert message is not None
    assert message.body == b"1"


def test_another_job_is_refused_by_both_with_what_differs() -> None:
    other = {"job": {"what": "sums", "seed": 1}}
    sessions = {"a": session("a"), "b": session("b", job=other), "c": session("c")}  # type: ignore[arg-type]
    tell(sessions, "a", "b")
    tell(sessions, "b", "a")
    for name, peer, here, there in (("a", "b", 0, 1), ("b", "a", 1, 0)):
        fault = sessions[name].fault
        assert fault is not None
        assert (fault.peer, fault.rule) == (peer, "job")
        assert f"job.seed is {here} here, {there} there" in str(fault)


def test_a_party_that_fails_ends_the_others_with_its_reason() -> None:
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    sessions["b"].failed("out of memory")
    tell(sessions, "b", "a")
    assert isinstance(sessions["a"].fault, PeerAborted)
    assert "out of memory" in str(sessions["a"].fault)


def test_parties_leave_when_all_are_done_and_know_it() -> None:
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    for one in sessions.values():
        one.finished()
    assert not sessions["a"].all_done()
    meet(sessions)
    assert all(one.all_done() for one in sessions.values())


def test_a_party_that_was_done_rejoins_only_for_those_who_are_not() -> None:
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    for name in ("a", "b"):
        sessions[name].finished()
    sessions["c"] = session("c", done=sessions["a"].status().view)
    meet(sessions)
    assert not any(one.interrupted for one in sessions.values())
    assert all(one.all_done() for one in sessions.values())
    for come_back in (session("c"), session("c", done=b"an older attempt")):
        sessions["c"] = come_back
        tell(sessions, "c", "a")
        assert sessions["a"].interrupted
        sessions["a"].interrupted = False


def test_an_older_word_of_the_same_process_changes_nothing() -> None:
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    old, _, _ = sessions["a"].frame("b", units=False)
    sessions["a"].begin([])
    for name in ("b", "c"):
        tell(sessions, "a", name)
        sessions[name].begin([])
    meet(sessions)
    sessions["b"].hear("a", old, [], 0.0)
    assert not sessions["b"].interrupted
    assert sessions["b"].phase == "running"


@pytest.mark.parametrize("seed", range(20))
def test_a_lossy_link_delivers_once_and_in_order(seed: int) -> None:
    generator = random.Random(seed)
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    bodies = [bytes([place]) * generator.choice([0, 1, UNIT_BYTES + 1]) for place in range(6)]
    for body in bodies:
        sessions["a"].put("b", "x", body)
    kept: list[tuple[Frame, list[bytes]]] = []
    received: list[bytes] = []
    for _ in range(400):
        frame, data, _ = sessions["a"].frame("b", units=True)
        kept.append((frame, data))
        if generator.random() < 0.6:
            # An old frame again, or the new one; or none.
            sessions["b"].hear("a", *generator.choice(kept[-5:]), 0.0)
        if generator.random() < 0.6:
            tell(sessions, "b", "a")
        while (message := sessions["b"].channel("a").pop()) is not None:
            received.append(message.body)
    assert sessions["b"].fault is None
    assert received == bodies
    assert not sessions["a"].channel("b").pending


def test_a_repeat_with_other_content_and_a_gap_are_faults() -> None:
    channel = Channel("a", ChannelLimits())
    channel.take_in([Unit(1, "x", True, b"one")])
    channel.take_in([Unit(1, "x", True, b"one")])
    assert channel.counts.repeated_total == 1
    for unit, rule in (
        (Unit(1, "x", True, b"two"), "replay"),
        (Unit(1, "x", False, b"one"), "replay"),
        (Unit(3, "x", True, b""), "gap"),
        (Unit(2, "", True, b""), "malformed"),
        (Unit(2, "x", True, bytes(UNIT_BYTES + 1)), "malformed"),
    ):
        with pytest.raises(PeerFault) as caught:
            channel.take_in([unit])
        assert caught.value.rule == rule
    with pytest.raises(PeerFault, match="never sent"):
        channel.confirmed(1)


def test_what_is_received_beyond_the_bound_is_taken_later() -> None:
    channel = Channel("a", ChannelLimits(out_bytes=3, in_bytes=3))
    units = [Unit(number, "x", True, b"12") for number in (1, 2, 3)]
    channel.take_in(units)
    assert channel.received == 2
    assert channel.pop() is not None
    channel.take_in(units)
    assert channel.received == 3
    channel.put("x", b"123")
    assert not channel.has_room
    channel.confirmed(1)
    assert channel.has_room


def test_a_frame_that_describes_more_than_it_carries_is_a_fault() -> None:
    sessions = {name: session(name) for name in NAMES}
    meet(sessions)
    sessions["a"].put("b", "x", b"1")
    frame, _, _ = sessions["a"].frame("b", units=True)
    sessions["b"].hear("a", frame, [], 0.0)
    assert sessions["b"].fault is not None
    assert sessions["b"].fault.rule == "malformed"


def test_differences_are_told_for_people() -> None:
    ours = job_text({"job": {"options": {"epochs": 5}, "what": "linear"}})
    theirs = job_text({"job": {"options": {}, "what": "linear"}})
    assert difference(ours, theirs) == "another job: job.options.epochs is 5 here, absent there"
    assert difference(ours, b"\xff") == "another job"
    with pytest.raises(ValueError, match="at most"):
        job_text({"x": "y" * 20_000})


STEPS = 7


class Simulated:
    """A party whose role, in each step, hears one message of every other and puts a checkpoint on its disk."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.labels: list[int] = []
        self.result = b""
        self.begins = 0
        self.start()

    def start(self) -> None:
        """As a process that was killed comes back: with its disk alone."""
        self.session = session(self.name, labels=self.labels, done=self.result)
        self.heard: dict[str, bytes] = {}
        self.sent = False

    def step(self) -> None:
        one = self.session
        assert one.fault is None
        if one.interrupted:
            one.begin(self.labels)
        if (attempt := one.agreed()) is not None:
            self.begins += 1
            self.view, self.at = attempt.view, attempt.label + 1
            self.labels = [label for label in self.labels if label <= attempt.label]
            self.result, self.heard, self.sent = b"", {}, False
        if one.phase != "running":
            return
        others = [name for name in NAMES if name != self.name]
        body = self.view + bytes([self.at])
        if not self.sent:
            for other in others:
                one.put(other, "step", body)
            self.sent = True
        for other in others:
            if other not in self.heard and (message := one.channel(other).pop()) is not None:
                assert message.body == body
                self.heard[other] = message.body
        if len(self.heard) < len(others):
            return
        if len(self.labels) >= KEEP - 1 and one.behind(self.labels[1 - KEEP]):
            return
        self.labels = [*self.labels, self.at][-KEEP:]
        one.kept(self.at)
        self.at, self.heard, self.sent = self.at + 1, {}, False
        if self.at == STEPS:
            self.result = self.view
            one.finished()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_dies_and_whatever_is_lost_all_end_with_one_run(seed: int) -> None:
    generator = random.Random(seed)
    parties = {name: Simulated(name) for name in NAMES}
    flying: list[tuple[str, str, int, Frame, list[bytes]]] = []
    boots = dict.fromkeys(NAMES, 0)
    deaths = 0
    for turn in range(6_000):
        calm = turn > 2_500
        if calm and all(one.session.all_done() for one in parties.values()):
            break
        if not calm and generator.random() < 0.01:
            name = generator.choice(NAMES)
            # What a dead process had on its way may arrive still, but nothing reaches it.
            flying = [one for one in flying if one[1] != name]
            parties[name].start()
            boots[name] += 1
            deaths += 1
        sender, receiver = generator.sample(NAMES, 2)
        frame, data, _ = parties[sender].session.frame(receiver, units=True)
        if calm or generator.random() < 0.7:
            flying.append((sender, receiver, boots[sender], frame, data))
        if flying and generator.random() < 0.9:
            place = generator.randrange(min(len(flying), 4)) if not calm else 0
            sender, receiver, boot, frame, data = (
                flying[place] if generator.random() < 0.1 else flying.pop(place)
            )
            # A connection ends with its process: words of the one before do not overtake those of the next.
            if boot == boots[sender]:
                parties[receiver].session.hear(sender, frame, data, 0.0)
        parties[generator.choice(NAMES)].step()
    assert deaths > 5
    assert all(one.session.all_done() for one in parties.values())
    assert {one.result for one in parties.values()} == {parties["a"].result}
    assert parties["a"].labels[-1] == STEPS - 1
