"""What anyone may send to a server: refused or bounded by a rule, and the round goes on."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import (
    Fleet,
    ask,
    create,
    free_ports,
    job,
    model,
    reference,
    server_settings,
    servers,
    state,
    wait_for,
)
from support.service_process import eventually, service

from federated.client_http import Answer, Call, HttpTransport
from federated.job import FederatedJob
from federated.rounds.messages import Accepted, Admitted, Refused, Reply, StartRequest, UploadRequest
from federated.wire import decode_reply, digest_of, encode_start, encode_upload
from services.api.auth import Keys
from services.federation.enrolment import TokenRefused, enrol, enrolled
from services.settings.checks import check
from services.settings.model import Settings

SIZE = job().make_model().layout().size
GOOD = np.full(SIZE, 0.01, "<f4").tobytes()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bounds = {"header_timeout": 1.0, "body_timeout": 2.0, "max_connections": 24, "max_body": 100_000}
    with servers(tmp_path_factory.mktemp("server"), **bounds) as running:
        yield running[0][1]


@pytest.fixture
def made(url: str, request: pytest.FixtureRequest) -> FederatedJob:
    name = f"job{abs(hash(request.node.nodeid)) % 10**12}"
    made = job(
        name, clients=2, rounds={"early_uploads": True, "max_examples": 10}, servers={"part_bytes": 50_000}
    )
    create(url, made)
    return made


def head_of(made: FederatedJob, what: str, *headers: str) -> bytes:
    """The head of a POST by hand."""
    path = f"/v1/fl/jobs/{made.job.name}/clients/a/{what}"
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", *headers, "", "")).encode()


def place(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def refusal(url: str, method: str, path: str, body: bytes) -> tuple[int, str]:
    """Status and text of an operator's request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(url, method, path, body)
    with refused.value as reply:
        return reply.code, reply.read().decode()


class Hand:
    """A client by hand: one request at a time."""

    def __init__(self, url: str, job: str, client: str) -> None:
        self.path = f"/v1/fl/jobs/{job}/clients/{client}"
        self.client = client
        self.transport = HttpTransport([url])
        self.ticket, self.iteration = b"", 0

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        return self.transport.send(Call(method, self.path + path, body, headers))

    def start(self) -> Reply:
        reply = decode_reply(self.call("POST", "/start", encode_start(StartRequest(self.client))).body, 0.0)
        if isinstance(reply, Admitted):
            self.ticket, self.iteration = reply.ticket, reply.iteration
        return reply

    def upload(self, payload: bytes | None = GOOD, **changed: Any) -> Answer:
        values: dict[str, Any] = {
            "client": self.client, "iteration": self.iteration, "ticket": self.ticket,
            "digest": digest_of(payload or b""), "examples": 5, "steps": 3, "loss": 0.5,
        }  # fmt: skip
        return self.call("POST", "/uploads", encode_upload(UploadRequest(**(values | changed)), payload))


@pytest.fixture
def named(url: str, made: FederatedJob) -> Iterator[Callable[[str], Hand]]:
    """Clients by name, closed at the end."""
    with ExitStack() as stack:

        def name(client: str) -> Hand:
            hand = Hand(url, made.job.name, client)
            stack.callback(hand.transport.close)
            return hand

        yield name


@pytest.fixture
def hand(named: Callable[[str], Hand]) -> Hand:
    hand = named("mallory")
    assert isinstance(hand.start(), Admitted)
    return hand


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (np.full(SIZE, np.nan, "<f4").tobytes(), b"not_finite"),
        (np.full(SIZE, -np.inf, "<f4").tobytes(), b"not_finite"),
        (np.full(SIZE, 1e30, "<f4").tobytes(), b"magnitude"),
        (GOOD[:-4], b"float32"),
        (GOOD + b"\0\0\0\0", b"float32"),
        (b"", b"float32"),
    ],
)
def test_an_update_that_breaks_a_rule_is_refused_and_another_of_the_same_client_counts(
    hand: Hand, url: str, payload: bytes, why: bytes
) -> None:
    refused = hand.upload(payload)
    assert (refused.status, why in refused.body) == (422, True), refused.body
    assert isinstance(decode_reply(hand.upload().body, 0.0), Accepted)


def test_wrong_rounds_and_foreign_tickets_are_refused(
    hand: Hand, named: Callable[[str], Hand], url: str, made: FederatedJob
) -> None:
    assert hand.upload(iteration=2).status == 403
    assert hand.upload(ticket=bytes(16)).status == 403
    other = named("other")
    other.ticket, other.iteration = hand.ticket, hand.iteration
    assert other.upload().status == 403
    assert (
        other.call(
            "PUT",
            f"/uploads/{'00' * 16}",
            b"x",
            **{"X-Iteration": "1", "X-Ticket": "00", "Upload-Offset": "0"},
        ).status
        == 403
    )
    assert state(url, made.job.name)["uploads"] == 0


