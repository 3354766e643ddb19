"""Reads what the API answers, as far as the command line shows it. Unknown fields are passed over."""

from __future__ import annotations

from typing import Any

import msgspec

from services.cli.client import Api
from services.cli.exits import Exit
from services.cli.failures import CommandFailed


class ShownItem(msgspec.Struct, frozen=True):
    """One recommended item."""

    item_id: str
    score: float = 0.0
    source: str = ""
    reasons: list[str] = []


class _Reply(msgspec.Struct, frozen=True):
    items: list[ShownItem] = []


class _Item(msgspec.Struct, frozen=True):
    attributes: dict[str, Any] = {}


def items_of(reply: object) -> list[ShownItem]:
    """The items of a reply. Raises CommandFailed for a reply of another form."""
    try:
        return msgspec.convert(reply, _Reply).items
    except msgspec.ValidationError as error:
        raise CommandFailed(
            Exit.REFUSED, f"the reply has an unknown form: {error}", "Is the API of another version?"
        ) from error


def title_of(api: Api, item_id: str) -> str:
    """The item's title, or nothing where it has none or may not be read."""
    try:
        item = msgspec.convert(api.get("items", item_id), _Item)
    except (CommandFailed, msgspec.ValidationError):
        return ""
    return str(item.attributes.get("title", ""))
