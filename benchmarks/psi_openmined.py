"""openmined-psi as a peer: a process in an environment of its own, told which sets to intersect."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAME: Final = "openmined-psi 2.0.6, one thread"
_FOLDER: Final = Path(__file__).parent / "peers" / "psi"
PYTHON: Final = _FOLDER / ".venv" / "bin" / "python"
REPOSITORY: Final = _FOLDER.parents[2]
INSTALL: Final = (
    "python3 -m venv benchmarks/peers/psi/.venv && "
    "benchmarks/peers/psi/.venv/bin/pip install -r benchmarks/peers/psi/requirements.lock"
)
_TIMEOUT_S: Final = 60.0


class OpenMinedFailed(RuntimeError):
    """Its process ended or said nonsense, or it found another intersection; the message says which."""


@dataclass(frozen=True, slots=True)
class Intersected:
    """A whole intersection: seconds, and bytes of its messages."""

    seconds: float
    bytes: int


Intersect = Callable[[int, int, int], Intersected]
"""Of sizes of both sets and of what they share."""


def available() -> bool:
    """Whether its environment is there."""
    return PYTHON.exists()


@contextmanager
def openmined() -> Iterator[Intersect]:
    """What intersects on one thread of one process. Raises OpenMinedFailed."""
    with tempfile.TemporaryDirectory(prefix="headwater-openmined-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmarks.peers.psi.openmined"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )

        def intersect(first: int, second: int, common: int) -> Intersected:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps({"first": first, "second": second, "common": common}) + "\n")
                process.stdin.flush()
                seconds, found, sent = json.loads(process.stdout.readline())
            except (BrokenPipeError, ValueError) as error:
                raise OpenMinedFailed(
                    "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                ) from error
            if found != common:
                raise OpenMinedFailed(f"found {found} common ids of {common}")
            return Intersected(float(seconds), int(sent))

        try:
            yield intersect
        finally:
            try:
                process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
