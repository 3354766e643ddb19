import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.device import Update
from federated.job import FederatedJob, load_job, read_job
from federated.job_sections import JobRefused
from federated.layout import Field, Layout
from federated.rounds import RoundSettings
from federated.sections import quantity, write_tables
from federated.selection import AllOf
from federated.strategies import AdaptiveFrequency, FedAdam, FedNova, Scaffold, sum_for

WRITTEN = """
[job]
name = "digits"
seed = 7

[model]
name = "perceptron"
hidden = [64, 32]

[data]
name = "digits"
clients = 1000
partition = "dirichlet:0.1"
features = 64
classes = 10

[training]
steps = 10
batch_size = 20
rate = 0.05

[strategy]
name = "fedadam"
server_rate = 0.01

[rounds]
start_fl_job_threshold = 25
update_model_ratio = 0.28
start_fl_job_time_window = "2m"
update_model_time_window_s = 90
come_back_min = "250ms"
max_examples = 500

[selection]
name = "eligible+fairness"
battery = 0.2
most = 1
window = 3

[compression]
upload = "top_k:0.03,quantise:1,deflate"
download_bits = 8

[simulation]
engine = "numpy"
memory = "64MiB"

[simulation.habits]
dropout = 0.3

[servers]
urls = ["https://localhost:8443"]
max_body = "1GiB"
"""


