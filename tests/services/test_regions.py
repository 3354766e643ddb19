"""Regions on one machine: what they are called, what their processes read, the numbers and ports that they keep."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.app import main
from services.cli.exits import Exit
from services.cli.running import print_regions, regions_of
from services.settings import Settings, SettingsError, load_settings, parse_address
from services.settings.shards import written_shards
from services.settings.show import to_toml
from services.supervisor.folder import ChildState, PlacesUnreadable, RunFolder
from services.supervisor.places import PlaceBook, Places, port_is_free
from services.supervisor.plan import plan
from services.supervisor.regions import (
    MAX_REGIONS,
    Region,
    Wanted,
    folder_of,
    lay_out,
    read_names,
    read_wanted,
)

DATA = Path("/data")


def settings_of(*overrides: str) -> Settings:
    return load_settings(overrides=[f"data.dir={DATA}", *overrides]).settings


def book(places: Places | None = None, busy: Collection[int] = ()) -> PlaceBook:
    """A book whose draws count up from 20,000; ``busy`` ports are others'."""
    draws = itertools.count(20_000)
    return PlaceBook(places or Places(), lambda _host, port: port not in busy, lambda *_range: next(draws))


def three(*overrides: str, places: PlaceBook | None = None) -> tuple[Region, ...]:
    return lay_out(settings_of(*overrides), Wanted(("home", "eu", "asia")), places or book())


