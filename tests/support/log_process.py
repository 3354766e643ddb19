"""A process that copies one topic to another in transactions, until it is killed. Run by the log's tests."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from services.messagelog.contract import Fenced, Message, TopicPartition
from services.messagelog.open import open_message_log


def main(backend: str, place: str, source: str, target: str, member: str) -> None:
    log = open_message_log(backend, folder=Path(place), servers=place, replication=1)
    consumer = log.consumer(f"copy-{source}", [source], member=member)
    print("ready", flush=True)
    while True:
        records = consumer.poll(7, 1.0)
        if not records:
            continue
        following = {TopicPartition(r.topic, r.partition): r.offset + 1 for r in records}
        copies = [Message(target, r.partition, r.key, r.value, r.accepted_at_ms) for r in records]
        try:
            consumer.transact(following, copies)
        except Fenced:
            continue
        time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
