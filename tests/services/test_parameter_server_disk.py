"""Parameters on disks that are full, broken or slow: training goes on, nothing is claimed, and it mends by itself."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support import disks
from support.disks import FaultyDisk, Kept, but_times, contents, recovered
from support.parameters import SOURCE

from services.parameter_server.storage.recovery import read_records
from services.parameter_server.storage.writer import Report

BACKLOG = 40_000
"""Bytes: about ten of the recorded pushes."""


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def kept(tmp_path: Path, disk: FaultyDisk) -> Iterator[Kept]:
    running = Kept(tmp_path, 1, disk, backlog_bytes=BACKLOG)
    yield running
    disk.room, disk.syncs_fail, disk.truncates_fail = None, False, False
    running.close()


def failing(kept: Kept) -> bool:
    return kept.durability.writer.failing


def whole(path: Path) -> bool:
    return [end for _, end in read_records(path)][-1] == path.stat().st_size


class TestFullDisk:
    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT])
    @pytest.mark.parametrize("room", [0, 1, 1_000])
    def test_what_waits_is_written_when_there_is_room(
        self,
        kept: Kept,
        disk: FaultyDisk,
        tmp_path: Path,
        room: int,
        error: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        kept.push(3)
        kept.flush()
        disk.room, disk.error = room, error
        kept.push(3)
        kept.until(lambda: failing(kept))
        assert kept.durable < 5
        assert all(whole(path) for path in kept.folder.glob("*.log")), "something half written stayed"
        kept.push()
        disk.room = None
        kept.flush()
        assert (kept.durable, failing(kept), kept.durability.counts.given_up_total) == (6, False, 0)
        assert contents(recovered(tmp_path)) == contents(kept.shard)
        messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(messages) == 1, "once is enough"
        assert str(kept.folder) in messages[0]
        assert "Make room on that disk" in messages[0]
        assert "is written again" in caplog.text

    def test_beyond_the_bound_the_log_is_given_up_and_a_snapshot_mends_it(
        self, kept: Kept, disk: FaultyDisk, tmp_path: Path
    ) -> None:
        kept.push(3)
        kept.flush()
        durable = contents(kept.shard)
        disk.room = 0
        most = 0
        for _ in range(60):
            assert not kept.durability.full, "a full disk made training wait"
            kept.push()
            kept.durability.step()
            most = max(most, kept.durability.writer.waiting_bytes)
            if not failing(kept):
                kept.until(lambda: failing(kept))
        assert most < BACKLOG + 10_000
        assert (kept.applied, kept.durable) == (62, 2)
        assert kept.durability.counts.dropped_total > 20
        assert kept.durability.given_up == 1
        kept.until(lambda: not list(kept.folder.glob("*.tmp")))
        assert contents(recovered(_copied(kept, tmp_path / "copy"))) == durable
        disk.room = None
        kept.until(lambda: kept.durable == 62)
        assert (failing(kept), kept.durability.given_up) == (False, 0)
        assert kept.push().durable == 62
        kept.flush()
        kept.crash()
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_pushes_while_it_mends_are_durable_with_the_snapshot_or_after_it(
        self, kept: Kept, disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("services.parameter_server.storage.durability.PAGE_BYTES", 10 * 40)
        disk.room = 0
        while kept.durability.given_up == 0:
            kept.push()
            kept.durability.step()
            time.sleep(0.001)
        disk.room = None
        before = kept.applied
        looks = 0
        while kept.durability.given_up:
            kept.durability.step()
            kept.push()
            assert kept.durable == -1 or kept.durable >= before
            if kept.durability.busy and kept.durable == -1 and list(kept.folder.glob("*.pending")):
                looks += 1
                recovered(_copied(kept, tmp_path / f"copy-{looks}"))
        assert looks, "no log waited for its snapshot"
        kept.flush()
        assert kept.durable == kept.applied > before
        kept.crash()
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_a_disk_that_fills_again_and_again(self, kept: Kept, disk: FaultyDisk, tmp_path: Path) -> None:
        for number in range(25):
            disk.room = (number * 7_919) % 30_000
            for _ in range(10):
                kept.push()
                kept.durability.step()
            stays = kept.durable
            assert recovered(_copied(kept, tmp_path / str(number))).applied(SOURCE) >= stays
        disk.room = None
        kept.until(lambda: kept.durable == kept.applied)
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_a_snapshot_without_room_leaves_nothing_and_the_log_goes_on(
        self, kept: Kept, disk: FaultyDisk, tmp_path: Path
    ) -> None:
        kept.push(20)
        kept.flush()
        disk.room = 3_000
        kept.durability.snapshot_now()
        kept.until(lambda: kept.durability.writer.counts.snapshot_failures_total > 0)
        assert failing(kept)
        assert not list(kept.folder.glob("*.tmp"))
        disk.room = None
        kept.push(2)
        kept.flush()
        assert kept.durable == 21
        kept.until(lambda: kept.durability.writer.counts.snapshots_total == 1)
        assert not failing(kept)
        assert kept.durability.counts.given_up_total == 0
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_a_checkpoint_does_not_lie(self, kept: Kept, disk: FaultyDisk) -> None:
        disk.room = 0
        kept.push()
        assert not kept.durability.finish(0.1)

    def test_a_stop_does_not_wait_for_a_full_disk(self, tmp_path: Path, disk: FaultyDisk) -> None:
        kept = Kept(tmp_path, 1, disk)
        kept.push()
        disk.room = 0
        kept.push(3)
        started = time.monotonic()
        kept.close()
        assert time.monotonic() - started < 1.0
        recovered(tmp_path)


class TestBrokenDisk:
    def test_after_a_failed_sync_nothing_written_since_counts(
        self, kept: Kept, disk: FaultyDisk, tmp_path: Path
    ) -> None:
        kept.push(3)
        kept.flush()
        durable = contents(kept.shard)
        disk.syncs_fail = True
        kept.push(3)
        kept.until(lambda: kept.durability.given_up == 1)
        assert kept.durable == 2
        assert contents(recovered(_copied(kept, tmp_path / "copy"))) == durable
        disk.syncs_fail = False
        kept.until(lambda: kept.durable == 5)
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_what_cannot_be_cut_off_now_is_cut_off_before_the_next_write(
        self, kept: Kept, disk: FaultyDisk, tmp_path: Path
    ) -> None:
        kept.push(3)
        kept.flush()
        disk.room, disk.truncates_fail = 100, True
        kept.push()
        kept.until(lambda: failing(kept))
        (path,) = kept.folder.glob("*.log")
        assert recovered(_copied(kept, tmp_path / "copy")).applied(SOURCE) == 2
        disk.room, disk.truncates_fail = None, False
        kept.flush()
        assert whole(path)
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_a_fault_of_ours_is_not_hidden(self, tmp_path: Path, disk: FaultyDisk) -> None:
        def fault() -> None:
            raise ZeroDivisionError

        kept = Kept(tmp_path, 1, disk)
        disk.before_write = fault
        kept.push()
        with pytest.raises(RuntimeError, match="has died"):
            kept.until(lambda: False)
        kept.close()

    def test_a_sync_that_succeeds_after_one_that_failed_proves_nothing(
        self, tmp_path: Path, disk: FaultyDisk
    ) -> None:
        kept = Kept(tmp_path, 1, disk)
        kept.push(3)
        kept.flush()
        disk.syncs_fail = True
        kept.push()
        deadline = time.monotonic() + 20.0
        while not failing(kept) and time.monotonic() < deadline:  # the loop is busy and looks at no report
            time.sleep(0.001)
        disk.syncs_fail = False
        kept.push(5)
        time.sleep(0.05)
        outcomes = [report.outcome for report in kept.durability.writer.reports()]
        assert "lost" in outcomes
        assert "synced" not in outcomes
        kept.close()

    def test_a_late_report_of_a_log_that_was_given_up_does_not_count(
        self, kept: Kept, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept.push(2)
        kept.flush()
        position = kept.held.durable.position
        disk.syncs_fail = True
        kept.push()
        kept.until(lambda: kept.durability.given_up == 1)
        writer = kept.durability.writer
        take = writer.reports
        (log,) = kept.durability._kept
        late = Report(log, "synced", position + 1_000, 0)
        monkeypatch.setattr(writer, "reports", lambda: [late, *take()])
        disk.syncs_fail = False
        kept.until(lambda: kept.durability.given_up == 0)
        assert kept.held.durable.position < position + 1_000


class TestSlowDisk:
    def test_pushes_wait_at_the_bound_and_nothing_is_given_up(
        self, kept: Kept, disk: FaultyDisk, tmp_path: Path
    ) -> None:
        go_on = threading.Event()
        disk.before_write = lambda: None if go_on.wait(20) else pytest.fail("nobody let it go on")
        while not kept.durability.full:
            kept.push()
            kept.durability.step()
        assert kept.durability.writer.waiting_bytes < BACKLOG + 10_000
        assert (kept.durable, kept.durability.counts.given_up_total, failing(kept)) == (-1, 0, False)
        go_on.set()
        kept.until(lambda: not kept.durability.full)
        kept.flush()
        assert contents(recovered(tmp_path)) == contents(kept.shard)


def _copied(kept: Kept, to: Path) -> Path:
    """The shard's files as a crash would leave them now, below ``to``; the running shard keeps its own."""
    (to / "main" / "0-of-1").mkdir(parents=True)
    for path in kept.folder.iterdir():
        with suppress(FileNotFoundError):  # a log or snapshot may go while it is copied
            (to / "main" / "0-of-1" / path.name).write_bytes(path.read_bytes())
    return to


