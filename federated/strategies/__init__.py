"""How the server turns an iteration's contributions into new weights."""

from federated.strategies.averaging import FedAvg, FedAvgM, FedProx, FedSGD
from federated.strategies.catalogue import STRATEGIES, make_strategy
from federated.strategies.fednova import FedNova
from federated.strategies.frequency import AdaptiveFrequency
from federated.strategies.optimisers import FedAdagrad, FedAdam, FedYogi
from federated.strategies.robust import Median, MultiKrum, NormBound, TrimmedMean
from federated.strategies.scaffold import Scaffold
from federated.strategies.signds import SignVotes
from federated.strategies.strategy import ServerState, StateRefused, Strategy, sum_for

__all__ = [
    "STRATEGIES",
    "AdaptiveFrequency",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedNova",
    "FedProx",
    "FedSGD",
    "FedYogi",
    "Median",
    "MultiKrum",
    "NormBound",
    "Scaffold",
    "ServerState",
    "SignVotes",
    "StateRefused",
    "Strategy",
    "TrimmedMean",
    "make_strategy",
    "sum_for",
]
