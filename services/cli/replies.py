"""Reads what the API answers, as far as the command line shows it. Unknown fields are passed over."""

from __future__ import annotations

import msgspec

from services.cli.exits import Exit
from services.cli.failures import CommandFailed


class ShownItem(msgspec.Struct, frozen=True):
    """One recommended item."""

    item_id: str
    score: float | None = None
    source: str = ""
    reasons: list[str] = []
    attributes: dict[str, object] | None = None

    @property
    def title(self) -> str:
        """The item's title, or nothing where it has none."""
        return str((self.attributes or {}).get("title", ""))

    @property
    def shown_score(self) -> str:
        """The score, or nothing where the item was not scored."""
        return "" if self.score is None else f"{self.score:.4f}"


class ShownList(msgspec.Struct, frozen=True):
    """A list and what it rests on."""

    items: list[ShownItem]
    model_version: str | None = None
    parameters_as_of: str | None = None
    took_ms: float | None = None
    degraded: bool = False


class BatchReceipt(msgspec.Struct, frozen=True):
    """What became of a batch of events."""

    accepted: int
    refused: int
    results: list[dict[str, object]] = []


def read_recommendations(reply: object) -> ShownList:
    """The reply of ``POST /v1/recommendations``. Raises CommandFailed for one of another form."""
    try:
        return msgspec.convert(reply, ShownList)
    except msgspec.ValidationError as error:
        raise _other_version(error) from error


def read_receipt(reply: object) -> BatchReceipt:
    """The reply of ``POST /v1/events:batch``. Raises CommandFailed for one of another form."""
    try:
        return msgspec.convert(reply, BatchReceipt)
    except msgspec.ValidationError as error:
        raise _other_version(error) from error


def _other_version(error: Exception) -> CommandFailed:
    return CommandFailed(
        Exit.REFUSED, f"the reply has an unknown form: {error}", "Is the API of another version?"
    )