def test_one_file_says_all(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(WRITTEN)
    job = load_job(path)
    assert job.rounds.thresholds.uploads_close == 7  # ceil(25 · .28) in decimals
    assert (job.rounds.start_fl_job_time_window_s, job.rounds.update_model_time_window_s) == (120.0, 90.0)
    assert job.rounds.come_back_min_s == 0.25
    assert (job.training.steps, job.training.epochs, job.training.rate) == (10, None, 0.05)
    assert job.simulation.memory_bytes == 64 * 2**20
    assert job.simulation.habits == {"dropout": 0.3}
    assert job.servers.max_body_bytes == 2**30
    strategy = job.make_strategy()
    assert isinstance(strategy, FedAdam)
    assert (strategy.server_rate, strategy.max_examples) == (0.01, 500)
    selection = job.make_selection()
    assert isinstance(selection, AllOf)
    assert selection.window == 3
    model = job.make_model()
    assert model.layout().size == 64 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10
    assert job.make_scheme() is not None
    assert job.make_grid(model.layout()) is not None


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(WRITTEN)
    job = load_job(path)
    path.write_text(job.to_toml())
    assert load_job(path) == job
    assert path.read_text().startswith("[job]")


def minimal(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"rounds": {"start_fl_job_threshold": 10}} | sections


def test_a_short_file_is_enough() -> None:
    job = load_job(minimal())
    assert job == FederatedJob(RoundSettings(start_fl_job_threshold=10))
    assert job.rounds.update_model_ratio == Decimal("0.8")
    assert job.make_scheme() is None


def test_scaffold_takes_its_population_from_the_data() -> None:
    job = load_job(minimal(strategy={"name": "scaffold"}, data={"clients": 20}))
    strategy = job.make_strategy()
    assert isinstance(strategy, Scaffold)
    assert strategy.population == 20


def test_fednova_counts_steps_as_devices_take_them_and_adaptive_begins_with_theirs() -> None:
    nova = load_job(minimal(strategy={"name": "fednova"}, training={"momentum": 0.9})).make_strategy()
    assert isinstance(nova, FedNova)
    assert nova.effective_steps(3) == pytest.approx(
        1 + 1.9 + 2.71
    )  # what each of three steps adds, with its echoes
    adaptive = load_job(minimal(strategy={"name": "adaptive"}, training={"steps": 7})).make_strategy()
    assert isinstance(adaptive, AdaptiveFrequency)
    assert adaptive.steps == 7


def test_where_all_devices_take_as_many_steps_a_lie_about_them_gains_nothing() -> None:
    strategy = load_job(minimal(strategy={"name": "fednova"}, training={"steps": 10})).make_strategy()
    layout = Layout((Field("weight", (2,)),))
    difference = {"difference": np.full(2, 1.0, np.float32)}
    means = []
    for claimed in (10, 10_000_000):
        total = sum_for(strategy, layout, 5)
        for steps in (10, 10, 10, claimed):
            total.add(strategy.contribution(layout, Update(difference, 20, steps, 0.5)))
        means.append(strategy.apply(strategy.init(layout, np.zeros(2, np.float32)), total).weights)
    np.testing.assert_array_equal(*means)


BUFFERED = {"mode": "buffered", "buffer_size": 5, "max_concurrency": 10}
SILO = {"kind": "cross_silo", "members": ["north", "south"]}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "the section rounds is missing"),
        ({"round": {}}, "the section 'round' is unknown; did you mean 'rounds'"),
        ({"rounds": 5}, "rounds must be a table, not 5"),
        ({"rounds": {}}, "start_fl_job_threshold must be at least 1"),
        ({"rounds": {"start_fl_job_treshold": 1}}, "did you mean 'start_fl_job_threshold'"),
        ({"rounds": {"start_fl_job_threshold": "many"}}, "must be a whole number, not 'many'"),
        ({"rounds": {"start_fl_job_threshold": True}}, "must be a whole number, not True"),
        ({"rounds": {"start_fl_job_threshold": 1.5}}, "must be a whole number, not 1.5"),
        ({"rounds": {"update_model_ratio": "much"}}, "rounds.update_model_ratio must be a decimal number"),
        ({"rounds": {"start_fl_job_time_window": "5 parsecs"}}, "rounds.start_fl_job_time_window: '5 parsecs' is not"),
        ({"rounds": {"come_back_max": "1m", "come_back_max_s": 60}}, "come_back_max_s is given twice"),
        ({"rounds": {"mode": "bufered"}}, "did you mean 'buffered'"),
        ({"rounds": SILO | {"members": "north"}}, "rounds.members must be a list"),
        ({"rounds": SILO | {"members": [1]}}, "rounds.members must be text"),
        (minimal(model={"hidden": 5}), "model must be a table with a name"),
        (minimal(strategy={"name": "fedagv"}), "strategy: the name 'fedagv' is unknown; did you mean 'fedavg'"),
        (minimal(strategy={"name": "fedavg", "sever_rate": 1}), "did you mean 'server_rate'"),
        (minimal(strategy={"name": "fedavg", "max_examples": 5}), "set rounds.max_examples"),
        (minimal(strategy={"name": "scaffold"}), "scaffold"),
        (minimal(selection={"name": "eligable"}), "did you mean 'eligible'"),
        (minimal(selection={"name": "random", "share": 2}), r"share must be in \(0, 1\]"),
        (minimal(selection={"name": "random", "shear": 0.5}), "no option shear"),
        (minimal(compression={"upload": "deflate,top_k:0.1"}), "compression.upload"),
        (minimal(compression={"download_bits": 1}), "download_bits must be 0 or 2 to 16"),
        (minimal(training={"steps": 5, "epochs": 2}), "training: local training counts epochs or steps"),
        (minimal(job={"name": "My Job"}), "job.name"),
        (minimal(job={"seed": -1}), "job.seed"),
        (minimal(data={"clients": 9}), "10 starts are needed and there are 9 clients"),
        (minimal(simulation={"engine": "numpy", "device": "cuda"}), "numpy engine has no cuda"),
        (minimal(simulation={"availability": "trace"}), "simulation.trace"),
        (minimal(servers={"part_bytes": "2GiB"}), "part_bytes"),
        (minimal(strategy={"name": "fedsgd"}, training={"epochs": 2}), "fedsgd takes one gradient"),
        (minimal(strategy={"name": "scaffold", "population": 9}, training={"momentum": 0.9}), "plain steps"),
        (minimal(strategy={"name": "fedprox"}, training={"proximal": 0.1}), "leave training.proximal out"),
        (minimal(strategy={"name": "fednova", "momentum": 0.5}), "leave strategy.momentum out"),
        (minimal(strategy={"name": "fednova"}, training={"momentum": 0.5, "proximal": 0.1}), "no momentum"),
        (minimal(selection={"name": "capability", "deadline_s": 301.0}), "beyond the update window"),
        (
            minimal(selection={"name": "fairness", "most": 1, "window": 5}, data={"clients": 50}),
            "not enough for 10 starts in each",
        ),
        ({"rounds": BUFFERED, "strategy": {"name": "scaffold", "population": 9}}, "scaffold needs synchronous"),
        ({"rounds": BUFFERED, "strategy": {"name": "median"}}, "mix several versions"),
        ({"rounds": BUFFERED, "data": {"clients": 4}}, "cannot be filled by 4 clients"),
        ({"rounds": SILO, "selection": {"name": "random"}}, "take every member"),
        ({"rounds": {"start_fl_job_threshold": 10**6, "max_examples": 10**9}}, "do not fit into 63 bits"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(JobRefused, match=message):
        load_job(tables)


def test_a_model_needs_to_know_its_size() -> None:
    job = load_job(minimal())
    with pytest.raises(JobRefused, match=r"data\.features and data\.classes"):
        job.make_model()
    assert job.make_model(64, 10).layout().size == 4810


def test_files_that_are_not_there_or_not_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobRefused, match=r"absent\.toml cannot be read"):
        read_job(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"[rounds\xff")
    with pytest.raises(JobRefused, match=r"broken\.toml is not TOML"):
        read_job(broken)


