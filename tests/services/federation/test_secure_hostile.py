"""Secure aggregation under devices that do not keep to it, and who is who: tickets, signing keys, registrars."""

from __future__ import annotations

import importlib.util
import json
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bare import bare_device
from support.federation import Fleet, create, job, model, reference_of, rows, servers, wait_for
from support.touched import Died, Touched

from federated.client_folder import DeviceFolder
from federated.client_http import Call, Clock, HttpTransport
from federated.client_identity import IdentityRefused, public_key
from federated.client_run import main as device_main
from federated.client_run import terms_of, with_identity
from federated.client_steps import Budget
from federated.compression import BodyRefused
from federated.job import FederatedJob
from federated.job_sections import JobRefused
from federated.rounds.messages import Admitted, StartRequest, UploadRequest
from federated.secagg.client import Client, Identity
from federated.secagg.keys import Registrar, SigningKey
from federated.secagg.roster import Context
from federated.sums import ContributionRefused
from federated.wire import decode_reply, digest_of, encode_start, encode_upload
from services.cli.app import main as headwater
from services.cli.exits import Exit
from services.federation.assembly import assemble_job
from services.federation.edge import EdgeRefused, require_edge

CLIENTS = [str(number) for number in range(4)]
PATH = "/v1/fl/jobs/job/clients"


def secure_job(clients: int = 4, **secure: Any) -> FederatedJob:
    told = {"protocol": "secagg", "colluding": 0.0, "dropouts": 0.2, "stage_window_s": 4.0, **secure}
    return job(clients=clients, iterations=1, secure_aggregation=told, rounds={"update_model_ratio": "0.75"})


