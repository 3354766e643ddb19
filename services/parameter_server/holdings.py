"""The shards that one parameter server holds, by model, and its part in each: it leads it, or follows. No I/O but
by what is passed in. Used by one thread, the server's loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.parameter_server.declarations import Declaration, digest_of, require_same
from services.parameter_server.storage.offsets import DurableOffsets
from services.parameter_server.types import IncarnationChanged, ModelUnknown, ParametersRefused
from sync.clock import HybridClock
from sync.contents import MAX_AHEAD_US
from sync.placement import single_shard
from sync.records import Delta, Head
from sync.shard import Shard

MAX_MODELS = 64
_log = logging.getLogger(__name__)
FENCE_BITS = 24
"""A writer is (region, fence): 8 and 24 bits."""


class NotMine(Exception):
    """The request names a shard that another server holds."""


@dataclass(slots=True)
class Held:
    """One shard of one model, with what of it is on disk.

    ``moves`` counts the pushes that moved its offsets. ``stale_total``: pushes that came too late for their bound.
    ``whole``: not a copy whose last steps are still to come. ``unchanged_total``: rows that clients asked for by their
    version and had already.
    """

    shard: Shard
    durable: DurableOffsets = field(default_factory=DurableOffsets)
    stale_total: int = 0
    whole: bool = True
    unchanged_total: int = 0

    @property
    def moves(self) -> int:
        counts = self.shard.counts
        return counts.applied_total + counts.refused_total


@dataclass(slots=True)
class Model:
    """One model on this server: its shards, and the number of its newest dense generation per single table."""

    declaration: Declaration
    held: dict[int, Held]
    generations: dict[str, int] = field(default_factory=dict)
    published_moves: dict[str, int] = field(default_factory=dict)
    digest: str = ""

    def __post_init__(self) -> None:
        self.digest = digest_of(self.declaration)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Of how many shards this is a server, and the bound of their change streams.

    ``region``: the number that leads the ids of its writers. ``written``: the shards that this region writes, None:
    all; the others come from other regions, with what the optimiser keeps where ``optimiser_state`` says so.
    ``max_ahead_us``: versions that are further ahead of this clock are refused.
    """

    name: str
    shards: int
    change_capacity: int
    region: int = 0
    written: frozenset[int] | None = None
    optimiser_state: bool = False
    max_ahead_us: int = MAX_AHEAD_US


class Keeper(Protocol):
    """What keeps shards over restarts (``Durability`` provides it). May do I/O."""

    def open(
        self, model: str, shard_id: int, make: Callable[[], Shard], check: Callable[[Head], None]
    ) -> Held:
        """The shard as it was left, or ``make()``; ``check`` looks at what is known of a stored one first."""
        ...

    def record(self, held: Held, delta: Delta) -> None:
        """Keep a step of the shard."""
        ...

    def renew(self, held: Held) -> None:
        """Another shard was put in the place of ``held.shard``: keep that one, from scratch, once it is whole. What is
        kept until then is the shard before it."""
        ...

    def forget(self, held: Held) -> None:
        """The shard is somebody else's now: keep nothing of it any more."""
        ...


