"""Many replicas in one process and in virtual time: the very core, under emulated links, clocks and failures."""

from __future__ import annotations

from sync.simulator.history import History, Outcome
from sync.simulator.invariants import Broken, Reader, Watcher
from sync.simulator.ledger import Ledger
from sync.simulator.machine import Costs, MachineClock
from sync.simulator.network import Network, Path
from sync.simulator.node import Node, NodeConfig
from sync.simulator.queue import EventQueue
from sync.simulator.regions import Region

__all__ = [
    "Broken",
    "Costs",
    "EventQueue",
    "History",
    "Ledger",
    "MachineClock",
    "Network",
    "Node",
    "NodeConfig",
    "Outcome",
    "Path",
    "Reader",
    "Region",
    "Watcher",
]
