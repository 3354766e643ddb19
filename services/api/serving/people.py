"""Who a list is for, as the model sees them: features, history, and how fresh what is known of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from featurestore.encoded import Encoded
from featurestore.encoder import Encoder
from featurestore.online import Cell, EntityKey
from services.api.store import AsyncStore
from services.processor.users import LIKES, RECENT, SEEN, STATE, UserState, read_state, seen_keys

Audience = Literal["user", "session", "nobody"]

MAX_SESSION: Final = 200


@dataclass(frozen=True, slots=True)
class Person:
    """One user, session or nobody in particular.

    ``encoded`` ``[1]``; ``seen`` ``[S]`` keys of items not to be shown again; ``recent`` ids of the items
    liked last, newest last; ``state`` how far the log was applied to a known user.
    """

    audience: Audience
    user_id: str | None
    encoded: Encoded
    seen: npt.NDArray[np.uint64]
    recent: tuple[str, ...]
    state: UserState | None


async def load(store: AsyncStore, user_id: str | None) -> Mapping[str, Cell]:
    """The stored cells of a user, none for nobody. Raises Problem unavailable."""
    return {} if user_id is None else (await store.read([EntityKey("user", user_id)]))[0]


def person(
    encoder: Encoder,
    user_id: str | None,
    cells: Mapping[str, Cell],
    session: Sequence[str],
    hash_items: npt.NDArray[np.uint64],
    now_ms: int,
) -> Person:
    """A person from stored cells and the ids of the items of a session, newest last, whose keys are
    ``hash_items``."""
    if "deleted" in cells and cells["deleted"].value is True:
        cells = {}
    recent = [*recent_items(cells), *session]
    merged = dict(cells)
    if session:
        merged[RECENT] = Cell(list(dict.fromkeys(reversed(recent)))[::-1], now_ms)
        likes = cells[LIKES].value if LIKES in cells else 0
        merged[LIKES] = Cell((likes if isinstance(likes, int) else 0) + len(session), now_ms)
    encoded = encoder.encode("user", [user_id or ""], [merged], now_ms)
    seen = np.concatenate([seen_keys(cells), hash_items]) if len(hash_items) else seen_keys(cells)
    audience: Audience = "user" if user_id is not None else "session" if session else "nobody"
    state = read_state(cells) if STATE in cells else None
    return Person(audience, user_id, encoded, seen, tuple(recent), state)


def recent_items(cells: Mapping[str, Cell]) -> list[str]:
    """The ids of the items that the user liked last, newest last."""
    value = cells[RECENT].value if RECENT in cells else None
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


FIELDS: Final = (RECENT, LIKES, SEEN, STATE)
