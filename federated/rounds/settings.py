"""Settings of federated rounds: the names and meaning of MindSpore Federated, plus over-selection and buffering."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

Mode = Literal["sync", "over_selection", "buffered"]
Kind = Literal["cross_device", "cross_silo"]
Absent = Literal["void", "proceed"]

MOST_UPLOADS = 1_000_000  # of one iteration: its slots and groups stay countable
MOST_STALENESS = 1_000
LEAST_WEIGHT = 2.0**-30  # of an upload: one unit of ``sums.SCALE``, below which it would be refused


class SettingsRefused(ValueError):
    """Settings that make no sense, alone or together; the message says which and why."""


def share_of(count: int, ratio: Decimal) -> int:
    """``ceil(count · ratio)`` in exact decimals: ceil(25 · .28) is 7, where binary floats say 8."""
    return math.ceil(Decimal(count) * ratio)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What opens and closes an iteration's phases, in clients.

    A phase closes at once when its ``*_close`` is reached. When its window runs out, ``*_floor`` is enough to
    go on; fewer make the iteration invalid.
    """

    starts_close: int
    starts_floor: int
    uploads_close: int
    uploads_floor: int


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How an iteration is run. Windows and waits are in seconds, thresholds in clients.

    ``mode``:
      sync: ``start_fl_job_threshold`` clients start, ``ceil(threshold · update_model_ratio)`` uploads close the
        iteration. Uploads are taken once the start phase has closed; with ``early_uploads`` from the first start on.
      over_selection: as many uploads close it, but ``ceil(uploads · over_selection)`` clients may start; whoever
        is slower is told that the iteration is full. ``start_fl_job_threshold`` starts are enough when the start
        window ends. If each start is lost with 30 %, 126 starts give 80 uploads with probability .953, 130
        (``over_selection`` 1.625) with .985.
      buffered: FedBuff (Nguyen et al. 2022). Clients start at any time, at most ``max_concurrency`` at once; every
        ``buffer_size`` uploads make a version. An upload that is s versions old weighs ``1/(1+s)**staleness_exponent``
        and is refused beyond ``max_staleness``.

    ``kind`` cross_silo: every one of ``members`` takes part in every iteration, which closes when all who started
    have uploaded. An ``absent`` member makes it invalid ("void") or the others go on when the window ends, if they
    are at least ``ceil(members · update_model_ratio)`` ("proceed").

    Windows: the start window opens with the first start, the update window with the first upload once the
    start phase has closed, the global window with the iteration's first request. They only bound a phase. In
    buffered mode the update window is the time that one client has, and the global window bounds the filling of one
    buffer: ``ceil(buffer_size · update_model_ratio)`` uploads are then enough.
    ``aggregation_time_window_s`` bounds the summing, ``aggregation_lease_s`` one server's hold on a part of it.

    Two are not for a file: a job derives them (``FederatedJob.round_settings``). ``most_releases``: the job is finished
    when so many iterations entered aggregation, since one more would exceed its budget of privacy (0: no limit).
    ``sampled``: selection poisson draws each of so many clients by a coin of its own (0: first come, first served). The
    start phase then ends by its window, at most so many start, all who did may upload, and an iteration closes when all
    have; ``start_fl_job_threshold`` starts are the fewest.
    """

    start_fl_job_threshold: int = 0
    start_fl_job_time_window_s: float = 300.0
    update_model_ratio: Decimal = Decimal("0.8")
    update_model_time_window_s: float = 300.0
    global_iteration_time_window_s: float = 3600.0
    fl_iteration_num: int = 20
    mode: Mode = "sync"
    kind: Kind = "cross_device"
    members: tuple[str, ...] = ()
    absent: Absent = "void"
    early_uploads: bool = False
    over_selection: Decimal = Decimal("1.575")
    buffer_size: int = 10
    max_concurrency: int = 100
    max_staleness: int = 20
    staleness_exponent: float = 0.5
    max_examples: int = 10_000
    come_back_min_s: float = 1.0
    come_back_max_s: float = 60.0
    aggregation_group: int = 64
    aggregation_lease_s: float = 30.0
    aggregation_time_window_s: float = 600.0
    aggregation_attempts: int = 5
    most_releases: int = 0
    sampled: int = 0

    def __post_init__(self) -> None:
        for name in ("update_model_ratio", "over_selection"):
            object.__setattr__(self, name, _decimal(name, getattr(self, name)))
        _require(
            self.mode in ("sync", "over_selection", "buffered"),
            f"mode is sync, over_selection or buffered, not {self.mode!r}",
        )
        _require(
            self.kind in ("cross_device", "cross_silo"),
            f"kind is cross_device or cross_silo, not {self.kind!r}",
        )
        _require(self.absent in ("void", "proceed"), f"absent is void or proceed, not {self.absent!r}")
        for name in (
            "fl_iteration_num",
            "buffer_size",
            "max_concurrency",
            "max_examples",
            "aggregation_group",
            "aggregation_attempts",
        ):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "start_fl_job_time_window_s", "update_model_time_window_s", "global_iteration_time_window_s",
            "come_back_min_s", "aggregation_lease_s", "aggregation_time_window_s",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(
                math.isfinite(value) and value > 0,
                f"{name} must be a positive number of seconds, not {value}",
            )
        _require(
            0 < self.update_model_ratio <= 1,
            f"update_model_ratio must be in (0, 1], not {self.update_model_ratio}",
        )
        _require(
            self.come_back_max_s >= self.come_back_min_s, "come_back_max_s must be at least come_back_min_s"
        )
        _require(
            0 <= self.max_staleness <= MOST_STALENESS,
            f"max_staleness must be in [0, {MOST_STALENESS}], not {self.max_staleness}: records are kept as long",
        )
        _require(
            0 <= self.staleness_exponent <= 10,
            f"staleness_exponent must be in [0, 10], not {self.staleness_exponent}",
        )
        if self.kind == "cross_silo":
            self._check_silo()
        else:
            _require(not self.members, "members are named for kind cross_silo only")
            _require(
                self.mode == "buffered" or self.start_fl_job_threshold >= 1,
                f"start_fl_job_threshold must be at least 1, not {self.start_fl_job_threshold}",
            )
        _require(self.most_releases >= 0, "most_releases must not be negative")
        if self.sampled:
            self._check_sampled()
        if self.mode == "over_selection":
            _require(
                self.thresholds.starts_close >= self.start_fl_job_threshold,
                f"over_selection {self.over_selection} admits {self.thresholds.starts_close} starts for "
                f"{self.thresholds.uploads_close} uploads: fewer than start_fl_job_threshold "
                f"{self.start_fl_job_threshold}",
            )
        if self.mode == "buffered":
            _require(
                self.max_concurrency >= self.buffer_size,
                f"max_concurrency {self.max_concurrency} can never fill a buffer of {self.buffer_size}",
            )
            _require(
                self.weight(1, self.max_staleness) >= LEAST_WEIGHT,
                f"an upload that is max_staleness {self.max_staleness} versions old weighs less than 2**-30 by "
                f"staleness_exponent {self.staleness_exponent:g}, and would be refused: lower one of them",
            )
        _require(
            self.thresholds.starts_close <= MOST_UPLOADS, f"an iteration holds at most {MOST_UPLOADS} clients"
        )
        _require(self.buffer_size <= MOST_UPLOADS, f"an iteration holds at most {MOST_UPLOADS} uploads")

    def _check_silo(self) -> None:
        _require(
            self.mode == "sync", f"cross_silo rounds are synchronous: mode {self.mode} leaves members out"
        )
        _require(len(self.members) >= 1, "kind cross_silo needs members")
        _require(len(set(self.members)) == len(self.members), "members are named twice")
        _require(
            self.start_fl_job_threshold in (0, len(self.members)),
            f"start_fl_job_threshold {self.start_fl_job_threshold} differs from the {len(self.members)} members; "
            "leave it out",
        )

    def _check_sampled(self) -> None:
        _require(
            self.mode == "sync" and self.kind == "cross_device",
            f"selection poisson is for mode sync and kind cross_device, not {self.mode} and {self.kind}: whoever is "
            "drawn takes part, be they many or few",
        )
        _require(
            not self.early_uploads, "selection poisson: early_uploads would let the first close an iteration"
        )
        _require(
            self.start_fl_job_threshold <= self.sampled,
            f"start_fl_job_threshold {self.start_fl_job_threshold} is beyond the population of {self.sampled}",
        )

    @property
    def thresholds(self) -> Thresholds:
        """The clients that open and close phases under these settings."""
        if self.sampled:
            fewest = share_of(self.start_fl_job_threshold, self.update_model_ratio)
            return Thresholds(self.sampled, self.start_fl_job_threshold, self.sampled, fewest)
        if self.kind == "cross_silo":
            everyone = len(self.members)
            enough = everyone if self.absent == "void" else share_of(everyone, self.update_model_ratio)
            return Thresholds(everyone, enough, everyone, enough)
        if self.mode == "buffered":
            return Thresholds(
                self.max_concurrency, 0, self.buffer_size, share_of(self.buffer_size, self.update_model_ratio)
            )
        uploads = share_of(self.start_fl_job_threshold, self.update_model_ratio)
        starts = self.start_fl_job_threshold
        close = share_of(uploads, self.over_selection) if self.mode == "over_selection" else starts
        return Thresholds(close, starts, uploads, uploads)

    @property
    def most_uploads(self) -> int:
        """The most uploads that one iteration may sum: what ``sums.Bounds`` proves is proved for it."""
        return max(self.thresholds.starts_close, self.thresholds.uploads_close)

    @property
    def takes_early_uploads(self) -> bool:
        """Whether uploads count before the start phase has closed."""
        return self.early_uploads or self.mode != "sync"

    @property
    def kept_iterations(self) -> int:
        """How many iterations back records of clients are kept, so that repeats get their reply."""
        return self.max_staleness + 2 if self.mode == "buffered" else 2

    def weight(self, examples: int, staleness: int = 0) -> float:
        """What an upload weighs: its examples, at most ``max_examples`` (whoever lies about the count gains no
        more than that), times ``1/(1+staleness)**staleness_exponent`` (Nguyen et al. 2022)."""
        return float(min(examples, self.max_examples) / (1.0 + staleness) ** self.staleness_exponent)


def _decimal(name: str, value: object) -> Decimal:
    # str() of a float is its shortest decimal: .28 means 28/100, not the nearest binary fraction.
    try:
        exact = Decimal(str(value))
    except InvalidOperation:
        raise SettingsRefused(f"{name} must be a decimal number, not {value!r}") from None
    _require(
        exact.is_finite() and 0 < exact <= 1000, f"{name} must be positive and at most 1000, not {value!r}"
    )
    return exact


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise SettingsRefused(message)
