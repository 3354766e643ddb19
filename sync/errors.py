"""What can go wrong in ``sync``: the other side's fault, ours, and damaged bytes are told apart.

Exceptions::

    SyncError
    ├── BadSpec              a table, initialiser or optimiser that cannot exist (a setting is wrong)
    ├── PeerFault            what another process sent makes no sense; nothing was changed
    │   ├── UnknownTable     it names a table that this shard does not hold
    │   ├── BadShape         arrays whose shape, type or keys do not fit the table
    │   ├── BadPush          an offset or predecessor that no log can produce
    │   ├── OutOfOrder       a step that does not follow the newest one
    │   ├── ClockAhead       a version further in the future than clocks may differ
    │   ├── Unsettled        a retirement of writers of whom more is here than there should be
    │   └── TooManySources   one more source of pushes than the bound allows
    ├── TableFull            the bound on rows is reached; nothing was changed
    ├── RecordDamaged        bytes or arrays that are not a whole, unaltered record
    │   └── OtherFormat      a whole record of a format that this version does not read
    └── SnapshotDamaged      bytes that are not a whole, unaltered snapshot
"""

from __future__ import annotations


class SyncError(Exception):
    """The root of everything that ``sync`` raises on purpose."""


class BadSpec(SyncError):
    """A table, initialiser or optimiser that cannot exist; the message names the field."""


class PeerFault(SyncError):
    """Another process sent what makes no sense. Nothing was changed, no offset moved."""


class UnknownTable(PeerFault):
    """The named table is not one of this shard's."""


class BadShape(PeerFault):
    """An array's shape, type or keys do not fit the table."""


class BadPush(PeerFault):
    """The push's offset or predecessor cannot come from a log."""


class OutOfOrder(PeerFault):
    """The step does not follow the newest one: something before it is missing, or its owner was deposed."""


class ClockAhead(PeerFault):
    """A version is further in the future than the clocks of two machines may differ."""


class Unsettled(PeerFault):
    """More is here of a writer that was retired than there should be; only a full replacement undoes that."""


class TooManySources(PeerFault):
    """The bound on sources of pushes is reached; forget the retired ones."""


class TableFull(SyncError):
    """The table holds as many rows as its bound allows. Nothing was changed."""


class RecordDamaged(SyncError):
    """The bytes are not a whole, unaltered record of a format that this version reads."""


class OtherFormat(RecordDamaged):
    """The record is whole, and of a format that this version does not read."""


class SnapshotDamaged(SyncError):
    """The bytes are not a whole, unaltered snapshot of a format that this version reads."""