class Child:
    """A process that pushes without end (``support/disks.py``); what it prints, line by line."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, disks.__file__, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def until(self, what: str, holds: object) -> dict[str, int]:
        """The first line of which ``holds`` is true."""
        assert callable(holds)
        assert self.process.stdout is not None
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            line = self.process.stdout.readline().split()
            assert line, "the process has ended"
            names = ("applied", "durable", "failing", "snapshots", "given_up")
            found = dict(zip(names, map(int, line), strict=True))
            if holds(found):
                return found
        raise AssertionError(f"it did not happen: {what}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def child(folder: Path) -> Iterator[Child]:
    running = Child(folder)
    try:
        yield running
    finally:
        running.kill()


def _ends_well(running: Child, folder: Path) -> None:
    """Once there is room again everything is durable, and a kill loses nothing of that."""
    mended = running.until("mended", lambda now: not now["given_up"] and not now["failing"])
    later = running.until("durable", lambda now: now["durable"] > mended["applied"])
    running.kill()
    assert recovered(folder).applied(SOURCE) >= later["durable"]


def test_a_file_may_not_grow_any_more_and_then_may_again(tmp_path: Path) -> None:
    with child(tmp_path) as running:
        running.until("a snapshot", lambda now: now["snapshots"] > 0)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        stuck = running.until("given up", lambda now: now["given_up"] and now["failing"])
        on = running.until("training", lambda now: now["applied"] > stuck["applied"] + 20)
        assert on["durable"] == stuck["durable"]
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, unlimited)
        _ends_well(running, tmp_path)


def test_a_file_system_is_full_and_then_is_not(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.getuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a file system of one MiB cannot be mounted here: that takes root and a mount privilege")
    try:
        ballast = place / "ballast"
        with child(place) as running:
            running.until("a snapshot", lambda now: now["snapshots"] > 0)
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4_096))
            stuck = running.until("given up", lambda now: now["given_up"] and now["failing"])
            running.until("training", lambda now: now["applied"] > stuck["applied"] + 20)
            ballast.unlink()
            _ends_well(running, place)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_killed_at_any_moment_what_was_durable_is_there(tmp_path: Path) -> None:
    """Five kills of one shard that pushes, logs and takes snapshots as fast as it can; bits equal each time."""
    reached = -1
    for number in range(5):
        enough = reached + 5 + 13 * number
        with child(tmp_path) as running:
            last = running.until("progress", lambda now, enough=enough: now["applied"] > enough)
            running.kill()
        shard = recovered(tmp_path, 1_000 + number)
        assert shard.applied(SOURCE) >= last["durable"]
        reached = shard.applied(SOURCE)
    undisturbed = Kept(tmp_path / "undisturbed")
    undisturbed.push(reached + 1)
    undisturbed.close()
    assert but_times(contents(shard)) == but_times(contents(undisturbed.shard))
