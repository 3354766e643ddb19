"""The processor process: from the events log to the online store and the samples."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Final

from featurestore import counters
from featurestore.encoder import Encoder
from featurestore.online import OnlineStore, StoreError
from featurestore.schema import Schema
from services.backends import open_coordination, open_log, open_store
from services.coordination.membership import Registration
from services.freshness.stamps import Stamper, Stamps
from services.messagelog.contract import LogError, MessageLog
from services.modelling import open_schema
from services.processor.metrics import ProcessorMetrics
from services.processor.processor import Archive, Plan, Processor
from services.processor.records import Rules
from services.processor.sampling import Recipe
from services.processor.transform import Context, Labels
from services.processor.users import Bounds
from services.settings.model import Settings
from services.topics import EVENTS, PROCESSOR_GROUP
from services.workers import close_all, keep_trying, registered

if TYPE_CHECKING:
    from services.processor.keeping import Keeper

SERVICE: Final = "processor"
POLL_S: Final = 0.1
RETENTION_EVERY_S: Final = 60.0

log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Process events as ``name`` until ``stop`` is set. Raises the backends' errors where one cannot be
    opened at the start; afterwards it waits for them to return."""
    schema, metrics = open_schema(settings), ProcessorMetrics()
    with ExitStack() as stack:
        coordination, events, store = open_coordination(settings), open_log(settings), open_store(settings)
        close_all(stack, coordination, events, store)
        ttl_s = settings.coordination.lease_ttl
        registration = stack.enter_context(registered(coordination, SERVICE, name, ttl_s, metrics.registry))
        plan = make_plan(settings, schema, events.incarnation(EVENTS))

        stamper = Stamper(events.producer)
        close_all(stack, stamper)

        def serve(progressed: Callable[[], None]) -> None:
            with _keeper(settings, name, events, store, plan) as archive:
                _serve(events, store, plan, metrics, archive, stamper, registration, stop, progressed)

        def failed(error: Exception) -> None:
            metrics.failures.labels(type(error).__name__).inc()

        keep_trying(serve, (LogError, StoreError), stop, failed)


def make_plan(settings: Settings, schema: Schema, incarnation: str) -> Plan:
    """What the settings ask of a processor of the events log of that ``incarnation``."""
    chosen = settings.processor
    recipe = Recipe(Encoder(schema), incarnation, settings.model.name, chosen.negatives)
    return Plan(
        context=Context(
            recipe,
            Labels(frozenset(chosen.positive_actions), chosen.rating_threshold),
            Bounds(chosen.recent_items, chosen.seen_items),
            counters.log_tag(incarnation),
        ),
        rules=Rules(schema, round(settings.api.max_clock_ahead * 1_000)),
        max_batch=chosen.max_batch,
        linger_s=chosen.linger,
        pace_s=chosen.pace,
        dedupe_window_s=chosen.dedupe_window,
    )


@contextmanager
def _keeper(
    settings: Settings, name: str, events: MessageLog, store: OnlineStore, plan: Plan
) -> Iterator[Keeper | None]:
    """The offline log, if the settings want one; what it buffers is written at a clean end."""
    if not settings.features.offline:
        yield None
        return
    from services.processor.keeping import Keeper  # loads pyarrow

    folder = settings.data.dir / "offline" / "events"
    context = plan.context
    keeper = Keeper(folder, name, events, store, context.recipe.log, context.labels)
    yield keeper
    keeper.close()


def _serve(
    events: MessageLog,
    store: OnlineStore,
    plan: Plan,
    metrics: ProcessorMetrics,
    archive: Archive | None,
    stamps: Stamps,
    registration: Registration,
    stop: threading.Event,
    progressed: Callable[[], None],
) -> None:
    """Work until told to stop; any error ends it, and what was not committed is read again."""
    member = registration.member.name
    with closing(events.consumer(PROCESSOR_GROUP, [EVENTS], member=member)) as consumer:
        processor = Processor(consumer, store, plan, metrics, archive, stamps=stamps)
        registration.update(ready=True)
        retained_s = -math.inf
        while not stop.is_set() and not registration.replaced.is_set():
            if processor.step(POLL_S):
                progressed()
            if time.monotonic() - retained_s >= RETENTION_EVERY_S:
                # Every stack has a processor, and several may do this at once.
                dropped = events.enforce_retention()
                retained_s = time.monotonic()
                if dropped:
                    log.info("dropped %d records older than the log's retention", dropped)
    if registration.replaced.is_set():
        stop.set()
