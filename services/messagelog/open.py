"""Opens the message log that the settings name."""

from __future__ import annotations

from pathlib import Path

from services.messagelog.contract import LogError, MessageLog


def open_message_log(backend: str, *, folder: Path, servers: str, replication: int) -> MessageLog:
    """The log on ``sqlite`` (files in ``folder``) or ``kafka`` (``servers``, comma-separated).

    Raises LogUnavailable where it cannot be reached, LogError for a backend that does not exist.
    """
    if backend == "sqlite":
        from services.messagelog.sqlite import SqliteLog

        return SqliteLog(folder)
    if backend == "kafka":
        from services.messagelog.kafka import KafkaLog

        return KafkaLog(servers, replication=replication)
    raise LogError(f"there is no message log backend {backend!r}; sqlite and kafka exist")
