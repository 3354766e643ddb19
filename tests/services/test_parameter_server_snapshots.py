"""Snapshots and logs as files: what is written, what is read back, and what damage costs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.disks import FaultyDisk, Kept, but_times, contents, recovered
from support.parameters import ALL_KEYS, SOURCE, Fleet, gradients, recorded

from services.parameter_server.client import operations
from services.parameter_server.storage.offsets import DurableOffsets
from services.parameter_server.storage.recovery import read_records, recover
from services.parameter_server.storage.snapshots import (
    LayoutChanged,
    OtherVersion,
    ShardFolder,
    SnapshotsLost,
)
from services.parameter_server.storage.writer import Pace
from services.parameter_server.types import ModelMismatch
from sync.pushes import NOTHING, Progress, Source
from sync.records import Delta, End, Head
from sync.snapshot import encode_record


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    running = Kept(tmp_path)
    yield running
    running.close()


def undisturbed(pushes: int) -> dict[str, bytes]:
    fleet = Fleet()
    for offset in range(pushes):
        fleet.ask(operations.push(fleet.route, gradients(offset, recorded(offset), 1)))
    return contents(fleet.hosts["a"].models["main"].held[0].shard)


def ends(path: Path) -> list[int]:
    return [end for _, end in read_records(path)]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def logs(kept: Kept) -> list[Path]:
    return sorted(kept.folder.glob("*.log"))


class TestLog:
    def test_what_is_durable_is_there_after_a_crash(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(5)
        assert kept.durable == NOTHING or kept.durable <= 4
        kept.flush()
        assert kept.durable == 4
        assert contents(recovered(tmp_path)) == undisturbed(5) == contents(kept.shard)

    def test_many_steps_share_a_sync(self, tmp_path: Path) -> None:
        kept = Kept(tmp_path, pace=Pace(fsync_s=0.2))
        kept.push(50)
        kept.flush()
        counts = kept.durability.writer.counts
        kept.close()
        assert counts.log_steps_total >= 50
        assert counts.syncs_total <= 5

    def test_a_log_says_whose_it_is(self, kept: Kept) -> None:
        kept.push(1)
        kept.flush()
        (path,) = logs(kept)
        (head, _), *steps = list(read_records(path))
        assert isinstance(head, Head)
        assert (head.model, head.shard_id, head.fingerprint, head.position) == ("main", 0, "fp-1", 0)
        assert [step.position for step, _ in steps if isinstance(step, Delta)] == list(
            range(1, kept.shard.position + 1)
        )

    def test_an_unfinished_last_record_is_cut_off_without_a_word_of_damage(
        self, kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.push(3)
        kept.flush()
        kept.close()
        (path,) = logs(kept)
        *_, before, whole = ends(path)
        data = path.read_bytes()
        assert whole == len(data)
        for size in (before + 1, before + 39, before + 41, whole - 1):
            path.write_bytes(data[:size])
            position = recovered(tmp_path).position
            assert position == kept.shard.position - 1
            assert path.stat().st_size == before
        path.write_bytes(data[:before] + bytes(5_000))
        assert recovered(tmp_path).position == kept.shard.position - 1
        assert "ERROR" not in {record.levelname for record in caplog.records}
        assert not list(kept.folder.glob("*.damaged"))

    def test_a_start_goes_on_in_a_log_of_its_own(self, tmp_path: Path) -> None:
        for start in range(1, 5):
            kept = Kept(tmp_path, start * 10)
            assert kept.applied == 2 * start - 3
            kept.push(2)
            kept.flush()
            kept.crash()
        assert len(logs(kept)) == 4
        assert contents(recovered(tmp_path)) == contents(kept.shard)
        assert len(logs(kept)) == 4

    def test_a_log_without_a_step_makes_room_for_its_successor(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(1)
        kept.flush()
        kept.close()
        (path,) = logs(kept)
        path.write_bytes(path.read_bytes()[: ends(path)[0]])
        assert recovered(tmp_path).position == 0
        assert logs(kept) == []


class TestSnapshots:
    def test_a_copy_that_pushes_interrupt_is_whole_by_the_log(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("services.parameter_server.storage.durability.PAGE_BYTES", 10 * 40)
        kept = Kept(tmp_path)
        kept.push(4)
        kept.durability.snapshot_now()
        while kept.durability.writer.counts.snapshots_total == 0:
            kept.durability.step()
            if kept.applied < 60:
                kept.push()
        kept.flush()
        kept.close()
        (path,) = kept.folder.glob("*.snapshot")
        end = [record for record, _ in read_records(path)][-1]
        assert end.position > int(path.stem) + 10, "nothing moved while the copy was taken"
        assert logs(kept)[-1].stem == f"{int(path.stem) + 1:012d}"
        for old in logs(kept)[:-1]:
            old.unlink()
        assert contents(recovered(tmp_path)) == contents(kept.shard) == undisturbed(kept.applied + 1)

    def test_a_copy_needs_the_log_up_to_its_end(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(2)
        kept.flush()
        folder = ShardFolder(tmp_path, "main", 0, 1, 2)
        head = kept.shard.head()
        kept.push(1)
        records = [head, *kept.shard.pages(), End(kept.shard.position + 1)]
        path = folder.snapshot(head.position)
        path.write_bytes(b"".join(bytes(b) for record in records for b in encode_record(record)))
        kept.flush()
        assert contents(recovered(tmp_path)) == undisturbed(3)
        assert path.with_name(path.name + ".damaged").exists()

    def test_a_log_goes_only_when_no_step_of_it_is_needed(self, tmp_path: Path) -> None:
        folder = ShardFolder(tmp_path, "main", 0, 1, 2)
        folder.path.mkdir(parents=True)
        for path in (*map(folder.snapshot, (5, 6, 7)), *map(folder.log, (1, 6, 7, 8))):
            path.touch()
        folder.prune()
        assert [position for position, _ in folder.snapshots()] == [6, 7]
        assert [position for position, _ in folder.logs()] == [7, 8]

    @pytest.mark.parametrize("pushes", [1, 2])
    def test_old_ones_go_with_the_logs_that_no_other_needs(
        self, kept: Kept, tmp_path: Path, pushes: int
    ) -> None:
        names = []
        for _ in range(4):
            kept.push(pushes)
            names.append(kept.snapshot().stem)
        kept.push(1)
        kept.flush()
        assert [path.stem for path in sorted(kept.folder.glob("*.snapshot"))] == names[-2:]
        assert [int(path.stem) for path in logs(kept)] == [int(name) + 1 for name in names[-2:]]
        (kept.folder / f"{names[-1]}.snapshot").write_bytes(b"x")
        assert contents(recovered(tmp_path)) == contents(kept.shard)

    def test_what_did_not_move_is_not_written_again(self, kept: Kept) -> None:
        kept.push(1)
        kept.snapshot()
        kept.durability.snapshot_now()
        for _ in range(50):
            kept.durability.step()
        assert kept.durability.writer.counts.snapshots_total == 1

    def test_they_come_by_themselves_and_when_the_log_is_long(self, tmp_path: Path) -> None:
        kept = Kept(tmp_path, snapshot_s=0.01)
        kept.push(1)
        kept.until(lambda: kept.durability.writer.counts.snapshots_total > 0)
        kept.close()
        kept = Kept(tmp_path, 10, log_bytes=20_000)
        while kept.durability.writer.counts.snapshots_total < 2:
            kept.push(1)
            kept.durability.step()
        assert kept.applied > 10, "more than once for so few steps"
        kept.close()

    def test_a_name_is_given_only_to_a_synced_file(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        kept = Kept(tmp_path, 1, disk)
        kept.push(1)
        kept.flush()
        disk.done.clear()
        kept.snapshot()
        kept.close()
        assert disk.done == ["sync ", "sync .tmp", "rename .snapshot", "sync "]

    def test_it_is_named_only_once_its_log_is_synced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("services.parameter_server.storage.durability.PAGE_BYTES", 10 * 40)
        disk = FaultyDisk()
        kept = Kept(tmp_path, 1, disk, pace=Pace(fsync_s=3_600.0))
        kept.push(5)
        kept.durability.snapshot_now()
        kept.until(lambda: kept.durability.writer.counts.snapshot_bytes_total > 0)
        begun = len(disk.done)
        kept.push(1)
        kept.until(lambda: kept.durability.writer.counts.snapshots_total == 1)
        kept.close()
        assert "sync .log" in disk.done[begun : disk.done.index("rename .snapshot")]

    def test_what_a_crash_left_half_written_is_swept(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(1)
        kept.flush()
        half = kept.folder / "000000000001.tmp"
        half.write_bytes(b"half")
        assert recovered(tmp_path).position == kept.shard.position
        assert not half.exists()

    def test_the_loop_copies_a_page_a_turn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.parameter_server.storage.durability.PAGE_BYTES", 10 * 40)
        copied: list[int] = []
        kept = Kept(tmp_path)
        kept.push(10)
        kept.durability.snapshot_now()
        take = kept.durability.writer.add
        monkeypatch.setattr(
            kept.durability.writer, "add", lambda log, page: (copied.append(len(page.keys)), take(log, page))
        )
        turns = 0
        while kept.durability.writer.counts.snapshots_total == 0:
            before = len(copied)
            kept.durability.step()
            assert len(copied) <= before + 1
            turns += 1
        assert len(copied) > 10
        assert max(copied) <= 10
        kept.close()

    def test_a_log_waits_for_the_snapshot_that_it_follows(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(2)
        first = kept.snapshot()
        kept.push(2)
        kept.flush()
        kept.close()
        last, folder = logs(kept)[-1], ShardFolder(tmp_path, "main", 0, 1, 2)
        pending = folder.pending(int(last.stem))
        last.rename(pending)
        assert contents(recovered(tmp_path)) == undisturbed(4), (
            "the process died just before it gave the log its name"
        )
        assert last.exists()
        last.rename(pending)
        first.rename(first.with_suffix(".other"))
        assert recovered(tmp_path).applied(SOURCE) == 1
        assert not pending.exists()


class TestDamage:
    @pytest.mark.parametrize("damage", ["cut", "flip", "empty", "head"])
    def test_a_damaged_snapshot_is_named_and_costs_nothing(
        self, kept: Kept, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.push(3)
        kept.snapshot()
        kept.push(3)
        newest = kept.snapshot()
        kept.push(3)
        kept.flush()
        data = newest.read_bytes()
        if damage in ("flip", "head"):
            flip(newest, len(data) // 2 if damage == "flip" else 45)
        else:
            newest.write_bytes(data[:-1] if damage == "cut" else b"")
        assert contents(recovered(tmp_path)) == contents(kept.shard) == undisturbed(9)
        assert str(newest) in caplog.text
        assert newest.with_name(newest.name + ".damaged").exists()
        assert not newest.exists()

    def test_the_log_alone_is_enough_while_there_are_fewer_snapshots_than_kept(
        self, kept: Kept, tmp_path: Path
    ) -> None:
        kept.push(3)
        only = kept.snapshot()
        kept.push(2)
        kept.flush()
        only.write_bytes(only.read_bytes()[:-40])
        assert contents(recovered(tmp_path)) == undisturbed(5)

    def test_a_damaged_step_is_named_with_what_is_lost(
        self, kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.push(2)
        kept.snapshot()
        kept.push(6)
        kept.flush()
        kept.close()
        path = logs(kept)[-1]
        steps = ends(path)
        data = path.read_bytes()
        flip(path, steps[2] + 60)
        shard = recovered(tmp_path)
        assert contents(shard) == undisturbed(4)
        assert f"log {path} cannot be used from byte {steps[2]} on" in caplog.text
        lost = kept.shard.position - shard.position
        assert f"lost are steps up to {kept.shard.position} ({lost})" in caplog.text
        (rest,) = kept.folder.glob("*.damaged")
        assert len(rest.read_bytes()) == len(data) - steps[2]
        again = Kept(tmp_path, 50)
        assert again.applied == 3
        again.push(4)
        again.flush()
        again.crash()
        found = contents(recovered(tmp_path))
        assert found == contents(again.shard)
        assert but_times(found) == but_times(undisturbed(8))

    def test_a_damaged_length_is_not_taken_for_an_unfinished_write(
        self, kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.push(4)
        kept.flush()
        (path,) = logs(kept)
        flip(path, ends(path)[1] + 20)  # the high bytes of a length: the record seems to go beyond the file
        assert recovered(tmp_path).position == 1
        assert "cannot be used" in caplog.text
        assert list(kept.folder.glob("*.damaged"))

    def test_logs_that_cannot_be_reached_any_more_are_set_aside(
        self, kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            kept.push(2)
            kept.flush()
            kept.crash()
            kept = Kept(tmp_path, kept.shard.position * 7)
        kept.crash()
        first, second, third = logs(kept)[:3]
        second.unlink()
        assert contents(recovered(tmp_path)) == undisturbed(2)
        assert f"steps {int(second.stem)} to {int(third.stem) - 1} are in no log" in caplog.text
        assert third.with_name(third.name + ".damaged").exists()
        assert first.exists()

    def test_no_start_from_nothing_when_all_is_damaged(self, tmp_path: Path) -> None:
        kept = Kept(tmp_path, kept=1)
        kept.push(2)
        path = kept.snapshot()
        kept.close()
        path.write_bytes(b"x")
        for old in logs(kept):
            old.unlink()
        for _ in range(2):
            with pytest.raises(SnapshotsLost, match="move the folder away"):
                recovered(tmp_path)

    def test_a_log_that_is_damaged_from_its_first_step_is_no_start_either(
        self, kept: Kept, tmp_path: Path
    ) -> None:
        kept.push(3)
        kept.flush()
        (path,) = logs(kept)
        flip(path, ends(path)[0] + 60)
        with pytest.raises(SnapshotsLost):
            recovered(tmp_path)
        assert path.exists()

    def test_damaged_files_are_bounded(self, tmp_path: Path) -> None:
        folder = ShardFolder(tmp_path, "main", 0, 1, 2)
        folder.path.mkdir(parents=True)
        for number in range(20):
            folder.snapshot(number).write_bytes(b"x")
            folder.set_aside(folder.snapshot(number))
        assert [int(path.name[:12]) for path in folder.damaged()] == list(range(12, 20))

    def test_another_line_of_owners_is_not_mixed_in(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(2)
        kept.snapshot()
        kept.push(2)
        kept.flush()
        kept.close()
        path = logs(kept)[-1]
        whole = list(read_records(path))
        (head, _), steps = whole[0], [step for step, _ in whole[1:]]
        assert isinstance(head, Head)
        other = replace(head, history=tuple((epoch + 7, first) for epoch, first in head.history))
        path.write_bytes(b"".join(bytes(b) for record in (other, *steps) for b in encode_record(record)))
        assert contents(recovered(tmp_path)) == undisturbed(2)

    def test_any_single_flipped_bit_is_found(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(3)
        kept.snapshot()
        kept.push(3)
        kept.flush()
        kept.close()
        generator = random.Random(3)
        expected = [undisturbed(count) for count in range(7)]
        for number in range(60):
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(tmp_path / "main", copy / "main")
            path = generator.choice(sorted((copy / "main" / "0-of-1").iterdir()))
            flip(path, generator.randrange(path.stat().st_size))
            try:
                shard = recovered(copy)
            except OtherVersion as error:
                raise AssertionError("damage was taken for another version") from error
            assert contents(shard) == expected[shard.applied(SOURCE) + 1]
            if path.suffix == ".snapshot":
                assert shard.applied(SOURCE) == 5
            assert shard.applied(SOURCE) >= 2


class TestOtherFiles:
    def test_the_first_format_is_refused_by_name(self, tmp_path: Path) -> None:
        folder = ShardFolder(tmp_path, "main", 0, 1, 2)
        folder.path.mkdir(parents=True)
        path = folder.snapshot(1)
        path.write_bytes(b"HWSHARD\x00" + bytes(100))
        with pytest.raises(OtherVersion, match=r"000000000001\.snapshot was written by another version"):
            recovered(tmp_path)
        assert path.exists()

    def test_another_number_of_shards_is_refused(self, kept: Kept, tmp_path: Path) -> None:
        kept.push(1)
        kept.flush()
        with pytest.raises(LayoutChanged, match="another number of shards than 4"):
            ShardFolder(tmp_path, "main", 0, 4, 2)

    @pytest.mark.parametrize("snapshot", [True, False])
    def test_another_schema_is_refused_and_stays_as_it_is(
        self, kept: Kept, tmp_path: Path, snapshot: bool
    ) -> None:
        kept.push(1)
        kept.flush()
        if snapshot:
            kept.snapshot()
        kept.close()
        before = kept.files()

        def other(_head: Head) -> None:
            raise ModelMismatch("main", "fp-1", "fp-2")

        with pytest.raises(ModelMismatch):
            recover(ShardFolder(tmp_path, "main", 0, 1, 2), lambda: Kept(tmp_path / "new").shard, other)
        assert kept.files() == before


class TestOtherShards:
    def test_a_shard_in_the_place_of_another_takes_its_place_on_disk(self, tmp_path: Path) -> None:
        old = Kept(tmp_path)
        old.push(6)
        old.snapshot()
        old.push(2)
        old.flush()
        other = Kept(tmp_path / "other", 20)
        other.push(3)
        old.held.shard = other.shard
        old.durability.renew(old.held)
        assert (old.held.durable.position, old.durable) == (0, NOTHING)
        old.until(lambda: old.held.durable.position == other.shard.position)
        assert old.durable == 2
        old.close()
        other.close()
        assert contents(recovered(tmp_path)) == contents(other.shard)
        assert old.files() == [f"{other.shard.position:012d}.snapshot"]

    def test_a_shard_that_left_and_comes_back_finds_its_files(self, tmp_path: Path) -> None:
        kept = Kept(tmp_path)
        host = kept.fleet.hosts["a"]
        kept.push(5)
        kept.flush()
        kept.push(1)
        kept.durability.forget(kept.held)
        held = kept.durability.open("main", 0, lambda: recovered(tmp_path / "none"), lambda _head: None)
        assert held.shard.applied(SOURCE) >= 4
        assert held.durable.of(SOURCE) == held.shard.applied(SOURCE)
        assert kept.durability.given_up == 0
        assert host.models["main"].held[0].shard.applied(SOURCE) == 5
        kept.close()


def step(position: int, offset: int, source: Source = SOURCE) -> Delta:
    return Delta(1, position, 1, position, ((source, Progress(offset)),))


class TestDurableOffsets:
    def test_offsets_follow_positions(self) -> None:
        offsets = DurableOffsets(3, {SOURCE: 7})
        for position in range(4, 8):
            offsets.note(step(position, position * 10))
        assert (offsets.of(SOURCE), offsets.of(Source("x", 0))) == (7, NOTHING)
        offsets.reached(5)
        assert (offsets.position, offsets.of(SOURCE)) == (5, 50)
        offsets.reached(4)
        assert (offsets.position, offsets.of(SOURCE)) == (5, 50)
        offsets.reached(7)
        assert (offsets.position, offsets.of(SOURCE)) == (7, 70)

    def test_nothing_counts_while_steps_are_missing(self) -> None:
        offsets, other = DurableOffsets(3, {SOURCE: 7}), Source("log-1", 1)
        offsets.note(step(4, 40))
        offsets.stand_still()
        offsets.reached(4)
        assert (offsets.position, offsets.of(SOURCE), offsets.standing_still) == (3, 7, True)
        offsets.restart(9, {SOURCE: 90})
        offsets.note(step(10, 5, other))
        offsets.note(step(11, 6, other))
        offsets.reached(10)
        assert (offsets.position, offsets.of(SOURCE), offsets.of(other)) == (3, 7, NOTHING)
        offsets.complete()
        assert (offsets.position, offsets.of(SOURCE), offsets.of(other)) == (10, 90, 5)
        offsets.reached(11)
        assert (offsets.position, offsets.of(other), offsets.standing_still) == (11, 6, False)


def test_the_values_pulled_after_a_start_are_those_before(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.push(7)
    kept.flush()
    kept.crash()
    again = Kept(tmp_path, 9)
    np.testing.assert_array_equal(again.shard.pull("items", ALL_KEYS), kept.shard.pull("items", ALL_KEYS))
    again.close()
