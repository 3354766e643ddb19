"""The topics of the log: their names, partitions and retention, and the consumer groups that read them."""

from __future__ import annotations

from typing import Final

from services.messagelog.contract import MessageLog, TopicSpec
from services.settings.model import LogSettings

EVENTS: Final = "events"
"""Raw events, by user (item events by item). Written by the API and the importers."""
SAMPLES: Final = "samples"
"""Training micro-batches. Partition p holds what partition p of the events became."""
REJECTED: Final = "rejected"
"""What the processor could not use, each with its reason."""
PROBES: Final = "probes"
"""When marked events passed the processor and the trainers (``services.freshness.stamps``)."""
PROBES_KEPT_S: Final = 3_600.0

PROCESSOR_GROUP: Final = "processor"
TRAINER_GROUP: Final = "trainer"


def topic_specs(settings: LogSettings) -> tuple[TopicSpec, ...]:
    """Every topic as these settings want it. Samples have the partitions of the events."""
    return (
        TopicSpec(EVENTS, settings.partitions, settings.retention),
        TopicSpec(SAMPLES, settings.partitions, settings.retention),
        TopicSpec(REJECTED, 1, settings.retention),
        TopicSpec(PROBES, 1, min(settings.retention, PROBES_KEPT_S)),
    )


def ensure_topics(log: MessageLog, settings: LogSettings) -> None:
    """Create the topics that are missing. Raises LogError if one exists with other partitions."""
    for spec in topic_specs(settings):
        log.ensure_topic(spec)
