"""Real services as processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr
from support import fork_server

from services.processes import SERVICES, run_service
from services.settings.model import Settings

ROOT = Path(__file__).resolve().parents[2]


class Running:
    """One service process that can be killed and started again."""

    def __init__(self, service: str, name: str, settings: Settings) -> None:
        folder = settings.data.dir / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{name}.json"
        self._file.write_text(json.dumps(settings.model_dump(), default=_plain))
        self.output = folder / f"{name}.log"
        self._service, self._name = service, name
        self._process: fork_server.Forked | None = None

    def start(self) -> None:
        self._process = fork_server.start(
            (__name__, SERVICES[self._service]),
            f"{__name__}:serve",
            (self._service, self._name, str(self._file)),
            self.output,
        )

    def kill(self) -> None:
        """SIGKILL: no goodbye of any kind."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: nothing of it runs until ``resume``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def died(self) -> bool:
        return self._process is not None and self._process.poll() is not None


def _plain(value: object) -> str:
    """A path or a secret as the process is to read it."""
    return str(value.get_secret_value()) if isinstance(value, SecretStr) else str(value)


@contextmanager
def service(name: str, settings: Settings, kind: str | None = None) -> Iterator[Running]:
    """Within the block the service runs as ``name`` (its kind is the name without its number)."""
    running = Running(kind or name.rstrip("0123456789-"), name, settings)
    running.start()
    try:
        yield running
        assert running.stop() == 0, running.output.read_text()[-3_000:]
    except BaseException:
        running.kill()
        print(f"--- {name}\n{running.output.read_text()[-3_000:]}")
        raise


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0, pause_s: float = 0.01) -> None:
    """Wait until ``holds()``. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(pause_s)


def serve(service: str, name: str, settings: str) -> None:
    """What the process does: serve by the settings in that file."""
    run_service(service, Settings.model_validate_json(Path(settings).read_text()), name)
