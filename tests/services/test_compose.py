"""``docker-compose.yml`` and the image, by reading: what can be wrong there without a Docker engine to tell. The real
run is ``tests/integration/test_compose_stack.py`` (slow)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from federated.job import read_job
from services.cli.app import main
from services.federation.certificates import AUTHORITY
from services.processes import SERVICES
from services.settings.checks import check
from services.settings.keys import new_key
from services.settings.load import PREFIX, load_settings

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
FILE: Final[Mapping[str, Any]] = yaml.safe_load(TEXT)
EVERY: Final[Mapping[str, Mapping[str, Any]]] = FILE["services"]
RUNNING: Final = {
    name: service
    for name, service in EVERY.items()
    if service.get("profiles", ["federation"]) == ["federation"]
}
OURS: Final = {name: service for name, service in RUNNING.items() if service["image"] == "headwater:dev"}
FEDERATION: Final = {name: service for name, service in RUNNING.items() if "profiles" in service}
_VARIABLE: Final = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def interpolated(text: str, environ: Mapping[str, str]) -> str:
    """``text`` as compose reads it: ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}``."""

    def value(match: re.Match[str]) -> str:
        found = environ.get(match["name"], "")
        if not found and match["kind"] == "?":
            raise LookupError(match["rest"])
        return found or (match["rest"] or "" if match["kind"] == "-" else "")

    return _VARIABLE.sub(value, text)


def environment(service: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a service of ours, with a key for the API in the shell."""
    shell = {"HEADWATER_API_KEYS": ",".join(new_key(scope)[1] for scope in ("read", "admin"))}
    return {name: interpolated(value, shell) for name, value in service["environment"].items()}


def test_every_process_has_a_container() -> None:
    commands = [service["command"] for service in OURS.values()]
    # Emulated links are for trials on one machine; containers have networks of their own.
    assert {command[1] for command in commands} == set(SERVICES) - {"link"}
    assert all(command[0] == "service" and command[2] == "--name" for command in commands)
    names = [command[3] for command in commands]
    assert len(set(names)) == len(names)


def test_a_plain_up_starts_no_federation() -> None:
    assert {service["command"][1] for service in FEDERATION.values()} == {"federation"}
    assert all(
        service["command"][1] != "federation" for name, service in OURS.items() if name not in FEDERATION
    )


@pytest.mark.parametrize("name", EVERY)
class TestEveryService:
    def test_its_ports_are_on_loopback(self, name: str) -> None:
        for port in EVERY[name].get("ports", []):
            assert interpolated(port, {}).startswith("127.0.0.1:"), port
        assert EVERY[name].get("network_mode") is None

    def test_its_image_is_pinned(self, name: str) -> None:
        image, _, tag = EVERY[name]["image"].rpartition(":")
        assert image
        assert tag == "dev" if image == "headwater" else re.fullmatch(r"v?\d+(\.\d+)+", tag), tag

    def test_its_logs_are_bounded(self, name: str) -> None:
        assert set(EVERY[name]["logging"]["options"]) == {"max-size", "max-file"}


