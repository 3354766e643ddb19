"""A user's history as the online store keeps it, and how an event changes it.

Cells of a user, besides the attributes that clients set:

- ``recent_items``: ids of the items liked last, newest last, each once.
- ``likes_total``: how many likes there were.
- ``seen``: the keys (uint64, little-endian) of items that the user did anything with, oldest first.
- ``state``: a ``UserState``.

An event that is delivered again must not be counted again, but its sample still has to be made (the first
attempt may have ended between the store and the log), and that sample must not see its own event. So the
state remembers how far the log was applied, and at which offset each recent item was liked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from featurestore.online import Cell

RECENT: Final = "recent_items"
LIKES: Final = "likes_total"
SEEN: Final = "seen"
STATE: Final = "state"

_FORMAT: Final = 1
_NOWHERE: Final = -1
MAX_IMPRESSIONS: Final = 20
MAX_IMPRESSED: Final = 100


class UserState(msgspec.Struct, array_like=True, frozen=True):
    """How far the log was applied to a user. Fields are only ever appended, with defaults.

    ``log`` is the tag of the log's incarnation (``featurestore.counters.log_tag``), ``accepted_at_ms`` and
    ``event_id`` are those of the newest event. ``liked_at`` holds the offset at which each recent item was
    liked, ``impressions`` the last lists that were shown: (recommendation id, item ids).
    """

    format: int = _FORMAT
    log: int = 0
    partition: int = -1
    offset: int = _NOWHERE
    accepted_at_ms: int = 0
    event_id: str | None = None
    liked_at: tuple[int, ...] = ()
    impressions: tuple[tuple[str, tuple[str, ...]], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(UserState)
_EMPTY: Final = UserState()


def encode_state(state: UserState) -> bytes:
    """The bytes of a ``state`` cell."""
    return _encoder.encode(state)


def read_state(cells: Mapping[str, Cell]) -> UserState:
    """The state among a user's cells; an empty one where there is none that this version reads."""
    cell = cells.get(STATE)
    if cell is None or not isinstance(cell.value, bytes):
        return _EMPTY
    try:
        state = _decoder.decode(cell.value)
    except msgspec.DecodeError:
        return _EMPTY
    return state if state.format == _FORMAT else _EMPTY


def seen_keys(cells: Mapping[str, Cell]) -> npt.NDArray[np.uint64]:
    """The keys of the items that the user has seen, oldest first (read-only)."""
    cell = cells.get(SEEN)
    if cell is None or not isinstance(cell.value, bytes) or len(cell.value) % 8:
        return np.zeros(0, np.uint64)
    return np.frombuffer(cell.value, "<u8").astype(np.uint64, copy=False)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of a user's history is kept."""

    recent_items: int
    seen_items: int


