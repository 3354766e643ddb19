"""What a guest knows of a host: when it was heard last, and which runs' parts it has. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

AWAY_S: Final = 2.5
"""A host that was not heard for so long, though it was asked, is not waited for any more until it is heard again."""
LOOK_S: Final = 1.0
"""How often a host is asked how it is, and how long it has for the answer."""


class Reach:
    """One host. ``away_s``: see AWAY_S; longer where answers may take longer."""

    def __init__(self, away_s: float = AWAY_S, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._away_s, self._monotonic = away_s, monotonic
        self._heard_s = monotonic()
        self._ever = False
        self.looked = False
        """Whether it was asked once, and answered or was late."""
        self.runs: tuple[str, ...] | None = None
        self.refusal = ""
        """The code with which it refuses to tell how it is."""

    @property
    def away(self) -> bool:
        """Whether asking it now would be waiting in vain."""
        return self.looked and self._monotonic() - self._heard_s > (self._away_s if self._ever else 0.0)

    def heard(self) -> None:
        """It answered something."""
        self._heard_s, self._ever = self._monotonic(), True

    def told(self, runs: tuple[str, ...]) -> None:
        """It told which runs it has."""
        self.heard()
        self.looked, self.runs, self.refusal = True, runs, ""

    def refused(self, code: str) -> None:
        """It answered, but told nothing of itself."""
        self.heard()
        self.looked, self.runs, self.refusal = True, None, code

    def missed(self) -> None:
        """It did not tell how it is in time."""
        self.looked = True

    def trouble(self, run: str) -> str:
        """Why it cannot answer with its share of ``run``, for people; empty where it can."""
        if not self.looked:
            return "not asked yet"
        if self.away:
            return f"not heard for {self._monotonic() - self._heard_s:.0f} s"
        if self.refusal:
            return f"refuses: {self.refusal}"
        if self.runs is not None and run not in self.runs:
            return f"has run {self.runs[0][:64] if self.runs else '(none)'}, not {run}: another model"
        return ""
