"""Flower's SecAgg+ as a peer: samples of its primitives from a process in its own environment, and how often its mod
and its workflow call each.

Its SecAgg is SecAgg+ with everybody as neighbour. ``shares`` counts a client's neighbours and itself, as Flower's
``num_shares`` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from benchmarks.federated_flower import INSTALL, PYTHON, REPOSITORY, FlowerFailed, available

NAME: Final = "Flower's SecAgg+ primitives"
MOST_COMBINED: Final = 100
"""Shares of a sample; more cost as their square, since Lagrange's coefficients are computed one pair at a time."""
SEED_CHUNKS: Final = 3
"""Polynomials of 16 bytes that a seed of 32 is shared by."""
_TIMEOUT_S: Final = 60.0

__all__ = ["INSTALL", "NAME", "Flower", "FlowerFailed", "available", "flower"]


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Seconds of Flower's server: what is ``long`` as the vectors are (masks and sums), secrets out of ``shares``, and
    ``agreements``."""

    long: float
    shares: float
    agreements: float

    @property
    def seconds(self) -> float:
        """All together."""
        return self.long + self.shares + self.agreements


Ask = Callable[..., tuple[float, int]]


@dataclass
class Flower:
    """Seconds of its parts; each is sampled when first asked for. A new object samples anew."""

    ask: Ask

    def __post_init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[float, int]] = {}

    def _sample(self, work: str, **numbers: int) -> tuple[float, int]:
        key = (work, *sorted(numbers.items()))
        if key not in self._known:
            self._known[key] = self.ask(work=work, **numbers)
        return self._known[key]

    def seconds(self, work: str, **numbers: int) -> float:
        """Of one call."""
        return self._sample(work, **numbers)[0]

    def bytes(self, work: str, **numbers: int) -> int:
        """What one call gives."""
        return self._sample(work, **numbers)[1]

    @cached_property
    def key_chunks(self) -> int:
        """Polynomials that a secret key is shared by: Flower shares its PEM text."""
        return self.bytes("secret") // 16 + 1  # padded to whole ones by at least a byte

    def combine_s(self, shares: float, threshold: int) -> float:
        """Of one polynomial from ``shares`` shares."""
        sampled = int(min(max(shares, threshold), MOST_COMBINED))
        return (
            self.seconds("combine", shares=sampled, threshold=min(threshold, sampled))
            * (shares / sampled) ** 2
        )

    def client_s(self, neighbours: int, threshold: int, length: int) -> float:
        """One client's part without training and quantising. A neighbour costs two agreements, a message each way and
        a mask."""
        each = (
            2 * self.seconds("agree")
            + self.seconds("seal")
            + self.seconds("unseal")
            + self.seconds("expand", length=length)
        )
        polynomials = SEED_CHUNKS + self.key_chunks
        return (
            self.seconds("keys")
            + polynomials * self.seconds("split", shares=neighbours + 1, threshold=threshold)
            + neighbours * each
            + self.seconds("expand", length=length)
            + self.seconds("send", length=length)
        )

    def server_s(self, clients: int, neighbours: int, threshold: int, dropped: int, length: int) -> float:
        """The server's part."""
        return self.server_parts(clients, neighbours, threshold, dropped, length).seconds

    def server_parts(
        self, clients: int, neighbours: int, threshold: int, dropped: int, length: int
    ) -> ServerParts:
        """The server's part without its messages, when ``dropped`` clients vanish after they shared. For each of those
        it expands the masks with all neighbours, dropped ones, too; secrets are put together of all shares that came,
        a survivor's own included.
        """
        left, others = clients - dropped, clients - 1
        expansions = left + dropped * neighbours
        long = left * self.seconds("take", length=length) + expansions * self.seconds("expand", length=length)
        shares = left * SEED_CHUNKS * self.combine_s(1 + neighbours * (left - 1) / others, threshold)
        if dropped:
            shares += dropped * self.key_chunks * self.combine_s(neighbours * left / others, threshold)
        return ServerParts(long, shares, dropped * neighbours * self.seconds("agree"))

    def client_bytes(self, neighbours: int, length: int) -> tuple[int, int]:
        """Bytes up and down of one client's keys, ciphertexts, masked vector and shares when everybody survives;
        Flower's message records around them are not counted, nor the model."""
        public, sealed, node = self.bytes("keys"), self.bytes("seal"), 8
        share = 4 + 16 * SEED_CHUNKS
        up = (
            public
            + neighbours * (sealed + node)
            + self.bytes("send", length=length)
            + (neighbours + 1) * (share + node)
        )
        down = (neighbours + 1) * (public + node) + neighbours * (sealed + node) + (neighbours + 1) * node
        return up, down


@contextmanager
def flower() -> Iterator[Callable[[], Flower]]:
    """What makes a Flower that samples anew, from one process. Raises FlowerFailed when that ends or says nonsense."""
    with tempfile.TemporaryDirectory(prefix="headwater-flower-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmarks.peers.flower.secagg"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "FLWR_TELEMETRY_ENABLED": "0"},
            )

        def ask(**wanted: object) -> tuple[float, int]:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(wanted) + "\n")
                process.stdin.flush()
                seconds, size = json.loads(process.stdout.readline())
            except (BrokenPipeError, ValueError) as error:
                raise FlowerFailed("\n".join(log.read_text(errors="replace").splitlines()[-15:])) from error
            return float(seconds), int(size)

        try:
            yield lambda: Flower(ask)
        finally:
            try:
                process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
