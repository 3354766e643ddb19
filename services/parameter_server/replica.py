"""One shard on one server, over all models: whom it follows or whom it leads, and how far everyone is. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from services.coordination.shardmap import Place
from services.parameter_server import messages as wire
from services.parameter_server.election import Replication
from services.parameter_server.replication import KEPT_BYTES, Followers, Step, Stream, upstream
from sync.records import Delta, Head, Record
from sync.shard import FIRST_PAGE, PageCursor, Shard
from sync.snapshot import encode_record
from sync.wire import Array

MAX_REPLY_BYTES: Final = 8 * 2**20
"""Steps in one answer to ``tail``."""
PAGE_BYTES: Final = 8 * 2**20
HAND_OVER_STEPS: Final = 64
"""A server that a shard moves to is waited for, with pushes held back, once it is so close."""
HELD_BACK_S: Final = 0.5
"""For so long at most: if it has not come by then, pushes go on, and it is waited for again after a while."""
HAND_OVER_AGAIN_S: Final = 5.0


class Shards(Protocol):
    """The shards of this server, as replication sees them (``Host`` provides it)."""

    def of(self, shard: int) -> Mapping[str, Shard]:
        """By model, the shard number ``shard`` of each."""
        ...

    def lead(self, shard: int, fence: int) -> None:
        """Own the shard of every model from now on, under ``fence``."""
        ...

    def follow(self, shard: int) -> None:
        """Take no pushes for it any more."""
        ...

    def blank(self, head: Head) -> Shard:
        """An empty shard to copy into, of a model that may not be known here yet. Raises ModelMismatch."""
        ...

    def adopt(self, copy: Shard) -> None:
        """Put a copy in the place of the shard that is there. It becomes whole by the steps that follow."""
        ...

    def settled(self, shard: Shard) -> None:
        """A copy is whole."""
        ...

    def took(self, shard: Shard, delta: Delta) -> None:
        """A shard took over a step of its leader."""
        ...

    def drop(self, shard: int) -> None:
        """The shard belongs to other servers now."""
        ...


@dataclass(slots=True)
class Replica:
    """``stream_id``: changes whenever the numbers of ``stream`` begin to mean something else.

    ``session``: the upstream's stream that ``origin`` is a number of (0: it has to be joined anew); ``origin``:
    the newest step of it that is here. ``voted``: the fence of the leader that it stopped following.
    ``held_back``: pushes are not taken now, as the shard is about to be led by another server; ``handing_over``: that
    was reported, so they stay held back until the shard map says what came of it. ``to_copy``: models
    that have to be copied before anything else; ``unsettled``: copied ones, each with the position at which its copy
    is whole. Until then this server cannot lead. ``restarted``: see ``election.Vote``.
    """

    shard: int
    name: str
    replication: Replication
    place: Place
    stream: Stream
    stream_id: int
    moving_to: str | None = None
    leading: bool = False
    session: int = 0
    origin: int = 0
    voted: int = -1
    held_back: bool = False
    handing_over: bool = False
    to_copy: list[str] = field(default_factory=list)
    unsettled: dict[str, int] = field(default_factory=dict)
    restarted: bool = field(init=False)
    followers: Followers = field(init=False)
    _joined: tuple[int, int] = (0, 0)
    _hold_until_s: float = 0.0
    _catch_up: int = 0

    def __post_init__(self) -> None:
        # Before the first leader nobody acknowledged anything.
        self.restarted = self.place.fence != 0
        self.followers = Followers(self.replication, self.place, self.name)
        self._bound()

    def place_at(self, place: Place, moving_to: str | None, stream_id: int) -> None:
        """The map changed. A new leader, or another to ask, begins a new session."""
        before = self.upstream
        changed = place.fence != self.place.fence
        self.place, self.moving_to = place, moving_to
        if changed:
            self.stream_id, self.session = stream_id, 0
            self.leading = self.restarted = False
            self.followers = Followers(self.replication, place, self.name)
        self.followers.place = place
        if self.upstream != before:
            self.session = 0
        if changed or moving_to is None:
            self.held_back = self.handing_over = False
        self._bound()

    def _bound(self) -> None:
        shared = len(self.place.replicas) > 1 or self.moving_to is not None
        self.stream.max_bytes = KEPT_BYTES if shared else 0
        self.stream.trim()

    @property
    def upstream(self) -> str | None:
        """Whom this server asks for steps of the shard; nobody once it voted."""
        if self.voted == self.place.fence:
            return None
        return upstream(self.place, self.name, self.moving_to)

    @property
    def whole(self) -> bool:
        """Whether this server could lead the shard."""
        return not self.to_copy and not self.unsettled

    @property
    def acknowledged(self) -> int:
        """Up to which number of ``stream`` enough replicas hold the steps."""
        return self.followers.acknowledged(self.stream.number)

    def vote(self) -> None:
        """Take nothing more from the present leader."""
        self.voted, self.leading, self.session = self.place.fence, False, 0

    def took(self, model: str, delta: Delta, origin: int = 0) -> None:
        """This server's shard of ``model`` took a step: its own, or number ``origin`` of its upstream's."""
        self.stream.add(Step(model, delta, origin))

    def join(self, session: int, number: int, newest: int) -> None:
        """Everything up to ``number`` of the upstream's stream ``session`` is here, what follows is to come; it
        stands at ``newest``."""
        self.session = session
        self._joined, self._catch_up = (self.stream.number, number), newest
        self.reached(number)

    def reached(self, number: int) -> None:
        """Everything up to ``number`` of the upstream's stream is here."""
        self.origin = number
        if self.whole and number >= self._catch_up:
            self.restarted = False

    def restart(self, stream_id: int) -> None:
        """A model's shard was replaced by a copy, so the numbers given out so far lead nowhere."""
        self.stream = Stream(self.stream.max_bytes)
        self.stream_id, self.session = stream_id, 0
        self.followers.held.clear()

    def holds(self) -> int:
        """The newest number of the upstream's stream that is held here, and in a chain by all behind; none while
        what is here is not whole, as it would be of no use in an election."""
        if not self.whole:
            return 0
        behind = self._next_in_chain()
        if behind is None:
            return self.origin
        number = self.followers.held.get(behind, 0)
        if number >= self.stream.number:
            return self.origin
        # What was here before the session has no number in it, except all of it together.
        own, theirs = self._joined
        return self.stream.origin(number) if number > own else theirs if number == own else 0

    def _next_in_chain(self) -> str | None:
        chain = self.place.chain
        if self.name not in chain or chain[-1] == self.name:
            return None
        return chain[chain.index(self.name) + 1]

    def ready_to_hand_over(self, now_s: float) -> bool:
        """Whether the server that the shard moves to has every step; holds pushes back when it is close."""
        to = self.moving_to
        if not self.leading or to is None or to == self.name or self.handing_over:
            return self.handing_over
        held = self.acknowledged if to in self.place.chain else self.followers.held.get(to)
        close = held is not None and self.stream.number - held <= HAND_OVER_STEPS
        if not self.held_back:
            if close and now_s >= self._hold_until_s:
                self.held_back, self._hold_until_s = True, now_s + HELD_BACK_S
        elif now_s >= self._hold_until_s:
            self.held_back, self._hold_until_s = False, now_s + HAND_OVER_AGAIN_S
        self.handing_over = self.held_back and held == self.stream.number
        return self.handing_over

    def to_join_chain(self) -> str | None:
        """A replica that is to stand in the chain again, as it is nearly in step."""
        if not self.leading or not self.place.chain:
            return None
        for server in self.place.replicas:
            held = self.followers.held.get(server)
            close = held is not None and self.stream.number - held <= HAND_OVER_STEPS
            if server not in self.place.chain and close:
                return server
        return None

    def tail(
        self, asked: wire.TailShard, server: str, shards: Mapping[str, Shard]
    ) -> tuple[wire.TailedShard, list[Array]] | None:
        """What ``server`` does not have yet, with its arrays, or None where it has everything; notes how far it
        is."""
        if asked.stream == self.stream_id and self.stream.floor <= asked.number <= self.stream.number:
            self.followers.note(server, min(asked.held, self.stream.number))
            return self._tailed(asked.number) if asked.number < self.stream.number else None
        own = {model: (shard.history, shard.position) for model, shard in shards.items()}
        joined = self.stream.join(asked.positions, own)
        # It may have been restarted and hold less than it said before.
        self.followers.note(server, 0 if isinstance(joined, set) else joined)
        if isinstance(joined, set):
            return wire.TailedShard(self.shard, self.stream_id, copy=sorted(joined)), []
        return self._tailed(joined)

    def _tailed(self, after: int) -> tuple[wire.TailedShard, list[Array]]:
        steps = self.stream.after(after, MAX_REPLY_BYTES)
        tailed = wire.TailedShard(
            self.shard, self.stream_id, after, [step.model for step in steps], newest=self.stream.number
        )
        if not steps:
            return tailed, []
        # Many small arrays would each be a frame: one block, as in the log, is faster and has a checksum.
        data = b"".join(part for step in steps for part in encode_record(step.delta))
        return tailed, [np.frombuffer(data, np.uint8)]


def copy_page(shard: Shard, cursor: PageCursor | None) -> tuple[Record, PageCursor | None]:
    """A piece of a shard that somebody copies: its head first (``cursor`` None), then page by page."""
    if cursor is None:
        return shard.head(), FIRST_PAGE
    widest = max(4 * (spec.dim + spec.state_dim) + 20 for spec in shard.specs)
    return shard.page(cursor, max(1, PAGE_BYTES // widest))
