"""Keys and scopes; and that a key is never found in a log or a repr."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api import Harness, quick_settings, running_api

from services.api.auth import Keys, scope_of
from services.api.problems import Problem

SECRET = {"read": "reader-secret", "write": "writer-secret", "admin": "admin-secret"}
STORED = [f"{scope}:{hashlib.sha256(key.encode()).hexdigest()}" for scope, key in SECRET.items()]
EVENT = {"type": "interaction", "user_id": "u", "item_id": "i", "action": "like"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running_api(tmp_path_factory.mktemp("locked"), quick_settings(keys=STORED)) as harness:
        yield harness


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("scope", ["write", "admin"])
@pytest.mark.parametrize("header", ["bearer", "x-api-key", "lower-case bearer"])
def test_a_key_of_sufficient_scope_is_let_in(locked: Harness, scope: str, header: str) -> None:
    key = SECRET[scope]
    headers = {
        "bearer": bearer(key),
        "x-api-key": {"X-API-Key": key},
        "lower-case bearer": {"authorization": f"bearer {key}"},
    }[header]
    assert locked.post("/v1/events", json=EVENT, headers=headers).status_code == 202
    assert locked.post("/v1/recommendations", json={}, headers=headers).status_code == 200


def test_a_reading_key_reads_and_does_not_write(locked: Harness) -> None:
    headers = bearer(SECRET["read"])
    assert locked.post("/v1/recommendations", json={}, headers=headers).status_code == 200
    assert locked.post("/v1/rankings", json={"item_ids": ["a"]}, headers=headers).status_code == 200
    assert locked.get("/v1/items", headers=headers).status_code == 200
    reply = locked.post("/v1/events", json=EVENT, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (403, "scope_missing")
    assert locked.request("DELETE", "/v1/users/u", headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/v1/events", "/v1/recommendations", "/v1/nothing-there"])
def test_without_a_key_nothing_below_v1_answers(locked: Harness, path: str) -> None:
    reply = locked.post(path, content=b"not even JSON")
    assert (reply.status_code, reply.json()["code"]) == (401, "key_missing")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [
        bearer("wrong"),
        bearer(""),
        bearer(hashlib.sha256(b"reader-secret").hexdigest()),
        {"X-API-Key": STORED[0]},
        {"X-API-Key": "\u00fc".encode().decode("latin-1")},
    ],
)
def test_an_unknown_key_is_refused(locked: Harness, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    reply = locked.post("/v1/recommendations", json={}, headers=encoded)
    assert (reply.status_code, reply.json()["code"]) == (401, "key_unknown")


def test_another_scheme_is_no_key(locked: Harness) -> None:
    reply = locked.get("/v1/items", headers={"Authorization": "Basic cmVhZGVyOnNlY3JldA=="})
    assert (reply.status_code, reply.json()["code"]) == (401, "key_missing")


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics", "/openapi.json"])
def test_health_metrics_and_the_document_need_no_key(locked: Harness, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_a_wrong_key_costs_no_body(locked: Harness) -> None:
    reply = locked.post("/v1/events", content=b"x" * 5_000_000, headers=bearer("wrong"))
    assert reply.status_code == 401


def test_keys_are_in_no_log_and_no_repr(locked: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    locked.post("/v1/events", json=EVENT, headers=bearer("wrong-but-secret"))
    locked.post("/v1/events", json=EVENT, headers=bearer(SECRET["admin"]))
    assert "secret" not in caplog.text
    assert "secret" not in locked.get("/metrics").text
    digest = STORED[0].split(":")[1]
    assert digest not in repr(Keys(STORED)) + repr(locked.api.settings)


def test_without_keys_everything_is_allowed() -> None:
    keys = Keys([])
    keys.check([], "admin")
    assert keys.open


def test_a_key_stored_with_two_scopes_has_the_higher(tmp_path: Path) -> None:
    digest = STORED[0].split(":")[1]
    keys = Keys([f"admin:{digest}", f"read:{digest}"])
    keys.check([(b"x-api-key", b"reader-secret")], "admin")
    with pytest.raises(Problem, match="scope_missing"):
        Keys([f"read:{digest}"]).check([(b"x-api-key", b"reader-secret")], "write")


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/users/u", "read"),
        ("HEAD", "/v1/users/u", "read"),
        ("POST", "/v1/recommendations", "read"),
        ("POST", "/v1/rankings", "read"),
        ("POST", "/v1/events", "write"),
        ("POST", "/v1/items:batch", "write"),
        ("DELETE", "/v1/users/u", "write"),
        ("BREW", "/v1/users/u", "write"),
        ("PUT", "/v1/recommendations", "read"),
        ("GET", "/metrics", None),
    ],
)
def test_scopes(method: str, path: str, scope: str | None) -> None:
    assert scope_of(method, path) == scope
