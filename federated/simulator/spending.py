"""What a simulated job has cost its clients so far, for the rows of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from federated.privacy.accounting_statement import Exposure, accountant_of, last_release
from federated.privacy.budget import report_epsilon
from federated.privacy.section import LOCAL
from federated.simulator.world import World


def spending(exposure: Exposure) -> Callable[[World], float | None]:
    """Gives ε so far: of local mechanisms at the client that has sent the most reports, of others over all sums that
    were aggregated. None without a mechanism, and where nothing is promised."""
    accountant, section = accountant_of(exposure), exposure.section
    if accountant is None:
        return lambda world: None
    last = last_release(exposure)

    def spent(world: World) -> float | None:
        if section.mechanism in LOCAL:
            return report_epsilon(section, int(world.reports.max(initial=0)))
        found = accountant.running(min(world.desk.header().releases, last), last)
        return found if math.isfinite(found) else None

    return spent
