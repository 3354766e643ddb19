"""Attempts to break what lies between parties: peers without end, twins, files of others, disks without room."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from federated.vertical.parties import PartResult, PeerFault
from services.vertical.channel import MOST_WAITING, Channel, ChannelLimits, Unit
from services.vertical.session import MOST_BEGINNINGS, MOST_WAITS, Frame, Session
from services.vertical.store import KEEP, HeldFolder, StateDamaged, StateFolder, StateInUse, StateNotKept


def tell(sender: Session, receiver: Session, name: str, to: str) -> None:
    frame, data, _ = sender.frame(to, units=True)
    receiver.hear(name, frame, data, 0.0)


def pair() -> tuple[Session, Session]:
    one, other = Session(["b"], {}, me="a"), Session(["a"], {}, me="b")
    for _ in range(3):
        tell(one, other, "a", "b")
        tell(other, one, "b", "a")
    assert one.agreed() is not None
    assert other.agreed() is not None
    return one, other


class TestEndless:
    def test_empty_messages(self) -> None:
        channel = Channel("a", ChannelLimits())
        for start in range(1, MOST_WAITING + 2_000, 500):
            channel.take_in([Unit(number, "x", True, b"") for number in range(start, start + 500)])
            if channel.received < start + 499:
                break
        assert channel.received == MOST_WAITING
        assert channel.pop() is not None
        channel.take_in([Unit(MOST_WAITING + 1, "x", True, b"")])
        assert channel.received == MOST_WAITING + 1

    def test_empty_parts_of_one_message(self) -> None:
        channel = Channel("a", ChannelLimits())
        channel.take_in([Unit(1, "x", False, b"1")])
        with pytest.raises(PeerFault, match="a part of 0 bytes"):
            channel.take_in([Unit(2, "x", False, b"")])

    def test_a_message_in_many_parts_is_whole(self) -> None:
        channel = Channel("a", ChannelLimits())
        channel.take_in([Unit(number, "x", number == 300, bytes([number % 256])) for number in range(1, 301)])
        message = channel.pop()
        assert message is not None
        assert message.body == bytes(number % 256 for number in range(1, 301))
        channel.take_in([Unit(301, "y", True, b"next")])
        following = channel.pop()
        assert following is not None
        assert (following.kind, following.body) == ("y", b"next")

    def test_a_message_beyond_the_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.vertical.channel.MOST_BODY", 10)
        channel = Channel("a", ChannelLimits())
        channel.take_in([Unit(1, "x", False, b"12345")])
        with pytest.raises(PeerFault, match="more than 10 bytes"):
            channel.take_in([Unit(2, "x", False, b"123456")])

    def test_processes_that_are_started_without_end(self) -> None:
        one = Session(["b"], {}, me="a")
        for _ in range(MOST_BEGINNINGS + 1):
            tell(Session(["a"], {}, me="b"), one, "b", "a")
            assert one.fault is None
        tell(Session(["a"], {}, me="b"), one, "b", "a")
        assert one.fault is not None
        assert one.fault.rule == "restarts"

    def test_processes_that_get_further_each_time(self) -> None:
        one = Session(["b"], {}, me="a")
        for label in range(2 * MOST_BEGINNINGS):
            tell(Session(["a"], {}, me="b", labels=[label]), one, "b", "a")
        assert one.fault is None

    @pytest.mark.parametrize(
        "change", [{"waits": ("x",) * (MOST_WAITS + 1)}, {"labels": tuple(range(17))}, {"job": bytes(20_000)}]
    )
    def test_a_status_that_has_no_end(self, change: dict[str, Any]) -> None:
        one, other = pair()
        frame, _, _ = other.frame("a", units=False)
        status = msgspec.structs.replace(frame.status, **change)
        one.hear("b", msgspec.structs.replace(frame, status=status), [], 0.0)
        assert one.fault is not None
        assert one.fault.rule == "malformed"


class TestTwins:
    def test_two_processes_with_one_key_are_named(self) -> None:
        one = Session(["b"], {}, me="a")
        twins = [Session(["a"], {}, me="b") for _ in range(2)]
        for _ in range(3):
            for twin in twins:
                tell(twin, one, "b", "a")
        assert one.fault is None
        tell(twins[0], one, "b", "a")
        tell(twins[1], one, "b", "a")
        assert one.fault is not None
        assert "two processes with its key" in str(one.fault)

    def test_one_that_was_started_again_is_none(self) -> None:
        one = Session(["b"], {}, me="a")
        for _ in range(20):
            process = Session(["a"], {}, me="b")
            for _ in range(3):
                tell(process, one, "b", "a")
        assert one.fault is None

    def test_a_folder_is_held_by_one_process(self, tmp_path: Path) -> None:
        first = StateFolder(tmp_path / "state")
        with pytest.raises(StateInUse, match="stop it first"):
            HeldFolder(tmp_path / "state")
        first.close()
        HeldFolder(tmp_path / "state").close()


class TestReplays:
    def test_parts_of_an_older_attempt(self) -> None:
        one, other = pair()
        other.put("a", "x", b"old")
        old = other.frame("a", units=True)
        for name, session, peer in (("a", one, other), ("b", other, one)):
            session.begin([])
            tell(session, peer, name, "b" if name == "a" else "a")
        for _ in range(3):
            tell(one, other, "a", "b")
            tell(other, one, "b", "a")
        assert one.agreed() is not None
        one.hear("b", old[0], old[1], 0.0)
        assert one.channel("b").pop() is None
        assert one.fault is None
        # Under the new attempt's name the old parts are as good as any others of this peer: numbers must follow.
        frame = Frame(other.status(), one.status().view, 0, ((7, "x", True),))
        one.hear("b", frame, [b"old"], 0.0)
        assert one.fault is not None
        assert one.fault.rule == "gap"


class TestFiles:
    def test_of_another_party_job_or_label(self, tmp_path: Path) -> None:
        bank, shop = (StateFolder(tmp_path / name, f"job/{name}") for name in ("bank", "shop"))
        bank.keep(3, b"bank's")
        bank.keep(4, b"later")
        shop.keep(3, b"shop's")
        stolen = (bank.folder / "checkpoint-3").read_bytes()
        (shop.folder / "checkpoint-3").write_bytes(stolen)
        (bank.folder / "checkpoint-4").write_bytes(stolen)
        assert bank.state(3) == b"bank's"
        for folder, label in ((shop, 3), (bank, 4)):
            with pytest.raises(StateDamaged, match="or of another job"):
                folder.state(label)
        bank.close()
        shop.close()

    @pytest.mark.parametrize("size", [0, 3, 40, 43])
    def test_one_that_is_cut_short_is_dropped_for_an_older_one(self, tmp_path: Path, size: int) -> None:
        store = StateFolder(tmp_path)
        for label in range(3):
            store.keep(label, b"12345678")
        os.truncate(tmp_path / "checkpoint-2", size)
        (dropped,) = store.drop_damaged()
        assert "checkpoint-2 is damaged" in str(dropped)
        assert store.labels() == [0, 1]
        assert store.drop_damaged() == []
        store.close()

    def test_a_disk_without_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = StateFolder(tmp_path)
        store.keep(1, b"one")
        before = sorted(one.name for one in tmp_path.iterdir())

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StateNotKept, match="No space left on device; make room for 3 bytes"):
            store.keep(2, b"two")
        with pytest.raises(StateNotKept, match="No space left on device"):
            store.keep_result(PartResult())
        # Nothing half-written stays in what room there is, and the checkpoint before is there.
        assert sorted(one.name for one in tmp_path.iterdir()) == before
        assert store.state(1) == b"one"
        store.close()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StateNotKept, match="Not a directory"):
            StateFolder(tmp_path / "file" / "state")

    def test_only_the_last_are_kept(self, tmp_path: Path) -> None:
        store = StateFolder(tmp_path)
        for label in range(3 * KEEP):
            store.keep(label, b"")
        assert store.labels() == list(range(2 * KEEP, 3 * KEEP))
        store.close()

    def test_one_of_each_label_is_kept_and_says_its_run(self, tmp_path: Path) -> None:
        store = StateFolder(tmp_path)
        store.keep(1, b"before", "aa")
        store.keep(2, b"before", "aa")
        store.keep(2, b"after", "bb")
        assert store.runs() == {1: "aa", 2: "bb"}
        assert store.state(2) == b"after"
        # A file under another run's name is none of it.
        (tmp_path / "checkpoint-2-bb").rename(tmp_path / "checkpoint-2-aa")
        assert [str(one).partition(" is ")[2] for one in store.drop_damaged()] == [
            "damaged, or of another job; remove it"
        ]
        store.forget_after(0)
        assert store.runs() == {}
        store.close()
