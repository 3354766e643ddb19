"""The requests of one device to a job's servers, and what a refusal is called."""

from __future__ import annotations

import json
from urllib.parse import quote

from federated.client_folder import Pending
from federated.client_http import Call
from federated.rounds.messages import StartRequest, UploadRequest
from federated.selection import DeviceFacts
from federated.wire import digest_of, encode_start, encode_upload


class Requests:
    """Of ``client`` in ``job``. ``path`` is what all their addresses begin with."""

    def __init__(self, job: str, client: str) -> None:
        self._client = client
        self.path = f"/v1/fl/jobs/{quote(job, safe='')}/clients/{quote(client, safe='')}"

    def start(self, facts: DeviceFacts, held: int | None) -> Call:
        """To take part; ``held`` is the version that is there (None: none)."""
        version = 0 if held is None else held + 1
        return Call("POST", f"{self.path}/start", encode_start(StartRequest(self._client, facts, version)))

    def model(self, version: int, held: int | None) -> Call:
        """For the model ``version``."""
        query = "" if held is None else f"?held={held}"
        return Call("GET", f"{self.path}/models/{version}{query}")

    def upload(self, pending: Pending, whole: bool) -> Call:
        """To count ``pending``; its body travels along if ``whole``, else it is there already."""
        request = UploadRequest(
            self._client, pending.iteration, pending.ticket, digest_of(pending.body), pending.examples,
            pending.steps, pending.loss,
        )  # fmt: skip
        return Call("POST", f"{self.path}/uploads", encode_upload(request, pending.body if whole else None))

    def parts_there(self, pending: Pending) -> Call:
        """How much of ``pending``'s body is there."""
        return Call("HEAD", self._parts(pending), b"", _headers(pending))

    def part(self, pending: Pending, offset: int, size: int) -> Call:
        """At most ``size`` bytes of ``pending``'s body, from ``offset`` on."""
        headers = {**_headers(pending), "Upload-Offset": str(offset)}
        return Call("PUT", self._parts(pending), pending.body[offset : offset + size], headers)

    def _parts(self, pending: Pending) -> str:
        return f"{self.path}/uploads/{digest_of(pending.body).hex()}"


def problem_code(body: bytes) -> str:
    """The code of a problem document (RFC 9457), empty where there is none."""
    try:
        document = json.loads(body)
    except ValueError:
        return ""
    return str(document.get("code", "")) if isinstance(document, dict) else ""


def _headers(pending: Pending) -> dict[str, str]:
    return {"X-Iteration": str(pending.iteration), "X-Ticket": pending.ticket.hex()}
