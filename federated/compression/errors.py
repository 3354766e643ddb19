"""What can be wrong with compression.

ValueError
├── UnsoundScheme    our fault: steps that make no sense together, told at start with the reason
└── BodyRefused      the peer's fault: bytes that this scheme cannot have made
"""

from __future__ import annotations


class UnsoundScheme(ValueError):
    """Steps that cannot work together, or an option that cannot work: the message says why."""


class BodyRefused(ValueError):
    """A body that is malformed, cut short, too long, or of another scheme: the message says what is wrong."""


class BaseUnknown(BodyRefused):
    """A difference from a version that is not the one held: ask for the whole model."""
