"""The tables of a job that say how clients are protected: [privacy] and [secure_aggregation]."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Mechanism = Literal[
    "none",
    "local_gaussian",
    "local_laplace",
    "signds",
    "central_gaussian",
    "distributed_gaussian",
    "distributed_skellam",
]
LOCAL: frozenset[Mechanism] = frozenset({"local_gaussian", "local_laplace", "signds"})
"""What leaves the device is private by itself."""
_KEY = re.compile("[0-9a-f]{64}")
DISTRIBUTED: frozenset[Mechanism] = frozenset({"distributed_gaussian", "distributed_skellam"})
"""Only the sum of many devices' noise is enough."""


@dataclass(frozen=True, slots=True)
class PrivacySection:
    """Differential privacy of a job.

    ``protects`` says what is clipped to ``clip`` and noised: the "difference" that a device learned, or its "weights"
    after training. The norm is L2, for local_laplace L1. ``clipping`` adaptive follows the ``clip_quantile`` of norms
    (Andrew et al. 2021) at ``clip_rate``, with noise of ``clip_count_noise`` standard deviations on the count.
    ``per_layer`` splits the clip over the layout's fields so that the whole keeps it.

    Local mechanisms: one report is (``epsilon``, ``delta``)-private. Central and distributed ones: the sum's noise has
    standard deviation ``noise_multiplier`` · clip. A job with ``budget_epsilon`` stops before more than
    (``budget_epsilon``, ``budget_delta``) is spent; 0 only reports. ``accountant`` auto is the tightest that can count
    the mechanism. ``statistics`` says what becomes of BatchNorm statistics and counters, which are data, too: "refuse"
    the job, or "keep" the server's own.

    The ``sign_`` options are those of SignDS (Jiang et al. 2022); ``magnitude_epsilon`` is spent on its magnitude.
    """

    mechanism: Mechanism = "none"
    protects: Literal["difference", "weights"] = "difference"
    clip: float = 1.0
    clipping: Literal["fixed", "adaptive"] = "fixed"
    clip_quantile: float = 0.5
    clip_rate: float = 0.2
    clip_count_noise: float = 10.0
    per_layer: bool = False
    epsilon: float = 1.0
    delta: float = 1e-5
    noise_multiplier: float = 1.0
    budget_epsilon: float = 0.0
    budget_delta: float = 1e-5
    accountant: Literal["auto", "pld", "rdp"] = "auto"
    statistics: Literal["refuse", "keep"] = "refuse"
    sign_k: float = 0.01
    sign_eps: float = 100.0
    sign_thr_ratio: float = 0.6
    sign_global_lr: float = 0.1
    sign_dim_out: int = 0
    magnitude_epsilon: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "clip",
            "epsilon",
            "noise_multiplier",
            "sign_eps",
            "sign_global_lr",
            "magnitude_epsilon",
        ):
            value = getattr(self, name)
            _require(0.0 < value < math.inf, f"{name} must be positive, not {value}")
        for name in ("delta", "budget_delta"):
            value = getattr(self, name)
            _require(0.0 < value < 1.0, f"{name} must be above 0 and below 1, not {value}")
        for name in ("clip_rate", "clip_count_noise"):
            _require(0.0 < getattr(self, name) < math.inf, f"{name} must be positive")
        _require(0.0 < self.clip_quantile < 1.0, "clip_quantile must be above 0 and below 1")
        _require(0.0 <= self.budget_epsilon < math.inf, "budget_epsilon must not be negative")
        _require(0.0 < self.sign_k < 1.0, f"sign_k must be above 0 and below 1, not {self.sign_k}")
        _require(0.0 < self.sign_thr_ratio <= 1.0, "sign_thr_ratio must be above 0 and at most 1")
        _require(self.sign_dim_out >= 0, "sign_dim_out must not be negative; 0 is automatic")


@dataclass(frozen=True, slots=True)
class SecureAggregationSection:
    """Secure aggregation of a job: the servers see the sum of updates and no single one.

    ``secagg`` is Bonawitz et al. (2017), every client a neighbour of every other; ``secagg+`` Bell et al. (2020), each
    with ``neighbours`` (0: from the assumptions). ``malicious`` holds against a server that does not keep to the
    protocol. ``threshold`` of a client's neighbours are needed to unmask (0: the smallest sound one). ``colluding`` and
    ``dropouts`` are the shares of clients assumed at most to work with the server, and to vanish.

    Values are clipped to ``clip`` each and rounded to multiples of 2**-``step_bits``; weights are whole, at most
    ``max_weight``. A stage of the protocol lasts at most ``stage_window_s``. ``simulate``: the simulator adds the same
    numbers without masks ("sums"), or makes every message ("protocol"). ``registrar`` is the public key, in
    hexadecimal, of the operator who certifies the devices' signing keys (malicious; "": the servers do).
    """

    protocol: Literal["none", "secagg", "secagg+"] = "none"
    malicious: bool = False
    threshold: int = 0
    neighbours: int = 0
    colluding: float = 0.1
    dropouts: float = 0.3
    clip: float = 8.0
    step_bits: int = 16
    max_weight: int = 64
    registrar: str = ""
    stage_window_s: float = 60.0
    simulate: Literal["sums", "protocol"] = "sums"

    def __post_init__(self) -> None:
        _require(0.0 <= self.colluding < 1.0, "colluding must be at least 0 and below 1")
        _require(0.0 <= self.dropouts < 1.0, "dropouts must be at least 0 and below 1")
        _require(
            self.threshold >= 0 and self.neighbours >= 0, "threshold and neighbours must not be negative"
        )
        _require(0.0 < self.clip < math.inf, f"clip must be positive, not {self.clip}")
        _require(0 <= self.step_bits <= 30, f"step_bits must be 0 to 30, not {self.step_bits}")
        _require(self.max_weight >= 1, f"max_weight must be at least 1, not {self.max_weight}")
        _require(
            not self.registrar or _KEY.fullmatch(self.registrar) is not None,
            "registrar must be a public key: 64 hexadecimal digits",
        )
        _require(0.0 < self.stage_window_s < math.inf, "stage_window_s must be positive")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
