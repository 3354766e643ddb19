"""A certificate that servers make for themselves, and the commands that trust it and no other."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from support.federation import free_ports, job, rows, server_settings
from support.service_process import eventually, service

from federated.client_http import Call, HttpTransport, NetworkLost
from services.cli.app import main
from services.cli.exits import Exit
from services.federation.certificates import AUTHORITY, CertificateFailed, ensure_certificate
from services.federation.cohort import MOST_DEVICES, run_cohort
from services.settings.checks import check
from services.settings.keys import new_key
from services.settings.model import FederationSettings, Settings

NAMES: Final = ("localhost", "127.0.0.1")


def federation(folder: Path, **other: Any) -> FederationSettings:
    given = {
        "certificate": folder / "server.pem",
        "certificate_key": folder / "server.key",
        "create_certificate": NAMES,
    }
    return FederationSettings.model_validate({**given, **other})


class TestMade:
    def test_by_one_of_many_whole_and_readable_to_its_owner_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "shared" / "tls"
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: ensure_certificate(federation(folder)), range(8)))
        assert {path.name for path in folder.iterdir()} == {AUTHORITY, "server.pem", "server.key"}
        assert [path.name for path in folder.parent.iterdir()] == ["tls"]
        assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600
        made = (folder / "server.pem").read_bytes()
        ensure_certificate(federation(folder))
        assert (folder / "server.pem").read_bytes() == made

    def test_for_its_names_and_servers_alone(self, tmp_path: Path) -> None:
        from cryptography import x509

        ensure_certificate(federation(tmp_path / "tls"))
        made, root = (
            x509.load_pem_x509_certificate((tmp_path / "tls" / name).read_bytes())
            for name in ("server.pem", AUTHORITY)
        )
        made.verify_directly_issued_by(root)
        named = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name.value) for name in named] == list(NAMES)
        assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert root.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0

    def test_not_unless_the_settings_say_so(self, tmp_path: Path) -> None:
        ensure_certificate(federation(tmp_path / "tls", create_certificate=()))
        ensure_certificate(FederationSettings())
        assert not list(tmp_path.iterdir())

    def test_not_where_it_cannot_be(self, tmp_path: Path) -> None:
        with pytest.raises(CertificateFailed, match="certificate_key must lie in"):
            ensure_certificate(federation(tmp_path / "tls", certificate_key=tmp_path / "elsewhere.key"))
        (tmp_path / "file").write_text("")
        with pytest.raises(CertificateFailed, match="cannot be made"):
            ensure_certificate(federation(tmp_path / "file" / "tls"))

    def test_names_without_a_place_are_refused(self) -> None:
        problems = list(check(Settings.model_validate({"federation": {"create_certificate": NAMES}})))
        assert [problem.name for problem in problems] == ["federation.create_certificate"]


def test_a_cohort_by_one_command_over_tls_with_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, dead = free_ports(2)
    key, hashed = new_key("admin")
    made = federation(tmp_path / "tls").model_dump(exclude_unset=True)
    settings = server_settings(tmp_path / "data", port, tokens=True, keys=(hashed,), **made)
    url, ca = f"https://localhost:{port}", tmp_path / "tls" / AUTHORITY
    (tmp_path / "job.toml").write_text(job(clients=3, iterations=2).to_toml())
    np.savez(tmp_path / "rows.npz", inputs=rows("0")[0], labels=rows("0")[1])
    monkeypatch.setenv("HEADWATER_FL_KEY", key)
    data_dir = f"--set=data.dir={tmp_path / 'data'}"

    def told(*words: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--format", "json"])
        found = capsys.readouterr()
        assert int(ended.value.code or 0) == code, found.err  # type: ignore[call-overload]
        return json.loads(found.out) if found.out else found.err

    def checked(certificate: Path, code: int = 0) -> Any:
        given = [f"--set=federation.{name}={path}" for name, path in (
            ("certificate", certificate), ("certificate_key", tmp_path / "tls" / "server.key"),
        )]  # fmt: skip
        return told("service", "check", "--name", "federation-0", data_dir, *given, code=code)

    with service("federation-0", settings, "federation"):
        eventually(ca.exists)
        assert "begins" in told("fl", "begin", str(tmp_path / "job.toml"), data_dir)
        words = ["fl", "cohort", url, "--job", "job", "--clients", "3", "--data", str(tmp_path / "rows.npz")]
        # Who does not know the authority is told so, and nobody is let in by another name.
        assert "certificate verify failed" in told(*words, code=Exit.NOT_RUNNING)
        with HttpTransport([f"https://127.0.0.2:{port}"], ca=str(ca)) as stranger, pytest.raises(NetworkLost):
            stranger.send(Call("GET", "/health/live"))
        monkeypatch.setenv("HEADWATER_FL_CA", str(ca))
        words.insert(2, f"https://localhost:{dead}")  # the next one is asked when one is away
        devices = told(*words, "--state", str(tmp_path / "devices"))["devices"]
        assert {name: came["ended"] for name, came in devices.items()} == dict.fromkeys("012", "finished")
        assert [came["accepted"] for came in devices.values()] == [2, 2, 2]
        assert {path.name for path in (tmp_path / "devices").iterdir()} == set("012")
        assert [row["valid"] for row in told("fl", "log", "job", "--url", url)["rounds"]] == [True, True]
        # A check believes the very certificate of its own settings.
        assert checked(tmp_path / "tls" / "server.pem") == {"federation-0": True}
        ensure_certificate(federation(tmp_path / "other"))
        assert checked(tmp_path / "other" / "server.pem", Exit.CHECK_FAILED) == {"federation-0": False}


@pytest.mark.parametrize("count", [0, MOST_DEVICES + 1])
def test_a_cohort_is_bounded(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match=f"not {count}"):
        run_cohort(job(), ["http://127.0.0.1:1"], [None] * count, tmp_path)  # type: ignore[list-item]
