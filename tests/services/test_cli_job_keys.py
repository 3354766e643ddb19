"""``headwater fl keys``, and what a job's file is told that holds something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from federated.job import FederatedJob, read_job
from federated.job_keys import DERIVED, JobKey, job_keys, keys_of
from federated.job_sections import KINDS, JobRefused
from federated.job_texts import SECTIONS, TEXTS
from federated.simulator.population import Habits
from federated.strategies import make_strategy
from services.cli.app import main
from services.cli.exits import Exit
from services.cli.failures import code_of

Run = Callable[..., tuple[int, str, str]]
ROUNDS: dict[str, dict[str, Any]] = {
    "rounds": {"start_fl_job_threshold": 4},
    "data": {"clients": 9, "features": 7, "classes": 7},
}


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process and gives its code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(("fl", "keys", *arguments))
        printed = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), printed.out, printed.err

    return run


class TestTheList:
    def test_every_field_of_every_section_is_a_key_or_derived(self) -> None:
        listed = {(key.section, key.key) for key in job_keys()}
        for section, kind in KINDS.items():
            for field in dataclasses.fields(kind):
                assert ((section, field.name) in listed) != ((section, "", field.name) in DERIVED), field.name
        assert {field.name for field in dataclasses.fields(FederatedJob)} == {
            section for section, _ in listed
        }
        assert all(("simulation", f"habits.{field.name}") in listed for field in dataclasses.fields(Habits))

    def test_the_table_of_texts_holds_all_and_nothing_else(self) -> None:
        assert set(SECTIONS) == {key.section for key in job_keys()}
        unused = [place for place, text in TEXTS.items() if text not in {key.doc for key in job_keys()}]
        assert unused == []
        assert {place.partition(".")[0] for place in TEXTS} == set(SECTIONS)

    @pytest.mark.parametrize("text", [*TEXTS.values(), *SECTIONS.values()])
    def test_each_text_is_one_sentence(self, text: str) -> None:
        assert text.endswith(".")
        assert ". " not in text.removesuffix(".").replace("...", "")
        assert text[0].isupper()

    @pytest.mark.parametrize("key", job_keys(), ids=lambda key: f"{key.section}.{key.key}.{'+'.join(key.of)}")
    def test_a_job_takes_each_key_with_its_default_and_its_choices(self, key: JobKey) -> None:
        usual = {"population": 9, "bound": 1.0}.get(key.key) if key.needed else key.default
        values = [*([usual] if usual is not None else []), *key.choices]
        for value in values:
            for whose in key.of or ("",):
                taken_by(key, whose, list(value) if isinstance(value, tuple) else value)

    def test_what_is_derived_is_refused(self) -> None:
        for section, whose, field in DERIVED - {("simulation", "", "habits")}:
            if section == "selection":
                continue  # a rule that counts nothing has no use for its window
            tables = ROUNDS | {"strategy": {"name": whose, field: 9}}
            if section == "rounds":
                tables = ROUNDS | {"rounds": {**ROUNDS["rounds"], field: 9}}
            made = read_job(tables)
            make = partial(made.make_rounds, 10) if section == "rounds" else made.make_strategy
            with pytest.raises(JobRefused, match=field.removeprefix("server_")):
                make()

    def test_options_say_whose_they_are(self) -> None:
        rates = {key.of: key.default for key in keys_of("strategy") if key.key == "server_rate"}
        assert rates[("fedadam", "fedyogi", "fedadagrad")] == make_strategy("fedadam").server_rate
        assert [key.of for key in keys_of("selection") if key.key == "window"] == [("fairness",)]
        assert [key.of for key in keys_of("strategy") if key.needed] == [("scaffold",), ("norm_bound",)]


def taken_by(key: JobKey, whose: str, value: object) -> None:
    """Raise JobRefused unless a job reads ``key`` and makes what it is of."""
    section = key.section
    if section in KINDS:
        table: dict[str, Any] = {key.key: value}
        if key.key.startswith("habits."):
            table = {"habits": {key.key.removeprefix("habits."): value}}
        if key.key == "start_fl_job_threshold" or value == "cross_silo":
            table |= {"kind": "cross_silo", "members": ["a", "b", "c", "d"]}  # who need no threshold
        read_job({**ROUNDS, section: {**ROUNDS.get(section, {}), **table}})
        return
    if key.key == "name":
        needed = {"bound": 1.0} if value == "norm_bound" else {}
        table = {"name": value, **needed}
    else:
        name, _, objective = whose.partition("/")
        more: dict[str, Any] = {"objective": objective} if objective else {}
        if name == "norm_bound":
            more["bound"] = 1.0
        table = {"name": name, **more, key.key: value}
    made = read_job({**ROUNDS, section: table})
    {"strategy": made.make_strategy, "selection": made.make_selection, "model": made.make_model}[section]()


class TestTheCommand:
    def test_all_sections_are_printed(self, keys: Run) -> None:
        code, out, err = keys()
        assert code == Exit.OK, err
        assert [line.split("]")[0][1:] for line in out.splitlines() if line.startswith("[")] == list(
            dict.fromkeys(key.section for key in job_keys())
        )

    def test_one_section_says_type_default_and_meaning(self, keys: Run) -> None:
        code, out, err = keys("privacy")
        assert code == Exit.OK, err
        line = next(line for line in out.splitlines() if line.startswith("clipping "))
        assert "fixed or adaptive" in line
        assert '"fixed"' in line
        assert TEXTS["privacy.clipping"] in line
        _, out, _ = keys("strategy")
        assert "all but fedadam, fedyogi, fedadagrad, signds" in out
        assert "no default" in out

    def test_json_has_the_same(self, keys: Run) -> None:
        code, out, err = keys("rounds", "--format", "json")
        assert code == Exit.OK, err
        ratio = next(row for row in json.loads(out) if row["key"] == "update_model_ratio")
        assert ratio["default"] == 0.8
        assert ratio["doc"] == TEXTS["rounds.update_model_ratio"]
        _, out, _ = keys("--format", "json")
        assert len(json.loads(out)) == len(job_keys())

    @pytest.mark.parametrize(
        ("asked", "meant"), [("privcy", "privacy"), ("secagg", "secure_aggregation"), ("dp", "privacy")]
    )
    def test_an_unknown_section_is_answered_with_the_one_that_is_meant(
        self, keys: Run, asked: str, meant: str
    ) -> None:
        code, out, err = keys(asked)
        assert (code, out) == (Exit.USAGE, "")
        assert f"did you mean {meant!r}?" in err


class TestWhatAFileIsTold:
    def test_secagg_is_secure_aggregation(self) -> None:
        with pytest.raises(JobRefused, match=r"'secagg' is unknown; did you mean 'secure_aggregation'\?"):
            read_job({**ROUNDS, "secagg": {"protocol": "secagg"}})

    @pytest.mark.parametrize("section", ["rounds", "strategy"])
    def test_a_section_within_another_is_told_to_be_a_table(self, section: str) -> None:
        tables = {**ROUNDS, "strategy": {"name": "fedavg"}}
        tables[section] = {**tables[section], "selection": "poisson"}
        with pytest.raises(JobRefused, match=r"a table of its own: \[selection\], with name = 'poisson'"):
            read_job(tables)

    def test_the_key_model_of_into_is_no_section(self) -> None:
        assert read_job({**ROUNDS, "into": {"model": "films"}}).into.model == "films"

    def test_options_of_selections_have_types_and_units(self) -> None:
        made = read_job({**ROUNDS, "selection": {"name": "capability", "deadline_s": "2m"}})
        assert (
            made.make_selection()
            == read_job({**ROUNDS, "selection": {"name": "capability", "deadline_s": 120}}).make_selection()
        )
        for name, options, message in (
            ("capability", {"deadline_s": "soon"}, "'soon' is not a number and a unit"),
            ("random", {"share": "all"}, "random.share must be a number, not 'all'"),
            ("random", {"share": 2.0}, r"^selection: random: share must be in \(0, 1\], not 2.0"),
        ):
            with pytest.raises(JobRefused, match=message):
                read_job({**ROUNDS, "selection": {"name": name, **options}}).make_selection()

    @pytest.mark.parametrize("command", ["simulate", "serve"])
    def test_the_next_step_is_to_list_the_keys(
        self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "job.toml"
        file.write_text("[rounds]\nstart_fl_job_threshold = 4\nbuffersize = 3\n")
        with pytest.raises(SystemExit):
            main(("fl", command, "--job", str(file), "--set", f"data.dir={tmp_path}"))
        err = capsys.readouterr().err
        assert "did you mean 'buffer_size'?" in err
        assert "headwater fl keys" in err
        assert code_of(JobRefused("x")) is Exit.BAD_INPUT
