"""Recommendation learned on devices: an item table for all, a private vector for each, which never leaves it."""

from federated.recommendation.device import Ranking, cohort_updates, device_update, rank_held_out
from federated.recommendation.learning import (
    Rounds,
    cohort_of,
    default_strategy,
    evaluate,
    learn,
    pooled,
    popular,
    sum_of,
    table_of,
)
from federated.recommendation.liked import LeaveOneOut, Liked, by_device, draw_negatives, leave_last_out
from federated.recommendation.model import ItemTable, device_rows, load_known
from federated.recommendation.objective import Objective, Softmax, SquaredError, initial_table, table_layout

__all__ = [
    "ItemTable",
    "LeaveOneOut",
    "Liked",
    "Objective",
    "Ranking",
    "Rounds",
    "Softmax",
    "SquaredError",
    "by_device",
    "cohort_of",
    "cohort_updates",
    "default_strategy",
    "device_rows",
    "device_update",
    "draw_negatives",
    "evaluate",
    "initial_table",
    "learn",
    "leave_last_out",
    "load_known",
    "pooled",
    "popular",
    "rank_held_out",
    "sum_of",
    "table_layout",
    "table_of",
]
