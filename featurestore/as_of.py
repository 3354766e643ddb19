"""The point-in-time join: what was known about an entity at the moment of a labelled row. NumPy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def as_of(
    keys: Integers,
    time_ms: Integers,
    query_keys: Integers,
    query_time_ms: Integers,
    *,
    visible_ms: Integers | None = None,
    inclusive: bool = True,
) -> Integers:
    """For each query the newest history row of its key that was visible at its time, or -1: ``[Q]``.

    Shapes: history keys, time_ms (event time) and visible_ms (when it became known; its event time if
    absent) ``[H]``; query_keys and query_time_ms ``[Q]``. Newest means the largest event time, the last row
    among equals. ``inclusive`` false leaves out what became visible in the query's very millisecond, so a
    feature cannot leak from the event that the row describes. Sorts once: O((H + Q) log(H + Q)).
    """
    visible = time_ms if visible_ms is None else np.maximum(time_ms, visible_ms)
    by_event_time = np.lexsort((time_ms, keys))
    rank = np.empty(len(keys), np.int64)
    rank[by_event_time] = np.arange(len(keys))
    all_keys = np.concatenate([keys, query_keys])
    moments = np.concatenate([visible, query_time_ms])
    is_query = np.arange(len(all_keys)) >= len(keys)
    order = np.lexsort((is_query == inclusive, moments, all_keys))
    # Ranks grow with the key, so a running maximum needs no restart where the key changes.
    ranks = np.concatenate([rank, np.full(len(query_keys), -1, np.int64)])[order]
    best = np.empty(len(order), np.int64)
    best[order] = np.maximum.accumulate(ranks) if len(ranks) else ranks
    best = best[len(keys) :]
    found = np.where(best >= 0, by_event_time[best], -1) if len(keys) else best
    return np.where((found >= 0) & (keys[found] == query_keys), found, -1) if len(keys) else found
