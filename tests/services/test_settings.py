"""Settings: four sources and one parser, errors that say what to do, values that read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.settings.catalogue import catalogue
from services.settings.checks import Address, parse_address
from services.settings.keys import hash_key, new_key
from services.settings.load import Loaded, load_settings
from services.settings.problems import SettingProblem, SettingsError
from services.settings.shards import parse_writes, written_shards
from services.settings.show import _readable, defaults_toml, shown, to_toml
from services.settings.units import parse_duration, parse_size

HASHED = "read:" + "a" * 64


def problems_of(
    file: Path | None = None, environ: dict[str, str] | None = None, overrides: tuple[str, ...] = ()
) -> tuple[SettingProblem, ...]:
    with pytest.raises(SettingsError) as caught:
        load_settings(file, environ, overrides)
    return caught.value.problems


def write(folder: Path, text: str) -> Path:
    file = folder / "headwater.toml"
    file.write_text(text, encoding="utf-8")
    return file


class TestPrecedence:
    FILE = "[log]\npartitions = 2\nretention = '1d'\n[trainer]\ncount = 2\n"

    def load(self, folder: Path) -> Loaded:
        environ = {"HEADWATER__LOG__PARTITIONS": "3", "HEADWATER__LOG__RETENTION": "2d", "HOME": "/root"}
        return load_settings(write(folder, self.FILE), environ, ["log.partitions=4"])

    def test_later_sources_win(self, tmp_path: Path) -> None:
        settings = self.load(tmp_path).settings
        assert settings.log.partitions == 4
        assert settings.log.retention == 2 * 86_400
        assert settings.trainer.count == 2
        assert settings.processor.count == 1

    def test_origins_name_the_source(self, tmp_path: Path) -> None:
        origins = {name: str(origin) for name, origin in self.load(tmp_path).origins.items()}
        assert origins["log.partitions"] == "flag --set log.partitions"
        assert origins["log.retention"] == "environment HEADWATER__LOG__RETENTION"
        assert origins["trainer.count"] == f"file {tmp_path / 'headwater.toml'}, line 5"
        assert origins["processor.count"] == "default"
        assert set(origins) == {key.name for key in catalogue()}

    def test_the_last_of_two_flags_wins(self) -> None:
        assert load_settings(overrides=["log.partitions=4", "log.partitions=5"]).settings.log.partitions == 5


@pytest.mark.parametrize(
    ("override", "section", "key", "expected"),
    [
        ("api.deadline=30", "api", "deadline", 30.0),
        ("api.deadline=1.5", "api", "deadline", 1.5),
        ("api.deadline=250ms", "api", "deadline", 0.25),
        ("api.max_body=1MiB", "api", "max_body", 2**20),
        ("api.max_body=4096", "api", "max_body", 4_096),
        ("features.offline=false", "features", "offline", False),
        ("features.schema_file=", "features", "schema_file", None),
        ("features.schema_file=a=b.toml", "features", "schema_file", Path("a=b.toml")),
        ("processor.positive_actions=like, save", "processor", "positive_actions", ("like", "save")),
        ('processor.positive_actions=["a,b", "c"]', "processor", "positive_actions", ("a,b", "c")),
        ("log.servers=9092", "log", "servers", "9092"),
        ("model.seed=-3", "model", "seed", -3),
    ],
)
def test_text_is_read_by_the_kind_of_its_setting(
    override: str, section: str, key: str, expected: object
) -> None:
    assert getattr(getattr(load_settings(overrides=[override]).settings, section), key) == expected


class TestRefusals:
    def test_all_problems_at_once_each_with_its_origin(self, tmp_path: Path) -> None:
        file = write(tmp_path, "[log]\npartitions = 0\n")
        found = problems_of(file, {"HEADWATER__LOG__BACKEND": "kafk"}, ("api.dedline=1s", "trainer.nice=77"))
        origins = {problem.name: problem.origin for problem in found}
        assert origins == {
            "log.partitions": f"file {file}, line 2",
            "log.backend": "environment HEADWATER__LOG__BACKEND",
            "api.dedline": "flag --set api.dedline",
            "trainer.nice": "flag --set trainer.nice",
        }

    @pytest.mark.parametrize(
        ("name", "suggested"),
        [
            ("log.partition", "log.partitions"),
            ("logs.partitions", "log.partitions"),
            ("partitions", "log.partitions"),
            ("api.deadlin", "api.deadline"),
        ],
    )
    def test_unknown_names_get_a_suggestion(self, name: str, suggested: str) -> None:
        (problem,) = problems_of(overrides=(f"{name}=3",))
        assert problem.suggestion == f"did you mean {suggested}?"

    def test_what_is_allowed_and_the_nearest_choice_are_named(self) -> None:
        (problem,) = problems_of(overrides=("log.backend=kafak",))
        assert problem.allowed == "one of sqlite, kafka"
        assert problem.suggestion == "did you mean kafka?"
        assert "'kafak'" in str(problem)

    @pytest.mark.parametrize(
        "override",
        [
            "log.partitions=2.5", "log.partitions=many", "log.partitions=", "api.deadline=0s",
            "api.deadline=-1", "api.deadline=nan", "api.deadline=inf", "api.deadline=3 parsecs",
            "api.max_body=1XB", "features.offline=maybe", "model.name=Main", "model.temperature=0",
            'api.keys=["a', "api.listen=8080", "api.listen=127.0.0.1:99999", "api.listen=::1:8080",
            "log.partitions",
        ],
    )  # fmt: skip
    def test_wrong_values(self, override: str) -> None:
        (problem,) = problems_of(overrides=(override,))
        assert problem.name == override.split("=")[0]

    @pytest.mark.parametrize("text", ["[log]\npartitions = true\n", "[log]\npartitions = [1]\n", "log = 3\n"])
    def test_wrong_toml_types(self, tmp_path: Path, text: str) -> None:
        assert len(problems_of(write(tmp_path, text))) == 1

    def test_broken_or_missing_file(self, tmp_path: Path) -> None:
        (broken,) = problems_of(write(tmp_path, "[log\n"))
        assert "line 1" in broken.reason
        (missing,) = problems_of(tmp_path / "none.toml")
        assert "No such file" in missing.reason

    def test_secrets_are_masked_in_messages(self) -> None:
        for override in ("api.keys=hunter2", "features.urls=redis://:hunter2@h", "api.keyz=hunter2"):
            assert "hunter2" not in "".join(map(str, problems_of(overrides=(override,))))

    @pytest.mark.parametrize("listen", ["0.0.0.0:8080", "192.168.1.4:80", "[::]:80", "example.org:80"])
    def test_an_open_address_needs_a_key(self, listen: str) -> None:
        (problem,) = problems_of(overrides=(f"api.listen={listen}",))
        assert (problem.name, problem.origin) == ("api.listen", "flag --set api.listen")
        assert load_settings(overrides=[f"api.listen={listen}", f"api.keys={HASHED}"]).settings.api.keys

    @pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.9.1:80", "localhost:80", "[::1]:80"])
    def test_loopback_needs_none(self, listen: str) -> None:
        assert load_settings(overrides=[f"api.listen={listen}"]).settings.api.listen == listen


def test_keys_verify_by_their_hash_and_differ() -> None:
    key, hashed = new_key("write")
    assert hashed == f"write:{hash_key(key)}"
    assert load_settings(overrides=[f"api.keys={hashed}"]).settings.api.keys[0].get_secret_value() == hashed
    assert new_key("write")[0] != key
    with pytest.raises(ValueError, match="root"):
        new_key("root")


class TestShowing:
    def test_secrets_are_masked(self) -> None:
        loaded = load_settings(overrides=[f"api.keys={HASHED}", "features.url=redis://:hunter2@h/0"])
        rows = {row.name: row for row in shown(loaded)}
        assert rows["api.keys"].value == ["**********"]
        assert rows["features.url"].value == "**********"
        assert rows["features.url"].origin == "flag --set features.url"

    def test_toml_reads_back_secrets_included(self, tmp_path: Path) -> None:
        given_ = ['features.url=redis://:p"\\\u00e9\x7f@h/0', f"api.keys={HASHED}", "api.deadline=125ms"]
        settings = load_settings(overrides=given_).settings
        assert load_settings(write(tmp_path, to_toml(settings))).settings == settings

    def test_the_file_to_start_from_holds_the_defaults(self, tmp_path: Path) -> None:
        text = defaults_toml()
        assert load_settings(write(tmp_path, text)).settings == load_settings().settings
        uncommented = re.sub(r"(?m)^# (\w+ = )", r"\1", text)
        loaded = load_settings(write(tmp_path, uncommented))
        assert loaded.settings == load_settings().settings
        assert all(origin.kind == "file" for origin in loaded.origins.values())


KEYS: Final = {key.name: key for key in catalogue()}


@given(st.floats(0.0, 1e9) | st.integers(0, 10**9).map(float))
@example(0.0)
@example(5e-324)
def test_a_shown_duration_reads_back_as_it_is(seconds: float) -> None:
    text = _readable(KEYS["sync.max_behind"], seconds)
    assert isinstance(text, str)
    assert parse_duration(text) == seconds


@given(st.integers(0, 2**50))
def test_a_shown_size_reads_back_as_it_is(size: int) -> None:
    text = _readable(KEYS["sync.max_bandwidth"], size)
    assert isinstance(text, str)
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(60.0, "1m"), (90.0, "90s"), (0.005, "5ms"), (1.5, "1500ms"), (0.0005, "500us"), (0.0, "0s")],
)
def test_durations_are_shown_with_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert _readable(KEYS["sync.max_behind"], seconds) == text


@given(st.integers(1, 10**9), st.sampled_from(["us", "ms", "s", "m", "h", "d"]))
def test_durations_scale_by_their_unit(number: int, unit: str) -> None:
    seconds = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}[unit]
    assert parse_duration(f"{number}{unit}") == pytest.approx(number * seconds)
    assert parse_size(f"{number}KiB") == number * 1_024


@given(st.integers(0, 65_535), st.sampled_from(["127.0.0.1", "::1", "example.org", "0.0.0.0"]))
def test_addresses_read_back(port: int, host: str) -> None:
    address = Address(host, port)
    assert parse_address(str(address)) == address


def test_each_trainer_needs_a_partition() -> None:
    assert load_settings(overrides=["trainer.count=3", "log.partitions=3"]).settings.trainer.count == 3
    (problem,) = problems_of(None, {}, ("trainer.count=3", "log.partitions=2"))
    assert problem.name == "trainer.count"
    assert problem.suggestion.startswith("set log.partitions=3")


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (("parameters.replicas=2",), "parameters.servers=2"),
        (
            ("parameters.servers=3", "parameters.replicas=2", "parameters.replication=quorum"),
            "parameters.replication=chain",
        ),
    ],
)
def test_replicas_that_cannot_be_are_refused_with_what_can(overrides: tuple[str, ...], advice: str) -> None:
    (problem,) = problems_of(None, {}, overrides)
    assert problem.name == "parameters.replicas"
    assert advice in problem.suggestion


class TestRegions:
    UPSTREAM = "sync.upstreams=127.0.0.1:7400, [::1]:7400"

    @pytest.mark.parametrize(
        ("overrides", "written"),
        [
            ((), {0, 1, 2, 3}),
            ((UPSTREAM,), set()),
            ((UPSTREAM, "sync.writes=all"), {0, 1, 2, 3}),
            ((UPSTREAM, "sync.writes=none"), set()),
            ((UPSTREAM, "sync.writes=0-1, 3"), {0, 1, 3}),
            ((UPSTREAM, "sync.writes=9,2-4", "parameters.shards=10"), {2, 3, 4, 9}),
        ],
    )
    def test_which_shards_a_region_writes(self, overrides: tuple[str, ...], written: set[int]) -> None:
        assert written_shards(load_settings(overrides=overrides).settings) == written

    @pytest.mark.parametrize(
        ("writes", "reason"),
        [
            ("some", "neither a shard nor a range"),
            ("1,,2", "neither a shard nor a range"),
            ("-1", "neither a shard nor a range"),
            ("\u0661", "neither a shard nor a range"),
            ("3-1", "ends before it begins"),
            ("2-4", "there is no shard 4"),
        ],
    )
    def test_shards_that_are_not_there(self, writes: str, reason: str) -> None:
        (problem,) = problems_of(overrides=(self.UPSTREAM, f"sync.writes={writes}"))
        assert problem.name == "sync.writes"
        assert reason in problem.reason

    @given(st.sets(st.integers(0, 30), min_size=1))
    def test_any_set_of_shards_reads_back(self, shards: set[int]) -> None:
        assert parse_writes(",".join(map(str, shards)), 31) == shards

    @pytest.mark.parametrize("writes", ["none", "0-2"])
    def test_what_nobody_writes_is_refused_where_nobody_is_followed(self, writes: str) -> None:
        (problem,) = problems_of(overrides=(f"sync.writes={writes}",))
        assert problem.name == "sync.writes"
        assert "sync.upstreams" in problem.suggestion

    @pytest.mark.parametrize(
        ("upstreams", "reason"),
        [
            ("7400", "is not HOST:PORT"),
            ("127.0.0.1:0", "no address to connect to"),
            ("127.0.0.1:7400,127.0.0.1:7400", "stands here twice"),
            ("10.0.0.1:7400", "this is another machine, and calls between processes have no keys"),
        ],
    )
    def test_upstreams_are_addresses_that_may_be_called(self, upstreams: str, reason: str) -> None:
        (problem,) = problems_of(overrides=(f"sync.upstreams={upstreams}",))
        assert (problem.name, problem.origin) == ("sync.upstreams", "flag --set sync.upstreams")
        assert reason in problem.reason

    @pytest.mark.parametrize("where", ["listen", "advertise"])
    def test_no_region_follows_itself(self, where: str) -> None:
        own = (f"parameters.{where}=127.0.0.1:7400", "sync.upstreams=127.0.0.1:7399, 127.0.0.1:7400")
        (problem,) = problems_of(overrides=own)
        assert (problem.name, problem.value) == ("sync.upstreams", "127.0.0.1:7400")
        assert "own parameter server" in problem.reason

    def test_with_keys_other_machines_are_upstreams(self) -> None:
        given_ = ["sync.upstreams=10.0.0.1:7400", "rpc.keys=/keys"]
        assert load_settings(overrides=given_).settings.sync.upstreams == ("10.0.0.1:7400",)

    @pytest.mark.parametrize(
        "override", ["region.name=EU", "region.name=", "region.number=256", "sync.window=0"]
    )
    def test_wrong_values(self, override: str) -> None:
        (problem,) = problems_of(overrides=(override,))
        assert problem.name == override.split("=")[0]
