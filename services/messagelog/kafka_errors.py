"""Kafka's exceptions become ours here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kafka import errors

from services.messagelog.contract import Fenced, LogError, LogFull, LogUnavailable, UnknownTopic

_FENCED: Final = (
    errors.CommitFailedError,
    errors.FencedInstanceIdError,
    errors.IllegalGenerationError,
    errors.InvalidProducerEpochError,
    errors.InvalidProducerIdMappingError,
    errors.ProducerFencedError,
    errors.RebalanceInProgressError,
    errors.TransactionCoordinatorFencedError,
    errors.UnknownMemberIdError,
)
_UNAVAILABLE: Final = (errors.KafkaConnectionError, errors.KafkaTimeoutError, errors.NodeNotReadyError)


def translate(error: errors.KafkaError) -> LogError:
    """What the contract calls this Kafka error."""
    name = type(error).__name__
    if isinstance(error, _FENCED):
        return Fenced(f"the group or the transactional id has another owner: {name}")
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return UnknownTopic(f"Kafka knows no such topic; make it with ensure_topic: {error}")
    if isinstance(error, errors.KafkaStorageError):
        return LogFull(f"the broker cannot write: {error}")
    if isinstance(error, _UNAVAILABLE) or error.retriable:
        return LogUnavailable(f"Kafka cannot be reached or is not ready: {name}: {error}")
    return LogError(f"{name}: {error}")


@contextmanager
def translated() -> Iterator[None]:
    """Within the block Kafka's exceptions leave as ours."""
    try:
        yield
    except errors.KafkaError as error:
        raise translate(error) from error
