"""The supervisor, with real processes: they start, come back, stop in order, and die with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from services.processes import stop_on_signals, stop_with_parent
from services.settings.load import load_settings
from services.supervisor.folder import AlreadyRunning, ProcessId, RunFolder
from services.supervisor.logs import RotatingLog, pump, tail
from services.supervisor.membership import Presence
from services.supervisor.plan import ChildSpec, child_environment, plan
from services.supervisor.regions import Region
from services.supervisor.restarts import RestartHistory, RestartPolicy, after_end
from services.supervisor.supervisor import NotReady, Supervisor

CHILD = Path(__file__).parents[1] / "support" / "child.py"


def eventually(true: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def spec(folder: Path, name: str, rank: int = 0, *options: str) -> ChildSpec:
    return ChildSpec(name, "tiny", (sys.executable, str(CHILD), str(folder), name, *options), rank)


def present(folder: Path) -> Mapping[str, Presence]:
    """Who the children say they are: one file each, as coordination would hold an entry."""
    found = {}
    for file in folder.glob("*.here"):
        text = file.read_text()
        if text:
            found[file.stem] = Presence(int(text), "127.0.0.1:1", True)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "data")


class TestSupervising:
    @pytest.fixture
    def running(self, folder: RunFolder, tmp_path: Path) -> Iterator[Supervisor]:
        specs = [spec(tmp_path, "first-0", 1), spec(tmp_path, "last-0", 0)]
        environ = {**os.environ, "HEADWATER__LOG__PARTITIONS": "9"}
        with Supervisor(specs, folder, lambda: present(tmp_path), environ=environ) as supervisor:
            supervisor.wait_ready(10.0)
            yield supervisor

    def test_ready_by_membership_and_written_down(self, running: Supervisor, folder: RunFolder) -> None:
        assert [(child.name, child.state) for child in running.children()] == [
            ("first-0", "ready"),
            ("last-0", "ready"),
        ]
        eventually(lambda: (state := folder.state()) and {c.state for c in state.children} == {"ready"})
        assert running.address("tiny") == "127.0.0.1:1"
        assert running.address("other") is None

    def test_a_killed_one_comes_back_at_once(self, running: Supervisor) -> None:
        before = running.children()[0].process
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        eventually(
            lambda: running.children()[0].restarts == 1 and running.children()[0].state == "ready", 5.0
        )
        after = running.children()[0]
        assert after.process is not None
        assert after.process.pid != before.pid
        assert after.last_exit == -signal.SIGKILL
        assert running.children()[1].restarts == 0

    def test_threads_are_limited_and_settings_come_from_the_file_alone(
        self, running: Supervisor, folder: RunFolder
    ) -> None:
        lines = tail(folder.log_file("first-0"), 100)
        assert "OMP_NUM_THREADS=1" in lines
        assert any(line.startswith("PATH=") for line in lines)
        assert not [line for line in lines if line.startswith("HEADWATER__")]


def test_stops_in_order(folder: RunFolder, tmp_path: Path) -> None:
    specs = [spec(tmp_path, "last-0", 2), spec(tmp_path, "first-0", 0), spec(tmp_path, "middle-0", 1)]
    with Supervisor(specs, folder, lambda: present(tmp_path)) as running:
        running.wait_ready(10.0)
    assert (tmp_path / "ended").read_text().split() == ["first-0", "middle-0", "last-0"]
    assert {(child.state, child.last_exit) for child in running.children()} == {("stopped", 0)}


def test_what_ignores_sigterm_is_killed(folder: RunFolder, tmp_path: Path) -> None:
    with Supervisor(
        [spec(tmp_path, "deaf-0", 0, "deaf")], folder, lambda: present(tmp_path), grace_s=0.3
    ) as running:
        running.wait_ready(10.0)
    (child,) = running.children()
    assert (child.state, child.last_exit) == ("stopped", -signal.SIGKILL)


def test_not_ready_shows_the_end_of_the_log(folder: RunFolder, tmp_path: Path) -> None:
    policy = RestartPolicy(base_s=30.0)
    with Supervisor([spec(tmp_path, "bad-0", 0, "fail")], folder, dict, policy=policy) as running:
        eventually(lambda: running.children()[0].restarts == 2)
        with pytest.raises(NotReady, match=r"(?s)bad-0 is waiting, last exit 3.*out of luck"):
            running.wait_ready(0.1)


def test_what_keeps_ending_is_given_up_before_the_time_is_over(folder: RunFolder, tmp_path: Path) -> None:
    policy = RestartPolicy(base_s=0.01)
    with Supervisor([spec(tmp_path, "bad-0", 0, "fail")], folder, dict, policy=policy) as running:
        started = time.monotonic()
        with pytest.raises(NotReady, match="out of luck"):
            running.wait_ready(60.0)
        assert time.monotonic() - started < 30.0


def test_an_entry_of_a_former_run_is_not_taken_for_ready(folder: RunFolder, tmp_path: Path) -> None:
    stale = {"slow-0": Presence(1, "127.0.0.1:1", True)}
    with (
        Supervisor([spec(tmp_path, "slow-0")], folder, lambda: stale) as running,
        pytest.raises(NotReady, match="slow-0 is starting"),
    ):
        running.wait_ready(1.0)


class TestKilledSupervisor:
    """A second process supervises; it is killed, and what it left behind is looked at."""

    PROGRAM = textwrap.dedent(
        """
        import sys, threading
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from services.supervisor import RunFolder, Supervisor
        from tests.services.test_supervisor import present, spec
        base = Path(sys.argv[1])
        folder = RunFolder(base / "data")
        specs = [spec(base, "a-0", 0, "slow")]
        with folder.locked(), Supervisor(specs, folder, lambda: present(base)) as running:
            running.wait_ready(10.0)
            print("ready", flush=True)
            threading.Event().wait()
        """
    )

    def start(self, base: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", self.PROGRAM, str(base), str(CHILD.parents[2])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def test_children_die_and_the_lock_is_free(self, tmp_path: Path, folder: RunFolder) -> None:
        process = self.start(tmp_path)
        assert folder.held()
        with pytest.raises(AlreadyRunning, match=str(process.pid)), folder.locked():
            pass
        state = folder.state()
        assert state is not None
        (child,) = state.children
        assert child.process is not None
        process.kill()
        process.communicate()
        assert not folder.held()
        eventually(lambda: child.process is not None and child.process.process() is None, 5.0)
        with folder.locked():
            assert folder.held()

    def test_a_new_one_waits_for_orphans(self, tmp_path: Path, folder: RunFolder) -> None:
        process = self.start(tmp_path)
        orphan = present(tmp_path)["a-0"].pid
        process.kill()
        process.communicate()
        with (
            folder.locked(),
            Supervisor([spec(tmp_path, "a-0")], folder, lambda: present(tmp_path)) as running,
        ):
            assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
            running.wait_ready(10.0)


def test_a_process_id_used_again_is_another_process() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.process() is not None
    assert ProcessId(me.pid, me.created_s - 100.0).process() is None


def test_restart_delays_grow_to_a_bound_and_start_over() -> None:
    policy, history = RestartPolicy(base_s=0.5, most_s=4.0, steady_s=60.0), RestartHistory()
    delays = []
    for _ in range(2_000):
        delay_s, history = after_end(policy, history, ran_for_s=1.0)
        delays.append(delay_s)
    assert delays[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert max(delays) == 4.0
    delay_s, history = after_end(policy, history, ran_for_s=61.0)
    assert (delay_s, history.in_a_row, history.total) == (0.0, 1, 2_001)


def test_plan_follows_the_counts() -> None:
    overrides = ["parameters.servers=2", "processor.count=1", "trainer.count=3", "log.partitions=3"]
    specs = plan(Region(load_settings(overrides=overrides).settings), Path("/x.toml"))
    assert [child.name for child in specs] == [
        "parameter-server-0", "parameter-server-1", "processor-0", "trainer-0", "trainer-1", "trainer-2",
        "api-0",
    ]  # fmt: skip
    assert {child.region for child in specs} == {"home"}
    assert all("--set" not in " ".join(child.command) for child in specs)
    ranks = {child.service: child.stop_rank for child in specs}
    assert ranks["api"] < ranks["trainer"] < ranks["processor"] < ranks["parameter-server"]
    assert child_environment({"HEADWATER__LOG__PARTITIONS": "9", "HOME": "/h"}).keys() >= {"HOME"}


class TestLogs:
    def test_rotation_bounds_the_files_and_loses_only_the_oldest(self, tmp_path: Path) -> None:
        log = RotatingLog(tmp_path / "a.log", max_bytes=100, kept=2)
        for number in range(50):
            log.write(b"%09d\n" % number)
        log.close()
        kept = [tmp_path / "a.log.2", tmp_path / "a.log.1", tmp_path / "a.log"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2"]
        assert all(path.stat().st_size <= 100 for path in kept)
        lines = "".join(path.read_text() for path in kept).split()
        assert [int(line) for line in lines] == list(range(20, 50))

    def test_a_log_goes_on_after_a_restart(self, tmp_path: Path) -> None:
        for text in (b"one\n", b"two\n"):
            log = RotatingLog(tmp_path / "a.log")
            log.write(text)
            log.close()
        assert tail(tmp_path / "a.log", 5) == ["one", "two"]

    def test_pump_copies_to_the_end(self, tmp_path: Path) -> None:
        process = subprocess.Popen([sys.executable, "-c", "print('x' * 200_000)"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        pump(process.stdout, RotatingLog(tmp_path / "a.log")).join(10.0)
        process.wait()
        assert (tmp_path / "a.log").stat().st_size == 200_001


class TestProcesses:
    def test_signals_set_the_event_and_handlers_are_put_back(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        stop = threading.Event()
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wait(1.0)
        assert signal.getsignal(signal.SIGTERM) is before

    def test_the_end_of_the_pipe_stops_and_then_leaves(self) -> None:
        reading, writing = os.pipe()
        stop, left = threading.Event(), threading.Event()
        stop_with_parent(stop, reading, grace_s=0.05, leave=lambda code: left.set())
        assert not stop.wait(0.1)
        os.close(writing)
        assert stop.wait(2.0)
        assert left.wait(2.0)
        os.close(reading)
