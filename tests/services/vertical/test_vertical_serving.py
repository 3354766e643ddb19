"""Joint inference: a guest's REST, hosts' answers, what happens past the deadline, and what is written down."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from federated.psi.ids import IdRefused, IdRule
from federated.vertical.parties import PeerFault
from federated.vertical.tables import Table
from federated.vertical.wire import pack
from services.rpc.security import KeyPair
from services.vertical.config import ConfigRefused, load_party
from services.vertical.network import Peer
from services.vertical.party import MODEL, Prepared, prepare
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.host import Rate, ServingHost
from services.vertical.serving.process import AUDIT, serve_party
from services.vertical.serving.tokens import Naming, names_in
from services.vertical.store import write_whole
from tests.support.vertical import party_files
from tests.support.vertical_sums import SumsPart

ROLES = {"bank": "guest", "shop": "host"}


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


def trained(folder: Path, *, runs: Mapping[str, str] = {}, serve: str = "") -> dict[str, Prepared]:
    """Parties with their parts of a model, as a run leaves them. The bank has ids 0..11, the shop 2..13."""
    files = party_files(folder, ROLES, listening=("shop",), options={})
    text = (folder / "shop" / "rows.csv").read_text().splitlines()
    moved = [text[0], *(f"{int(line.split(',')[0]) + 2},2" for line in text[1:])]
    (folder / "shop" / "rows.csv").write_text("\n".join(moved) + "\n")
    found = {}
    for name, file in files.items():
        if name == "bank":
            file.write_text(f'{file.read_text()}[serve]\nlisten = "127.0.0.1:0"\n{serve}')
        prepared = prepare(load_party(file))
        head = {
            "job": "sums",
            "party": name,
            "parties": ROLES,
            "features": ["x"],
            "run": runs.get(name, "r1"),
        }
        prepared.folder.mkdir(parents=True)
        write_whole(prepared.folder / MODEL, pack({"head": json.dumps(head), "model": b"sums"}))
        found[name] = prepared
    return found


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


def audit(prepared: Prepared) -> list[dict[str, Any]]:
    text = (prepared.config.party.state / AUDIT).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_guest_answers_with_its_hosts_and_both_write_it_down(tmp_path: Path) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        reply = httpx.post(f"{url}/v1/predictions", json={"ids": ["5", "0", " 5 ", "99"]}, timeout=20)
        assert reply.status_code == 200
        found = reply.json()
        again = httpx.post(f"{url}/v1/predictions", json={"ids": ["7"]}, timeout=20).json()
        metrics = httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/health/ready").json()["model"] == {"job": "sums", "run": "r1"}
    assert found["predictions"] == [
        {"id": "5", "status": "present", "score": 3.0, "degraded": False},
        {"id": "0", "status": "present", "score": 1.0, "degraded": True},  # not at the shop
        {"id": " 5 ", "status": "present", "score": 3.0, "degraded": False},
        {"id": "99", "status": "not_found"},
    ]
    assert (found["degraded"], found["hosts"]) == (True, {"shop": "answered"})
    assert (again["degraded"], again["predictions"][0]["score"]) == (False, 3.0)
    assert 'headwater_vertical_rows_total{how="not_found"} 1.0' in metrics
    bank, shop = audit(parties["bank"]), audit(parties["shop"])
    assert [(one["rows"], one["outcome"]) for one in bank] == [(4, "degraded"), (1, "answered")]
    assert [(one["who"], one["rows"], one["here"]) for one in shop] == [("bank", 3, 2), ("bank", 1, 1)]
    assert [one["request_id"] for one in shop] == [found["request_id"], again["request_id"]]


def test_past_the_deadline_the_guest_answers_alone(tmp_path: Path) -> None:
    parties = trained(tmp_path)
    with serving(parties["bank"]) as url:
        found = httpx.post(
            f"{url}/v1/predictions", json={"ids": ["5"], "deadline_ms": 150}, timeout=20
        ).json()
        assert found["took_ms"] < 5_000
        assert found["hosts"] == {"shop": "late"}
        assert found["predictions"] == [{"id": "5", "status": "present", "score": 1.0, "degraded": True}]
        # The host comes back: so does the joint answer.
        with serving(parties["shop"]):
            for _ in range(50):
                found = httpx.post(f"{url}/v1/predictions", json={"ids": ["5"]}, timeout=20).json()
                if not found["degraded"]:
                    break
        assert found["predictions"][0]["score"] == 3.0


def test_parts_of_different_runs_do_not_answer_together(tmp_path: Path) -> None:
    parties = trained(tmp_path, runs={"shop": "r2"}, serve='deadline = "10s"\n')
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        found = httpx.post(f"{url}/v1/predictions", json={"ids": ["5"]}, timeout=20).json()
    assert (found["hosts"], found["degraded"]) == ({"shop": "another-model"}, True)
    assert audit(parties["shop"])[0]["outcome"] == "another-model"


@pytest.mark.parametrize(
    ("share", "outcome"),
    [
        (lambda rows: np.zeros(len(rows) + 1), "malformed"),
        (lambda rows: np.full(len(rows), np.nan), "malformed"),
        (lambda rows: np.zeros((len(rows), 2)), "malformed"),  # refused by the guest's part itself
    ],
)
def test_a_share_that_no_honest_host_has_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    outcome: str,
) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    monkeypatch.setattr(SumsPart, "partial", lambda self, rows: share(rows))
    monkeypatch.setattr(SumsPart, "alone", lambda self, rows: rows.sum(axis=1))
    monkeypatch.setattr(SumsPart, "combine", _combine)
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        found = httpx.post(f"{url}/v1/predictions", json={"ids": ["5", "6"]}, timeout=20).json()
    assert found["hosts"] == {"shop": outcome}
    assert [row["score"] for row in found["predictions"]] == [1.0, 1.0]
    assert all(row["degraded"] for row in found["predictions"])


def _combine(
    self: SumsPart, rows: npt.NDArray[np.float64], partials: Mapping[str, npt.NDArray[Any]]
) -> npt.NDArray[np.float64]:
    for name, one in partials.items():
        if one.shape != (len(rows),):
            raise PeerFault(name, "malformed", "shape")
    return rows.sum(axis=1)


def test_requests_are_bounded_and_take_a_key(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    parties = trained(tmp_path, serve=f'api_keys = ["read:{digest}"]\nmost_ids = 2\n')
    key = {"X-API-Key": "secret"}
    with serving(parties["bank"]) as url:
        replies = [
            httpx.post(f"{url}/v1/predictions", content=body, headers=headers)
            for body, headers in (
                (b'{"ids": ["1"]}', {}),
                (b'{"ids": ["1"]}', {"X-API-Key": "wrong"}),
                (b"{", key),
                (b'{"ids": [1]}', key),
                (b'{"ids": ["1"], "more": 1}', key),
                (b'{"ids": []}', key),
                (b'{"ids": ["1"], "deadline_ms": 0}', key),
                (b'{"ids": ["a\\u0000b"]}', key),
                (b'{"ids": ["1", "2", "3"]}', key),
            )
        ]
        missing = httpx.get(f"{url}/v1/none", headers=key)
        wrong = httpx.get(f"{url}/v1/predictions", headers=key)
        who = httpx.post(f"{url}/v1/predictions", content=b'{"ids": ["1"], "deadline_ms": 1}', headers=key)
    assert [one.status_code for one in replies] == [401, 401, 400, 400, 400, 422, 422, 422, 413]
    assert {one.headers["content-type"] for one in replies} == {"application/problem+json"}
    assert (missing.status_code, wrong.status_code, who.status_code) == (404, 405, 200)
    lines = audit(parties["bank"])
    assert [one["outcome"] for one in lines] == ["refused", "degraded"]
    assert lines[1]["who"] == f"key {digest[:12]}"
    assert "secret" not in json.dumps(lines)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('listen = "0.0.0.0:0"\n', "serve.api_keys is empty"),
        ("", "train first"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, change: str, why: str) -> None:
    files = party_files(tmp_path, ROLES, listening=("shop",), options={})
    files["bank"].write_text(f"{files['bank'].read_text()}[serve]\n{change}")
    prepared = prepare(load_party(files["bank"]))
    if change:
        other = trained(tmp_path / "other")["bank"]
        prepared.folder.mkdir(parents=True)
        (prepared.folder / MODEL).write_bytes((other.folder / MODEL).read_bytes())
    with pytest.raises(ConfigRefused, match=why):
        serve_party(prepared, threading.Event())


def test_names_of_ids_are_for_two_parties_alone() -> None:
    bank, shop, stranger = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
    rule = IdRule("fold")
    here, there = Naming(bank, shop.public, rule), Naming(shop, bank.public, rule)
    assert here.of("Ä ") == there.of("a\u0308")
    assert here.of("a") != Naming(bank, stranger.public, rule).of("a")
    assert names_in(here.array(["a", "b"])) == [here.of("a"), here.of("b")]
    with pytest.raises(IdRefused):
        here.of(" ")


def test_a_host_answers_so_many_rows_a_minute() -> None:
    now = [0.0]
    rate = Rate(60, lambda: now[0])
    assert rate.take("bank", 50)
    assert not rate.take("bank", 20)
    assert rate.take("other", 20)
    now[0] = 10.0
    assert rate.take("bank", 20)
    assert not rate.take("bank", 61)


def test_the_audit_log_is_bounded_and_keyed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, 4_096)
    for place in range(200):
        log.write("bank", place, log.digest([b"a"]), "answered")
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["rows"] == 199
    assert path.stat().st_size <= 4_096
    assert path.with_name("audit.jsonl.1").stat().st_size <= 4_096
    assert {entry.name for entry in tmp_path.iterdir()} == {"audit.jsonl", "audit.jsonl.1", "audit.key"}
    assert lines[0]["ids"] != hashlib.sha256(b"a").hexdigest()[:32]
    again, other = AuditLog(path, 4_096), AuditLog(tmp_path / "other" / "audit.jsonl", 4_096)
    assert again.digest([b"a"]) == lines[0]["ids"] != other.digest([b"a"])
    assert again.digest([b"ab", b"c"]) != again.digest([b"a", b"bc"])
    again.close()
    other.close()


def test_a_host_knows_only_its_guests(tmp_path: Path) -> None:
    keys, bank = KeyPair.generate(), KeyPair.generate()
    log = AuditLog(tmp_path / "audit.jsonl", 4_096)
    table = Table(("a",), np.ones((1, 1)), ("x",))
    host = ServingHost(
        "127.0.0.1:0", keys, {"bank": Peer(bank.public)}, SumsPart(), "r", table, log,
        rule=IdRule(), most_rows=10, rate=Rate(10),
    )  # fmt: skip
    assert host.port > 0
    host.close()
    log.close()


def test_a_host_that_fails_at_one_request_answers_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    sums = SumsPart.partial

    def partial(self: SumsPart, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if len(rows) == 2:
            raise MemoryError("two are too many")
        return sums(self, rows)

    monkeypatch.setattr(SumsPart, "partial", partial)
    monkeypatch.setattr(SumsPart, "alone", lambda self, rows: rows.sum(axis=1))
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        failed = httpx.post(f"{url}/v1/predictions", json={"ids": ["5", "6"]}, timeout=20).json()
        found = httpx.post(f"{url}/v1/predictions", json={"ids": ["5"]}, timeout=20).json()
    assert (failed["hosts"], failed["degraded"]) == ({"shop": "internal"}, True)
    assert (found["hosts"], found["degraded"]) == ({"shop": "answered"}, False)
