"""``deploy/compose.regions.yml`` on top of ``docker-compose.yml``, by reading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
import yaml

from services.settings.load import PREFIX, load_settings
from services.settings.shards import written_shards
from tests.services import test_compose as base

TEXT: Final = (base.ROOT / "deploy" / "compose.regions.yml").read_text(encoding="utf-8")
FILE: Final[Mapping[str, Any]] = yaml.safe_load(TEXT)
EVERY: Final[Mapping[str, Mapping[str, Any]]] = FILE["services"]
OURS: Final = {name: service for name, service in EVERY.items() if service["image"] == "headwater:dev"}
HOME: Final = load_settings(None, base.environment(base.OURS["api"])).settings


def test_nothing_of_the_first_file_is_replaced() -> None:
    assert not EVERY.keys() & base.EVERY.keys()
    assert not FILE["volumes"].keys() & base.FILE["volumes"].keys()


def test_a_region_is_parameter_servers_and_an_api() -> None:
    assert {service["command"][1] for service in OURS.values()} == {"parameter-server", "api"}
    assert all(service["command"][0] == "service" for service in OURS.values())


@pytest.mark.parametrize("name", EVERY)
class TestEveryService:
    def test_its_ports_are_on_loopback(self, name: str) -> None:
        for port in EVERY[name].get("ports", []):
            assert base.interpolated(port, {}).startswith("127.0.0.1:"), port

    def test_its_image_is_pinned_and_it_is_kept_running(self, name: str) -> None:
        image, _, tag = EVERY[name]["image"].rpartition(":")
        assert tag == "dev" if image == "headwater" else re.fullmatch(r"v?\d+(\.\d+)+", tag), tag
        assert EVERY[name]["restart"] == "unless-stopped"
        assert {"test", "interval", "timeout", "retries", "start_period"} <= set(EVERY[name]["healthcheck"])
        assert set(EVERY[name]["logging"]["options"]) == {"max-size", "max-file"}

    def test_what_it_waits_for_and_mounts_is_in_either_file(self, name: str) -> None:
        assert set(EVERY[name].get("depends_on", {})) <= EVERY.keys() | base.EVERY.keys()
        mounted = {volume.split(":")[0] for volume in EVERY[name].get("volumes", [])}
        named = {source for source in mounted if not source.startswith("./")}
        assert named <= {*FILE["volumes"], *base.FILE["volumes"]}
        assert all((base.ROOT / source).exists() for source in mounted - named)


@pytest.mark.parametrize("name", OURS)
class TestOurServices:
    def test_its_settings_are_right_and_those_of_the_home_region_but_for_its_own(self, name: str) -> None:
        given = base.environment(OURS[name])
        assert all(variable.startswith(PREFIX) for variable in given)
        settings = load_settings(None, given).settings
        assert (settings.region.name, settings.region.number) != (HOME.region.name, HOME.region.number)
        assert settings.region.number != HOME.region.number
        assert (settings.log, settings.features, settings.rpc) == (HOME.log, HOME.features, HOME.rpc)
        assert (settings.model, settings.parameters.shards) == (HOME.model, HOME.parameters.shards)
        assert settings.coordination.url != HOME.coordination.url
        assert settings.coordination.backend == "etcd"
        assert written_shards(settings) == frozenset()

    def test_it_follows_every_parameter_server_of_the_home_region(self, name: str) -> None:
        settings = load_settings(None, base.environment(OURS[name])).settings
        advertised = {
            base.environment(service)["HEADWATER__PARAMETERS__ADVERTISE"]
            for service in base.OURS.values()
            if service["command"][1] == "parameter-server"
        }
        assert set(settings.sync.upstreams) == advertised

    def test_where_it_is_reached_is_its_own_name(self, name: str) -> None:
        settings = load_settings(None, base.environment(OURS[name])).settings
        if OURS[name]["command"][1] == "api":
            assert settings.api.advertise == f"http://{name}:{settings.api.listen.split(':')[1]}"
        else:
            assert settings.parameters.advertise == f"{name}:{settings.parameters.listen.split(':')[1]}"

    def test_its_check_names_itself(self, name: str) -> None:
        _, service, _, process = OURS[name]["command"]
        test = OURS[name]["healthcheck"]["test"]
        assert test[2:] == ["service", "check", "--service", service, "--name", process]

    def test_it_may_do_no_more_than_it_needs(self, name: str) -> None:
        assert (OURS[name]["cap_drop"], OURS[name]["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert "keys:/keys" in OURS[name]["volumes"]

    def test_as_many_servers_run_as_the_settings_say(self, name: str) -> None:
        settings = load_settings(None, base.environment(OURS[name])).settings
        assert settings.parameters.servers == sum("parameter-server" in other for other in OURS)


def test_the_gateway_leads_to_both_apis() -> None:
    environment = EVERY["gateway"]["environment"]
    eu = load_settings(None, base.environment(OURS["api-eu"])).settings
    assert [f"http://{environment[f'HEADWATER_{which}']}" for which in ("NEAR", "FAR")] == [
        HOME.api.advertise,
        eu.api.advertise,
    ]
    configuration = (base.ROOT / "deploy" / "gateway" / "haproxy.cfg").read_text(encoding="utf-8")
    assert {name for name in environment if f'"${{{name}}}"' in configuration} == set(environment)


def test_no_key_stands_in_the_file() -> None:
    assert not re.search(r"[0-9a-f]{64}|hw_(read|write|admin)_\w", TEXT)
