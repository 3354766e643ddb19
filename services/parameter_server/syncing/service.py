"""The server's part in what regions tell each other: it feeds pullers, pulls itself, and keeps what goes with that.

Used by the server's loop.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from services.parameter_server.acknowledging import Acknowledging
from services.parameter_server.declarations import Declaration
from services.parameter_server.host import Host
from services.parameter_server.syncing.brake import Brake
from services.parameter_server.syncing.clocks import Verdict, by_region, judge
from services.parameter_server.syncing.contests import contest
from services.parameter_server.syncing.forwarding import Forwarding
from services.parameter_server.syncing.messages import REST, SYNC, SyncRequest
from services.parameter_server.syncing.rates import Rate
from services.parameter_server.syncing.source import Source
from services.parameter_server.syncing.upkeep import Upkeep
from services.parameter_server.syncing.upstream import Links, Upstream
from services.rpc.server import Call
from sync.clock import system_time_us
from sync.exchange import Pace, PaceConfig, Puller, ShardName
from sync.knowledge import Knowledge
from sync.quantise import Precision
from sync.replica import Replica

MAX_BATCH_BYTES: Final = 2**20
"""Of one batch: some milliseconds to take over, in which no call is answered."""
METHODS: Final = frozenset((SYNC, REST))
READS: Final = frozenset(("pull", "changes", "dense"))
MAX_WINDOW: Final = 32
"""Pulls that may be open at once, well below what a source takes: that fills a gigabit over a fifth of a second."""
CLOCKS_S: Final = 1.0
MERGE_AGAIN_S: Final = 0.005
"""Pause where batches wait and no step may be taken: the disk is slow, or a shard is being handed over."""
LONGEST_PAUSE_S: Final = 0.1
"""Between two batches, for readers' sake: what is new is wanted by them, too."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """``region``: this one's name; ``upstreams``: addresses of servers of the regions that it follows. See the settings
    ``sync`` for the rest."""

    region: str = "home"
    upstreams: tuple[str, ...] = ()
    precision: Precision = "float32"
    optimiser_state: bool = False
    max_bandwidth: int = 0
    coalesce_s: float = 0.005
    window: int = 3
    max_staleness_s: float = 60.0
    priority_share: float = 0.1
    reader_wait_s: float = 0.01
    max_clock_skew_s: float = 600.0
    member_timeout_s: float = 3_600.0


class SystemClock:
    """This machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def physical_us(self) -> int:
        return system_time_us()

    def worked_s(self) -> float:
        """What the calling thread had of the processor so far."""
        return time.thread_time()


