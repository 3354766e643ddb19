"""Federated rounds as a pure machine: servers, the simulator and tests drive the same transitions."""

from federated.rounds.aggregation import Task, Work
from federated.rounds.desk import Desk, JobUnknown
from federated.rounds.keys import Keys
from federated.rounds.machine import Decision, Rounds, Together, valid_id
from federated.rounds.messages import (
    Accepted,
    Admitted,
    Finished,
    NotYet,
    PollRequest,
    Refused,
    Reply,
    Request,
    Standing,
    StartRequest,
    UploadRequest,
)
from federated.rounds.phases import Event, Phase
from federated.rounds.records import Closed, Entry, Header, RecordRefused, Slot
from federated.rounds.settings import RoundSettings, SettingsRefused, Thresholds
from federated.rounds.store import MemoryStore, Store, StoreUnavailable, read
from federated.rounds.tickets import Tickets

__all__ = [
    "Accepted",
    "Admitted",
    "Closed",
    "Decision",
    "Desk",
    "Entry",
    "Event",
    "Finished",
    "Header",
    "JobUnknown",
    "Keys",
    "MemoryStore",
    "NotYet",
    "Phase",
    "PollRequest",
    "RecordRefused",
    "Refused",
    "Reply",
    "Request",
    "RoundSettings",
    "Rounds",
    "SettingsRefused",
    "Slot",
    "Standing",
    "StartRequest",
    "Store",
    "StoreUnavailable",
    "Task",
    "Thresholds",
    "Tickets",
    "Together",
    "UploadRequest",
    "Work",
    "read",
    "valid_id",
]
