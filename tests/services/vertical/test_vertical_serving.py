"""Joint inference: a guest's REST, hosts' answers, what happens past the deadline, and what is written down."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from federated.psi.ids import IdRefused, IdRule
from federated.vertical.parties import PeerFault
from services.rpc.security import KeyPair
from services.vertical.config import ConfigRefused, load_party
from services.vertical.party import MODEL, ROWS, prepare
from services.vertical.serving import guest, process
from services.vertical.serving.parts import Loaded, Parts, Renewal
from services.vertical.serving.process import serve_party
from services.vertical.serving.tokens import Naming, names_in
from services.vertical.store import StateDamaged
from tests.support.vertical import free_ports, party_files
from tests.support.vertical_serving import ROLES, ask, audit, leave_part, serving, trained, until
from tests.support.vertical_sums import SumsPart


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


def test_a_guest_answers_with_its_hosts_and_both_write_it_down(tmp_path: Path) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        reply = httpx.post(f"{url}/v1/predictions", json={"ids": ["5", "0", " 5 ", "99"]}, timeout=20)
        assert reply.status_code == 200
        found = reply.json()
        again = httpx.post(f"{url}/v1/predictions", json={"ids": ["7"]}, timeout=20).json()
        metrics = httpx.get(f"{url}/metrics").text
        ready = httpx.get(f"{url}/health/ready").json()
    assert found["predictions"] == [
        {"id": "5", "status": "present", "score": 3.0, "degraded": False},
        {"id": "0", "status": "present", "score": 1.0, "degraded": True},  # not at the shop
        {"id": " 5 ", "status": "present", "score": 3.0, "degraded": False},
        {"id": "99", "status": "not_found"},
    ]
    assert (found["degraded"], found["hosts"]) == (True, {"shop": "answered"})
    assert (found["job"], found["model_version"]) == ("sums", "r1")
    assert ready == {
        "status": "ready",
        "job": "sums",
        "model_version": "r1",
        "dependencies": {"shop": {"ok": True, "detail": ""}},
    }
    assert (again["degraded"], again["predictions"][0]["score"]) == (False, 3.0)
    assert 'headwater_vertical_rows_total{how="not_found"} 1.0' in metrics
    bank, shop = audit(parties["bank"]), audit(parties["shop"])
    assert [(one["rows"], one["outcome"]) for one in bank] == [(4, "degraded"), (1, "answered")]
    assert [(one["who"], one["rows"], one["here"]) for one in shop] == [("bank", 3, 2), ("bank", 1, 1)]
    assert [one["request_id"] for one in shop] == [found["request_id"], again["request_id"]]


def test_a_host_has_health_and_metrics_of_its_own(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    parties = trained(
        tmp_path, serve='deadline = "10s"\n', host=f'metrics = "127.0.0.1:{port}"\nmost_ids = 3\n'
    )
    own = f"http://127.0.0.1:{port}"
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        ask(url, "5", "6", "0")
        ask(url, "5", "6", "7", "8")
        assert httpx.get(f"{own}/health/live").json() == {"status": "live"}
        assert httpx.get(f"{own}/health/ready").json()["model_version"] == "r1"
        metrics = httpx.get(f"{own}/metrics").text
        assert httpx.get(f"{own}/v1/predictions").status_code == 404
    for line in (
        'asks_total{guest="bank",outcome="answered"} 1.0',
        'asks_total{guest="bank",outcome="too-many"} 1.0',
        'asked_rows_total{guest="bank",here="yes"} 2.0',
        'asked_rows_total{guest="bank",here="no"} 1.0',
        'ask_seconds_count{guest="bank"} 1.0',
    ):
        assert f"headwater_vertical_{line}" in metrics
    assert not metrics.count("audit_bytes 0.0")


def test_past_the_deadline_the_guest_answers_alone(tmp_path: Path) -> None:
    parties = trained(tmp_path)
    with serving(parties["bank"]) as url:
        found = ask(url, "5", deadline_ms=150)
        assert found["took_ms"] < 5_000
        assert found["hosts"] == {"shop": "late"}
        assert found["predictions"] == [{"id": "5", "status": "present", "score": 1.0, "degraded": True}]
        # A host that is not heard is not waited for.
        until(lambda: ask(url, "5")["hosts"] == {"shop": "away"})
        ready = httpx.get(f"{url}/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        assert "not heard" in ready.json()["dependencies"]["shop"]["detail"]
        # It comes back: so does the joint answer.
        with serving(parties["shop"]):
            until(lambda: not ask(url, "5")["degraded"])
            assert ask(url, "5")["predictions"][0]["score"] == 3.0
        metrics = httpx.get(f"{url}/metrics").text
    assert 'headwater_vertical_degraded_answers_total{reason="late"}' in metrics
    assert 'headwater_vertical_degraded_answers_total{reason="away"}' in metrics
    assert 'headwater_vertical_host_seconds_count{host="shop"}' in metrics


def test_parts_of_different_runs_do_not_answer_together(tmp_path: Path) -> None:
    parties = trained(tmp_path, runs={"shop": "r2"}, serve='deadline = "10s"\n')
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        found = httpx.post(f"{url}/v1/predictions", json={"ids": ["5"]}, timeout=20).json()
        ready = httpx.get(f"{url}/health/ready").json()
    assert (found["hosts"], found["degraded"]) == ({"shop": "another-model"}, True)
    assert audit(parties["shop"])[0]["outcome"] == "another-model"
    assert ready["dependencies"]["shop"]["detail"] == "has run r2, not r1: another model"


def test_a_new_training_run_is_taken_up_by_all_while_they_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RENEW_S", 0.02)
    monkeypatch.setattr(guest, "LOOK_S", 0.2)
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        assert ask(url, "5")["model_version"] == "r1"
        # The guest has the new run first, and goes on with the old one until the host has it, too.
        leave_part(parties["bank"], "r2")
        time.sleep(0.5)
        found = ask(url, "5")
        assert (found["model_version"], found["degraded"]) == ("r1", False)
        leave_part(parties["shop"], "r2")
        until(lambda: ask(url, "5")["model_version"] == "r2")
        assert not ask(url, "5")["degraded"]


def test_the_newest_run_that_all_have_answers(tmp_path: Path) -> None:
    parts = Parts(Loaded("r1", "one"))
    parts.put(Loaded("r2", "two"))
    assert parts.common([]).run == "r2"
    assert parts.common([("r1", "r2"), ("r1",)]).run == "r1"
    assert parts.common([("r9",)]).run == "r2"
    parts.put(Loaded("r3", "three"))
    assert (parts.runs, parts.of("r1"), parts.newest.part) == (("r3", "r2"), None, "three")


def test_a_part_that_cannot_be_used_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, parts, loads = tmp_path / "part.model", Parts(Loaded("r1", "one")), [0]
    path.write_bytes(b"1")

    def load() -> Loaded:
        loads[0] += 1
        if path.read_bytes() == b"bad":
            raise StateDamaged("part.model is damaged")
        return Loaded("r2", "two")

    renewal = Renewal(path, load, parts)
    renewal.look()
    assert loads == [0]
    path.write_bytes(b"bad")
    for _ in range(3):
        renewal.look()
    assert (loads, parts.newest.run, caplog.text.count("is damaged")) == ([1], "r1", 1)
    path.unlink()
    renewal.look()
    path.write_bytes(b"2")
    renewal.look()
    assert parts.runs == ("r2", "r1")


def test_a_host_may_answer_for_the_joint_rows_alone(tmp_path: Path) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n', host='rows = "joint"\n')
    with pytest.raises(ConfigRefused, match=r"rows\.csv is not there"):
        serve_party(parties["shop"], threading.Event())
    (parties["shop"].folder / ROWS).write_text("id,held_out\n5,0\n6,1\n")
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        found = ask(url, "5", "7")
    assert [row["degraded"] for row in found["predictions"]] == [False, True]


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
    total: npt.NDArray[np.float64] = rows.sum(axis=1)
    return total


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
                (b'{"ids": "1"}', key),
                (b'{"ids": ["1"], "more": 1}', key),
                (b'{"ids": ["1"], "deadline_ms": 1.5}', key),
                (b'{"ids": ["\\ud800"]}', key),
                (b'{"ids": []}', key),
                (b'{"ids": ["1"], "deadline_ms": 0}', key),
                (b'{"ids": ["1", "a\\u0000b"]}', key),
                (b'{"ids": [" ", "' + b"x" * 300 + b'"]}', key),
                (b'{"ids": ["' + b"x" * 2**20 + b'"]}', key),
                (b'{"ids": ["1", "2", "3"]}', key),
                (json.dumps({"ids": [str(one) for one in range(100_000)]}).encode(), key),
                (b'{"ids": ["' + b"x" * 2**22 + b'"]}', key),
            )
        ]
        missing = httpx.get(f"{url}/v1/none", headers=key)
        wrong = httpx.get(f"{url}/v1/predictions", headers=key)
        both = httpx.post(
            f"{url}/v1/predictions",
            content=b'{"ids": ["1", "1"], "deadline_ms": 1}',
            headers={"X-API-Key": "another's", "Authorization": "Bearer secret"},
        )
        document = httpx.get(f"{url}/openapi.json").json()
    statuses = [401, 401, 400, 400, 400, 400, 400, 422, 422, 422, 422, 422, 422, 413, 413, 413]
    assert [one.status_code for one in replies] == statuses
    assert {one.headers["content-type"] for one in replies} == {"application/problem+json"}
    assert all(one.json()["request_id"] == one.headers["x-request-id"] for one in replies)
    assert [one["path"] for one in replies[11].json()["errors"]] == ["ids[0]", "ids[1]"]
    assert replies[10].json()["errors"] == [{"path": "ids[1]", "message": "holds a control character"}]
    assert (missing.status_code, wrong.status_code, both.status_code) == (404, 405, 200)
    assert [row["id"] for row in both.json()["predictions"]] == ["1", "1"]
    assert "/v1/predictions" in document["paths"]
    lines = audit(parties["bank"])
    assert [one["outcome"] for one in lines] == ["refused", "refused", "refused", "degraded"]
    # By the key that let it in, not by the other one.
    assert {one["who"] for one in lines} == {f"key {digest[:12]}"}
    assert "secret" not in json.dumps(lines)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('listen = "0.0.0.0:0"\n', "serve.api_keys is empty"),
        ('listen = "127.0.0.1:99999"\n', "serve.listen: 99999 is not a port"),
        ('listen = "192.0.2.1:1"\n' + f'api_keys = ["read:{"0" * 64}"]\n', "serve.listen: .* cannot be had"),
        ("", "train first"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, change: str, why: str) -> None:
    files = party_files(tmp_path, ROLES, listening=("shop",), options={})
    files["bank"].write_text(f"{files['bank'].read_text()}[serve]\n{change}")

    def serve() -> None:
        prepared = prepare(load_party(files["bank"]))
        if change:
            other = trained(tmp_path / "other")["bank"]
            prepared.folder.mkdir(parents=True)
            (prepared.folder / MODEL).write_bytes((other.folder / MODEL).read_bytes())
        serve_party(prepared, threading.Event())

    with pytest.raises(ConfigRefused, match=why):
        serve()


def test_names_of_ids_are_for_two_parties_alone() -> None:
    bank, shop, stranger = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
    rule = IdRule("fold")
    here, there = Naming(bank, shop.public, rule), Naming(shop, bank.public, rule)
    assert here.of("Ä ") == there.of("a\u0308")
    assert here.of("a") != Naming(bank, stranger.public, rule).of("a")
    assert names_in(here.array([b"a", b"b"])) == [here.of("a"), here.of("b")]
    with pytest.raises(IdRefused):
        here.of(" ")


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
    assert (failed["hosts"], failed["degraded"]) == ({"shop": "refused"}, True)
    assert (found["hosts"], found["degraded"]) == ({"shop": "answered"}, False)
