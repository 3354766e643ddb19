"""What both parties of a federated transfer agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MOST_STEPS: Final = 100_000
MOST_HIDDEN: Final = 256
MOST_GAMMA: Final = 1e3
MOST_GAMMAS: Final = 16


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Raises ValueError for what cannot be.

    ``hidden``: length of the vectors in which the parties' users are compared. ``gamma``: weight of how near both
    vectors of a common user must be. ``gammas``: where there are any, ``gamma`` is the one of them with the best AUC
    over a quarter of the common rows; each takes a whole training on the others. ``steps``: over all common rows each.
    ``rate`` (over 1 + gamma), ``momentum``: of a step. ``l2``: weight of half the squared weights. ``clip``:
    standardised features beyond it are cut. ``every``: steps from one checkpoint to the next. ``noise``: standard
    deviation of what a key holder adds to a mean gradient; so much costs no AUC.
    """

    hidden: int = 8
    gamma: float = 0.1
    gammas: tuple[float, ...] = ()
    steps: int = 60
    rate: float = 0.2
    momentum: float = 0.9
    l2: float = 1e-3
    clip: float = 3.0
    every: int = 10
    noise: float = 1e-2

    def __post_init__(self) -> None:
        for name, largest in (("hidden", MOST_HIDDEN), ("steps", MOST_STEPS), ("every", MOST_STEPS)):
            if not 1 <= getattr(self, name) <= largest:
                raise ValueError(f"{name} is {getattr(self, name)}, not within 1 and {largest}")
        if len(self.gammas) > MOST_GAMMAS or not all(0.0 <= gamma <= MOST_GAMMA for gamma in self.gammas):
            raise ValueError(f"gammas are at most {MOST_GAMMAS}, each within 0 and {MOST_GAMMA}")
        for name, least, most in (
            ("gamma", 0.0, MOST_GAMMA),
            ("rate", 1e-9, 100.0),
            ("momentum", 0.0, 0.999),
            ("l2", 0.0, 1e3),
            ("clip", 0.1, 100.0),
            ("noise", 1e-9, 1.0),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or not least <= value <= most:
                raise ValueError(f"{name} is {value}, not within {least} and {most}")
