"""The stack that a federation server belongs to, as what a job of items learns from and goes to.

A job's item table starts as the vectors that the stack serves. A version's change of it is, divided by the devices'
learning rate, the negative gradient that they found at those vectors (a pseudo-gradient, Reddi et al. 2021): it goes
through the item tower to the items' own embedding rows, as a trainer's gradient does (``teaching``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from featurestore.online import StoreError
from federated.weights import Array
from services.coordination.contract import CoordinationError
from services.federation.hosted import HostedJob
from services.federation.outbox import StackAway
from services.federation.teaching import FederatedWriter, NotTaught, RowNumbers, Teacher
from services.parameter_server.types import Keys, ParameterError, Rows
from services.settings.model import Settings

if TYPE_CHECKING:
    from featurestore.online import OnlineStore
    from models.training import RecommenderModel
    from services.catalogue import Catalogue
    from services.parameter_server.client import ParameterClient

LOG: Final = "federated-job/"
"""With the job's name it is the source of its pushes: parameter servers remember one for each name."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a stack serves: the ids of its items, by number, and their vectors [I, d]."""

    ids: tuple[str, ...]
    vectors: Array


def served_items(settings: Settings) -> Served:
    """What the stack of ``settings`` serves now. Raises StackAway, and ValueError for no item or too many."""
    with closing(_Connections(settings)) as connected, _asking():
        rows = connected.available()
        vectors, _, _ = connected.teacher(rows, _writer(connected, "")).vectors()
        return Served(tuple(connected.catalogue.ids[row] for row in rows.tolist()), vectors)


class ServedStack:
    """The stack of ``settings`` as an outbox sees it (``outbox.Stack``). Opened anew after it was away. One thread."""

    def __init__(self, settings: Settings, job: HostedJob) -> None:
        self._settings = settings
        self._job = job
        self._connected: _Connections | None = None

    def open(self) -> None:
        """See ``outbox.Stack``."""
        with self._connection() as connected:
            connected.available()

    def prepare(self, change: Array) -> tuple[Keys, Rows]:
        """See ``outbox.Stack``. What is no longer in the stack's catalogue, or hidden, is left out."""
        with self._connection() as connected:
            width, dim = connected.model.config.retrieval_dim, self._job.layout.size // len(self._job.items)
            if width != dim:
                raise StackAway(f"its items have vectors of {width} values, the job's of {dim}")
            connected.available()
            rows = connected.catalogue.rows(self._job.items)
            there = rows >= 0
            there[there] = connected.catalogue.available(_now_ms())[rows[there]]
            if not there.any():
                raise StackAway(f"none of the job's {len(rows)} items is in it")
            scale = np.float32(self._job.into.weight / self._job.training.rate)
            at_vectors = -scale * change.reshape(len(rows), dim)[there]
            return connected.teacher(rows[there], self._writer(connected)).gradients(at_vectors)

    def push(self, number: int, at_ns: int, keys: Keys, gradients: Rows) -> float:
        """See ``outbox.Stack``."""
        with self._connection() as connected:
            return self._writer(connected).repeat(number, at_ns, keys, gradients)

    def close(self) -> None:
        """End all connections."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _writer(self, connected: _Connections) -> FederatedWriter:
        return _writer(connected, self._job.name)

    @contextmanager
    def _connection(self) -> Iterator[_Connections]:
        try:
            with _asking():
                if self._connected is None:
                    self._connected = _Connections(self._settings, self._job.into.model)
                yield self._connected
        except StackAway:
            self.close()
            raise


class _Connections:
    """To one stack: its parameter servers, its catalogue, and the model that it serves. Loads torch."""

    def __init__(self, settings: Settings, model: str = "") -> None:
        """``model`` is the one that is wanted (""; whichever it serves). Raises StackAway and what opening raises."""
        from featurestore.encoder import Encoder
        from services.backends import open_coordination, open_security, open_store
        from services.catalogue import Catalogue
        from services.modelling import build_model, open_schema
        from services.parameter_server.client import ParameterClient

        self.name = settings.model.name
        if model not in ("", self.name):
            raise StackAway(f"it serves model {self.name}, not {model}")
        schema = open_schema(settings)
        self.model: RecommenderModel = build_model(schema, settings.model)
        self.catalogue: Catalogue = Catalogue(Encoder(schema))
        with ExitStack() as resources:
            self._store: OnlineStore = resources.enter_context(closing(open_store(settings)))
            coordination = resources.enter_context(closing(open_coordination(settings)))
            self.client: ParameterClient = resources.enter_context(
                closing(
                    ParameterClient(
                        coordination,
                        deadline_s=settings.parameters.deadline,
                        security=open_security(settings),
                    )
                )
            )
            self._resources = resources.pop_all()

    def available(self) -> RowNumbers:
        """The catalogue's rows that may be shown, after what changed was read."""
        self.catalogue.refresh(self._store, _now_ms())
        return np.flatnonzero(self.catalogue.available(_now_ms())).astype(np.int64)

    def teacher(self, rows: RowNumbers, writer: FederatedWriter) -> Teacher:
        """Of the catalogue's ``rows``. Raises ValueError for none and for too many."""
        return Teacher(self.client, writer, self.model, self.name, self.catalogue, rows, _now_ms())

    def close(self) -> None:
        self._resources.close()


def _writer(connected: _Connections, job: str) -> FederatedWriter:
    return FederatedWriter(connected.client, connected.name, 0, log=f"{LOG}{job}")


@contextmanager
def _asking() -> Iterator[None]:
    """What a stack that is away raises, as StackAway."""
    try:
        yield
    except NotTaught:
        raise
    except (CoordinationError, ParameterError, StoreError) as error:
        raise StackAway(str(error)) from error


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
