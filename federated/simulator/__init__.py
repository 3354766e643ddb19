"""Federated learning on one machine, in virtual time: whole cohorts at once, the same rounds as the servers."""

from federated.simulator.cohort import Cohort, Engine, Rows, Trained
from federated.simulator.engines import ENGINES, make_engine

__all__ = ["ENGINES", "Cohort", "Engine", "Rows", "Trained", "make_engine"]
