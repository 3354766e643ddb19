"""Where probes come from and go to: the log's stamps, and the model of the marked updates."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator

from services.coordination.contract import Coordination
from services.freshness.updates import MODEL, SLOTS, TABLE, Update, UpdateWriter
from services.messagelog.contract import MessageLog, Record, TopicPartition
from services.parameter_server.client import AsyncParameterClient, ParameterClient
from services.parameter_server.types import ShardChanges
from services.rpc.security import Security
from services.topics import PROBES


class ProbeBackends:
    """Implements ``probing.Backends``. Log, coordination store and ``parameters`` stay their owner's to close."""

    def __init__(
        self,
        messages: MessageLog,
        coordination: Coordination,
        parameters: AsyncParameterClient,
        security: Security | None,
        deadline_s: float,
    ) -> None:
        self._messages, self._coordination, self._parameters = messages, coordination, parameters
        self._security, self._deadline_s = security, deadline_s
        self._client: ParameterClient | None = None
        self._writer: UpdateWriter | None = None

    def stamps(self, offset: int, most: int) -> list[Record]:
        """Stamps from ``offset`` on. Raises LogError."""
        return self._messages.read(TopicPartition(PROBES, 0), offset, most)

    def stamps_end(self) -> int:
        """Where the stamps end. Raises LogError."""
        return self._messages.end_offset(TopicPartition(PROBES, 0))

    def updates(self) -> AsyncGenerator[ShardChanges]:
        """The change streams of the marked updates, for ever."""
        return self._parameters.follow(MODEL, (TABLE,))

    def push(self, count: int) -> list[Update]:
        """Push marked updates, one after the other. Raises ParameterError, CoordinationError."""
        if self._writer is None:
            self._client = ParameterClient(
                self._coordination, deadline_s=self._deadline_s, security=self._security
            )
            self._writer = UpdateWriter(self._client, random.randrange(SLOTS))
        self._writer.open()
        return [self._writer.push() for _ in range(count)]

    def close(self) -> None:
        """Close what was opened."""
        if self._client is not None:
            self._client.close()
