"""Mechanisms in whole rounds: a device's own budget, simulated budgets that stop and resume, and real servers."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import Fleet, ask, create, servers, wait_for
from support.federation import job as server_job
from support.simulated import accuracy, blobs

from federated.client_device import Device
from federated.client_folder import DeviceFolder, LedgerUnreadable
from federated.client_http import Answer, Call
from federated.client_steps import Done, Terms, Train, Wait
from federated.data import Federation, federate
from federated.device import ControlVariates, Instructions, Update
from federated.job import load_job
from federated.job_sections import JobRefused
from federated.layout import Field, Layout
from federated.models import make_model
from federated.privacy.budget import affordable_reports, report_epsilon, terms_of
from federated.privacy.mechanisms import make_protection
from federated.privacy.section import PrivacySection
from federated.rounds import Accepted, Admitted, Refused, Tickets
from federated.selection import DeviceFacts
from federated.simulator.arrivals import NobodyComes
from federated.simulator.build import Built, build
from federated.simulator.simulation import Row
from federated.weights import Array
from federated.wire import decode_start, encode_model, encode_reply
from services.federation.assembly import assemble_job

TICKETS = Tickets("job", b"k" * 32)
SECTION = PrivacySection(mechanism="local_gaussian", epsilon=2.0, budget_epsilon=4.0)


@dataclass
class Learns:
    """Training that always comes to the same."""

    layout: Layout

    def train(
        self, start: Array, instructions: Instructions, iteration: int, control: ControlVariates | None
    ) -> Update:
        return Update({"difference": np.ones_like(start)}, examples=4, steps=1, loss=0.5)


LAYOUT = make_model("softmax", features=4, classes=2).layout()


def device(folder: Path, section: PrivacySection = SECTION) -> Device:
    terms = Terms("job", 1, protection=make_protection(section))
    return Device("7", terms, Learns(LAYOUT), DeviceFolder(folder), 0.0, lambda: 0.5)


def up_to_training(made: Device, iteration: int) -> Call | Train | Wait | Done:
    """Up to the training, or to where it ends before; every wait is over."""
    now = 1000.0 * iteration
    step = made.next(now)
    if isinstance(step, Done):
        return step
    made.received(
        Answer(200, encode_reply(Admitted(iteration, 0, TICKETS.issue("7", iteration), now), now)), now
    )
    step = made.next(now)
    if isinstance(step, Call) and not step.path.endswith("/uploads"):
        model = np.ones(LAYOUT.size, "<f4").tobytes()
        made.received(Answer(200, encode_model(0, 0, model, Instructions(), {})), now)
        step = made.next(now)
    return step


def to_upload(made: Device, iteration: int) -> Call | Done:
    """Up to the call that uploads; every wait is over."""
    step = up_to_training(made, iteration)
    if isinstance(step, Train):
        made.train(1000.0 * iteration)
        step = made.next(1000.0 * iteration)
    assert isinstance(step, Call | Done)
    return step


def accept(made: Device, now: float = 0.0) -> None:
    made.received(Answer(200, encode_reply(Accepted(1, now), now)), now)


class TestDevice:
    """The device's own account."""

    def test_it_sends_what_its_budget_affords_and_no_more(self, tmp_path: Path) -> None:
        most = affordable_reports(SECTION)
        assert most == 3
        made, bodies = device(tmp_path), set()
        for iteration in range(1, most + 1):
            call = to_upload(made, iteration)
            assert isinstance(call, Call)
            bodies.add(call.body)
            accept(made)
        end = made.next(1e6)
        assert isinstance(end, Done)
        assert end.why == "budget"
        assert "3 reports have spent" in end.detail
        assert len(bodies) == most
        assert report_epsilon(SECTION, most) <= 4.0 < report_epsilon(SECTION, most + 1)
        # Nor after it is started again.
        again = device(tmp_path).next(0.0)
        assert isinstance(again, Done)
        assert again.why == "budget"

    def test_a_report_is_counted_before_it_can_leave(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted: list[int] = []
        keep = DeviceFolder.keep_pending

        def watched(folder: DeviceFolder, pending: Any) -> None:
            counted.append(folder.ledger().reports)
            keep(folder, pending)

        monkeypatch.setattr(DeviceFolder, "keep_pending", watched)
        to_upload(device(tmp_path), 1)
        assert counted == [1]

    def test_what_is_sent_again_is_counted_once(self, tmp_path: Path) -> None:
        first = to_upload(device(tmp_path), 1)
        assert isinstance(first, Call)
        for _ in range(3):  # killed before the reply came, thrice
            made = device(tmp_path)
            again = made.next(0.0)
            assert isinstance(again, Call)
            assert again.body == first.body
            made.lost("no reply", 0.0)
        assert DeviceFolder(tmp_path).ledger().reports == 1

    def test_what_was_refused_has_left_all_the_same(self, tmp_path: Path) -> None:
        made = device(tmp_path)
        for iteration in range(1, 4):
            assert isinstance(to_upload(made, iteration), Call)
            made.received(Answer(200, encode_reply(Refused("late", "", 0.0), 0.0)), 0.0)
        step = made.next(1e6)
        assert isinstance(step, Done)
        assert step.why == "budget"

    def test_the_last_report_is_still_sent_after_a_restart(self, tmp_path: Path) -> None:
        made = device(tmp_path)
        for iteration in (1, 2, 3):
            call = to_upload(made, iteration)
            if iteration < 3:
                accept(made)
        again = device(tmp_path)
        step = again.next(0.0)
        assert isinstance(step, Call)
        assert isinstance(call, Call)
        assert step.body == call.body
        accept(again)
        assert isinstance(again.next(1e6), Done)

    def test_two_processes_of_one_device_have_one_budget(self, tmp_path: Path) -> None:
        both = [device(tmp_path), device(tmp_path)]
        for iteration in (1, 2):
            assert isinstance(to_upload(both[0], iteration), Call)
            accept(both[0])
        waiting = [up_to_training(made, 3) for made in both]
        assert all(
            isinstance(step, Train) for step in waiting
        )  # one report is left, and both are about to make it
        for made in both:
            made.train(3000.0)
        calls = [made.next(3000.0) for made in both]
        assert isinstance(calls[0], Call)
        assert isinstance(calls[1], Done)
        assert calls[1].why == "budget"
        assert DeviceFolder(tmp_path).ledger().reports == affordable_reports(SECTION) == 3

    def test_reports_that_are_counted_at_once_are_all_counted(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(4) as pool:
            counted = list(pool.map(lambda _: DeviceFolder(tmp_path).count_report(b"t" * 16, 30), range(40)))
        assert counted.count(True) == DeviceFolder(tmp_path).ledger().reports == 30

    @pytest.mark.parametrize("body", [b"", b"HWr2", b"x" * 36, b"HWr2" + bytes(32)])
    def test_a_count_that_cannot_be_read_ends_it(self, tmp_path: Path, body: bytes) -> None:
        (tmp_path / "reports").write_bytes(body)
        step = device(tmp_path).next(0.0)
        assert isinstance(step, Done)
        assert step.why == "budget"
        assert "damaged" in step.detail
        with pytest.raises(LedgerUnreadable):
            DeviceFolder(tmp_path).count_report(terms_of(SECTION))

    def test_without_a_budget_reports_are_counted_all_the_same(self, tmp_path: Path) -> None:
        made = device(tmp_path, PrivacySection(mechanism="local_gaussian"))
        for iteration in range(1, 8):
            assert isinstance(to_upload(made, iteration), Call)
            accept(made)
        assert DeviceFolder(tmp_path).ledger().reports == 7
        assert isinstance(made.next(0.0), Call | Wait)

    @pytest.mark.parametrize(
        "now",
        [
            replace(SECTION, budget_epsilon=400.0),
            replace(SECTION, budget_epsilon=0.0),
            replace(SECTION, epsilon=0.1),
            replace(SECTION, budget_delta=1e-3),
            PrivacySection(),
            PrivacySection(mechanism="central_gaussian"),
        ],
    )
    def test_terms_that_a_server_changes_end_it(self, tmp_path: Path, now: PrivacySection) -> None:
        """The job's file comes from a server, anew at every start: ε of reports that were sent is what it was then."""
        accept_one = device(tmp_path)
        assert isinstance(to_upload(accept_one, 1), Call)
        accept(accept_one)
        step = device(tmp_path, now).next(0.0)
        assert isinstance(step, Done)
        assert step.why == "budget"
        assert "other terms" in step.detail
        assert not DeviceFolder(tmp_path).count_report(terms_of(now))
        # Another clip costs the same: ε is for any two clipped vectors.
        assert isinstance(device(tmp_path, replace(SECTION, clip=2.0)).next(0.0), Call)

    @pytest.mark.parametrize(("section", "told"), [(SECTION, 0), (PrivacySection(), 4321)])
    def test_how_many_examples_it_has_is_not_told(
        self, tmp_path: Path, section: PrivacySection, told: int
    ) -> None:
        terms = Terms("job", 1, protection=make_protection(section))
        facts = DeviceFacts(battery=0.5, examples=4321)
        made = Device("7", terms, Learns(LAYOUT), DeviceFolder(tmp_path), 0.0, lambda: 0.5, facts=facts)
        call = made.next(0.0)
        assert isinstance(call, Call)
        sent = decode_start(call.body, "7").facts
        assert (sent.battery, sent.examples) == (0.5, told)

    def test_no_loss_is_told(self, tmp_path: Path) -> None:
        made = device(tmp_path)
        assert isinstance(to_upload(made, 1), Call)
        pending = DeviceFolder(tmp_path).pending()
        assert pending is not None
        assert (pending.examples, pending.steps, pending.loss) == (1, 1, 0.0)


FEDERATION: Federation = federate(blobs(), 30, 7, "iid")


def simulated(folder: Path, privacy: dict[str, Any], iterations: int = 6, **sections: Any) -> Built:
    tables: dict[str, Any] = {
        "job": {"seed": 7},
        "rounds": {"start_fl_job_threshold": 10, "fl_iteration_num": iterations},
        "data": {"features": FEDERATION.features, "classes": FEDERATION.classes},
        "model": {"name": "perceptron", "hidden": [8]},
        "training": {"epochs": 2, "batch_size": 8},
        "privacy": privacy,
        "simulation": {"checkpoint_every": 2},
    }
    for title, values in sections.items():
        tables[title] = {**tables.get(title, {}), **values}
    return build(load_job(tables), FEDERATION, folder, evaluate=lambda model: accuracy(model, FEDERATION))


def finish(built: Built) -> list[Row]:
    rows = list(built.simulation.run())
    built.simulation.close()
    return rows


MECHANISMS: list[dict[str, Any]] = [
    {"mechanism": "local_gaussian", "epsilon": 8.0},
    {"mechanism": "local_laplace", "epsilon": 8.0, "per_layer": True},
    {"mechanism": "local_gaussian", "epsilon": 8.0, "protects": "weights", "clip": 4.0},
    {"mechanism": "central_gaussian"},
    {"mechanism": "central_gaussian", "clipping": "adaptive", "clip": 0.1},
]


@pytest.mark.parametrize("privacy", MECHANISMS, ids=lambda one: "-".join(map(str, one.values())))
def test_simulations_repeat_and_resume_bit_for_bit(tmp_path: Path, privacy: dict[str, Any]) -> None:
    (tmp_path / "whole").mkdir()
    whole = simulated(tmp_path / "whole", privacy)
    rows = finish(whole)
    assert all(row.valid and row.loss is None for row in rows)
    epsilons = [row.epsilon for row in rows]
    assert all(
        now is not None and later is not None and now <= later for now, later in itertools.pairwise(epsilons)
    )
    assert all(row.clipped is not None and 0.0 <= row.clipped <= 1.0 for row in rows)
    (tmp_path / "cut").mkdir()
    cut = simulated(tmp_path / "cut", privacy)
    running = cut.simulation.run()
    for _ in range(3):
        next(running)
    cut.simulation.close()
    again = simulated(tmp_path / "cut", privacy)
    assert again.simulation.resume()
    finish(again)
    assert [row.epsilon for row in again.simulation.rows] == epsilons
    assert again.simulation.weights.tobytes() == whole.simulation.weights.tobytes()
    assert (again.simulation.world.reports == whole.simulation.world.reports).all()


@pytest.mark.parametrize("mechanism", ["distributed_gaussian", "distributed_skellam", "central_gaussian"])
def test_noise_under_secure_aggregation_is_in_the_sum_and_is_counted(tmp_path: Path, mechanism: str) -> None:
    masked = {
        "secure_aggregation": {"protocol": "secagg", "dropouts": 0.0, "colluding": 0.1},
        "rounds": {"update_model_ratio": 1},
    }
    found = []
    for name, multiplier in (("little", 0.05), ("much", 20.0)):
        (tmp_path / name).mkdir()
        privacy = {"mechanism": mechanism, "clip": 0.2, "noise_multiplier": multiplier}
        built = simulated(tmp_path / name, privacy, 2, **masked)
        first = built.simulation.weights.copy()
        rows = finish(built)
        assert all(row.valid and row.loss is None for row in rows)
        found.append((rows[-1].epsilon or math.inf, built.simulation.weights - first))
    (dear, near), (cheap, far) = found
    assert cheap < 1.0 < dear
    # Ten devices, of whom one may collude: nine make z·C together, all ten a little more; two rounds, divided by ten.
    extra = 10 / 9 if mechanism != "central_gaussian" else 1.0
    wanted = 20.0 * 0.2 * math.sqrt(2.0 * extra) / 10.0
    assert float(far.std()) == pytest.approx(wanted, rel=0.25)
    assert float(near.std()) < wanted / 10.0


def test_noise_changes_what_is_learned_and_a_clip_alone_does_too(tmp_path: Path) -> None:
    found = set()
    for name, privacy in (
        ("plain", {}),
        ("clipped", {"mechanism": "central_gaussian", "clip": 0.05, "noise_multiplier": 1e-6}),
        ("noised", {"mechanism": "central_gaussian", "clip": 0.05}),
    ):
        (tmp_path / name).mkdir()
        built = simulated(tmp_path / name, privacy, iterations=2)
        rows = finish(built)
        assert rows[-1].clipped == {"plain": None, "clipped": 1.0, "noised": 1.0}[name]
        found.add(built.simulation.weights.tobytes())
    assert len(found) == 3


@pytest.mark.parametrize(
    ("privacy", "lets_in"), [({"mechanism": "none"}, False), ({"mechanism": "local_gaussian"}, True)]
)
def test_simulated_clients_do_not_tell_either(tmp_path: Path, privacy: dict[str, Any], lets_in: bool) -> None:
    """A deadline that nobody with examples makes, at speeds below a hundred a second."""
    selection = {"name": "capability", "deadline_s": 1e-3}
    built = simulated(tmp_path, privacy, 1, selection=selection, simulation={"patience_s": 1000.0})
    if lets_in:
        assert finish(built)[0].valid
        return
    with pytest.raises(NobodyComes):
        finish(built)
    built.simulation.close()


@pytest.mark.parametrize("mechanism", ["local_gaussian", "central_gaussian"])
def test_clients_that_diverge_take_part_with_nothing(tmp_path: Path, mechanism: str) -> None:
    """Who stayed away would tell, without noise, what its data do to training."""
    privacy = {"mechanism": mechanism, "clip": 0.5}
    training = {"rate": 1e30}
    built = simulated(tmp_path, privacy, 2, training=training)
    for row in finish(built):
        assert row.valid
        assert row.uploads == row.trained
        assert row.clipped == 1.0
        assert not row.refused
    assert np.isfinite(built.simulation.weights).all()


@pytest.mark.parametrize("engine", ["batched", "numpy"])
def test_engines_agree_on_what_is_reported(tmp_path: Path, engine: str) -> None:
    built = simulated(
        tmp_path, {"mechanism": "local_gaussian", "epsilon": 50.0}, 2, simulation={"engine": engine}
    )
    assert finish(built)[-1].valid
    reference = simulated(tmp_path, {"mechanism": "local_gaussian", "epsilon": 50.0}, 2)
    finish(reference)
    np.testing.assert_allclose(built.simulation.weights, reference.simulation.weights, atol=2e-3)


def test_clients_without_budget_take_no_further_part_and_the_run_ends(tmp_path: Path) -> None:
    privacy = {"mechanism": "local_gaussian", "epsilon": 2.0, "budget_epsilon": 4.0}
    built = simulated(tmp_path, privacy, iterations=50)
    rows = finish(built)
    world = built.simulation.world
    assert world.reports.max() == 3
    assert world.spent
    assert len(rows) < 12
    assert rows[-1].epsilon is not None
    assert rows[-1].epsilon <= 4.0
    # Late bodies have left their devices, too.
    assert world.reports.sum() == sum(row.trained for row in rows) + world.tally.late


def test_a_job_with_central_noise_ends_before_it_would_exceed_its_budget(tmp_path: Path) -> None:
    privacy = {"mechanism": "central_gaussian", "noise_multiplier": 2.0, "budget_epsilon": 4.0}
    built = simulated(tmp_path, privacy, iterations=50)
    rows = finish(built)
    assert 1 < len(rows) < 50
    assert built.simulation.world.finished
    assert rows[-1].epsilon is not None
    assert rows[-1].epsilon <= 4.0
    one_more = math.sqrt((len(rows) + 1) / len(rows))
    assert rows[-1].epsilon * one_more > 3.9


def test_a_model_with_statistics_is_refused_at_start(tmp_path: Path) -> None:
    class Normed:
        """Another model's layout is enough: it is looked at before anything is trained."""

        def layout(self) -> Layout:
            return Layout((Field("a", (4,)), Field("n.running_mean", (2,), kind="statistic")))

    job = load_job({"rounds": {"start_fl_job_threshold": 10}, "privacy": {"mechanism": "central_gaussian"}})
    with pytest.raises(JobRefused, match=r"n\.running_mean is a statistic"):
        build(job, FEDERATION, tmp_path, model=Normed())  # type: ignore[arg-type]


def test_servers_refuse_a_model_that_is_not_protected_also_where_its_size_is_told_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = load_job({"rounds": {"start_fl_job_threshold": 10}, "privacy": {"mechanism": "central_gaussian"}})
    sized = replace(made, data=replace(made.data, features=4, classes=2))
    assert assemble_job(sized, bytes(32)).protection.section.mechanism == "central_gaussian"
    layout = Layout((Field("a", (4,)), Field("n.running_mean", (2,), kind="statistic")))
    monkeypatch.setattr("federated.models.perceptron.Perceptron.layout", lambda model: layout)
    with pytest.raises(JobRefused, match=r"n\.running_mean is a statistic"):
        assemble_job(sized, bytes(32))


CLIENTS = [str(number) for number in range(4)]


def test_real_devices_and_servers_keep_to_the_mechanism(tmp_path: Path) -> None:
    local = server_job(
        "local", iterations=5, privacy={"mechanism": "local_gaussian", "epsilon": 2.0, "budget_epsilon": 4.0}
    )
    central = server_job(
        "central", iterations=9,
        privacy={"mechanism": "central_gaussian", "clipping": "adaptive", "noise_multiplier": 2.0,
                 "budget_epsilon": 3.0},
    )  # fmt: skip
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        for made in (local, central):
            create(urls[0], made)
        done = Fleet("local", urls, tmp_path / "local").run(CLIENTS)
        assert {end.why for end in done.values()} == {"budget"}
        waits = wait_for(urls[1], "local", version=3)
        assert waits["valid"] == 3
        assert any("first 3 iterations have spent" in warning for warning in waits["privacy"]["warnings"])
        done = Fleet("central", urls, tmp_path / "central").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}
        ended = wait_for(urls[1], "central", phase="finished")
        assert 0 < ended["valid"] < 9
        assert ended["over"] == "budget"
        assert ended["privacy"]["epsilon_now"] <= 3.0
        assert ended["privacy"]["budget_epsilon"] == 3.0
        for name in ("local", "central"):
            rounds = [
                row for row in ask(urls[1], "GET", f"/v1/fl/jobs/{name}/rounds")["rounds"] if row["valid"]
            ]
            assert {row["loss"] for row in rounds} == {None}
            spent = [row["epsilon"] for row in rounds]
            assert spent == sorted(spent)
            assert 0.0 < spent[0] < spent[-1] <= 4.0
