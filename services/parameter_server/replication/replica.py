"""One shard on one server, over all models: whom it follows or whom it leads, and how far everyone is. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from services.coordination.shardmap import Place
from services.parameter_server import messages as wire
from services.parameter_server.replication.election import Replication
from services.parameter_server.replication.streams import (
    BEGINNING,
    KEPT_BYTES,
    Followers,
    Step,
    Stream,
    upstream,
)
from sync.records import Delta, Head, Record
from sync.replica import FIRST_PAGE, PageCursor
from sync.shard import Shard
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
JOIN_S: Final = 0.5
"""For so long a server that is to stand in the chain again is waited for, until it has all that was acknowledged."""
JOIN_AGAIN_S: Final = 2.0
COPYING_S: Final = 10.0
"""So long after the last page of a copy, the steps since it began are kept for whoever reads it."""


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

    ``placed``: the epoch of the map that first had ``place``, as far as is known here.
    ``session``: the upstream's stream that ``origin`` is a number of (0: it has to be joined anew); ``origin``:
    the newest step of it that is here. ``voted``: the fence of the leader that it stopped following.
    ``held_back``: pushes are not taken now, as the shard is about to be led by another server; ``handing_over``: that
    was reported, so they stay held back until the shard map says what came of it. ``to_copy``: models
    that have to be copied before anything else; ``unsettled``: copied ones, each with the position at which its copy
    is whole, all read from the upstream's stream ``copied_from``; ``mixed``: some models' copies are ahead of the other
    models. Until neither is so this server cannot lead. ``restarted``: see ``election.Vote``. ``joining``: a server
    that is about to stand in the chain; nothing is acknowledged without it any more.
    """

    shard: int
    name: str
    replication: Replication
    place: Place
    stream: Stream
    stream_id: int
    moving_to: str | None = None
    placed: int = 0
    leading: bool = False
    session: int = 0
    origin: int = 0
    voted: int = -1
    held_back: bool = False
    handing_over: bool = False
    to_copy: list[str] = field(default_factory=list)
    unsettled: dict[str, int] = field(default_factory=dict)
    copied_from: int = 0
    mixed: bool = False
    joining: str | None = None
    restarted: bool = field(init=False)
    followers: Followers = field(init=False)
    _joined: tuple[int, int] = (0, 0)
    _hold_until_s: float = 0.0
    _catch_up: int = 0
    _join_reported: bool = False
    _join_until_s: float = 0.0
    _acknowledged: int = 0
    _still: tuple[int, float, int] = (0, 0.0, 0)
    _copied_s: float = -COPYING_S
    _copied_bytes: int = 0

    def __post_init__(self) -> None:
        # Before the first leader nobody acknowledged anything.
        self.restarted = self.place.fence != 0
        self.followers = Followers(self.replication, self.place, self.name)
        self.stream.number = max(self.stream.number, BEGINNING)
        self._bound()

    def place_at(self, place: Place, moving_to: str | None, stream_id: int, epoch: int) -> None:
        """The map changed to that of ``epoch``. A new leader, or another to ask, begins a new session."""
        before = self.upstream
        changed = place.fence != self.place.fence
        if place != self.place:
            self.placed = epoch
            for server in place.chain[:-1]:
                # It spoke for others than those that are behind it now.
                self.followers.forget(server)
        self.place, self.moving_to = place, moving_to
        if changed:
            self.stream_id = stream_id
            self.leading = False
            self.followers = Followers(self.replication, place, self.name)
            self.end_joining(0.0)
        self.followers.place = place
        for server in [one for one in self.followers.held if upstream(place, one, moving_to) != self.name]:
            # It asks another now, so nothing more is heard of it here.
            self.followers.forget(server)
        if changed or self.upstream != before:
            self.rejoin()
        if changed or moving_to is None:
            self.held_back = self.handing_over = False
        self._bound()

    def lead(self) -> None:
        """This server was elected: what it has is what counts."""
        self.leading, self.restarted, self.mixed = True, False, False
        self.rejoin()
        self.unsettled.clear()

    def rejoin(self) -> None:
        """Ask the upstream anew where to go on from, and whether anything has to be copied."""
        self.session, self.to_copy = 0, []

    def _bound(self) -> None:
        shared = len(self.place.replicas) > 1 or self.moving_to is not None
        self.stream.max_bytes = max(KEPT_BYTES, self._copied_bytes) if shared else 0
        self.stream.trim()

    def being_copied(self, nbytes: int, now_s: float) -> None:
        """Somebody reads a model's shard of ``nbytes``. It needs the steps meanwhile, as long as they are fewer bytes
        than the shard: else it would have to begin again and again where pushes come faster than pages."""
        self._copied_s, self._copied_bytes = now_s, max(nbytes, self._copied_bytes)
        self._bound()

    def let_go(self, now_s: float) -> None:
        """Keep steps for nobody who has stopped to read."""
        if self._copied_bytes and now_s - self._copied_s > COPYING_S:
            self._copied_bytes = 0
            self._bound()

    @property
    def upstream(self) -> str | None:
        """Whom this server asks for steps of the shard; nobody once it voted."""
        if self.voted == self.place.fence:
            return None
        return upstream(self.place, self.name, self.moving_to)

    @property
    def consistent(self) -> bool:
        """Whether this server could lead the shard: it has all steps of some leader up to one of them."""
        return not self.unsettled and not self.mixed

    @property
    def whole(self) -> bool:
        """Whether it can, and nothing has to be copied for it to go on."""
        return self.consistent and not self.to_copy

    @property
    def acknowledged(self) -> int:
        """Up to which number of ``stream`` enough replicas hold the steps."""
        number = self.followers.acknowledged(self.stream.number)
        if self.joining is None:
            return number
        return max(self._acknowledged, min(number, self.followers.held.get(self.joining, 0)))

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
        if number >= self._catch_up and not self.to_copy and not self.unsettled:
            self.restarted = self.mixed = False

    def adopted(self, model: str, copied_from: int, stream_id: int, *, alone: bool) -> None:
        """The shard of ``model`` was replaced by a copy, so the numbers given out so far lead nowhere. ``alone``: there
        is no other model that it could be ahead of."""
        self.stream = Stream(self.stream.max_bytes, BEGINNING)
        self.stream_id, self.session = stream_id, 0
        self.followers.held.clear()
        self.to_copy = [other for other in self.to_copy if other != model]
        self.unsettled.pop(model, None)
        self.mixed = not alone
        if self.copied_from != copied_from:
            # What the earlier copies lack comes in no stream any more.
            self.to_copy += [other for other in self.unsettled if other not in self.to_copy]
            self.copied_from = copied_from

    def holds(self) -> int:
        """The newest number of the upstream's stream that is held here, and in a chain by all behind; none while
        what is here is not whole, as it would be of no use in an election."""
        if not self.whole or not self.session:
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

    def to_join_chain(self, now_s: float) -> str | None:
        """A replica that is to stand in the chain again, as it has all that was acknowledged. From then on nothing is
        acknowledged without it, until ``end_joining``: the map may say already that it stands there."""
        if not self.leading or not self.place.chain:
            return None
        if self.joining is None and now_s >= self._join_until_s:
            joining = next((one for one in self.place.replicas if self._may_join(one)), None)
            if joining is not None:
                self._acknowledged, self._join_until_s = self.acknowledged, now_s + JOIN_S
                self.joining = joining
        if self.joining is None:
            return None
        if self.followers.held.get(self.joining, 0) >= self._acknowledged:
            self._join_reported = True
        elif not self._join_reported and now_s >= self._join_until_s:
            self.end_joining(now_s + JOIN_AGAIN_S)
        return self.joining if self._join_reported else None

    def _may_join(self, server: str) -> bool:
        held = self.followers.held.get(server)
        close = held is not None and self.stream.number - held <= HAND_OVER_STEPS
        return close and server not in self.place.chain

    def end_joining(self, again_s: float) -> None:
        """The map says who stands in the chain, and will not say otherwise for what was reported."""
        self.joining, self._join_reported, self._join_until_s = None, False, again_s

    def stuck_in_chain(self, now_s: float, patience_s: float) -> tuple[str, ...]:
        """Whom to take out of the chain, as steps did not pass it for ``patience_s``: the one behind this server, or
        if that one keeps asking, those behind it. They may join again once they are in step."""
        chain = self.place.chain
        if not self.leading or len(chain) < 2 or self.name != chain[0]:
            return ()
        acknowledged, since_s, asked = self._still
        polls = self.followers.polls.get(chain[1], 0)
        if acknowledged != self.acknowledged or self.acknowledged >= self.stream.number:
            self._still = self.acknowledged, now_s, polls
            return ()
        if now_s - since_s <= patience_s:
            return ()
        self._still = acknowledged, now_s, polls
        return chain[2:] if polls > asked and len(chain) > 2 else chain[1:2]

    def tail(
        self, asked: wire.TailShard, server: str, epoch: int, shards: Mapping[str, Shard]
    ) -> tuple[wire.TailedShard, list[Array]] | None:
        """What ``server``, which goes by the map of ``epoch``, does not have yet, with its arrays, or None where it has
        everything; notes how far it is."""
        if asked.stream:
            if asked.stream != self.stream_id or not self.stream.floor <= asked.number <= self.stream.number:
                return wire.TailedShard(self.shard, 0), []
            if epoch >= self.placed or not self._has_others_behind(server):
                self._note(server, min(asked.held, self.stream.number))
            return self._tailed(asked.number) if asked.number < self.stream.number else None
        if not self.leading and (self.restarted or not self.whole):
            # Who joined now would think that it has everything, once it has what is here.
            return None
        own = {model: (shard.history, shard.position) for model, shard in shards.items()}
        unknown = [model for model, (_, position) in asked.positions.items() if position and model not in own]
        if unknown:
            self._note(server, 0)
            return wire.TailedShard(self.shard, self.stream_id, unknown=sorted(unknown)), []
        joined = self.stream.join(asked.positions, own)
        if asked.copied_from != self.stream_id and (broken := own.keys() & set(asked.unsettled)):
            joined = broken | (joined if isinstance(joined, set) else set())
        # It may have been restarted and hold less than it said before.
        held = 0 if isinstance(joined, set) or asked.held < 0 or self._has_others_behind(server) else joined
        self._note(server, held)
        if isinstance(joined, set):
            return wire.TailedShard(self.shard, self.stream_id, copy=sorted(joined)), []
        return self._tailed(joined)

    def _note(self, server: str, held: int) -> None:
        if upstream(self.place, server, self.moving_to) == self.name:
            self.followers.note(server, held)

    def _has_others_behind(self, server: str) -> bool:
        """Whether what ``server`` has says nothing yet: those behind it in the chain count, too."""
        return server in self.place.chain[:-1]

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
