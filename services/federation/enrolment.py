"""Enrolment: a device proves who it is by a token that its job's key signed. No list of devices is kept anywhere, so
ten million of them cost the servers nothing.

A token is ``fl1.ROLE.ID.ENDS.MAC``: the id in base64url, when it ends (seconds since 1970, 0: never), and HMAC-SHA256
over (job, role, id, end) under the job's key. A device that is to lose access early needs a short end: there is no list
of withdrawn tokens either; ``headwater fl token --valid 30d``.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass
from typing import Final, Literal

from federated.rounds import valid_id

Role = Literal["client", "edge"]
_MARK: Final = "fl1"
_MAC_BYTES: Final = 32
_LONGEST: Final = 1_024


class TokenRefused(ValueError):
    """Not a token of this job, or one that has ended; the message says which."""


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Whom a token names."""

    role: Role
    id: str


def enrol(job: str, key: bytes, id_: str, role: Role = "client", ends: int = 0) -> str:
    """A token for ``id_``. Raises ValueError for an id that is none."""
    if not valid_id(id_):
        raise ValueError("an id has 1 to 256 UTF-8 bytes, no control characters")
    return f"{_MARK}.{role}.{_text(id_.encode())}.{ends}.{_text(_mac(job, key, role, id_, ends))}"


def enrolled(job: str, key: bytes, token: str, now: float) -> Enrolled:
    """Whom ``token`` names. Raises TokenRefused."""
    parts = token.split(".") if len(token) <= _LONGEST else []
    if len(parts) != 5 or parts[0] != _MARK or parts[1] not in ("client", "edge"):
        raise TokenRefused("it is no token of federation")
    role: Role = "edge" if parts[1] == "edge" else "client"
    try:
        id_, ends, mac = _bytes(parts[2]).decode(), int(parts[3]), _bytes(parts[4])
    except (ValueError, binascii.Error):
        raise TokenRefused("it is damaged") from None
    # The signature first: nothing is told about a token that is not ours.
    if len(mac) != _MAC_BYTES or not hmac.compare_digest(mac, _mac(job, key, role, id_, ends)):
        raise TokenRefused("this job has not signed it")
    if ends and now > ends:
        raise TokenRefused("it has ended")
    return Enrolled(role, id_)


def _mac(job: str, key: bytes, role: str, id_: str, ends: int) -> bytes:
    # Each part with its length, so that no two tokens sign the same bytes; "enrolment" keeps them apart from tickets.
    parts = ("enrolment", job, role, id_, str(ends))
    message = b"".join(len(raw := part.encode()).to_bytes(4, "little") + raw for part in parts)
    return hmac.digest(key, message, "sha256")


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
