"""Joint boosting as a kind of job."""

from __future__ import annotations

from typing import Final

from federated.vertical.boosting.messages import SEEN
from federated.vertical.boosting.model import load
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.kinds import Count, Kind, Setup
from federated.vertical.parties import Make


def make(options: BoostingOptions, setup: Setup) -> Make:
    """The function that makes this party's role. Raises ValueError for tables that do not fit."""
    # TenSEAL takes its time, and a model that answers does without.
    if setup.me == setup.one("guest"):
        from federated.vertical.boosting.guest import make_guest

        return make_guest(options, setup)
    from federated.vertical.boosting.host import make_host

    return make_host(options, setup)


KIND: Final = Kind(
    "boosting",
    "SecureBoost: gradient boosted trees over all parties' columns; gradients encrypted, columns and edges stay",
    {"guest": Count(1, 1), "host": Count(1, 8)},
    BoostingOptions,
    make,
    SEEN,
    load=load,
)