@pytest.mark.parametrize(
    ("text", "unit", "value"), [("1.5h", "_s", 5400), ("250 ms", "_s", 0.25), ("2kB", "_bytes", 2000)]
)
def test_quantities(text: str, unit: str, value: float) -> None:
    assert quantity(text, unit) == value


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c_s"]),
        st.text() | st.integers() | st.booleans() | st.floats() | st.lists(st.text(max_size=5), max_size=3),
        max_size=3,
    )
)
def test_any_table_is_written_as_toml(table: dict[str, Any]) -> None:
    import tomllib

    if any("\ud800" <= c <= "\udfff" for value in table.values() if isinstance(value, str) for c in value):
        return
    read = tomllib.loads(write_tables({"one": table, "two": {"inner": {"x": 1}}}))
    assert read["two"] == {"inner": {"x": 1}}
    assert repr(read.get("one", {})) == repr(table)


class TestItems:
    TABLES: ClassVar[dict[str, Any]] = {
        "rounds": {"start_fl_job_threshold": 4},
        "model": {"name": "items", "dim": 4},
        "data": {"items": ["a", 'b "two"', "ü"]},
        "into": {"model": "main", "weight": 20},
    }

    def test_a_job_of_items_has_their_number_and_reads_back_the_same(self) -> None:
        job = load_job(self.TABLES)
        assert job.make_model().layout().size == 3 * 4
        assert job.into.weight == 20.0
        assert load_job(tomllib.loads(job.to_toml())) == job

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"model": {"name": "softmax"}}, "not about items"),
            ({"data": {"items": ["a", "a"]}}, "names an item twice"),
            ({"into": {"model": "main", "weight": 0}}, "weight must be positive"),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, changed: dict[str, Any], why: str) -> None:
        with pytest.raises(JobRefused, match=why):
            load_job({**self.TABLES, **changed})

    def test_more_items_than_names_are_refused(self) -> None:
        with pytest.raises(JobRefused, match="names 3 items"):
            load_job({**self.TABLES, "data": {"items": ["a", "b", "c"], "classes": 4}}).make_model()