class Syncing:
    """``fed`` and ``pushed`` answer pulls of other regions and forwarded pushes, once what they tell of is acknowledged
    in this region. ``allowed``: whether a shard that is led here may take steps of its own now. ``settle``: writes a
    model that another region declared to this region's store."""

    def __init__(
        self,
        config: SyncConfig,
        host: Host,
        fed: Acknowledging,
        pushed: Acknowledging,
        links: Links,
        allowed: Callable[[int], bool],
        settle: Callable[[Declaration], None],
        clock: SystemClock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.config, self.brake = config, Brake(config.reader_wait_s)
        self.clock_verdict = Verdict()
        self.models_learned_total = 0
        self.host, self._allowed, self._settle = host, allowed, settle
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self.source = Source(host, fed, self._clock, config.region, config.member_timeout_s)
        self.upkeep = Upkeep(host, self.source.feeds, allowed, config.member_timeout_s, self._clock.monotonic)
        self.upstreams = [self._upstream(address, links) for address in config.upstreams]
        self.forwarding = Forwarding(
            host,
            self.upstreams,
            lambda call, body, shards: pushed.answer(call, body, (), shards),
            pushed,
            self._clock.monotonic,
            config.region,
            self.learn,
        )
        host.owner_of = self.forwarding.owner_of
        self.rates = {upstream.address: (Rate(), Rate()) for upstream in self.upstreams}
        """By upstream, of bytes and of rows."""
        self._next_clocks_s = 0.0
        self._contested: dict[str, list[int]] = {}
        """By upstream, the shards that were said to be written there, too."""
        self._turn = 0
        self.merging_s = 0.0
        """How long taking over a batch held up all else, in the last turn: by its own work, whoever else has the
        processor."""
        self._merge_again_s = 0.0

    def _upstream(self, address: str, links: Links) -> Upstream:
        config = self.config
        pace = PaceConfig(
            max_bytes=MAX_BATCH_BYTES, max_bandwidth=config.max_bandwidth, window=min(config.window, MAX_WINDOW),
            max_window=MAX_WINDOW,
        )  # fmt: skip
        template = SyncRequest(
            puller=f"{config.region}/{self.host.config.name}/{address}",
            region=config.region,
            shards=self.host.config.shards,
            stream=0,
            number=0,
            budget=0,
            wait_s=0.0,
            precision=config.precision,
            state=config.optimiser_state,
            coalesce_s=config.coalesce_s,
            priority_share=config.priority_share,
            max_staleness_s=config.max_staleness_s,
            region_number=self.host.config.region,
        )

        def make(shards: Callable[[], Mapping[ShardName, Replica]]) -> Puller:
            return Puller(
                shards,
                Pace(pace, lambda: self.brake_level),
                # Larger than those of all processes of this name before, also where coordination was begun anew.
                self._clock.physical_us() // 1_000,
                self._rng,
                self._held,
            )

        return Upstream(address, links, make, self.followed, template, self, self._clock)

    def followed(self) -> Mapping[ShardName, Replica]:
        """The shards that are led here and written elsewhere."""
        host = self.host
        return {
            (name, shard): held.shard
            for name, model in host.models.items()
            for shard, held in host.led(model)
            if held.whole and not host.writes(shard)
        }

    @property
    def now_s(self) -> float:
        """The monotonic clock that everything here is timed by."""
        return self._clock.monotonic()

    @property
    def brake_level(self) -> float:
        """Which part of the usual is left to readers now."""
        return self.brake.level(self.now_s)

    def _held(self, name: ShardName) -> Knowledge:
        """What this server, and everybody who pulls from it, holds of a shard."""
        replica = self.followed()[name]
        return self.source.feeds.held_by_all(name, replica.knowledge, self._clock.monotonic())

    def digests(self) -> dict[str, str]:
        """By model, the digest of its declaration."""
        return {name: model.digest for name, model in self.host.models.items()}

    def learn(self, declaration: Declaration) -> None:
        """Another region declares a model so. Raises ModelMismatch, ParametersRefused."""
        known = declaration.model in self.host.models
        self.host.declare(declaration)
        if not known:
            self.models_learned_total += 1
            _log.info("model %s was declared in another region", declaration.model)
            self._settle(declaration)

    def answer(self, call: Call) -> None:
        """Answer one of ``METHODS``, now or later. Raises Rejected."""
        if call.request.method == SYNC:
            self.source.take(call)
        else:
            self.source.take_rest(call)

    def note_read(self, waited_s: float) -> None:
        """A reader waited for so long until its call was answered."""
        self.brake.note(waited_s, self._clock.monotonic())

    def turn(self) -> bool:
        """Take over a batch, ask for more, feed others. Whether anything happened that readers may want to see."""
        began_s = self._clock.worked_s()
        merged = self._pull() if self.upstreams else False
        self.merging_s = self._clock.worked_s() - began_s
        if merged:
            # So that taking over has no more than the share of this thread that the brake leaves to it.
            brake = self.brake_level
            self._merge_again_s = self.now_s + min(self.merging_s * brake / (1.0 - brake), LONGEST_PAUSE_S)
        forgotten = self.upkeep.turn()
        self.source.turn()
        self._look_at_writers()
        self._look_at_clocks()
        return merged or forgotten

    def _pull(self) -> bool:
        for upstream in self.upstreams:
            upstream.receive()
        merged = False
        waiting = [upstream for upstream in self.upstreams if upstream.waiting]
        if waiting and self._may_merge() and self.now_s >= self._merge_again_s:
            # Each in turn: one that sends much must not keep the others waiting.
            self._turn += 1
            merged = waiting[self._turn % len(waiting)].merge_next()
        now = self._clock.monotonic()
        for upstream in self.upstreams:
            upstream.pull()
            counts = upstream.puller.counts
            bytes_, rows = self.rates[upstream.address]
            bytes_.note(upstream.puller.pace.bytes_total, now)
            rows.note(counts.rows_total, now)
        return merged

    def _may_merge(self) -> bool:
        return all(self._allowed(shard) for shard in self.host.fences if not self.host.writes(shard))

    def next_s(self, at_most_s: float) -> float:
        """Seconds until there is something to do although nothing comes in, but not more than ``at_most_s``."""
        found = self.source.next_s(at_most_s)
        pause_s = max(self._merge_again_s - self.now_s, 0.0 if self._may_merge() else MERGE_AGAIN_S)
        for upstream in self.upstreams:
            found = min(found, max(upstream.next_s(at_most_s), pause_s))
        return found

    def contested(self, upstream: Upstream) -> list[int]:
        """The shards that both this region and that of ``upstream`` write, ascending."""
        return sorted(shard for shard in upstream.written if self.host.writes(shard))

    def takes_no_pushes(self) -> str:
        """An empty text, or why this server may not write."""
        verdict = self.clock_verdict
        if not verdict.certain or verdict.ahead_s is None:
            return ""
        return (
            f"the clock of {self.host.config.name} is {verdict.ahead_s:+.1f} s off those of other regions, more than "
            f"sync.max_clock_skew = {self.config.max_clock_skew_s:g} s; set it right"
        )

    def _look_at_writers(self) -> None:
        for upstream in self.upstreams:
            if not upstream.written:
                continue
            found = self.contested(upstream)
            if found and found != self._contested.get(upstream.address):
                _log.error("%s", contest(found, self.config.region, upstream.region))
            self._contested[upstream.address] = found

    def _look_at_clocks(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_clocks_s:
            return
        self._next_clocks_s = now + CLOCKS_S
        seen = [(u.region, u.puller.clock_ahead_s) for u in self.upstreams if u.puller.counts.batches_total]
        seen += [
            (p.region, p.clock_ahead_s) for p in self.source.peers.values() if p.clock_ahead_s is not None
        ]
        ahead = by_region(seen)
        found = judge(ahead, self.config.max_clock_skew_s)
        if found.off and not self.clock_verdict.off:
            _log.error(
                "this clock is %+.1f s off the median of %d other regions, more than sync.max_clock_skew = %g s%s",
                found.ahead_s, len(ahead), self.config.max_clock_skew_s,
                ": no pushes are taken until it is right" if found.certain else "",
            )  # fmt: skip
        self.clock_verdict = found

    def close(self) -> None:
        """Close the connections."""
        for upstream in self.upstreams:
            upstream.close()
