"""How much of the server's thread is to be left to readers: serving comes before catching up. Pure; time is passed."""

from __future__ import annotations

from typing import Final

STEP: Final = 0.1
MOST: Final = 0.95
HALF_LIFE_S: Final = 1.0


class Brake:
    """Rises with every reader that waited longer than ``target_s`` in the loop, and is halved every second. Of a target
    of 0 it stays down."""

    __slots__ = ("_at_s", "_level", "_target_s", "longest_s", "slow_total")

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._level = self._at_s = 0.0
        self.slow_total = 0
        self.longest_s = 0.0

    def note(self, waited_s: float, now_s: float) -> None:
        """A reader waited for so long before it was answered."""
        self.longest_s = max(self.longest_s, waited_s)
        if not self._target_s or waited_s <= self._target_s:
            return
        self.slow_total += 1
        excess = min(waited_s / self._target_s - 1.0, 3.0)
        self._level = min(self.level(now_s) + STEP * (1.0 + excess), MOST)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """In [0, ``MOST``]: which part is not to be used now."""
        found: float = self._level * 0.5 ** (max(now_s - self._at_s, 0.0) / HALF_LIFE_S)
        return found if found > 0.01 else 0.0