class Stranger:
    """A device that sends whatever it likes."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.http = HttpTransport([url], timeout_s=20.0)
        self.name = name
        self.ticket = b""

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *why: object) -> None:
        self.http.close()

    def start(self) -> bytes:
        answer = self.http.send(
            Call("POST", f"{PATH}/{self.name}/start", encode_start(StartRequest(self.name)))
        )
        reply = decode_reply(answer.body, 0.0)
        assert isinstance(reply, Admitted)
        self.ticket = reply.ticket
        return self.ticket

    def announce(self, where: str, size: int) -> int:
        """The status of the answer to a body of so many bytes, which is not sent."""
        with socket.create_connection(
            ("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=10
        ) as connection:
            head = (
                f"POST {PATH}/{self.name}/{where} HTTP/1.1\r\nHost: here\r\nX-Ticket: {self.ticket.hex()}\r\n"
            )
            connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
            reply = b""
            while received := connection.recv(4096):  # until the server ends the connection
                reply += received
        return int(reply.split(b" ")[1])

    def ask(
        self, method: str, where: str, body: bytes = b"", ticket: bytes | None = None, name: str | None = None
    ) -> tuple[int, str]:
        headers = {"X-Ticket": (self.ticket if ticket is None else ticket).hex()}
        answer = self.http.send(Call(method, f"{PATH}/{name or self.name}/{where}", body, headers))
        return answer.status, json.loads(answer.body)["code"] if answer.status >= 400 else ""


def test_hostile_messages_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    made = secure_job()
    masked = made.make_masked(made.make_model().layout())
    assert masked is not None
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        fleet = Fleet("job", [url], tmp_path / "devices")
        with Stranger(url, "9") as it:
            ticket = it.start()
            assert it.ask("POST", "secure/1/advertise", bytes(65)) == (409, "stage_early")  # the others start
            began = fleet.start(CLIENTS[:3])
            wait_for(url, phase="updating")
            assert it.ask("POST", "secure/1/advertise", bytes(65)) == (422, "message_refused")
            assert it.ask("POST", "secure/1/advertise", bytes(64)) == (422, "message_refused")
            assert it.announce("secure/1/advertise", 10_000_000) == 413
            assert it.ask("POST", "secure/1/advertise", bytes(65), bytes(16)) == (403, "foreign_ticket")
            assert it.ask("POST", "secure/1/advertise", bytes(65), name="0") == (403, "foreign_ticket")
            assert it.ask("POST", "secure/7/advertise", bytes(65)) == (403, "foreign_ticket")
            assert it.ask("POST", f"secure/{2**80}/advertise", bytes(65)) == (403, "foreign_ticket")
            assert it.ask("POST", "secure/1/masked", bytes(65)) == (404, "not_found")
            assert it.ask("POST", "secure/1/reveal", bytes(65)) == (404, "not_found")
            assert it.ask("GET", "secure/1/advertise") == (404, "not_found")
            assert it.ask("GET", "secure/1/share") == (204, "")  # the roster is open
            # Its keys at last, then shares for nobody.
            honest = Client(masked.plan, Context("job", 1), "9")
            body = honest.advertise()
            assert it.ask("POST", "secure/1/advertise", body) == (204, "")
            assert it.ask("POST", "secure/1/advertise", body) == (204, "")  # a repeat is no second part
            assert it.ask("POST", "secure/1/advertise", Client(masked.plan, Context("job", 1), "9").advertise()) == (
                422, "message_refused",
            )  # fmt: skip
            assert it.ask("POST", "secure/1/unmask", bytes(40)) in (
                (409, "stage_early"),
                (422, "message_refused"),
            )
            assert it.ask("POST", "secure/1/share", bytes(1000))[0] in (409, 413, 422)
            # A vector of its own making, though it never shared: it would spoil the sum.
            payload = bytes(masked.plan.masked_bytes)
            upload = encode_upload(UploadRequest("9", 1, ticket, digest_of(payload), 1, 1, 0.0), payload)
            assert it.ask("POST", "uploads", upload)[1] in ("stage_early", "stage_over")
            for thread in began.threads:
                thread.join(40)
            assert {end.why for end in began.done.values()} == {"finished"}
        wait_for(url, phase="finished", valid=1)
        np.testing.assert_array_equal(model(url, "job", 1, made), reference_of(made, [CLIENTS[:3]]))


def test_a_masked_vector_of_another_length_or_weight_is_refused(tmp_path: Path) -> None:
    made = secure_job()
    masked = made.make_masked(made.make_model().layout())
    assert masked is not None
    hosted = assemble_job(made, bytes(32))
    size = masked.plan.masked_bytes
    hosted.require_body(bytes(size), 1, 1, 1, 0.0)
    with pytest.raises(BodyRefused):
        hosted.require_body(bytes(size - 1), 1, 1, 1, 0.0)
    for told in ((2, 1, 0.0), (1, 2, 0.0), (1, 1, 0.5)):
        with pytest.raises(ContributionRefused):
            hosted.require_body(bytes(size), 1, *told)


def test_an_edge_serves_no_masked_job() -> None:
    with pytest.raises(EdgeRefused, match="masks cancel over a whole cohort"):
        require_edge(assemble_job(secure_job(), bytes(32)))


def test_keys_that_nobody_certified_are_refused_before_they_can_stop_the_others(tmp_path: Path) -> None:
    made = secure_job(3, malicious=True)
    masked = made.make_masked(made.make_model().layout())
    assert masked is not None
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        with Stranger(url, "9") as it:
            it.start()
            fleet = Fleet("job", [url], tmp_path / "devices")
            began = fleet.start(CLIENTS[:2])
            wait_for(url, phase="updating")
            own, key = Registrar(), SigningKey()
            identity = Identity(key, own.certify("job", "9", key.public))
            itself = Client(masked.plan, Context("job", 1), "9", identity, own.public)
            assert it.ask("POST", "secure/1/advertise", itself.advertise()) == (422, "message_refused")
        wait_for(url, phase="finished", timeout_s=20.0)
        for thread in began.threads:
            thread.join(30)
        assert {end.why for end in began.done.values()} == {"finished"}


class TestSigningKeys:
    def test_a_key_is_made_once_and_kept_for_its_user_alone(self, tmp_path: Path) -> None:
        folder = DeviceFolder(tmp_path / "device")
        public = public_key(folder)
        assert public_key(DeviceFolder(tmp_path / "device")) == public
        assert stat.S_IMODE((tmp_path / "device" / "signing-key").stat().st_mode) == 0o600

    def test_servers_certify_the_first_key_of_a_client_and_no_other(self, tmp_path: Path) -> None:
        made = secure_job(malicious=True)
        with servers(tmp_path, 2) as running:
            urls = [url for _, url in running]
            create(urls[0], made)
            found = []
            for url in urls:  # both servers are one registrar
                with HttpTransport([url]) as network:
                    folder = DeviceFolder(tmp_path / f"device-{url[-5:]}")
                    folder.keep_signing_seed(bytes(32))
                    found.append(with_identity(terms_of(made), made, "1", folder, network, Clock()).secure)
            registrars = {terms.registrar for terms in found if terms is not None}
            assert len(registrars) == 1
            with HttpTransport(urls) as network:
                with pytest.raises(IdentityRefused, match="409"):
                    with_identity(
                        terms_of(made), made, "1", DeviceFolder(tmp_path / "other"), network, Clock()
                    )
                with pytest.raises(IdentityRefused, match="not of"):
                    with_identity(
                        terms_of(made), made, "2", DeviceFolder(tmp_path / "pinned"), network, Clock(),
                        registrar="ab" * 32,
                    )  # fmt: skip
                answer = network.send(Call("POST", f"{PATH}/3/certificate", bytes(31)))
                assert (answer.status, json.loads(answer.body)["code"]) == (422, "invalid_value")
            with Stranger(urls[0], "3") as it:
                assert it.announce("certificate", 10_000_000) == 413

    def test_an_operator_certifies_in_the_servers_place(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def told(*words: str) -> str:
            with pytest.raises(SystemExit) as ended:
                headwater(["fl", *words])
            assert not ended.value.code
            return capsys.readouterr().out.strip()

        key = tmp_path / "registrar"
        public = told("registrar", str(key))
        assert told("registrar", str(key)) == public
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        made = secure_job(3, malicious=True, registrar=public)
        with servers(tmp_path) as running:
            url = running[0][1]
            create(url, made)
            with HttpTransport([url]) as network:
                answer = network.send(Call("POST", f"{PATH}/0/certificate", bytes(32)))
                assert answer.status == 404  # the servers certify nothing of this job
                for client in CLIENTS[:3]:
                    place = tmp_path / "devices" / client
                    own = told("identity", "job", client, "--state", str(place))
                    word = told("certify", "job", client, own, "--registrar-key", str(key))
                    with_identity(
                        terms_of(made), made, client, DeviceFolder(place), network, Clock(),
                        registrar=public, certificate=word,
                    )  # fmt: skip
            done = Fleet("job", [url], tmp_path / "devices").run(CLIENTS[:3])
            assert {end.why for end in done.values()} == {"finished"}
            wait_for(url, phase="finished", valid=1)

    def test_a_wrong_certificate_or_key_is_said_in_a_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        key = tmp_path / "registrar"
        key.write_bytes(bytes(31))
        for words, said, code in (
            (["certify", "job", "0", "00" * 32, "--registrar-key", str(key)], "31 bytes", Exit.BAD_INPUT),
            (
                ["certify", "job", "0", "00", "--registrar-key", str(tmp_path / "no")],
                "cannot be read",
                Exit.BAD_INPUT,
            ),
        ):
            with pytest.raises(SystemExit) as ended:
                headwater(["fl", *words])
            assert ended.value.code == code
            assert said in capsys.readouterr().err
        key.write_bytes(bytes(32))
        with pytest.raises(SystemExit) as ended:
            headwater(["fl", "certify", "job", "0", "abc", "--registrar-key", str(key)])
        assert ended.value.code == Exit.USAGE
        assert "no public key" in capsys.readouterr().err


def test_a_device_goes_by_the_protection_that_it_agreed_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers that leave the masks out, or assume less, are refused by devices that have the job's file."""
    agreed = tmp_path / "job.toml"
    agreed.write_text(secure_job(colluding=0.25).to_toml())
    np.savez(tmp_path / "rows.npz", inputs=rows("0")[0], labels=rows("0")[1])
    words = ["--client", "0", "--data", str(tmp_path / "rows.npz"), "--state", str(tmp_path / "kept")]
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, secure_job(colluding=0.0))
        with pytest.raises(SystemExit) as ended:
            device_main(["--server", url, "--job", "job", "--agreed", str(agreed), *words])
        assert ended.value.code == 1
        assert "[secure_aggregation] is not the one agreed to" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            headwater(["fl", "join", url, "--agreed", str(agreed), *words])
        assert ended.value.code == Exit.REFUSED
        assert "[secure_aggregation] is not the one agreed to" in capsys.readouterr().err
        agreed.write_text(secure_job(colluding=0.0).to_toml())
        device_main(
            ["--server", url, "--job", "job", "--agreed", str(agreed), *words, "--budget-seconds", "1"]
        )
        assert json.loads(capsys.readouterr().out)["ended"] == "seconds"