class User:
    """One user while a batch is worked through. Events must come in the order of the log."""

    def __init__(self, cells: Mapping[str, Cell], log: int, partition: int, bounds: Bounds) -> None:
        self.cells = cells
        """The user's cells as of now; managed ones as of before the batch. Never changed in place."""
        self.deleted = False
        self._set: dict[str, Cell] = {}
        self._changed = False
        self._log, self._partition, self._bounds = log, partition, bounds
        state = read_state(cells)
        ours = state.log == log and state.partition == partition
        self._applied = state.offset if ours else _NOWHERE
        self._accepted_at_ms, self._event_id = state.accepted_at_ms, state.event_id
        recent = cells[RECENT].value if RECENT in cells else None
        self._recent: list[str] = (
            [i for i in recent if isinstance(i, str)] if isinstance(recent, list) else []
        )
        known = ours and len(state.liked_at) == len(self._recent)
        self._liked_at = list(state.liked_at) if known else [_NOWHERE] * len(self._recent)
        likes = cells[LIKES].value if LIKES in cells else None
        self._likes = likes if isinstance(likes, int) else 0
        self._liked = False
        self._liked_ms = cells[RECENT].event_time_ms if RECENT in cells else 0
        self._seen_ms = cells[SEEN].event_time_ms if SEEN in cells else 0
        self._newest_ms = cells[STATE].event_time_ms if STATE in cells else 0
        self._seen = seen_keys(cells)
        self._seen_new: list[int] = []
        self._impressions = list(state.impressions)

    def advance(self, offset: int, accepted_at_ms: int, time_ms: int, event_id: str | None) -> bool:
        """Whether the event at ``offset`` still has to be applied; if so, it is noted as applied."""
        if offset <= self._applied:
            return False
        self._changed = True
        self._applied = offset
        self._newest_ms = max(self._newest_ms, time_ms)
        self._accepted_at_ms = max(self._accepted_at_ms, accepted_at_ms)
        self._event_id = event_id if event_id is not None else self._event_id
        return True

    def before(self, offset: int) -> tuple[list[str], int]:
        """Recent items and number of likes as they were before the event at ``offset``.

        Exact for the newest event. For one delivered again, what fell off the end of the recent items
        meanwhile is missing.
        """
        if offset > self._applied:
            return self._recent.copy(), self._likes
        earlier = [n for n, liked_at in enumerate(self._liked_at) if liked_at < offset]
        return [self._recent[n] for n in earlier], max(self._likes - len(self._liked_at) + len(earlier), 0)

    def like(self, item_id: str, offset: int, time_ms: int) -> None:
        """The user liked an item: it becomes the newest recent one."""
        self._liked_ms = max(self._liked_ms, time_ms)
        if item_id in self._recent:
            at = self._recent.index(item_id)
            del self._recent[at], self._liked_at[at]
        self._recent.append(item_id)
        self._liked_at.append(offset)
        if len(self._recent) > self._bounds.recent_items:
            del self._recent[0], self._liked_at[0]
        self._likes += 1
        self._liked = True

    def see(self, key: int, time_ms: int) -> None:
        """The user did something with the item of that key."""
        if not self.has_seen(key):
            self._seen_new.append(key)
            self._seen_ms = max(self._seen_ms, time_ms)

    def show(self, recommendation_id: str, item_ids: Iterable[str]) -> None:
        """A list was shown to the user."""
        self._impressions.append((recommendation_id, tuple(item_ids)[:MAX_IMPRESSED]))
        del self._impressions[:-MAX_IMPRESSIONS]

    def shown(self, recommendation_id: str) -> tuple[str, ...]:
        """The items of a list that was shown, () if it is not remembered."""
        for shown_id, item_ids in reversed(self._impressions):
            if shown_id == recommendation_id:
                return item_ids
        return ()

    def has_seen(self, key: int) -> bool:
        """Whether the user did anything with the item of that key."""
        return key in self._seen_new or bool((self._seen == key).any())

    def set(self, attributes: Mapping[str, Cell]) -> None:
        """Attributes were given."""
        self.cells = {**self.cells, **attributes}
        self._set.update(attributes)

    def forget(self) -> None:
        """The user is deleted: nothing is kept but how far the log was applied, for what follows."""
        self.deleted, self._changed = True, False
        self.cells, self._set = {}, {}
        self._recent, self._liked_at, self._likes, self._liked = [], [], 0, False
        self._seen, self._seen_new, self._impressions = np.zeros(0, np.uint64), [], []
        self._accepted_at_ms, self._event_id = 0, None
        self._newest_ms = self._liked_ms = self._seen_ms = 0

    def writes(self) -> dict[str, Cell]:
        """The cells to write after the batch; {} if nothing changed."""
        if not self._changed:
            return {}
        state = UserState(
            _FORMAT,
            self._log,
            self._partition,
            self._applied,
            self._accepted_at_ms,
            self._event_id,
            tuple(self._liked_at),
            tuple(self._impressions),
        )
        cells = {**self._set, STATE: Cell(encode_state(state), self._newest_ms)}
        if self._liked:
            cells[RECENT] = Cell(self._recent, self._liked_ms)
            cells[LIKES] = Cell(self._likes, self._liked_ms)
        if self._seen_new:
            keys = np.concatenate([self._seen, np.array(self._seen_new, np.uint64)])[
                -self._bounds.seen_items :
            ]
            cells[SEEN] = Cell(keys.astype("<u8", copy=False).tobytes(), self._seen_ms)
        return cells
