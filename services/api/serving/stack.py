"""The serving side put together: catalogue, model, follower, recommender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from featurestore.encoder import Encoder
from services.api.context import Api
from services.api.serving.choose import Chooser
from services.api.serving.follow import Follower
from services.api.serving.freshness import Freshness
from services.api.serving.items import ItemState
from services.api.serving.probe_backends import ProbeBackends
from services.api.serving.probing import Probing
from services.api.serving.recommender import Recommender
from services.backends import open_security
from services.catalogue import Catalogue
from services.coordination.contract import Coordination
from services.messagelog.contract import MessageLog
from services.modelling import build_model
from services.parameter_server.client import AsyncParameterClient
from services.parameter_server.client.readers import Reading
from services.topics import EVENTS


@dataclass(frozen=True)
class Serving:
    """What recommendations are made from; ``follower.run`` keeps it in step."""

    items: ItemState
    freshness: Freshness
    follower: Follower
    recommender: Recommender
    parameters: AsyncParameterClient
    probing: Probing

    async def close(self) -> None:
        """Close the connections to the parameter servers."""
        await self.probing.close()
        await self.parameters.close()


def open_serving(
    api: Api, coordination: Coordination, log: MessageLog, outdated: Callable[[], bool]
) -> Serving:
    """Make the parts, inside the event loop that will serve. Of ``log`` only the partitions are read yet.
    ``outdated``: whether the region's parameters are too old."""
    settings = api.settings
    encoder = Encoder(api.schema)
    items = ItemState(Catalogue(encoder), build_model(api.schema, settings.model))
    security = open_security(settings)
    parameters = AsyncParameterClient(
        coordination,
        deadline_s=settings.parameters.deadline,
        security=security,
        reading=Reading.of(settings.parameters),
    )
    backends = ProbeBackends(log, coordination, parameters, security, settings.parameters.deadline)
    partitions = log.partitions(EVENTS)
    probing = Probing(
        api.incarnation, partitions, settings.region.name, append=api.ingest.append, backends=backends
    )
    freshness = probing.recommendations
    name, clock_ms = settings.model.name, api.clock_ms
    follower = Follower(items, freshness, api.store, parameters, name, clock_ms, arrived=probing.parameters)
    chooser = Chooser(items, settings.recommendation)
    recommender = Recommender(
        encoder, items, chooser, freshness, api.store, parameters, name, clock_ms, outdated
    )
    return Serving(items, freshness, follower, recommender, parameters, probing)
