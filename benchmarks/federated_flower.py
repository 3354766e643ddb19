"""Flower's simulator as a peer: a process in an environment of its own, told when to do a round."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.federated_loop import Floats, Work
from federated.data import Federation

NAME: Final = "Flower's simulator"
_FOLDER: Final = Path(__file__).parent / "peers" / "flower"
PYTHON: Final = _FOLDER / ".venv" / "bin" / "python"
REPOSITORY: Final = _FOLDER.parents[2]
_WORK: Final = "HEADWATER_FLOWER_WORK"
INSTALL: Final = (
    "python3 -m venv benchmarks/peers/flower/.venv && "
    "benchmarks/peers/flower/.venv/bin/pip install -r benchmarks/peers/flower/requirements.lock"
)


class FlowerFailed(RuntimeError):
    """Flower's process ended or said something else than seconds; the message holds its last lines."""


def available() -> bool:
    """Whether its environment is there."""
    return PYTHON.exists()


@contextmanager
def flower(
    federation: Federation, work: Work, start: Floats, cores: int
) -> Iterator[tuple[Callable[[], float], Callable[[], Floats]]]:
    """What does a round of all clients of ``federation`` and gives its seconds, and what ends the process and gives
    the last weights [D]. Nothing is timed before the first call. Raises FlowerFailed."""
    with tempfile.TemporaryDirectory(prefix="headwater-flower-") as name:
        folder = Path(name)
        training = work.training
        np.savez(
            folder / "work.npz",
            inputs=federation.inputs,
            labels=federation.labels,
            rows=federation.training.rows,
            offsets=federation.training.offsets,
            weights=start,
            sizes=np.array(work.sizes),
            steps=training.steps or 0,
            epochs=training.epochs or 0,
            batch_size=training.batch_size,
            rate=training.rate,
        )
        log = folder / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmarks.peers.flower.rounds", str(cores)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(folder),
            )

        def round_s() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write("\n")
                process.stdin.flush()
                return float(process.stdout.readline())
            except (BrokenPipeError, ValueError) as error:
                raise FlowerFailed("\n".join(log.read_text(errors="replace").splitlines()[-15:])) from error

        def finish() -> Floats:
            process.communicate(timeout=60.0)
            weights: Floats = np.load(folder / "weights.npy")
            return weights

        try:
            yield round_s, finish
        finally:
            if process.poll() is None:
                try:
                    process.communicate(timeout=60.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()


def _environment(folder: Path) -> dict[str, str]:
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": str(REPOSITORY), _WORK: str(folder)}
    return {**os.environ, **quiet, **threads, **paths}
