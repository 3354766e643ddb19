"""``deploy/compose.metrics.yml`` and what Prometheus is told, by reading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from services.federation.certificates import AUTHORITY
from services.federation.metrics import FederationMetrics
from services.settings.load import load_settings
from tests.services import test_compose as base

DEPLOY: Final = base.ROOT / "deploy"
SERVICE: Final[Mapping[str, Any]] = yaml.safe_load((DEPLOY / "compose.metrics.yml").read_text())["services"][
    "prometheus"
]
JOBS: Final[Mapping[str, Any]] = {
    job["job_name"]: job
    for job in yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
}
RULES: Final[list[Mapping[str, Any]]] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())[
    "groups"
][0]["rules"]


def test_it_is_pinned_bounded_and_on_loopback() -> None:
    assert re.fullmatch(r"prom/prometheus:v\d+\.\d+\.\d+", SERVICE["image"])
    assert all(base.interpolated(port, {}).startswith("127.0.0.1:") for port in SERVICE["ports"])
    assert (SERVICE["cap_drop"], SERVICE["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert any(word.startswith("--storage.tsdb.retention.size=") for word in SERVICE["command"])


def test_its_files_are_there_and_mounted_where_it_looks() -> None:
    mounted = dict(volume.split(":")[:2] for volume in SERVICE["volumes"])
    files = {source: target for source, target in mounted.items() if source.startswith("./")}
    assert all((base.ROOT / source).is_file() for source in files)
    assert {Path(source).name for source in files} == {
        path.name for path in (DEPLOY / "prometheus").iterdir()
    }
    assert f"--config.file={files['./deploy/prometheus/prometheus.yml']}" in SERVICE["command"]


def test_everybody_who_answers_over_http_is_watched() -> None:
    watched = {
        job: {target for group in of["static_configs"] for target in group["targets"]}
        for job, of in JOBS.items()
    }
    api = load_settings(None, base.environment(base.EVERY["api"])).settings.api
    servers = {
        load_settings(None, base.environment(service)).settings.federation.advertise
        for service in base.FEDERATION.values()
    }
    assert {f"http://{target}" for target in watched["headwater-api"]} == {api.advertise}
    assert {f"https://{target}" for target in watched["headwater-federation"]} == servers


def test_it_knows_the_authority_of_the_servers() -> None:
    federation = load_settings(None, base.environment(base.EVERY["federation-0"])).settings.federation
    assert federation.certificate is not None
    tls = JOBS["headwater-federation"]["tls_config"]
    assert tls == {"ca_file": str(federation.certificate.with_name(AUTHORITY))}
    assert "federation:/federation:ro" in SERVICE["volumes"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_is_about_what_there_is(rule: Mapping[str, Any]) -> None:
    named = set(re.findall(r"\bheadwater_\w+", rule["expr"]))
    shown = FederationMetrics().render().decode()
    assert all(re.search(rf"^# TYPE {name} ", shown, re.MULTILINE) for name in named), named
    assert set(re.findall(r'job="([\w-]+)"', rule["expr"])) <= JOBS.keys()
    assert rule["annotations"]["summary"]
