"""Where a job's records and bodies are kept in the store."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one job. What belongs to an iteration has one prefix, so that it goes at once. Raises ValueError for a
    name that is not 1 to 64 of a–z, 0–9, ``_.-``, beginning with a letter or digit."""

    job: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.job):
            raise ValueError(f"a job's name is 1 to 64 of a-z, 0-9, _ . -, not {self.job!r}")

    @property
    def all(self) -> str:
        """Prefix of everything."""
        return f"{self.job}/"

    @property
    def header(self) -> str:
        """The Header."""
        return f"{self.job}/header"

    def iteration(self, iteration: int) -> str:
        """Prefix of what belongs to an iteration alone."""
        return f"{self.job}/iteration/{iteration:08d}/"

    def entry(self, iteration: int, client: str) -> str:
        """A client's Entry."""
        return f"{self.job}/iteration/{iteration:08d}/entry/{client}"

    def slot(self, iteration: int, index: int) -> str:
        """The Slot of a counted upload."""
        return f"{self.job}/iteration/{iteration:08d}/slot/{index:07d}"

    def work(self, iteration: int) -> str:
        """The Work of aggregating an iteration."""
        return f"{self.job}/iteration/{iteration:08d}/work"

    def body(self, started: int, client: str, digest: bytes) -> str:
        """Blob: what a client that started in iteration ``started`` uploaded."""
        return f"{self.job}/iteration/{started:08d}/body/{digest.hex()}/{client}"

    def partial(self, iteration: int, number: int, attempt: int) -> str:
        """Blob: the sum of a group."""
        return f"{self.job}/iteration/{iteration:08d}/partial/{number:07d}/{attempt}"

    def states(self, version: int) -> str:
        """Prefix of the strategy's states of a version."""
        return f"{self.job}/state/{version:08d}/"

    def state(self, version: int, attempt: int) -> str:
        """Blob: the strategy's state (with the model) of a version, as that attempt made it."""
        return f"{self.job}/state/{version:08d}/{attempt}"

    def log(self, iteration: int) -> str:
        """How an iteration ended: Closed."""
        return f"{self.job}/log/{iteration:08d}"
