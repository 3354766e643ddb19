"""The API process: opens its backends, follows items and parameters, serves until told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from contextlib import AsyncExitStack, closing
from dataclasses import asdict
from typing import Final

import uvloop

from services.api.app import assemble
from services.api.behind import ANSWER_S, Behind, watch
from services.api.context import Api, wall_clock_ms
from services.api.ingest import Ingest
from services.api.metrics import ApiMetrics
from services.api.reach import Reach
from services.api.readiness import Readiness
from services.api.serving.stack import Serving, open_serving
from services.api.store import AsyncStore
from services.backends import open_coordination, open_log, open_security, open_store
from services.coordination.contract import Coordination
from services.coordination.membership import Member, Registration
from services.listening import address_of, cancel, listen, serve_until
from services.modelling import open_schema
from services.parameter_server.client import AsyncParameterClient
from services.parameter_server.client.readers import Reading
from services.parameter_server.client.syncs import ask_region_aio
from services.rpc.aio import AsyncRpcClient
from services.settings import Address, Settings, SettingsError, parse_address
from services.settings.checks import check
from services.topics import EVENTS

SERVICE: Final = "api"

log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Serve as ``name`` until ``stop`` is set. Raises SettingsError (an open address without a key) and the
    backends' errors where one cannot be opened."""
    if problems := tuple(check(settings)):
        raise SettingsError(tuple(problem.at("settings") for problem in problems))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, name, stop))


async def _serve(settings: Settings, name: str, stop: threading.Event) -> None:
    async with AsyncExitStack() as stack:
        listener = listen(parse_address(settings.api.listen))
        stack.callback(listener.close)
        coordination = open_coordination(settings)
        stack.callback(coordination.close)
        events = open_log(settings)
        stack.callback(events.close)
        store = AsyncStore(lambda: open_store(settings), direct=settings.features.backend == "sqlite")
        stack.callback(store.close)
        metrics = ApiMetrics()
        ingest = Ingest(events.producer, events.partitions(EVENTS), settings.api.queue, metrics.appended)
        ingest.start()
        stack.push_async_callback(ingest.close)
        api = Api(settings, open_schema(settings), ingest, store, metrics, events.incarnation(EVENTS))
        behind = Behind(settings.model.name, settings.region.name, settings.sync.max_behind)
        serving = open_serving(api, coordination, events, behind.outdated)
        stack.push_async_callback(serving.close)
        reach = _reach(settings, coordination, stack)
        readiness = Readiness(api, serving, events, coordination, reach, behind)
        checks, behind_s = readiness.checks(), lambda: behind.behind_s
        app = assemble(api, serving.recommender, checks, serving.probing, behind_s).asgi
        _measure(api, serving, behind)
        registration = _register(settings, name, coordination, address_of(listener))
        stack.callback(registration.close)
        following = asyncio.create_task(serving.follower.run(), name="follow")
        stack.push_async_callback(cancel, following)
        watching = asyncio.create_task(_watch(settings, coordination, behind), name="behind")
        stack.push_async_callback(cancel, watching)
        becoming = asyncio.create_task(readiness.announce(registration), name="ready")
        stack.push_async_callback(cancel, becoming)
        log.info("serving at %s", registration.member.address)
        await serve_until(stop, listener, app, http="httptools", timeout_keep_alive=75)


def _reach(settings: Settings, coordination: Coordination, stack: AsyncExitStack) -> Reach:
    """What looks for the parameter servers: with a client of its own, so that it touches no kept rows."""
    client = AsyncParameterClient(
        coordination, security=open_security(settings), reading=Reading(settings.parameters.reads)
    )
    stack.push_async_callback(client.close)
    return Reach(client, settings.model.name, settings.region.name)


async def _watch(settings: Settings, coordination: Coordination, behind: Behind) -> None:
    with closing(AsyncRpcClient(open_security(settings))) as rpc:
        await watch(behind, lambda: ask_region_aio(coordination, rpc, ANSWER_S))


def _register(settings: Settings, name: str, coordination: Coordination, bound: Address) -> Registration:
    member = Member(
        name=name,
        service=SERVICE,
        address=settings.api.advertise or f"http://{bound}",
        pid=os.getpid(),
        incarnation=coordination.increment(f"incarnations/{SERVICE}"),
        started_at_ms=wall_clock_ms(),
    )
    return Registration(coordination, member, settings.coordination.lease_ttl)


def _measure(api: Api, serving: Serving, behind: Behind) -> None:
    """Gauges of what is held in memory and how old it is, and what the cache of rows counts."""
    gauge = api.metrics.gauge
    gauge(
        "headwater_region_behind_seconds",
        "Since this region was level with those that it follows (NaN: it writes all itself).",
        lambda: math.nan if behind.behind_s is None else behind.behind_s,
    )
    gauge("headwater_api_queue_events", "Events waiting for the log.", lambda: float(api.ingest.waiting))
    gauge("headwater_api_items", "Items in memory.", lambda: float(len(serving.items.catalogue)))
    gauge("headwater_api_item_rows", "Embedding rows in memory.", lambda: float(len(serving.items.rows)))
    gauge(
        "headwater_api_dense_generation",
        "Generation of the dense weights served (-1: none).",
        lambda: -1.0 if serving.items.current is None else float(serving.items.current.dense.generation),
    )
    api.metrics.totals(
        "headwater_api_cached_rows",
        "Rows in the cache of hot rows, by what became of them.",
        "what",
        lambda: {
            name.removesuffix("_total"): count for name, count in asdict(serving.parameters.cached).items()
        },
    )