def test_a_repeated_upload_counts_once_and_another_body_never(
    hand: Hand, url: str, made: FederatedJob
) -> None:
    assert isinstance(decode_reply(hand.upload().body, 0.0), Accepted)
    again = decode_reply(hand.upload().body, 0.0)
    assert isinstance(again, Accepted)
    assert again.repeated
    other = decode_reply(hand.upload(np.full(SIZE, 0.5, "<f4").tobytes()).body, 0.0)
    assert isinstance(other, Refused)
    assert other.code == "different_body"
    assert state(url, made.job.name)["uploads"] == 1


def test_a_client_cannot_fill_the_store_with_bodies(hand: Hand) -> None:
    statuses = [hand.upload(np.full(SIZE, n, "<f4").tobytes()).status for n in range(6)]
    assert statuses == [200, 200, 200, 200, 429, 429]


def test_whoever_lies_about_examples_weighs_no_more_than_the_cap(
    hand: Hand, named: Callable[[str], Hand], url: str, made: FederatedJob
) -> None:
    honest = named("honest")
    honest.start()
    assert isinstance(decode_reply(hand.upload(examples=4_000_000_000).body, 0.0), Accepted)
    assert isinstance(
        decode_reply(honest.upload(np.zeros(SIZE, "<f4").tobytes(), examples=10).body, 0.0), Accepted
    )
    wait_for(url, made.job.name, version=1)
    start = made.make_strategy().init(made.make_model().layout(), model(url, made.job.name, 1, made)).weights
    before = reference(made, [], 0)
    # Both weigh max_examples: the mean of .01 and 0.
    np.testing.assert_allclose(start - before, 0.005, atol=1e-6)


def test_a_body_of_10_gb_is_refused_before_it_is_read(url: str, made: FederatedJob) -> None:
    with socket.create_connection(place(url), timeout=5) as connection:
        head = head_of(made, "uploads", "Content-Length: 10000000000")
        connection.sendall(head)
        reply = b""
        while received := connection.recv(4096):  # until the server ends the connection
            reply += received
        assert b" 413 " in reply.split(b"\r\n")[0]
        assert b"body_too_large" in reply


def test_a_body_without_a_length_is_cut_off_at_the_limit(url: str, made: FederatedJob) -> None:
    with socket.create_connection(place(url), timeout=5) as connection:
        head = head_of(made, "uploads", "Transfer-Encoding: chunked")
        connection.sendall(head)
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(chunk * 50_000)