class Holdings:
    """All models of one server: shards that it leads, and shards that follow another server's.

    ``keeper`` keeps each shard's steps; ``number(model, table)`` gives a number for a new dense generation that none
    before it had, or None if none can be had now. Both may do I/O and are called seldom.
    """

    def __init__(
        self,
        config: HostConfig,
        keeper: Keeper,
        number: Callable[[str, str], int | None],
        clock: HybridClock | None = None,
    ) -> None:
        self.config = config
        self.fences: dict[int, int] = {}
        """By shard that is led here: since which epoch of the shard map."""
        self.holds: set[int] = set()
        """The shards that are here, led or followed."""
        self.on_step: Callable[[str, int, Delta], None] = lambda model, shard, delta: None
        """Told of every step that a shard led here takes."""
        self._keeper, self._number = keeper, number
        self._clock = clock or HybridClock()
        # Fences alone are given for a second time where coordination was begun anew.
        self._started_ms = self._clock.physical_us() // 1_000 % 2**38
        self.models: dict[str, Model] = {}
        self.foreign_starts = 0
        self.owner_of: Callable[[str, int], str] = lambda model, shard: "another region"
        """Which region writes a shard of a model that this one does not write, in words."""
        self.newest_accepted_at_ms = 0
        """When the newest event among all pushes was accepted (the API's clock, Unix ms)."""

    def declare(self, declaration: Declaration) -> None:
        """Hold the model's shards from now on. Raises ModelMismatch if it, or its snapshot, is another."""
        known = self.models.get(declaration.model)
        if known is not None:
            require_same(known.declaration, declaration)
            return
        if len(self.models) >= MAX_MODELS:
            raise ParametersRefused(f"{self.config.name} holds {MAX_MODELS} models already")
        model = self.models[declaration.model] = Model(declaration, {})
        for shard in sorted(self.holds):
            self._start(model, shard)

    @property
    def incarnation(self) -> int:
        """Changes whenever this server starts, begins to lead a shard, or another region's that it forwards to is
        another process: what clients knew of it may be wrong then."""
        return (self._started_ms + self.foreign_starts) << FENCE_BITS | max(self.fences.values(), default=0)

    def writes(self, shard: int) -> bool:
        """Whether this region writes the shard; else another one does, and this follows."""
        return self.config.written is None or shard in self.config.written

    @property
    def written(self) -> frozenset[int]:
        """All that this region writes."""
        every = frozenset(range(self.config.shards))
        return every if self.config.written is None else self.config.written & every

    def _start(self, model: Model, shard_id: int) -> None:
        """Open a shard of a model as it was left; lead it if that is this server's part."""
        declaration = model.declaration

        def check(head: Head) -> None:
            require_same(Declaration(head.model, head.fingerprint, head.specs), declaration)
            if head.stateless and not self._stateless(shard_id):
                raise ParametersRefused(
                    f"shard {shard_id} of {head.model} was kept without what the optimiser keeps, so it cannot be "
                    f"{'written' if self.writes(shard_id) else 'kept with it'} here: set sync.writes and "
                    "sync.optimiser_state as they were, or begin with empty folders and sync.optimiser_state = true"
                )

        held = self._keeper.open(
            declaration.model, shard_id, lambda: self._empty(declaration, shard_id), check
        )
        model.held[shard_id] = held
        if shard_id in self.fences:
            self._own(model, held)

    def _empty(self, declaration: Declaration, shard_id: int) -> Shard:
        return Shard(
            shard_id,
            declaration.tables,
            0,
            self._clock,
            model=declaration.model,
            fingerprint=declaration.fingerprint,
            change_capacity=self.config.change_capacity,
            max_ahead_us=self.config.max_ahead_us,
            stateless=self._stateless(shard_id),
        )

    def _stateless(self, shard: int) -> bool:
        return not (self.writes(shard) or self.config.optimiser_state)

    def _own(self, model: Model, held: Held) -> None:
        shard, fence = held.shard, self.fences[held.shard.shard_id]
        # The fence is what nobody wrote under before in this region, so it serves as the writer's id, too.
        if fence >> FENCE_BITS:
            raise ParametersRefused(f"fence {fence} of shard {shard.shard_id} does not fit a writer's id")
        shard.lead(self.config.region << FENCE_BITS | fence, fence)
        shard.on_delta = lambda delta: self._stepped(held, delta)
        for table, at in self.single_tables(model):
            if at == shard.shard_id and shard.resume_dense(table):
                _log.warning(
                    "shard %d of %s: %s was trained in another region; it goes on from the generation that came here",
                    shard.shard_id, shard.model, table,
                )  # fmt: skip
            # Restored weights get a number of their own: they may differ from what was published before.
            if at == shard.shard_id and shard.pushes:
                self.publish(model.declaration.model, table)

    def _stepped(self, held: Held, delta: Delta) -> None:
        self._keeper.record(held, delta)
        self.on_step(held.shard.model, held.shard.shard_id, delta)

    def of(self, shard: int) -> Mapping[str, Shard]:
        """By model, its shard number ``shard``, where it is here."""
        return {name: model.held[shard].shard for name, model in self.models.items() if shard in model.held}

    def lead(self, shard: int, fence: int) -> None:
        """Own the shard of every model from now on, under ``fence``, which is newer than all before."""
        self._hold(shard)
        self.fences[shard] = fence
        for model in self.models.values():
            self._own(model, model.held[shard])

    def follow(self, shard: int) -> None:
        """Hold the shard, and take no pushes for it any more."""
        self._hold(shard)
        if self.fences.pop(shard, None) is None:
            return
        for model in self.models.values():
            model.held[shard].shard.resign()
            for spec in model.declaration.tables:
                if spec.placement == "single" and single_shard(spec.name, self.config.shards) == shard:
                    model.generations.pop(spec.name, None)
                    model.published_moves.pop(spec.name, None)

    def _hold(self, shard: int) -> None:
        if shard in self.holds:
            return
        self.holds.add(shard)
        for model in self.models.values():
            self._start(model, shard)

    def drop(self, shard: int) -> None:
        """The shard belongs to other servers now."""
        self.follow(shard)
        self.holds.discard(shard)
        for model in self.models.values():
            self._keeper.forget(model.held.pop(shard))

    def blank(self, head: Head) -> Shard:
        """An empty shard to copy into, of a model that may not be known here yet. Raises ModelMismatch,
        ParametersRefused."""
        declaration = Declaration(head.model, head.fingerprint, head.specs)
        self.declare(declaration)
        return self._empty(declaration, head.shard_id)

    def adopt(self, copy: Shard) -> None:
        """Put a copy in the place of the shard that is here. Nothing of it is kept until it is ``settled``."""
        held = self.models[copy.model].held[copy.shard_id]
        held.shard, held.whole = copy, False
        self._keeper.renew(held)

    def settled(self, shard: Shard) -> None:
        """A copy is whole: keep it from now on."""
        held = self.models[shard.model].held[shard.shard_id]
        held.whole = True
        self._keeper.renew(held)

    def took(self, shard: Shard, delta: Delta) -> None:
        """A shard took over a step of its leader."""
        held = self.models[shard.model].held[shard.shard_id]
        if held.whole:
            self._keeper.record(held, delta)

    def all_held(self) -> Iterator[tuple[str, Held]]:
        """Every shard of every model, with the model's name."""
        for name, model in self.models.items():
            for held in model.held.values():
                yield name, held

    def model(self, name: str) -> Model:
        """Raises ModelUnknown."""
        try:
            return self.models[name]
        except KeyError:
            raise ModelUnknown(f"model {name} is not declared on {self.config.name}") from None

    def held(self, model: Model, shard: int, *, followed: bool = False) -> Held:
        """A shard of ``model`` that is led here, or (``followed``) at least held. Raises NotMine."""
        held = model.held.get(shard)
        if held is None or not (shard in self.fences or (followed and held.whole)):
            raise NotMine(f"shard {shard} is not led by {self.config.name}")
        return held

    def led(self, model: Model) -> Iterator[tuple[int, Held]]:
        """The shards of ``model`` that are led here, by number."""
        return ((shard, held) for shard, held in model.held.items() if shard in self.fences)

    def single_tables(self, model: Model) -> Iterator[tuple[str, int]]:
        """The dense tables of ``model`` that are published here, each with its shard: it is led here, and written by
        this region."""
        for spec in model.declaration.tables:
            shard = single_shard(spec.name, self.config.shards)
            led = shard in model.held and shard in self.fences
            if spec.placement == "single" and led and self.writes(shard):
                yield spec.name, shard

    def require_written(self, model: str, shards: Iterable[int]) -> None:
        """Raises ParametersRefused where this region does not write all of ``shards``."""
        for shard in shards:
            if not self.writes(shard):
                raise ParametersRefused(
                    f"shard {shard} of {model} is written by {self.owner_of(model, shard)}, not by this one "
                    "(sync.writes)"
                )

    def require_incarnation(self, expected: int) -> None:
        """Raises IncarnationChanged unless this is the process that is ``expected`` (0: any)."""
        if expected not in (0, self.incarnation):
            raise IncarnationChanged(self.config.name, expected, self.incarnation)

    def shard_of(self, table: str) -> int:
        """The shard of the single ``table``."""
        return single_shard(table, self.config.shards)

    def holder(self, model: str, table: str) -> Held | None:
        """The shard of the single ``table``, if it is led here. Raises ModelUnknown."""
        shard = single_shard(table, self.config.shards)
        return self.model(model).held.get(shard) if shard in self.fences else None

    def _dense_shard(self, model: Model, table: str) -> Held:
        return self.held(model, single_shard(table, self.config.shards))

    def _publish_first(self, name: str, model: Model) -> None:
        for table, shard in self.single_tables(model):
            if table not in model.generations and model.held[shard].moves:
                self.publish(name, table)

    def publish(self, model_name: str, table: str) -> int:
        """Publish the live dense weights if they changed; the number of the newest generation (0: none yet).

        Readers of several incarnations compare numbers, so they come from outside and never repeat.
        """
        model = self.model(model_name)
        held = self._dense_shard(model, table)
        if not self.writes(held.shard.shard_id):
            raise ParametersRefused(f"table {table} of {model_name} is published in another region")
        before = held.shard.dense(table).number
        if table in model.generations and model.published_moves.get(table) == held.moves:
            return model.generations[table]
        # The number comes first: if none can be had now, nothing is published under an old one.
        number = self._number(model_name, table)
        if number is None:
            return model.generations.get(table, 0)
        # A store that was begun anew counts from 1 again: the shard knows better.
        again = table not in model.generations
        model.generations[table] = held.shard.publish_dense(table, max(number, before + 1), again=again)
        model.published_moves[table] = held.moves
        return model.generations[table]

    def publish_all(self) -> None:
        """Publish every dense table that changed and was published before."""
        for name, model in self.models.items():
            for table in list(model.generations):
                self.publish(name, table)
