"""Parties that are there and get nothing done: who is named, and when; with a clock of the test's."""

from __future__ import annotations

import pytest

from services.vertical.pulse import MOST_STEP_S, Pulse, SteadyClock, WatchedWorkers
from services.vertical.session import Blocked, Session

NAMES = ("a", "b", "c")
STUCK_S, LOCKED_S = 900.0, 310.0


class Parties:
    """Three parties that hear each other every second, but for those ``silent``."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pulses = {name: Pulse() for name in NAMES}
        self.sessions = {name: self.session(name) for name in NAMES}
        self.silent: set[str] = set()
        self.busy: set[str] = set()
        self.pass_s(3)
        assert all(one.agreed() is not None for one in self.sessions.values())
        self.since_s = self.now_s

    def session(self, me: str) -> Session:
        pulse = self.pulses[me]
        return Session([name for name in NAMES if name != me], {}, me=me, work=lambda: pulse.count)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for name in self.busy:
                self.pulses[name].beat()
            for sender in NAMES:
                for receiver in NAMES:
                    if sender != receiver and not {sender, receiver} & self.silent:
                        frame, data, _ = self.sessions[sender].frame(receiver, units=True)
                        self.sessions[receiver].hear(sender, frame, data, self.now_s)

    def waits(self, **waits: tuple[str, ...]) -> None:
        for name, awaited in waits.items():
            self.sessions[name].waits = awaited

    def blocked(self, me: str = "a") -> Blocked | None:
        return self.sessions[me].blocked(self.since_s, self.now_s, STUCK_S, LOCKED_S)


def test_a_peer_that_hangs_is_named_after_the_setting() -> None:
    parties = Parties()
    parties.waits(a=("b",))
    parties.pass_s(899)
    assert parties.blocked() is None
    parties.pass_s(1)
    found = parties.blocked()
    assert found is not None
    assert (found.peer, found.detail) == ("b", "is there, but has done nothing for 900 s")


def test_a_long_computation_is_waited_for() -> None:
    parties = Parties()
    parties.waits(a=("b",))
    for _ in range(5):
        parties.pass_s(600)
        parties.pulses["b"].beat()
        parties.pass_s(1)
        assert parties.blocked() is None
    parties.pass_s(901)
    assert parties.blocked() is not None


def test_a_peer_that_waits_itself_is_not_to_blame() -> None:
    parties = Parties()
    parties.waits(a=("b",), b=("c",))
    parties.pass_s(899)
    assert parties.blocked() is None
    parties.pass_s(2)
    for me in ("a", "b"):
        found = parties.blocked(me)
        assert found is not None
        assert found.peer == "c"
    assert "b waits for c" in str(parties.blocked("a"))
    parties.busy.add("c")
    parties.pass_s(10)
    assert parties.blocked("a") is parties.blocked("b") is None


def test_what_is_on_its_way_is_progress() -> None:
    """A slow link: nobody computes, and parts of a message arrive now and then."""
    parties = Parties()
    parties.waits(a=("b",), b=("a",))
    for _ in range(4):
        parties.pass_s(300)
        parties.sessions["a"].put("b", "x", b"1")
        parties.pass_s(2)
        assert parties.blocked("a") is parties.blocked("b") is None


def test_all_who_wait_for_each_other_are_named_sooner() -> None:
    parties = Parties()
    parties.waits(a=("b",), b=("c",), c=("b",))
    parties.pass_s(309)
    assert parties.blocked() is None
    parties.pass_s(2)
    found = parties.blocked()
    assert found is not None
    assert "everybody has waited" in found.detail
    assert "b waits for c; c waits for b" in found.detail


def test_silence_is_not_idleness() -> None:
    """Whoever is not heard is named as dead, or waited for; and may be slow at first when it is heard again."""
    parties = Parties()
    parties.waits(a=("b",), b=("a",))
    parties.silent.add("b")
    parties.pass_s(2_000)
    assert parties.blocked() is None
    parties.silent.clear()
    parties.pass_s(300)
    assert parties.blocked() is None


def test_one_of_several_that_moves_is_enough() -> None:
    parties = Parties()
    parties.waits(a=("b", "c"))
    parties.busy.add("c")
    parties.pass_s(2_000)
    assert parties.blocked() is None
    parties.waits(a=("b",))
    found = parties.blocked()
    assert found is not None
    assert found.peer == "b"


def test_chunks_of_work_and_rows_are_beats() -> None:
    class Backwards:
        def map(self, function: object, chunks: object) -> list[int]:
            assert callable(function)
            return [function(one) for one in chunks][::-1]  # type: ignore[attr-defined]

    pulse = Pulse()
    assert WatchedWorkers(Backwards(), pulse).map(abs, iter([-1, -2, -3])) == [3, 2, 1]
    assert pulse.count == 3
    assert list(pulse.watched(range(25), 10)) == list(range(25))
    assert pulse.count == 3 + 3


@pytest.mark.parametrize("jump_s", [3_600.0, 1e12])
def test_a_clock_that_jumped_counts_a_step(jump_s: float) -> None:
    now_s = [1e6]
    clock = SteadyClock(lambda: now_s[0])
    now_s[0] += 1.0
    assert clock() == 1.0
    now_s[0] += jump_s
    assert clock() == 1.0 + MOST_STEP_S
    now_s[0] -= jump_s
    assert clock() == 1.0 + MOST_STEP_S
    now_s[0] += 0.5
    assert clock() == 1.5 + MOST_STEP_S
