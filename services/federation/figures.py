"""Figures of an iteration, beside how it ended: kept by whoever merged it, for people to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from federated.rounds import Keys, Store

_PAGE: Final = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """``upload_bytes`` of the bodies that were summed, and their mean training ``loss`` (None: clients keep it to
    themselves); ``detail`` of why there is none."""

    upload_bytes: int
    loss: float | None
    detail: str = ""


def keep_figures(store: Store, keys: Keys, iteration: int, figures: Figures) -> None:
    """Keep them; of several attempts at one iteration the figures are the same."""
    body = json.dumps(asdict(figures)).encode()
    store.transact([], lambda values: ({_key(keys, iteration): body}, None))


def read_figures(store: Store, keys: Keys, iterations: Sequence[int]) -> Mapping[int, Figures]:
    """Those that are kept, by iteration."""
    found: dict[int, Figures] = {}
    for start in range(0, len(iterations), _PAGE):
        page = {_key(keys, iteration): iteration for iteration in iterations[start : start + _PAGE]}
        bodies = store.transact(list(page), lambda values: ({}, dict(values)))
        found |= {page[key]: Figures(**json.loads(body)) for key, body in bodies.items() if body is not None}
    return found


def _key(keys: Keys, iteration: int) -> str:
    return f"{keys.all}figures/{iteration:08d}"
