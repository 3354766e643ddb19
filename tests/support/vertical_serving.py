"""Parties that have their parts of a small model, serving in threads of the test."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from federated.vertical.wire import pack
from services.vertical.config import load_party
from services.vertical.party import MODEL, Prepared, prepare
from services.vertical.serving.opening import AUDIT
from services.vertical.serving.process import serve_party
from services.vertical.store import write_whole
from tests.support.vertical import party_files

ROLES: Final = {"bank": "guest", "shop": "host"}


def trained(
    folder: Path, *, runs: Mapping[str, str] = {}, serve: str = "", host: str = ""
) -> dict[str, Prepared]:
    """Parties with their parts of a model, as a run leaves them. The bank has ids 0..11, the shop 2..13.

    ``serve``, ``host``: lines of [serve] at the bank, and at the shop.
    """
    files = party_files(folder, ROLES, listening=("shop",), options={})
    text = (folder / "shop" / "rows.csv").read_text().splitlines()
    moved = [text[0], *(f"{int(line.split(',')[0]) + 2},2" for line in text[1:])]
    (folder / "shop" / "rows.csv").write_text("\n".join(moved) + "\n")
    found = {}
    for name, file in files.items():
        own = f'listen = "127.0.0.1:0"\n{serve}' if name == "bank" else host
        file.write_text(f"{file.read_text()}[serve]\n{own}")
        found[name] = prepare(load_party(file))
        found[name].folder.mkdir(parents=True)
        leave_part(found[name], runs.get(name, "r1"))
    return found


def leave_part(prepared: Prepared, run: str) -> None:
    """The party's part of the model of ``run``, as training leaves it."""
    name = prepared.config.party.name
    head = {"job": "sums", "party": name, "parties": ROLES, "features": ["x"], "run": run}
    write_whole(prepared.folder / MODEL, pack({"head": json.dumps(head), "model": b"sums"}))


@contextmanager
def serving(prepared: Prepared) -> Iterator[str]:
    """A party that serves; the address it told."""
    stop, there = threading.Event(), threading.Event()
    told: list[str] = []

    def listening(address: str) -> None:
        told.append(address)
        there.set()

    thread = threading.Thread(target=serve_party, args=(prepared, stop, listening))
    thread.start()
    try:
        assert there.wait(10)
        yield told[0]
    finally:
        stop.set()
        thread.join()


def ask(url: str, *ids: str, **more: Any) -> dict[str, Any]:
    """The answer for ``ids``."""
    # Not httpx, whose clients take longer to make than an answer takes.
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/predictions", json.dumps({"ids": ids, **more}))
        reply = connection.getresponse()
        text = reply.read()
    finally:
        connection.close()
    assert reply.status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def until(found: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until ``found()``."""
    end_s = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.02)


def audit(prepared: Prepared) -> list[dict[str, Any]]:
    """The lines of a party's audit log."""
    text = (prepared.config.party.state / AUDIT).read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]
