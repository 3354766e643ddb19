"""What every process of ours does at its start and end: threads, logging, signals, the parent's death.

Nothing heavy is imported here, so that thread limits are in the environment before NumPy or torch read it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol, cast

if TYPE_CHECKING:
    from services.settings.model import Settings

SERVICES: Final[Mapping[str, str]] = {
    "parameter-server": "services.parameter_server.main",
    "processor": "services.processor.main",
    "trainer": "services.trainer.main",
    "api": "services.api.main",
    "link": "services.wan.main",
    "federation": "services.federation.main",
}
"""Every service that ``headwater service`` can start, with the module whose ``run`` serves it."""

# Two busy processes with two threads each ran 4 to 40 times slower than with one.
_ONE_THREAD: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_GRACE_S: Final = 20.0

log = logging.getLogger(__name__)


class Service(Protocol):
    """A service's entry point: serve until ``stop`` is set, then end cleanly."""

    def __call__(self, settings: Settings, name: str, stop: threading.Event) -> None: ...


def limit_threads(environ: MutableMapping[str, str]) -> None:
    """Allow one BLAS, OpenMP and numba thread in this process and its children; call before NumPy loads."""
    environ.update(dict.fromkeys(_ONE_THREAD, "1"))


def configure_logging(name: str, level: str = "INFO") -> None:
    """Log to standard error, one line each: time, level, process name, logger, message."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format=f"%(asctime)s.%(msecs)03dZ %(levelname)s {name} %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        force=True,
    )
    logging.Formatter.converter = time.gmtime
    # A line a request (etcd's keep-alives among them) says nothing that an error would not.
    for chatty in ("httpx", "kafka"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # A supervisor that died leaves a broken pipe behind; that must not take down what is still being saved.
    logging.raiseExceptions = False


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Within the block SIGTERM and SIGINT set ``stop``; a second one ends the process at once.

    Only the main thread may enter it.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does: what was begun is ended in order.

    Only the main thread may enter it.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_with_parent(
    stop: threading.Event,
    descriptor: int = 0,
    grace_s: float = _GRACE_S,
    leave: Callable[[int], None] = os._exit,
) -> None:
    """Set ``stop`` once the pipe at ``descriptor`` closes, and leave for good ``grace_s`` after.

    The parent holds the pipe's other end for as long as it lives, so this works however it dies, at once and
    without the race between a parent's death and a look at its process id.
    """

    def watch() -> None:
        try:
            while os.read(descriptor, 4096):
                pass
        except OSError:
            log.debug("the parent's pipe broke")
        stop.set()
        time.sleep(grace_s)
        leave(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_service(service: str, settings: Settings, name: str, *, with_parent: bool = False) -> None:
    """Serve as ``service`` under ``name`` until SIGTERM, SIGINT or, if asked, the parent's death.

    Raises KeyError for a service that does not exist.
    """
    module = SERVICES[service]
    limit_threads(os.environ)
    configure_logging(name)
    stop = threading.Event()
    if with_parent:
        stop_with_parent(stop)
    if service == "trainer" and settings.trainer.nice:
        os.nice(settings.trainer.nice)
    with stop_on_signals(stop):
        run = cast(Service, import_module(module).run)
        log.info("%s starts, process %d", service, os.getpid())
        announce(settings.data.dir, name, os.getpid())
        run(settings, name, stop)
        (settings.data.dir / "run" / f"{name}.pid").unlink(missing_ok=True)
        log.info("%s ended", service)


def leave() -> None:
    """End this process at once after a clean run: all is saved, and tearing down torch takes seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def announce(data_dir: Path, name: str, pid: int) -> None:
    """Note in the data folder that ``pid`` runs as ``name``, for health checks without a supervisor."""
    folder = data_dir / "run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.pid").write_text(f"{pid}\n", encoding="ascii")


def running_here(data_dir: Path) -> dict[str, int]:
    """Name and process id of each process announced in the data folder."""
    found: dict[str, int] = {}
    for file in (data_dir / "run").glob("*.pid"):
        text = file.read_text(encoding="ascii").strip()
        if text.isdecimal():
            found[file.stem] = int(text)
    return found
