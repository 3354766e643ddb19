"""Roles in one process: order, repeats, loss, checkpoints, faults that are named."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.vertical.parties import (
    ABORT,
    Checkpoint,
    CheckpointCrossed,
    Log,
    PeerAborted,
    PeerFault,
    Progress,
    Receive,
    ReceiveAny,
    Role,
    Send,
    Sent,
    Stalled,
    broadcast,
    gather,
    reason_of,
    receive,
    run_local,
)


def asker(peer: str, numbers: list[int], start: int = 0) -> Role[list[int]]:
    found = []
    for turn in range(start, len(numbers)):
        yield Send(peer, "ask", str(numbers[turn]).encode())
        found.append(int((yield from receive(peer, "reply"))))
        yield Checkpoint(turn, str(turn + 1).encode())
    return found


def doubler(peer: str, turns: int, start: int = 0) -> Role[int]:
    total = 0
    for turn in range(start, turns):
        number = int((yield from receive(peer, "ask")))
        total += number
        yield Send(peer, "reply", str(2 * number).encode())
        yield Checkpoint(turn, b"")
    return total


def test_two_roles_have_their_results_and_a_transcript() -> None:
    outcome = run_local({"a": asker("b", [1, 2, 3]), "b": doubler("a", 3)}, bodies=True)
    assert outcome.results == {"a": [2, 4, 6], "b": 6}
    assert outcome.transcript.counts() == {("a", "b", "ask"): (3, 3), ("b", "a", "reply"): (3, 3)}
    assert [one.body for one in outcome.transcript.of(sender="b")] == [b"2", b"4", b"6"]
    assert list(outcome.checkpoints["a"]) == [0, 1, 2]


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=8), st.data())
def test_roles_made_from_any_common_checkpoint_go_on_from_there(
    numbers: list[int], data: st.DataObject
) -> None:
    label = data.draw(st.integers(0, len(numbers) - 1))
    outcome = run_local(
        {"a": asker("b", numbers, label + 1), "b": doubler("a", len(numbers), label + 1)}, label=label
    )
    assert outcome.results["a"] == [2 * number for number in numbers[label + 1 :]]


def sender(peer: str, bodies: list[bytes]) -> Role[None]:
    for body in bodies:
        yield Send(peer, "part", body)


def collector(peers: tuple[str, ...], each: int) -> Role[dict[str, list[bytes]]]:
    found: dict[str, list[bytes]] = {peer: [] for peer in peers}
    for _ in range(each * len(peers)):
        waits_for = tuple(peer for peer in peers if len(found[peer]) < each)
        got = yield ReceiveAny(waits_for, "part")
        assert got is not None
        found[got.sender].append(got.body)
    return found


@given(st.lists(st.lists(st.binary(max_size=4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_messages_of_each_sender_arrive_once_and_in_order(bodies: list[list[bytes]]) -> None:
    names = tuple(f"p{place}" for place in range(len(bodies)))
    # Whoever collects stands first, or last: its turn changes when messages come, never their order.
    for first in (True, False):
        senders = {name: sender("c", sent) for name, sent in zip(names, bodies, strict=True)}
        c = {"c": collector(names, 3)}
        outcome = run_local({**c, **senders} if first else {**senders, **c})
        assert outcome.results["c"] == dict(zip(names, bodies, strict=True))


def test_gather_gives_the_given_order_whoever_came_first() -> None:
    def late(peer: str) -> Role[None]:
        yield from receive("b", "go")
        yield Send(peer, "part", b"late")

    def early(peer: str) -> Role[None]:
        yield Send(peer, "part", b"early")
        yield from broadcast(["a"], "go", b"")

    def all_of() -> Role[dict[str, bytes]]:
        return (yield from gather(["a", "b"], "part"))

    outcome = run_local({"a": late("c"), "b": early("c"), "c": all_of()})
    assert list(outcome.results["c"].items()) == [("a", b"late"), ("b", b"early")]


def test_a_lost_message_is_a_stall_that_says_who_waits_for_what() -> None:
    def lose(sent: Sent) -> Iterable[tuple[str, bytes]]:
        return [] if sent.kind == "reply" else [(sent.kind, sent.body or b"")]

    with pytest.raises(Stalled, match="a for 'reply' of b"):
        run_local({"a": asker("b", [1]), "b": doubler("a", 1)}, twist=lose)


def test_a_repeated_message_is_a_fault_of_its_sender_where_another_kind_is_expected() -> None:
    def repeat(sent: Sent) -> Iterable[tuple[str, bytes]]:
        return [(sent.kind, sent.body or b"")] * 2

    def one_of_each(peer: str) -> Role[None]:
        yield from receive(peer, "first")
        yield from receive(peer, "second")

    def other(peer: str) -> Role[None]:
        yield Send(peer, "first", b"")
        yield Send(peer, "second", b"")

    with pytest.raises(PeerFault, match=r"b: kind: sent 'first', expected 'second'") as caught:
        run_local({"a": one_of_each("b"), "b": other("a")}, twist=repeat)
    assert (caught.value.peer, caught.value.rule) == ("b", "kind")
    assert reason_of(caught.value) == "b broke the rule 'kind'"


def test_what_a_failing_party_tells_holds_no_values() -> None:
    def failing(peer: str) -> Role[None]:
        yield Send(peer, "ask", b"1")
        raise ValueError("salary 12345")

    with pytest.raises(ValueError, match="salary"):
        run_local({"a": failing("b"), "b": doubler("a", 2)})
    assert reason_of(ValueError("salary 12345")) == "it failed with ValueError"


def test_an_abort_is_told_with_its_reason() -> None:
    def end(sent: Sent) -> Iterable[tuple[str, bytes]]:
        return [(ABORT, b"out of memory\xff")] if sent.kind == "reply" else [(sent.kind, sent.body or b"")]

    with pytest.raises(PeerAborted, match="b: gave up: out of memory"):
        run_local({"a": asker("b", [1]), "b": doubler("a", 1)}, twist=end)


def test_a_message_may_not_cross_a_checkpoint() -> None:
    def early(peer: str) -> Role[None]:
        yield Send(peer, "part", b"")
        yield Checkpoint(0, b"")

    def late(peer: str) -> Role[None]:
        yield Checkpoint(0, b"")
        yield from receive(peer, "part")

    with pytest.raises(CheckpointCrossed, match="a sent 'part' at label -1, b received it at 0"):
        run_local({"a": early("b"), "b": late("a")})


@pytest.mark.parametrize(
    ("effect", "why"),
    [
        (Send("a", "x", b""), "no other party"),
        (Send("nobody", "x", b""), "no other party"),
        (Send("b", "", b""), "no kind"),
        (Send("b", ABORT, b""), "no kind"),
        (Receive("nobody", "x"), "not all other parties"),
        (ReceiveAny((), "x"), "not all other parties"),
    ],
)
def test_a_role_that_cannot_be_carried_is_our_own_fault(
    effect: Send | Receive | ReceiveAny, why: str
) -> None:
    def wrong() -> Role[None]:
        yield effect

    def idle() -> Role[None]:
        return
        yield

    with pytest.raises(ValueError, match=why):
        run_local({"a": wrong(), "b": idle()})


def test_labels_rise_and_what_is_said_is_kept() -> None:
    def role() -> Role[None]:
        yield Progress(1, 2, "rows")
        yield Log("half of it")
        yield Checkpoint(3, b"")
        yield Checkpoint(3, b"")

    with pytest.raises(ValueError, match="checkpoint 3 after 3"):
        run_local({"a": role()})
    outcome = run_local({"a": (effect for effect in (Progress(1, 2, "rows"), Log("x")))})  # type: ignore[dict-item]
    assert outcome.effects["a"] == [Progress(1, 2, "rows"), Log("x")]


def test_the_secrets_of_a_checkpoint_are_not_shown() -> None:
    assert "exponent" not in repr(Checkpoint(1, b"exponent"))