def test_servers_that_protect_less_than_when_the_device_first_joined_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same address serves a job of the same name without masks when the device comes back."""
    np.savez(tmp_path / "rows.npz", inputs=rows("0")[0], labels=rows("0")[1])
    words = ["--client", "0", "--data", str(tmp_path / "rows.npz"), "--state", str(tmp_path / "kept")]
    with servers(tmp_path / "before") as running:
        create(running[0][1], secure_job())
        for _ in range(2):  # the same terms again are fine
            device_main(["--server", running[0][1], "--job", "job", *words, "--budget-seconds", "0.5"])
            assert json.loads(capsys.readouterr().out)["ended"] == "seconds"
    with servers(tmp_path / "after") as running:
        url, plain = running[0][1], job(clients=len(CLIENTS), iterations=2)
        create(url, plain)
        with pytest.raises(SystemExit) as ended:
            device_main(["--server", url, "--job", "job", *words, "--budget-seconds", "0.5"])
        assert ended.value.code == 1
        told = capsys.readouterr().err
        assert "[secure_aggregation] is not the one that this device joined under" in told
        assert "protocol = 'none' where it was 'secagg'" in told
        assert "--agreed" in told
        with pytest.raises(SystemExit) as ended:
            headwater(["fl", "join", url, *words, "--budget-seconds", "0.5"])
        assert ended.value.code == Exit.REFUSED
        assert "that this device joined under" in capsys.readouterr().err
        (tmp_path / "job.toml").write_text(plain.to_toml())
        agreed = ["--agreed", str(tmp_path / "job.toml"), "--budget-seconds", "0.5"]
        device_main(["--server", url, "--job", "job", *words, *agreed])
        assert json.loads(capsys.readouterr().out)["ended"] == "seconds"


def test_a_masking_device_needs_numpy_and_cryptography_alone(tmp_path: Path) -> None:
    made = secure_job(3, malicious=True)
    folder = tmp_path / "devices"
    folder.mkdir()
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)

        def run(packages: str) -> tuple[int, str, str]:
            process = bare_device(folder, "0", [url], rows("0"), packages=packages)
            told, errors = process.communicate(timeout=100)
            return process.returncode, told.decode(), errors.decode()

        code, _, errors = run("numpy")
        assert code == 1
        assert errors.strip().endswith("pip install cryptography")
        began = Fleet("job", [url], folder).start(CLIENTS[1:3])
        _, told, errors = run("numpy,cryptography,_cffi_backend,cffi")
        assert json.loads(told)["ended"] == "finished", errors
        for thread in began.threads:
            thread.join(30)
        wait_for(url, phase="finished", valid=1)
        np.testing.assert_array_equal(model(url, "job", 1, made), reference_of(made, [CLIENTS[:3]]))


def test_a_device_without_cryptography_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "cryptography" else find(name)
    )
    with pytest.raises(JobRefused, match="pip install cryptography"):
        terms_of(secure_job())
    words = ["--client", "0", "--data", str(tmp_path / "rows.npz"), "--state", str(tmp_path / "kept")]
    np.savez(tmp_path / "rows.npz", inputs=rows("0")[0], labels=rows("0")[1])
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, secure_job())
        with pytest.raises(SystemExit) as ended:
            device_main(["--server", url, "--job", "job", *words])
        assert ended.value.code == 1
        assert "pip install cryptography" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            headwater(["fl", "join", url, *words])
        assert ended.value.code == Exit.BAD_INPUT
        assert "pip install cryptography" in capsys.readouterr().err


def test_a_device_that_ends_in_mid_iteration_hands_in_what_it_had_masked(tmp_path: Path) -> None:
    """Its secrets are gone with its process; the others' shares take its mask off."""
    made = job(
        clients=5,
        iterations=1,
        secure_aggregation={"protocol": "secagg", "colluding": 0.0, "dropouts": 0.2, "stage_window_s": 1.5},
    )
    everybody = [*CLIENTS, "4"]
    ended: list[str] = []

    def end(client: str, call: Call) -> None:
        if client == "0" and call.path.endswith("/uploads") and not ended:
            ended.append(client)
            raise Died(client)

    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        fleet = Touched("job", [url], tmp_path / "devices", before=end)
        began = fleet.start(everybody)
        began.threads[0].join(30)
        assert fleet.died == ["0"]
        kept = DeviceFolder(tmp_path / "devices" / "0").pending()
        assert kept is not None
        assert fleet.run(["0"], Budget(seconds=30.0))["0"].why == "finished"
        for thread in began.threads:
            thread.join(30)
        wait_for(url, phase="finished", valid=1)
        np.testing.assert_array_equal(model(url, "job", 1, made), reference_of(made, [everybody]))