class TestNames:
    def test_by_count(self) -> None:
        assert read_names("1", "home") == ("home",)
        assert read_names("5", "home") == ("home", "eu", "asia", "r4", "r5")

    def test_by_name(self) -> None:
        assert read_names("home, eu,us-1", "home") == ("home", "eu", "us-1")

    @given(st.integers(1, MAX_REGIONS), st.sampled_from(["home", "eu", "asia", "r2", "r5", "x"]))
    def test_are_as_many_as_asked_for_and_differ(self, count: int, home: str) -> None:
        names = read_names(str(count), home)
        assert names[0] == home
        assert len(set(names)) == len(names) == count

    @pytest.mark.parametrize(
        ("regions", "links", "reason"),
        [
            ("0", (), "0 regions"),
            ("65", (), "65 regions"),
            ("home,eu,eu", (), "two regions have one name"),
            ("home,Eu", (), "'Eu' is no name of a region"),
            ("home,", (), "'' is no name of a region"),
            ("home,../x", (), "no name of a region"),
            ("2", ("asia:delay=80ms",), r"\(eu\), not to 'asia'"),
            ("2", ("home:delay=80ms",), "beside home"),
            ("1", ("eu:delay=80ms",), r"\(none\)"),
            ("2", ("eu:delay=80ms", "eu:rate=1mbit"), "two links lead to eu"),
            ("2", ("eu:speed=80ms",), "speed"),
        ],
    )
    def test_what_cannot_be_is_refused(self, regions: str, links: tuple[str, ...], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            read_wanted(regions, links, "home")


class TestLayout:
    def test_one_region_is_the_settings_as_they_are(self) -> None:
        settings = settings_of("parameters.servers=2")
        places = book()
        assert lay_out(settings, Wanted(("home",)), places) == (Region(settings),)
        assert places.places == Places()

    def test_home_stays_as_it_is_but_its_servers_have_known_addresses(self) -> None:
        home = three("parameters.servers=2")[0]
        assert home.settings == settings_of("parameters.servers=2")
        assert home.servers == ("127.0.0.1:20000", "127.0.0.1:20001")

    def test_each_further_region_has_its_own_and_follows_home(self) -> None:
        home, eu, asia = three("parameters.servers=2", "log.partitions=2")
        for number, region in enumerate((eu, asia), 1):
            settings = region.settings
            assert settings.region.number == number
            assert settings.data.dir == DATA / "regions" / region.name
            assert settings.data.shared == DATA
            assert settings.sync.upstreams == home.servers
            assert written_shards(settings) == frozenset()
            assert settings.api.listen == f"127.0.0.1:{8080 + number}"
            assert settings.parameters.servers == 2
            assert (settings.log, settings.model) == (home.settings.log, home.settings.model)
        assert written_shards(home.settings) == {0, 1, 2, 3}

    def test_what_is_set_for_all_reaches_all_but_not_what_is_homes(self) -> None:
        home, eu, _ = three("sync.precision=int8", "sync.writes=all", "api.advertise=http://h:1")
        assert home.settings.sync.writes == "all"
        assert (eu.settings.sync.precision, eu.settings.sync.writes) == ("int8", "auto")
        assert eu.settings.api.advertise is None

    def test_the_settings_of_every_region_are_right_and_read_back(self, tmp_path: Path) -> None:
        for region in three("parameters.servers=2", "api.listen=[::1]:9000"):
            file = tmp_path / f"{region.name}.toml"
            file.write_text(to_toml(region.settings))
            assert load_settings(file).settings == region.settings

    @pytest.mark.parametrize(
        ("listen", "reached"),
        [
            ("127.0.0.1:7400", "127.0.0.1:7400"),
            ("0.0.0.0:7400", "127.0.0.1:7400"),
            ("[::]:7400", "[::1]:7400"),
        ],
    )
    def test_a_port_that_home_names_is_used(self, listen: str, reached: str) -> None:
        home, eu, asia = three(f"parameters.listen={listen}", "rpc.keys=/keys")
        assert home.servers == (listen,)
        assert eu.settings.sync.upstreams == asia.settings.sync.upstreams == (reached,)
        assert parse_address(eu.settings.parameters.listen).port == 0

    def test_home_may_have_another_name_and_number(self) -> None:
        regions = lay_out(settings_of("region.number=7"), Wanted(("us", "eu")), book())
        assert [(one.name, one.settings.region.number) for one in regions] == [("us", 7), ("eu", 8)]

    def test_one_coordination_store_for_all_is_refused(self) -> None:
        with pytest.raises(SettingsError, match="a coordination store of its own"):
            three("coordination.backend=etcd")


class TestPlan:
    def test_names_services_and_regions(self) -> None:
        regions = three("parameters.servers=2")
        specs = [spec for region in regions for spec in plan(region, Path(f"/{region.name}.toml"))]
        assert [(spec.name, spec.region) for spec in specs] == [
            *((name, "home") for name in ("parameter-server-0", "parameter-server-1")),
            *((name, "home") for name in ("processor-0", "trainer-0", "api-0")),
            *((f"{name}@eu", "eu") for name in ("server-0", "server-1", "api")),
            *((f"{name}@asia", "asia") for name in ("server-0", "server-1", "api")),
        ]
        for spec in specs:
            assert f"--config /{spec.region}.toml" in " ".join(spec.command)
            assert spec.command[spec.command.index("--name") + 1] == spec.name

    def test_only_homes_servers_are_told_where_to_listen(self) -> None:
        specs = [spec for region in three("parameters.servers=2") for spec in plan(region, Path("/x"))]
        told = {spec.name: part for spec in specs for part in spec.command if part.startswith("--set")}
        assert told == {
            "parameter-server-0": "--set=parameters.listen=127.0.0.1:20000",
            "parameter-server-1": "--set=parameters.listen=127.0.0.1:20001",
        }


class TestLinks:
    WANTED = read_wanted("3", ["eu:delay=80ms,rate=100mbit"], "home")

    def test_a_region_follows_home_through_its_link_and_another_directly(self) -> None:
        home, eu, asia = lay_out(settings_of(), self.WANTED, book())
        (link,) = home.links["eu"]
        assert (link.name, link.target, link.conditions) == ("eu", home.servers[0], "delay=80ms,rate=100mbit")
        assert eu.settings.sync.upstreams == (link.listen,)
        assert asia.settings.sync.upstreams == home.servers
        assert parse_address(link.listen).port not in (0, parse_address(link.target).port)

    def test_each_server_of_home_has_a_link_of_its_own(self) -> None:
        home, eu, _ = lay_out(settings_of("parameters.servers=2"), self.WANTED, book())
        assert [(link.name, link.target) for link in home.links["eu"]] == [
            ("eu-0", home.servers[0]),
            ("eu-1", home.servers[1]),
        ]
        assert eu.settings.sync.upstreams == tuple(link.listen for link in home.links["eu"])

    def test_one_process_a_region_which_is_told_its_links_alone(self) -> None:
        home, *others = lay_out(settings_of("parameters.servers=2"), self.WANTED, book())
        (spec,) = [spec for spec in plan(home, Path("/home.toml")) if spec.service == "link"]
        assert (spec.name, spec.region) == ("link@eu", "eu")
        overrides = [part.removeprefix("--set=") for part in spec.command if part.startswith("--set=")]
        assert load_settings(overrides=overrides).settings.wan.links == home.links["eu"]
        assert not [spec for one in others for spec in plan(one, Path("/x")) if spec.service == "link"]

    def test_links_of_the_settings_are_homes_alone(self) -> None:
        given_ = 'wan.links=[{name = "mine", target = "127.0.0.1:1"}]'
        home, eu, _ = three(given_)
        assert [spec.name for spec in plan(home, Path("/x")) if spec.service == "link"] == ["link-0"]
        assert eu.settings.wan.links == ()


class TestPlaces:
    def test_are_kept_over_restarts_also_of_regions_that_pause(self) -> None:
        first = book()
        before = three(places=first)
        without_eu = book(first.places)
        lay_out(settings_of(), Wanted(("home", "asia")), without_eu)
        assert without_eu.places == first.places
        assert three(places=book(without_eu.places)) == before

    def test_a_number_is_never_given_to_another(self) -> None:
        first = book()
        three(places=first)
        later = book(first.places)
        (_, us) = lay_out(settings_of(), Wanted(("home", "us")), later)
        assert us.settings.region.number == 3
        with pytest.raises(SettingsError, match="1 is the number of region eu"):
            lay_out(settings_of("region.number=1"), Wanted(("home", "eu")), later)

    def test_numbers_end(self) -> None:
        with pytest.raises(SettingsError, match="no number is left for region eu"):
            lay_out(settings_of("region.number=255"), Wanted(("home", "eu")), book())

    def test_what_another_took_is_chosen_anew(self) -> None:
        first = book()
        before = three("api.listen=127.0.0.1:0", places=first)
        server = parse_address(before[0].servers[0]).port
        after = three("api.listen=127.0.0.1:0", places=book(first.places, {server}))
        assert after[0].servers != before[0].servers
        assert after[1].settings.sync.upstreams == after[0].servers
        assert after[1].settings.api.listen == before[1].settings.api.listen

    def test_apis_come_after_homes_at_the_next_free_ports(self) -> None:
        _, eu, asia = three("api.listen=127.0.0.1:9000", places=book(busy={9001}))
        assert [parse_address(one.settings.api.listen).port for one in (eu, asia)] == [9002, 9003]

    def test_no_port_twice(self) -> None:
        same = PlaceBook(Places(), lambda _host, _port: True, lambda *_range: 20_000)
        assert same.port("a", "127.0.0.1") == 20_000
        with pytest.raises(OSError, match="no port for b") as caught:
            same.port("b", "127.0.0.1")
        assert caught.value.errno == errno.EADDRINUSE

    @pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
    def test_a_port_is_free_when_nobody_listens(self, family: socket.AddressFamily, host: str) -> None:
        with socket.create_server((host, 0), family=family) as listener:
            port = listener.getsockname()[1]
            assert not port_is_free(host, port)
        assert port_is_free(host, port)

    def test_are_written_and_read(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path)
        assert folder.places() == Places()
        places = book()
        three(places=places)
        folder.write_places(places.places)
        assert RunFolder(tmp_path).places() == places.places
        (tmp_path / "run" / "regions.json").write_text("{")
        with pytest.raises(PlacesUnreadable, match=r"regions\.json cannot be read"):
            folder.places()


class TestCommands:
    def run(self, *arguments: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return ended.value.code

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (("--regions=none at all",), "'none at all' is no name of a region"),
            (("--regions=2", "--link=asia:delay=80ms"), "(eu), not to 'asia'"),
            (("--link=eu:delay=80ms",), "beside home"),
        ],
    )
    def test_regions_that_cannot_be_are_told_before_anything_starts(
        self, options: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run("up", f"--set=data.dir={tmp_path / 'data'}", *options) == Exit.USAGE
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "data").exists()

    def test_a_region_is_not_stopped_without_the_others(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with RunFolder(tmp_path).locked():
            code = self.run("down", f"--set=data.dir={tmp_path}", "--set=region.name=eu")
        assert code == Exit.NOT_RUNNING
        assert "region eu runs as part of a stack" in capsys.readouterr().err


class TestShown:
    def children(self, *names: str) -> list[ChildState]:
        return [
            ChildState(
                name,
                "api" if name.startswith("api") else "parameter-server",
                "ready",
                0,
                address="http://h:1" if name == "api-0" else "h:2",
                region=name.partition("@")[2] or "home",
            )
            for name in names
        ]

    def test_each_region_has_the_url_of_its_api_and_its_settings(self, tmp_path: Path) -> None:
        settings = load_settings(overrides=[f"data.dir={tmp_path}"]).settings
        RunFolder(tmp_path).write_settings("")
        RunFolder(folder_of(tmp_path, "eu")).write_settings("")
        regions = regions_of(settings, self.children("api-0", "api@eu", "server-0@asia"))
        assert [(region.name, region.url) for region in regions] == [
            ("home", "http://h:1"),
            ("eu", "http://h:2"),
            ("asia", ""),
        ]
        files = [region.settings and region.settings.relative_to(tmp_path) for region in regions]
        assert files == [Path("run/settings.toml"), Path("regions/eu/run/settings.toml"), None]

    def test_one_region_needs_no_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        settings = settings_of()
        print_regions(regions_of(settings, self.children("api-0")))
        assert capsys.readouterr().out == ""
        print_regions(regions_of(settings, self.children("api-0", "server-0@asia")))
        assert "not ready" in capsys.readouterr().out
