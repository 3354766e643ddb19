"""What may go wrong with a party without a fault of Headwater's own."""

from __future__ import annotations

from typing import Final

import zmq

from federated.vertical.parties import PeerFault
from federated.vertical.tables import TableRefused
from services.rpc.errors import KeysError
from services.vertical.config import ConfigRefused
from services.vertical.jobs import JobRefused
from services.vertical.runner import PeerGone
from services.vertical.store import StateDamaged, StateInUse, StateNotKept

EXPECTED: Final = (
    ConfigRefused,
    JobRefused,
    KeysError,
    PeerFault,
    PeerGone,
    StateDamaged,
    StateInUse,
    StateNotKept,
    TableRefused,
    zmq.ZMQError,
    ValueError,
)
