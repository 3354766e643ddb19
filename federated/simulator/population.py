"""Who the simulated clients are: speed, network, habits; columns of numbers, so that 100,000 clients cost megabytes.

Speeds are log-normal, as measured on phones (Yang et al. 2021 and others): ``median · exp(spread · normal)``. What
happens to a client in an iteration (drops out, straggles) is drawn by (client, iteration), see ``draws``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from federated.selection import DeviceFacts
from federated.simulator.draws import Purpose, normal, uniform

Clients = npt.NDArray[np.int64]
Column = npt.NDArray[np.float32]
HOUR_S = 3600.0


SLOWEST, FASTEST = 1e-3, 1e12


@dataclass(frozen=True, slots=True)
class Habits:
    """What the clients are like.

    ``compute`` is the median speed in examples of local training per second, ``uplink`` and ``downlink`` in bytes per
    second, each log-normal with its spread (0: all alike). ``dropout`` is the share of starts that never upload;
    ``stragglers`` the share that trains and uploads ``straggler_factor`` times slower, for that iteration.
    ``check_in_s`` is the mean time after which an idle client asks again. ``charging``, ``unmetered`` and ``idle`` are
    shares of the hours.
    """

    compute: float = 500.0
    compute_spread: float = 0.5
    uplink: float = 500_000.0
    downlink: float = 2_000_000.0
    network_spread: float = 0.5
    dropout: float = 0.0
    stragglers: float = 0.0
    straggler_factor: float = 20.0
    check_in_s: float = 20.0
    charging: float = 1.0
    unmetered: float = 1.0
    idle: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "uplink", "downlink", "check_in_s"):
            # So that what one client draws, many deviations away, is still a number of float32.
            if not SLOWEST <= getattr(self, name) <= FASTEST:
                raise ValueError(f"{name} must be in [{SLOWEST:g}, {FASTEST:g}], not {getattr(self, name)}")
        for name in ("compute_spread", "network_spread"):
            if not 0.0 <= getattr(self, name) <= 10.0:
                raise ValueError(f"{name} must be in [0, 10], not {getattr(self, name)}")
        for name in ("dropout", "stragglers", "charging", "unmetered", "idle"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a share in [0, 1], not {getattr(self, name)}")
        if not 1.0 <= self.straggler_factor < math.inf:
            raise ValueError(f"straggler_factor must be at least 1, not {self.straggler_factor}")


@dataclass(frozen=True)
class Population:
    """``size`` clients with ``habits``, drawn by ``seed``."""

    size: int
    habits: Habits
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a population has at least 1 client, not {self.size}")

    @cached_property
    def compute(self) -> Column:
        """Examples per second [N]."""
        return self._speeds(self.habits.compute, self.habits.compute_spread, Purpose.COMPUTE)

    @cached_property
    def uplink(self) -> Column:
        """Bytes per second up [N]."""
        return self._speeds(self.habits.uplink, self.habits.network_spread, Purpose.UPLINK)

    @cached_property
    def downlink(self) -> Column:
        """Bytes per second down [N]."""
        return self._speeds(self.habits.downlink, self.habits.network_spread, Purpose.DOWNLINK)

    def _speeds(self, median: float, spread: float, purpose: Purpose) -> Column:
        drawn = normal(self.seed, purpose, np.arange(self.size))
        return np.asarray(median * np.exp(spread * drawn), np.float32)

    def drops_out(self, client: int, iteration: int) -> bool:
        """Whether the client's start in that iteration leads nowhere."""
        return self._happens(Purpose.DROPOUT, self.habits.dropout, client, iteration)

    def straggles(self, client: int, iteration: int) -> bool:
        """Whether the client is slow in that iteration."""
        return self._happens(Purpose.STRAGGLER, self.habits.stragglers, client, iteration)

    def round_trip_s(
        self, client: int, iteration: int, *, down_bytes: int, examples: int, up_bytes: int
    ) -> float:
        """Seconds from the download's begin to the upload's end: ``examples`` are those of all local steps."""
        took_s = (
            down_bytes / float(self.downlink[client])
            + examples / float(self.compute[client])
            + up_bytes / float(self.uplink[client])
        )
        return took_s * (self.habits.straggler_factor if self.straggles(client, iteration) else 1.0)

    def facts(self, client: int, at_s: float, examples: int) -> DeviceFacts:
        """What the client says of itself at that time; its state changes by the hour."""
        hour, one, habits = int(at_s // HOUR_S), np.array([client]), self.habits

        def flag(purpose: Purpose, share: float) -> bool:
            return share >= 1.0 or float(uniform(self.seed, purpose, one, hour)[0]) < share

        charging = flag(Purpose.CHARGING, habits.charging)
        drawn = float(uniform(self.seed, Purpose.BATTERY, one, hour)[0])
        return DeviceFacts(
            battery=1.0 if habits.charging >= 1.0 else drawn,
            charging=charging,
            unmetered=flag(Purpose.UNMETERED, habits.unmetered),
            idle=flag(Purpose.IDLE, habits.idle),
            compute=float(self.compute[client]),
            bandwidth=float(self.uplink[client]),
            examples=examples,
        )

    def _happens(self, purpose: Purpose, share: float, client: int, iteration: int) -> bool:
        if share <= 0.0:
            return False
        return float(uniform(self.seed, purpose, np.array([client]), iteration)[0]) < share
