"""What every process does at its start and end, seen from outside with a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from services.processes import announce, limit_threads, running_here

ROOT = Path(__file__).parents[2]
PROGRAM = textwrap.dedent(
    """
    import json, os, sys, types
    from services import processes
    from services.settings.load import load_settings

    def run(settings, name, stop):
        threads = {key: value for key, value in os.environ.items() if key.endswith("_NUM_THREADS")}
        print(json.dumps({"name": name, "threads": threads, "nice": os.nice(0)}), flush=True)
        stop.wait()
        print("saved", flush=True)

    module = types.ModuleType("tiny")
    module.run = run
    sys.modules["tiny"] = module
    processes.SERVICES = {"trainer": "tiny"}
    settings = load_settings(overrides=[f"data.dir={sys.argv[1]}", "trainer.nice=3"]).settings
    processes.run_service("trainer", settings, "trainer-7", with_parent=sys.argv[2] == "with-parent")
    """
)


def start(folder: Path, how: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    said: dict[str, object] = json.loads(process.stdout.readline())
    return process, said


def test_a_service_has_one_thread_per_library_is_niced_announced_and_ends_cleanly(tmp_path: Path) -> None:
    process, said = start(tmp_path, "alone")
    assert said["name"] == "trainer-7"
    threads = said["threads"]
    assert isinstance(threads, dict)
    assert set(threads) >= {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"}
    assert set(threads.values()) == {"1"}
    assert said["nice"] == os.nice(0) + 3
    assert running_here(tmp_path) == {"trainer-7": process.pid}
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "saved\n")
    assert "Z INFO trainer-7 services.processes: trainer ended" in err
    assert running_here(tmp_path) == {}


def test_a_service_ends_cleanly_with_its_parent_only_if_asked(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "with-parent")
    out, _err = process.communicate(timeout=10)  # closes its standard input
    assert (process.returncode, out) == (0, "saved\n")

    process, _ = start(tmp_path, "alone")
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        still_there = True
    else:
        still_there = False
    process.stdin = None
    process.terminate()
    process.communicate(timeout=10)
    assert still_there


def test_a_second_signal_ends_at_once() -> None:
    program = (
        "import threading\n"
        "from services.processes import stop_on_signals\n"
        "with stop_on_signals(threading.Event()):\n"
        "    print('on', flush=True)\n"
        "    while True: threading.Event().wait(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    for _ in range(200):
        process.terminate()
        try:
            process.wait(0.05)
            break
        except subprocess.TimeoutExpired:
            continue
    process.stdout.close()
    assert process.returncode == 128 + signal.SIGTERM


def test_limits_replace_what_was_there() -> None:
    environ = {"OMP_NUM_THREADS": "8", "HOME": "/h"}
    limit_threads(environ)
    assert (environ["OMP_NUM_THREADS"], environ["HOME"]) == ("1", "/h")


def test_what_is_no_process_id_is_passed_over(tmp_path: Path) -> None:
    announce(tmp_path, "a-0", 17)
    (tmp_path / "run" / "b-0.pid").write_text("seventeen")
    assert running_here(tmp_path) == {"a-0": 17}
    assert running_here(tmp_path / "none") == {}