@pytest.mark.parametrize("name", RUNNING)
def test_what_keeps_running_is_checked_and_restarted(name: str) -> None:
    assert RUNNING[name]["restart"] == "unless-stopped"
    assert RUNNING[name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries", "start_period"} <= set(RUNNING[name]["healthcheck"])


@pytest.mark.parametrize("name", OURS)
class TestOurServices:
    def test_its_check_is_a_command_and_names_itself(
        self, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        _, service, _, process = OURS[name]["command"]
        test = OURS[name]["healthcheck"]["test"]
        assert test[:4] == ["CMD", "headwater", "service", "check"]
        assert test[4:] == ["--service", service, "--name", process]
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main(test[2:])
        assert ended.value.code == 4
        assert f"{process} of the {service} service is not registered" in capsys.readouterr().err

    def test_its_environment_is_settings(self, name: str) -> None:
        given = environment(OURS[name])
        assert all(variable.startswith(PREFIX) for variable in given)
        settings = load_settings(None, given).settings
        assert (settings.log.backend, settings.features.backend, settings.coordination.backend) == (
            "kafka",
            "redis",
            "etcd",
        )
        assert settings.parameters.servers == sum("parameter-server" in other for other in OURS)

    def test_where_it_is_reached_is_its_own_name(self, name: str) -> None:
        settings = load_settings(None, environment(OURS[name])).settings
        service = OURS[name]["command"][1]
        if service == "parameter-server":
            assert settings.parameters.advertise == f"{name}:{settings.parameters.listen.split(':')[1]}"
        if service == "api":
            assert settings.api.advertise == f"http://{name}:{settings.api.listen.split(':')[1]}"
        if service == "federation":
            port = settings.federation.listen.split(":")[1]
            assert settings.federation.advertise == f"https://{name}:{port}"

    def test_it_waits_for_its_backends(self, name: str) -> None:
        backends = {"kafka", "redis", "etcd"}
        assert OURS[name]["depends_on"] == {backend: {"condition": "service_healthy"} for backend in backends}

    def test_it_may_do_no_more_than_it_needs(self, name: str) -> None:
        assert OURS[name]["cap_drop"] == ["ALL"]
        assert OURS[name]["security_opt"] == ["no-new-privileges:true"]


def test_no_two_containers_share_a_folder_or_build_one_image_twice() -> None:
    mounted = [volume.split(":")[0] for service in EVERY.values() for volume in service.get("volumes", [])]
    folders = {name for name in mounted if name.startswith("./")}
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert {name for name in mounted if name not in folders} == set(FILE["volumes"])
    # The keys are everybody's, a certificate its servers'; all else has one owner.
    own = [name for name in mounted if name not in ("keys", "federation")]
    assert len(own) == len(set(own))
    assert sum("build" in service for service in EVERY.values()) == 1


@pytest.mark.parametrize("name", [*OURS, "tools"])
def test_its_calls_are_encrypted_with_keys_that_all_share(name: str) -> None:
    given = {key: value for key, value in environment(EVERY[name]).items() if key.startswith(PREFIX)}
    rpc = load_settings(None, given).settings.rpc
    assert (rpc.keys, rpc.create_keys, rpc.insecure) == (Path("/keys/rpc"), True, False)
    assert "keys:/keys" in EVERY[name]["volumes"]
    assert re.search(r"install -d -o headwater .*/keys\b", TestImage.TEXT)


class TestFederation:
    SETTINGS: Final = {
        name: load_settings(None, environment(service)).settings for name, service in FEDERATION.items()
    }

    def test_it_is_a_scheduler_and_servers_that_share_what_they_know(self) -> None:
        roles = {name: settings.federation.role for name, settings in self.SETTINGS.items()}
        assert roles == {
            "federation-scheduler": "scheduler",
            "federation-0": "server",
            "federation-1": "server",
        }
        stores = {settings.federation.store.get_secret_value() for settings in self.SETTINGS.values()}
        assert stores == {environment(EVERY["tools"])["HEADWATER__FEDERATION__STORE"]}
        assert urlsplit(stores.pop()).hostname == "redis"

    @pytest.mark.parametrize("name", FEDERATION)
    def test_its_settings_are_right_and_let_nobody_in(self, name: str) -> None:
        settings = self.SETTINGS[name]
        assert not list(check(settings))
        assert settings.federation.tokens
        # The stack's own operators are its.
        api = load_settings(None, environment(EVERY["api"])).settings.api
        assert [key.get_secret_value()[:5] for key in settings.federation.keys] == [
            key.get_secret_value()[:5] for key in api.keys
        ]

    @pytest.mark.parametrize("name", FEDERATION)
    def test_the_certificate_that_they_make_has_all_their_names_and_a_place_that_all_see(
        self, name: str
    ) -> None:
        federation = self.SETTINGS[name].federation
        assert {*FEDERATION, "localhost", "127.0.0.1"} == set(federation.create_certificate)
        assert federation.certificate is not None
        assert federation.certificate_key is not None
        assert federation.certificate.parent == federation.certificate_key.parent
        assert federation.certificate.parent.parent == Path("/federation")
        assert "federation:/federation" in FEDERATION[name]["volumes"]
        assert re.search(r"install -d -o headwater .*/federation\b", TestImage.TEXT)

    @pytest.mark.parametrize("name", ["tools", "devices"])
    def test_commands_know_its_authority(self, name: str) -> None:
        given = EVERY[name]["environment"]
        federation = self.SETTINGS["federation-0"].federation
        assert federation.certificate is not None
        assert given["HEADWATER_FL_CA"] == str(federation.certificate.with_name(AUTHORITY))
        assert interpolated(given["HEADWATER_FL_KEY"], {"HEADWATER_API_KEY": "k"}) == "k"
        assert "federation:/federation:ro" in EVERY[name]["volumes"]

    def test_commands_ask_the_scheduler_and_devices_the_servers(self) -> None:
        addresses = {name: settings.federation.advertise for name, settings in self.SETTINGS.items()}
        assert EVERY["tools"]["environment"]["HEADWATER_FL_URL"] == addresses["federation-scheduler"]
        assert EVERY["devices"]["entrypoint"] == [
            "headwater", "fl", "cohort", addresses["federation-0"], addresses["federation-1"],
        ]  # fmt: skip

    def test_its_job_teaches_the_stack_and_is_what_the_devices_join(self) -> None:
        folder, place, _ = EVERY["tools"]["volumes"][-1].split(":")
        (file,) = (ROOT / folder).iterdir()
        assert f"fl begin {place}/{file.name}" in TEXT
        job = read_job(file)
        settings = self.SETTINGS["federation-0"]
        assert (job.model.name, job.into.model) == ("items", settings.model.name)
        assert job.secure_aggregation.protocol != "none"
        devices = EVERY["devices"]["command"]
        assert devices == ["--job", job.job.name, "--clients", str(job.rounds.start_fl_job_threshold)]


class TestKeys:
    def test_without_a_key_the_stack_does_not_start(self) -> None:
        with pytest.raises(LookupError, match=re.escape(".env")):
            interpolated(EVERY["api"]["environment"]["HEADWATER__API__KEYS"], {})

    def test_several_keys_stand_side_by_side(self) -> None:
        keys = load_settings(None, environment(EVERY["api"])).settings.api.keys
        assert [key.get_secret_value().split(":")[0] for key in keys] == ["read", "admin"]

    def test_no_key_stands_in_the_file(self) -> None:
        assert not re.search(r"[0-9a-f]{64}|hw_(read|write|admin)_\w", TEXT)


class TestImage:
    TEXT: Final = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")

    def test_what_it_copies_is_in_the_build_context(self) -> None:
        sources = re.findall(r"^COPY (.+) \S+$", self.TEXT, re.MULTILINE)
        copied = {source for line in sources for source in line.split()}
        ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        assert copied == {line[1:] for line in ignored if line.startswith("!")}
        assert all((ROOT / source).exists() for source in copied)
        # Peers of benchmarks have environments of their own, gigabytes of them.
        assert {"**/.venv", "**/__pycache__"} <= set(ignored)

    def test_it_has_what_every_command_of_the_compose_files_needs(self) -> None:
        extras = re.search(r"^ARG EXTRAS=(\S+)$", self.TEXT, re.MULTILINE)
        assert extras is not None
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        # Of machines of a cluster (ray), and of developers, it has nothing.
        assert set(extras[1].split(",")) == set(known) - {"dev", "ray"}

    def test_it_does_not_run_as_root(self) -> None:
        users = re.findall(r"^USER (\S+)$", self.TEXT, re.MULTILINE)
        assert users == ["headwater"]
        assert "--uid 10001" in self.TEXT
