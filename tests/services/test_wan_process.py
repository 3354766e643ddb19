"""The process of links: its settings, ``headwater link`` against it, who may control it, its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.rpc import serving
from support.service_process import Running, service
from support.wan import connect, listening, until

from services.backends import open_security
from services.cli.app import main
from services.cli.exits import Exit
from services.cli.failures import code_of
from services.coordination.membership import Member, members
from services.coordination.sqlite import SqliteCoordination
from services.rpc import KeyPair, NoAnswer, Outgoing, RemoteFailure, RpcClient, Security
from services.rpc.codec import Failure
from services.rpc.keys import create_keys
from services.settings.load import load_settings
from services.settings.model import DataSettings, LinkSettings, Settings, WanSettings
from services.settings.problems import SettingsError
from services.settings.show import defaults_toml, to_toml
from services.supervisor.plan import plan
from services.supervisor.regions import Region
from services.wan.conditions import LinkConditions
from services.wan.control import MALFORMED, SERVICE, Command, metrics, order
from services.wan.main import link_plans
from services.wan.types import AddressUnusable, LinkPlan

FILE = """
[data]
dir = "ours"

[wan]
control = "127.0.0.1:7002"

[[wan.links]]
name = "eu"
target = "127.0.0.1:7000"
conditions = "delay=80ms,rate=100mbit"

[[wan.links]]
name = "us"
listen = "127.0.0.1:7001"
target = "host.example:7000"
back = "delay=1s"
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "headwater.toml"
    file.write_text(text)
    return file


class TestSettings:
    def test_tables_of_a_file(self, tmp_path: Path) -> None:
        loaded = load_settings(write(tmp_path, FILE))
        wan = loaded.settings.wan
        assert [link.name for link in wan.links] == ["eu", "us"]
        assert wan.control == "127.0.0.1:7002"
        assert str(loaded.origins["wan.links"]).endswith("line 8")
        assert link_plans(wan) == (
            LinkPlan(
                "eu", "127.0.0.1:7000", LinkConditions(0.08, 0.0, 100e6), LinkConditions(0.08, 0.0, 100e6)
            ),
            LinkPlan("us", "host.example:7000", back=LinkConditions(1.0), listen="127.0.0.1:7001"),
        )

    def test_they_read_back(self, tmp_path: Path) -> None:
        settings = load_settings(write(tmp_path, FILE)).settings
        assert load_settings(write(tmp_path, to_toml(settings))).settings == settings
        assert "# links = []" in defaults_toml()

    def test_from_the_environment_and_a_flag(self) -> None:
        text = '[{name = "eu", target = "127.0.0.1:7000", conditions = "delay=1ms"}]'
        expected = (LinkSettings(name="eu", target="127.0.0.1:7000", conditions="delay=1ms"),)
        assert load_settings(None, {"HEADWATER__WAN__LINKS": text}).settings.wan.links == expected
        assert load_settings(overrides=[f"wan.links={text}"]).settings.wan.links == expected

    @pytest.mark.parametrize(
        ("links", "said"),
        [
            ("eu", "not a TOML list of tables"),
            ('["eu"]', "dictionary"),
            ('[{name = "eu"}]', "target: Field required"),
            ('[{name = "eu", target = "h:1", conditons = ""}]', "conditons: Extra"),
            ('[{name = "EU", target = "h:1"}]', "name: String should match"),
            ('[{name = "eu", target = "h"}]', "target = 'h' is not HOST:PORT"),
            ('[{name = "eu", target = "h:0"}]', "has no port"),
            ('[{name = "eu", target = "h:1", listen = "x"}]', "listen = 'x' is not HOST:PORT"),
            ('[{name = "eu", target = "h:1", conditions = "dely=1ms"}]', "delay, jitter, rate, queue"),
            ('[{name = "eu", target = "h:1", back = "rate=1mb"}]', "kbit, mbit, gbit"),
            ('[{name = "eu", target = "h:1"}, {name = "eu", target = "h:1"}]', "another link has this name"),
            (
                '[{name = "a", target = "h:1", listen = "127.0.0.1:9"},'
                ' {name = "b", target = "h:1", listen = "127.0.0.1:9"}]',
                "another link listens at 127.0.0.1:9",
            ),
            ('[{name = "eu", target = "h:1", listen = "0.0.0.0:9"}]', "others could reach this address"),
        ],
    )
    def test_refusals(self, links: str, said: str) -> None:
        with pytest.raises(SettingsError) as refused:
            load_settings(overrides=[f"wan.links={links}"])
        (problem,) = refused.value.problems
        assert problem.name == "wan.links"
        assert said in problem.reason

    def test_control_beyond_this_machine_needs_keys(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="no keys"):
            load_settings(overrides=["wan.control=0.0.0.0:7000"])
        overrides = ["wan.control=0.0.0.0:7000", f"rpc.keys={tmp_path}"]
        assert load_settings(overrides=overrides).settings.wan.control == "0.0.0.0:7000"

    def test_a_supervisor_starts_it_only_where_there_are_links(self) -> None:
        def services(settings: Settings) -> list[str]:
            return [child.service for child in plan(Region(settings), Path("/x.toml"))]

        linked = Settings(wan=WanSettings(links=(LinkSettings(name="eu", target="h:1"),)))
        assert services(linked).count("link") == 1
        assert "link" not in services(Settings())


