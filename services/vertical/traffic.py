"""What a party sent and received in a job, counted for its report; over all attempts, and over restarts.

The count lies beside the checkpoints. What a killed process received after its last checkpoint is not in it; most of
that comes again, and is counted then.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

Count = Counter[tuple[str, str]]
_COUNTS: Final = ("sent", "sent_bytes", "received", "received_bytes")


@dataclass(slots=True)
class Traffic:
    """Messages and bytes by (peer, kind). ``attempts``: how often the parties began together. ``seconds``: how long
    the processes before this one took, as far as their last checkpoints."""

    sent: Count = field(default_factory=Counter)
    sent_bytes: Count = field(default_factory=Counter)
    received: Count = field(default_factory=Counter)
    received_bytes: Count = field(default_factory=Counter)
    attempts: int = 0
    seconds: float = 0.0

    def dump(self, seconds: float) -> bytes:
        """For ``read_traffic``; this process took ``seconds`` so far."""
        counts: dict[str, Any] = {
            name: [[peer, kind, count] for (peer, kind), count in getattr(self, name).items()]
            for name in _COUNTS
        }
        return json.dumps(counts | {"attempts": self.attempts, "seconds": self.seconds + seconds}).encode()


def read_traffic(body: bytes) -> Traffic:
    """What ``Traffic.dump`` gave. Raises ValueError, KeyError, TypeError for anything else."""
    found = json.loads(body)
    counts: dict[str, Count] = {
        name: Counter({(peer, kind): count for peer, kind, count in found[name]}) for name in _COUNTS
    }
    return Traffic(**counts, attempts=int(found["attempts"]), seconds=float(found["seconds"]))
