"""Wide-area links between real processes on one machine: delay, jitter, bandwidth, partitions, resets.

Only the pure part is exported here, since the settings check conditions by it; ``emulator.py`` runs links.
"""

from services.wan.conditions import LinkConditions, parse_conditions, parse_named

__all__ = ["LinkConditions", "parse_conditions", "parse_named"]