class Headwater:
    """Runs ``headwater`` with the settings of a file in this process, and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str, code: int = Exit.OK) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        self.out, self.err = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, self.err
        return self.out + self.err

    def link(self, *arguments: str) -> dict[str, Any]:
        """The first link that is printed as JSON."""
        self("link", *arguments, "--format=json")
        found: dict[str, Any] = json.loads(self.out)["links"][0]
        return found


@pytest.fixture
def headwater(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Headwater:
    for name in [name for name in os.environ if name.startswith("HEADWATER")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Headwater(capsys)


@pytest.fixture(params=["clear", "keys"])
def settings(request: pytest.FixtureRequest, headwater: Headwater, tmp_path: Path) -> Iterator[Settings]:
    """Of a process with two links to an echoing server; the file that says so is where the command looks."""
    with listening() as server:
        text = f'[data]\ndir = "{tmp_path / "data"}"\n'
        if request.param == "keys":
            create_keys(tmp_path / "keys")
            text += f'[rpc]\nkeys = "{tmp_path / "keys"}"\n'
        for name in ("eu", "us"):
            text += f'[[wan.links]]\nname = "{name}"\ntarget = "{server.address}"\nconditions = "delay=2ms"\n'
        yield load_settings(write(tmp_path, text)).settings


def the_member(settings: Settings) -> Member:
    with closing(SqliteCoordination(settings.data.dir / "coordination.db")) as store:
        (member,) = members(store, SERVICE)
    return member


def wait_ready(settings: Settings) -> Member:
    with closing(SqliteCoordination(settings.data.dir / "coordination.db")) as store:
        until(lambda: any(member.ready for member in members(store, SERVICE)))
    return the_member(settings)


def test_it_is_controlled_while_it_runs(settings: Settings, headwater: Headwater) -> None:
    with service("link-0", settings):
        wait_ready(settings)
        assert "name=eu target=" in headwater("config", "show")
        shown = headwater("link", "show")
        assert "eu" in shown
        assert "delay=2ms" in shown
        assert [headwater.link("show", name)["name"] for name in ("eu", "us")] == ["eu", "us"]
        address = headwater.link("show", "eu")["address"]
        with connect(address) as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            changed = headwater.link("set", "eu", "rate=1mbit", "--direction=back")
            assert (changed["forward"]["conditions"], changed["back"]["conditions"]) == (
                "delay=2ms",
                "rate=1mbit",
            )
            assert headwater.link("set", "eu", "")["back"]["conditions"] == ""
            assert headwater.link("partition", "eu")["partitioned"] is True
            assert "partitioned" in headwater("link", "show", "eu")
            client.sendall(b"y")
            assert headwater.link("heal", "eu")["partitioned"] is False
            assert client.recv(1) == b"y"
            assert headwater.link("show", "eu")["connections"] == 1
            headwater("link", "reset", "eu")
            assert "connections broken: 1" in headwater.err
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert headwater.link("show", "us")["connections_total"] == 0
        for action in (("heal",), ("set", "delay=1ms"), ("show",)):
            told = headwater("link", action[0], "asia", *action[1:], code=Exit.USAGE)
            assert "there is no link 'asia'; there are: eu, us" in told
        told = headwater("link", "set", "eu", "dely=1ms", code=Exit.USAGE)
        assert "delay, jitter, rate, queue" in told
        assert "PASS  link-0" in headwater("service", "check")
    told = headwater("link", "show", code=Exit.NOT_RUNNING)
    assert "headwater service link" in told


def test_only_who_has_the_keys_controls_it(settings: Settings) -> None:
    ours = open_security(settings)
    with service("link-0", settings), closing(RpcClient(ours)) as client:
        address = wait_ready(settings).address
        assert len(order(client, address, "show", Command()).links) == 2
        strangers: list[Security | None] = []
        if ours is not None:
            strangers = [None, Security(ours.server_public, KeyPair.generate())]
        for security in strangers:
            with closing(RpcClient(security)) as stranger, pytest.raises(NoAnswer):
                order(stranger, address, "partition", Command("eu"), timeout_s=0.5)
        assert not any(link.partitioned for link in order(client, address, "show", Command()).links)


def test_metrics_and_bad_calls(tmp_path: Path) -> None:
    link = LinkSettings(name="eu", target="127.0.0.1:9", conditions="rate=1mbit")
    settings = Settings(data=DataSettings(dir=tmp_path), wan=WanSettings(links=(link,)))
    with service("link-0", settings), closing(RpcClient()) as client:
        address = wait_ready(settings).address
        text = metrics(client, address)
        assert 'headwater_link_bytes_total{direction="forward",link="eu"} 0.0' in text
        assert 'headwater_link_bound_bytes{direction="back",link="eu"} 262144.0' in text
        assert 'headwater_link_connections{link="eu"} 0.0' in text
        for outgoing, code in (
            (Outgoing("show", b"\xc1"), MALFORMED),
            (Outgoing("set", b""), MALFORMED),
            (Outgoing("drop", b"\x80"), "unknown-method"),
        ):
            answer = client.exchange({address: outgoing}, 5.0)[address]
            assert isinstance(answer, Failure)
            assert answer.code == code
        with pytest.raises(RemoteFailure, match="unknown-link"):
            order(client, address, "reset", Command("us"))
        with pytest.raises(RemoteFailure, match="unusable"):
            order(client, address, "set", Command("eu", forward="delay=-1ms"))
        assert len(order(client, address, "show", Command()).links) == 1


def test_a_port_that_is_taken_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    with serving() as (_, address):
        link = LinkSettings(name="eu", target="127.0.0.1:9", listen=address)
        settings = Settings(data=DataSettings(dir=tmp_path), wan=WanSettings(links=(link,)))
        running = Running("link", "link-0", settings)
        running.start()
        until(running.died)
        assert running.stop() != 0
    assert f"AddressUnusable: link eu cannot listen at {address}" in running.output.read_text()
    assert code_of(AddressUnusable("taken")) is Exit.SETTINGS
