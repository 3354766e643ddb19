"""The versioned parameter table, its optimisers and what replicates it.

Names are loaded when first asked for: clients that only place keys and describe tables never load a compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sync.changes import Cursor
    from sync.clock import HybridClock, system_time_us
    from sync.errors import (
        BadPush,
        BadShape,
        BadSpec,
        ClockAhead,
        OutOfOrder,
        PeerFault,
        RecordDamaged,
        SnapshotDamaged,
        SyncError,
        TableFull,
        TooManySources,
        UnknownTable,
    )
    from sync.placement import shard_of, single_shard
    from sync.pushes import Push, PushOutcome, PushTable, Source, Watermark
    from sync.records import Delta, Generation, Graves, Head, Learned, Rows, Update
    from sync.replica import Replica, ShardState, Token
    from sync.shard import Shard
    from sync.snapshot import decode, encode, encode_buffers
    from sync.spec import Initialiser, Optimiser, Segment, TableSpec
    from sync.stream import Changes
    from sync.warm import warm_up

__all__ = [
    "BadPush",
    "BadShape",
    "BadSpec",
    "Changes",
    "ClockAhead",
    "Cursor",
    "Delta",
    "Generation",
    "Graves",
    "Head",
    "HybridClock",
    "Initialiser",
    "Learned",
    "Optimiser",
    "OutOfOrder",
    "PeerFault",
    "Push",
    "PushOutcome",
    "PushTable",
    "RecordDamaged",
    "Replica",
    "Rows",
    "Segment",
    "Shard",
    "ShardState",
    "SnapshotDamaged",
    "Source",
    "SyncError",
    "TableFull",
    "TableSpec",
    "Token",
    "TooManySources",
    "UnknownTable",
    "Update",
    "Watermark",
    "decode",
    "encode",
    "encode_buffers",
    "shard_of",
    "single_shard",
    "system_time_us",
    "warm_up",
]

_HOMES: Final = {
    "changes": ("Cursor",),
    "clock": ("HybridClock", "system_time_us"),
    "errors": (
        "BadPush", "BadShape", "BadSpec", "ClockAhead", "OutOfOrder", "PeerFault", "RecordDamaged", "SnapshotDamaged",
        "SyncError", "TableFull", "TooManySources", "UnknownTable",
    ),
    "placement": ("shard_of", "single_shard"),
    "pushes": ("Push", "PushOutcome", "PushTable", "Source", "Watermark"),
    "records": ("Delta", "Generation", "Graves", "Head", "Learned", "Rows", "Update"),
    "replica": ("Replica", "ShardState", "Token"),
    "shard": ("Shard",),
    "snapshot": ("decode", "encode", "encode_buffers"),
    "spec": ("Initialiser", "Optimiser", "Segment", "TableSpec"),
    "stream": ("Changes",),
    "warm": ("warm_up",),
}  # fmt: skip
_HOME: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'sync' has no attribute {name!r}")
    value: object = getattr(import_module(f"sync.{home}"), name)
    globals()[name] = value
    return value