def test_slow_connections_are_closed_and_others_are_served(url: str, made: FederatedJob) -> None:
    slow = [socket.create_connection(place(url), timeout=5) for _ in range(10)]
    try:
        for connection in slow:
            connection.sendall(b"POST /v1/fl/jobs/x/clients/a/start HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert state(url, made.job.name)["phase"] == "starting"
        began = time.monotonic()
        for connection in slow:
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        assert time.monotonic() - began < 4
    finally:
        for connection in slow:
            connection.close()


def test_a_slow_body_is_refused_in_time(url: str, made: FederatedJob) -> None:
    with socket.create_connection(place(url), timeout=8) as connection:
        head = head_of(made, "start", "Content-Length: 22")
        connection.sendall(head + b"x")
        assert b" 408 " in connection.recv(4096).split(b"\r\n")[0]


def test_connections_beyond_the_bound_are_closed_at_once(url: str) -> None:
    opened = [socket.create_connection(place(url), timeout=5) for _ in range(40)]
    try:
        time.sleep(0.3)
        closed = 0
        for connection in opened:
            connection.setblocking(False)
            try:
                closed += connection.recv(1) == b""
            except BlockingIOError:
                continue
            except ConnectionResetError:
                closed += 1
        assert closed >= 40 - 24
    finally:
        for connection in opened:
            connection.close()
    time.sleep(0.2)
    assert ask(url, "GET", "/health/live") == {"status": "live"}


def test_a_job_that_makes_no_sense_is_refused_with_the_reason(url: str) -> None:
    large = job("large", servers={"part_bytes": 200_000}).to_toml().encode()
    for body, why in [
        (b"[job", "invalid_value"),
        (b"[job]\nname='x'", "rounds"),
        (b"[jobb]\n", "jobb"),
        (large, "part_bytes"),
    ]:
        status, told = refusal(url, "POST", "/v1/fl/jobs", body)
        assert status == 422
        assert why in told


def test_a_name_stands_for_one_definition(url: str, made: FederatedJob) -> None:
    again = ask(url, "POST", "/v1/fl/jobs", made.to_toml().encode())
    assert again == {"job": made.job.name, "created": False}
    other = job(made.job.name, clients=3, servers={"part_bytes": 50_000}).to_toml().encode()
    assert refusal(url, "POST", "/v1/fl/jobs", other)[0] == 409


def test_stop_and_resume(named: Callable[[str], Hand], url: str, made: FederatedJob) -> None:
    path = f"/v1/fl/jobs/{made.job.name}"
    assert ask(url, "POST", f"{path}/stop")["phase"] == "stopped"
    hand = named("a")
    assert not isinstance(hand.start(), Admitted)
    assert ask(url, "POST", f"{path}/resume")["phase"] == "starting"
    assert isinstance(hand.start(), Admitted)


def test_tokens_say_who_a_device_is(tmp_path: Path) -> None:
    key, made = "operators-key-of-this-test", job(clients=2, iterations=1)
    hashed = "admin:" + hashlib.sha256(key.encode()).hexdigest()
    assert not Keys([hashed]).open
    with servers(tmp_path, tokens=True, keys=(hashed,)) as running:
        url = running[0][1]
        assert refusal(url, "POST", "/v1/fl/jobs", made.to_toml().encode())[0] == 401
        create(url, made, key)
        path = "/v1/fl/jobs/job/tokens"
        tokens = {name: ask(url, "POST", f"{path}?client={name}", None, key)["token"] for name in ("0", "1")}

        def start(client: str, token: str) -> int:
            with HttpTransport([url], token) as transport:
                body = encode_start(StartRequest(client))
                return transport.send(Call("POST", f"/v1/fl/jobs/job/clients/{client}/start", body)).status

        def definition(token: str) -> int:
            with HttpTransport([url], token) as transport:
                return transport.send(Call("GET", "/v1/fl/jobs/job/definition")).status

        assert (definition(""), definition("nonsense")) == (401, 401)
        assert (definition(tokens["1"]), definition(key)) == (200, 200)
        assert start("0", "") == 401
        assert start("0", "nonsense") == 401
        assert start("0", tokens["1"]) == 403
        assert start("0", tokens["0"][:-2] + "AA") == 401
        done = Fleet("job", [url], tmp_path / "devices", tokens).run(["0", "1"])
        assert {end.why for end in done.values()} == {"finished"}


def test_a_token_ends_and_is_of_one_job_and_role() -> None:
    key = b"k" * 32
    token = enrol("job", key, "ü/a", "client", 100)
    assert enrolled("job", key, token, 99.0).id == "ü/a"
    for job_, key_, now in [("job", key, 101.0), ("other", key, 99.0), ("job", b"j" * 32, 99.0)]:
        with pytest.raises(TokenRefused):
            enrolled(job_, key_, token, now)
    with pytest.raises(TokenRefused):
        enrolled("job", key, token.replace("client", "edge"), 99.0)


def test_client_certificates_over_tls(tmp_path: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority",
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "0", "1"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key",
                "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-out", f"{name}.pem", "-extfile", "names")  # fmt: skip
    (port,) = free_ports(1)
    files = {"certificate": tmp_path / "server.pem", "certificate_key": tmp_path / "server.key"}
    settings = server_settings(tmp_path / "data", port, client_ca=tmp_path / "ca.pem", **files)
    made, url = job(clients=2, iterations=1), f"https://127.0.0.1:{port}"

    def options(name: str) -> dict[str, str]:
        return {
            "ca": str(tmp_path / "ca.pem"),
            "certificate": str(tmp_path / f"{name}.pem"),
            "key": str(tmp_path / f"{name}.key"),
        }

    def as_zero(method: str, path: str, body: bytes = b"") -> Answer:
        with HttpTransport([url], **options("0")) as transport:  # type: ignore[arg-type]
            return transport.send(Call(method, path, body))

    with service("federation-0", settings, "federation"):

        def ready() -> bool:
            try:
                return as_zero("GET", "/health/ready").status == 200
            except OSError:
                return False

        eventually(ready)
        with pytest.raises(OSError), HttpTransport([url], ca=str(tmp_path / "ca.pem")) as stranger:  # noqa: PT011
            stranger.send(Call("GET", "/health/live"))
        assert as_zero("POST", "/v1/fl/jobs", made.to_toml().encode()).status == 201
        path = "/v1/fl/jobs/job/clients/1/start"
        assert as_zero("POST", path, encode_start(StartRequest("1"))).status == 403
        fleets = [
            Fleet("job", [url], tmp_path / "devices", options=options(name)).start([name])
            for name in ("0", "1")
        ]
        for fleet in fleets:
            for thread in fleet.threads:
                thread.join(30)
        assert [end.why for fleet in fleets for end in fleet.done.values()] == ["finished", "finished"]


@pytest.mark.parametrize(
    ("federation", "named"),
    [
        ({"listen": "0.0.0.0:8090"}, "federation.listen"),
        ({"listen": "0.0.0.0:8090", "tokens": True, "keys": ("admin:" + "0" * 64,)}, "federation.listen"),
        ({"certificate": "a.pem"}, "federation.certificate"),
        ({"store": "file:x"}, "federation.store"),
        ({"role": "edge", "token_file": "t", "job": "j"}, "federation.parent"),
        ({"role": "edge", "parent": "http://x", "job": "j"}, "federation.token_file"),
        ({"keys": ("secret",)}, "federation.keys"),
    ],
)
def test_settings_that_let_anybody_in_are_refused_at_start(federation: dict[str, Any], named: str) -> None:
    problems = list(check(Settings.model_validate({"federation": federation})))
    assert [problem.name for problem in problems] == [named]
