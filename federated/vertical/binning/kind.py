"""Joint binning as a kind of job."""

from __future__ import annotations

from typing import Final

from federated.vertical.binning.findings import read_findings
from federated.vertical.binning.messages import SEEN
from federated.vertical.binning.options import BinningOptions
from federated.vertical.kinds import Count, Kind, Setup
from federated.vertical.parties import Make


def make(options: BinningOptions, setup: Setup) -> Make:
    """The function that makes this party's role. Raises ValueError for tables that do not fit."""
    # TenSEAL takes its time, and what was found is read without.
    if setup.me == setup.one("guest"):
        from federated.vertical.binning.guest import make_guest

        return make_guest(options, setup)
    from federated.vertical.binning.host import make_host

    return make_host(options, setup)


KIND: Final = Kind(
    "binning",
    "what each column of each party tells of the labels: weight of evidence, information value, KS; and which to keep",
    {"guest": Count(1, 1), "host": Count(1, 8)},
    BinningOptions,
    make,
    SEEN,
    findings=read_findings,
)
