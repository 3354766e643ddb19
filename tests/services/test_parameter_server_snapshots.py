"""Snapshots as files, and the thread that writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.parameters import EVERYTHING, SOURCE, Fleet, gradients, recorded

from services.parameter_server import operations
from services.parameter_server.saver import Saver
from services.parameter_server.snapshots import Buffer, LayoutChanged, SnapshotSeries, SnapshotsLost
from sync.shard import ShardState
from sync.snapshot import encode


def state_after(pushes: int) -> ShardState:
    fleet = Fleet()
    for offset in range(pushes):
        fleet.ask(operations.push(fleet.route, gradients(offset, recorded(offset), 1)))
    return fleet.hosts["a"].models["main"].held[0].shard.state()


def applied(state: ShardState | None) -> int:
    assert state is not None
    return state.pushes[SOURCE].applied


@pytest.fixture
def series(tmp_path: Path) -> SnapshotSeries:
    return SnapshotSeries(tmp_path, "main", 0, 1, kept=2)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "main" / "0-of-1").iterdir())


class TestSeries:
    def test_what_is_written_is_read_back(self, series: SnapshotSeries) -> None:
        assert series.newest() is None
        state = state_after(2)
        series.write([encode(state)])
        found = series.newest()
        assert found is not None
        assert encode(found) == encode(state)

    def test_the_newest_are_kept(self, series: SnapshotSeries, tmp_path: Path) -> None:
        for pushes in range(1, 6):
            series.write([encode(state_after(pushes))])
        assert files(tmp_path) == ["000000000004.snapshot", "000000000005.snapshot"]
        assert applied(series.newest()) == 4

    @pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
    def test_a_damaged_newest_is_named_and_the_one_before_used(
        self, series: SnapshotSeries, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        series.write([encode(state_after(1))])
        path = series.write([encode(state_after(2))])
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes({"cut": data[:-1], "flip": data, "empty": b""}[damage])
        assert applied(series.newest()) == 0
        assert str(path) in caplog.text
        assert files(tmp_path) == ["000000000001.snapshot", "000000000002.damaged"]
        series.write([encode(state_after(3))])
        assert files(tmp_path)[-1] == "000000000003.snapshot"
        assert applied(series.newest()) == 2

    def test_no_start_from_nothing_when_all_are_damaged(self, series: SnapshotSeries) -> None:
        series.write([encode(state_after(1))]).write_bytes(b"x")
        with pytest.raises(SnapshotsLost, match="can be read"):
            series.newest()
        with pytest.raises(SnapshotsLost, match="move the folder away"):
            series.newest()

    def test_damaged_files_are_bounded(self, series: SnapshotSeries, tmp_path: Path) -> None:
        for pushes in range(1, 6):
            series.write([encode(state_after(1))])
            series.write([encode(state_after(pushes))]).write_bytes(b"x")
            series.newest()
        series.write([encode(state_after(1))])
        assert sum(name.endswith(".damaged") for name in files(tmp_path)) == 2

    def test_a_write_that_was_cut_off_leaves_the_last_snapshot(
        self, series: SnapshotSeries, tmp_path: Path
    ) -> None:
        path = series.write([encode(state_after(1))])
        path.with_name("000000000002.tmp").write_bytes(b"half")
        assert applied(series.newest()) == 0
        assert files(tmp_path) == ["000000000001.snapshot"]

    def test_a_full_disk_changes_nothing(
        self, series: SnapshotSeries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        series.write([encode(state_after(1))])

        def full(_descriptor: int, _data: Buffer) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            series.write([encode(state_after(2))])
        assert files(tmp_path) == ["000000000001.snapshot"]

    def test_a_name_is_given_only_to_a_synced_file(
        self, series: SnapshotSeries, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        sync, rename = os.fsync, Path.rename

        def synced(descriptor: int) -> None:
            done.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
            sync(descriptor)

        def renamed(path: Path, to: Path) -> Path:
            done.append("rename")
            return rename(path, to)

        series.write([encode(state_after(1))])
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Path, "rename", renamed)
        series.write([encode(state_after(2))])
        assert done == ["sync .tmp", "rename", "sync "]

    def test_another_number_of_shards_is_refused(self, series: SnapshotSeries, tmp_path: Path) -> None:
        series.write([encode(state_after(1))])
        with pytest.raises(LayoutChanged, match="another number of shards than 4"):
            SnapshotSeries(tmp_path, "main", 0, 4, kept=2)


class Broken(SnapshotSeries):
    def write(self, buffers: Sequence[Buffer]) -> Path:
        raise OSError("broken")


class TestSaver:
    def test_durable_offsets_are_those_on_disk(self, series: SnapshotSeries) -> None:
        fleet = Fleet(("a",), 1)
        host = fleet.hosts["a"]
        saver = Saver(lambda _model, _shard: series)
        push = lambda offset: fleet.ask(  # noqa: E731
            operations.push(fleet.route, gradients(offset, recorded(offset), 1))
        )[0]
        assert push(0).durable == -1
        saver.begin(list(host.all_held()))
        saver.step()
        push(1)
        assert saver.finish(10.0)
        assert push(2).durable == 0
        assert applied(series.newest()) == 0
        saver.begin(list(host.all_held()))
        assert saver.finish(10.0)
        assert fleet.ask(operations.applied(fleet.route, SOURCE))[0].durable == 2
        saver.close()

    def test_a_copy_is_what_it_was_when_it_was_taken(self, series: SnapshotSeries) -> None:
        fleet = Fleet(("a",), 1)
        saver = Saver(lambda _model, _shard: series)
        fleet.ask(operations.push(fleet.route, gradients(0, recorded(0), 1)))
        rows = fleet.ask(operations.pull(fleet.route, EVERYTHING)).rows
        saver.begin(list(fleet.hosts["a"].all_held()))
        saver.step()
        for offset in range(1, 5):
            fleet.ask(operations.push(fleet.route, gradients(offset, recorded(offset), 1)))
        assert saver.finish(10.0)
        restored = Fleet(("a",), 1, lambda _model, _shard: series.newest(), incarnation=2)
        found = restored.ask(operations.pull(restored.route, EVERYTHING)).rows
        np.testing.assert_array_equal(found["items"], rows["items"])
        np.testing.assert_array_equal(found["dense"], rows["dense"])
        saver.close()

    def test_what_did_not_move_is_not_written_again(self, series: SnapshotSeries, tmp_path: Path) -> None:
        fleet = Fleet(("a",), 1)
        saver = Saver(lambda _model, _shard: series)
        fleet.ask(operations.push(fleet.route, gradients(0, recorded(0), 1)))
        for _ in range(3):
            saver.begin(list(fleet.hosts["a"].all_held()))
            assert saver.finish(10.0)
        assert saver.counts.snapshots_total == 1
        assert files(tmp_path) == ["000000000001.snapshot"]
        saver.close()

    def test_a_failed_write_is_counted_and_claims_nothing(self, tmp_path: Path) -> None:
        fleet = Fleet(("a",), 1)
        saver = Saver(lambda _model, _shard: Broken(tmp_path, "main", 0, 1, 2))
        fleet.ask(operations.push(fleet.route, gradients(0, recorded(0), 1)))
        saver.begin(list(fleet.hosts["a"].all_held()))
        assert saver.finish(10.0)
        assert (saver.counts.failures_total, saver.counts.snapshots_total) == (1, 0)
        assert fleet.ask(operations.applied(fleet.route, SOURCE))[0].durable == -1
        saver.close()
