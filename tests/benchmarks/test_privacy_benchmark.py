"""The benchmark of privacy: what is counted is what the protocol does, what is spent is the ε that a row names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    privacy,
    privacy_accuracy,
    privacy_flower,
    privacy_picture,
    privacy_secagg,
    privacy_small,
)
from benchmarks.federated_work import digits
from benchmarks.privacy_accuracy import Learned, Point
from benchmarks.privacy_flower import Flower
from benchmarks.privacy_round import Iteration
from benchmarks.privacy_secagg import PROTOCOLS, Protocol, plan_of
from benchmarks.privacy_work import Way, dealt, for_validation, learn, noise_for, spent, tables
from federated.frames import UPLOAD_OVERHEAD
from federated.job import load_job
from federated.privacy.section import Mechanism, PrivacySection
from federated.privacy.signds import reports_of

CLIENTS = 12
WEIGHTS = privacy_accuracy.SOFTMAX_WEIGHTS
MECHANISMS: tuple[Mechanism, ...] = tuple(name for name in privacy_accuracy.NAMES if name != "none")


class TestSecureAggregation:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_servers_expand_and_agree_as_often_as_the_protocol_says(self, protocol: Protocol) -> None:
        iteration = Iteration(plan_of(protocol, CLIENTS, 8))
        everybody, some = iteration.servers(0), iteration.servers(3)
        assert (len(everybody.found.seeds), everybody.found.agreements) == (CLIENTS, 0)
        # Each of three dropped clients shares a mask with the nine survivors, if all are neighbours.
        most = 3 * (CLIENTS - 3)
        assert len(some.found.seeds) == CLIENTS - 3 + some.found.agreements
        assert some.found.agreements == most if protocol == "secagg" else 0 < some.found.agreements <= most
        assert not some.found.liars
        assert min(everybody.seconds, some.seconds, iteration.client.seconds) > 0.0

    def test_clients_made_up_sign_nothing(self) -> None:
        with pytest.raises(ValueError, match="sign nothing"):
            Iteration(plan_of("secagg", CLIENTS, 8, malicious=True))

    def test_a_client_sends_what_a_client_of_a_whole_iteration_sends(self) -> None:
        plan = plan_of("secagg", CLIENTS, 8)
        cost = Iteration(plan).client
        holders = CLIENTS - 1
        # Keys; a commitment and sealed shares; the vector; a share of everybody else's seed.
        assert cost.up == 65 + (35 + 94 * holders) + plan.masked_bytes + (3 + 33 * holders)

    def test_without_flower_rows_name_the_command_that_installs_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(privacy_flower, "available", lambda: False)
        sizes = privacy_secagg.Sizes((CLIENTS,), (500,), (0.0, 0.25), 0.25, (CLIENTS,), rounds=1)
        rows = {row.work: row for row in privacy_secagg.measure(sizes)}
        # Of each protocol: two of servers, masks and sums, the key stream, a client, bytes, four whole.
        assert len(rows) == 2 * 10
        row = rows[f"secagg, {CLIENTS} clients, 500 values, 25% dropped: servers"]
        assert (row.peer, row.ratio, row.met) == (None, None, None)
        assert "pip install -r benchmarks/peers/flower/requirements.lock" in row.note
        whole = rows[f"secagg, {CLIENTS} clients, 500 values, 25% dropped: servers, a whole iteration"]
        assert whole.peer is not None
        assert whole.peer > 0.0
        stream = rows[
            f"secagg, {CLIENTS} clients, 500 values, 25% dropped: masks against the bare key stream"
        ]
        assert stream.met is not None

    def test_the_whole_iteration_is_checked_against_the_sum(self) -> None:
        servers_s, client_s = privacy_secagg._run(plan_of("secagg+", CLIENTS, 100), 2)
        assert min(servers_s, client_s) > 0.0
        with pytest.raises(RuntimeError, match="no sum"):
            privacy_secagg._run(plan_of("secagg+", CLIENTS, 100), CLIENTS - 1)


class TestFlower:
    """Its counts, with every sample a different power of ten so that each is seen."""

    @staticmethod
    def ask(**wanted: object) -> tuple[float, int]:
        seconds = {"take": 1e-6, "expand": 1e-3, "agree": 1.0, "combine": 1e3, "split": 1e6, "keys": 1e9}
        sizes = {"secret": 306, "keys": 430, "seal": 612, "send": 8_000}
        work = str(wanted["work"])
        return seconds.get(work, 0.0), sizes.get(work, 0)

    def test_the_server(self) -> None:
        parts = Flower(self.ask).server_parts(clients=10, neighbours=9, threshold=3, dropped=2, length=100)
        assert parts.long == pytest.approx(8 * 1e-6 + (8 + 2 * 9) * 1e-3)
        assert parts.agreements == 2 * 9
        # 3 polynomials of each survivor's seed, 20 of each dropped key.
        assert parts.shares == pytest.approx((8 * 3 + 2 * 20) * 1e3)
        assert parts.seconds == parts.long + parts.agreements + parts.shares

    def test_many_shares_cost_as_their_square(self) -> None:
        flower = Flower(self.ask)
        assert flower.combine_s(100, 3) == 1e3
        assert flower.combine_s(500, 3) == pytest.approx(25e3)

    def test_the_client(self) -> None:
        flower = Flower(self.ask)
        assert flower.client_s(neighbours=9, threshold=3, length=100) == pytest.approx(
            1e9 + 23 * 1e6 + 2 * 9 + 10 * 1e-3, abs=1e-6
        )
        up, down = flower.client_bytes(neighbours=9, length=100)
        assert up == 430 + 9 * 620 + 8_000 + 10 * 60
        assert down == 10 * 438 + 9 * 620 + 10 * 8

    @pytest.mark.slow
    @pytest.mark.skipif(not privacy_flower.available(), reason=privacy_flower.INSTALL)
    def test_every_sample_is_taken_by_flower_itself(self) -> None:
        with privacy_flower.flower() as new:
            one = new()
            assert one.client_s(neighbours=9, threshold=3, length=1_000) > 0.0
            parts = one.server_parts(clients=10, neighbours=9, threshold=3, dropped=2, length=1_000)
            assert min(parts.long, parts.shares, parts.agreements) > 0.0
            assert one.key_chunks >= 2
            assert one.bytes("send", length=1_000) > 8 * 1_000
            with pytest.raises(privacy_flower.FlowerFailed, match="KeyError"):
                one.seconds("nothing")


class TestAccuracy:
    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_a_job_spends_what_its_row_says_and_hardly_less(self, mechanism: Mechanism) -> None:
        way = Way(mechanism, rounds=3, size=1.0)
        noise = noise_for(way, 4.0, 100, WEIGHTS)
        job = load_job(tables(way, 100, 0, noise))
        assert 0.999 * 4.0 < spent(job, WEIGHTS) <= 4.0

    def test_no_privacy_spends_nothing_that_is_counted(self) -> None:
        assert noise_for(Way("none", 3), 4.0, 100, WEIGHTS) == 0.0
        assert spent(load_job(tables(Way("none", 3), 100, 0, 0.0)), WEIGHTS) == 0.0

    @pytest.mark.parametrize("mechanism", ["local_gaussian", "distributed_skellam", "central_gaussian"])
    def test_noise_reaches_the_model(self, mechanism: Mechanism) -> None:
        federation, found = dealt(60, 0), {}
        for epsilon in (1e-2, 1e3):
            way = Way(mechanism, 3)
            found[epsilon] = learn(tables(way, 60, 0, noise_for(way, epsilon, 60, WEIGHTS)), federation)
        assert found[1e-2] < 30.0 < found[1e3]

    def test_it_is_heard_after_each_round(self) -> None:
        heard: list[float] = []
        last = learn(tables(Way("none", 3), 60, 0, 0.0), dealt(60, 0), heard.append)
        assert len(heard) == 3
        assert heard[-1] == last > heard[0]

    def test_the_rows_are_those_that_the_simulator_would_make(self) -> None:
        made, lazy, everybody = dealt(60, 1), digits(60, 1), np.arange(60)
        assert made.augmentation is None
        assert lazy.augmentation is not None
        assert np.array_equal(made.rows(everybody).inputs, lazy.rows(everybody).inputs)
        assert np.array_equal(made.rows(everybody).labels, lazy.rows(everybody).labels)
        validation = for_validation(60, 1)
        assert len(validation.test_labels) != len(made.test_labels)
        assert np.array_equal(validation.inputs, made.inputs)

    def test_a_way_is_there_for_every_epsilon(self) -> None:
        for mechanism in privacy_accuracy.NAMES:
            for epsilon in (0.5, 1.0, 4.0, 16.0, 100.0):
                assert privacy_accuracy.way_of(mechanism, epsilon).mechanism == mechanism
        assert privacy_accuracy.way_of("signds", 90.0).rounds == 32

    def test_rows_and_the_picture_show_every_point(self, tmp_path: Path) -> None:
        points = [
            tuple(
                Point(mechanism, at, (50.0, 60.0, 70.0)) for mechanism in privacy_accuracy.NAMES for at in ats
            )
            for ats in ((1.0, 4.0), (100.0, 300.0), (985.0, 9_985.0))
        ]
        sizes = privacy_accuracy.Sizes()
        learned = Learned(sizes, Point("none", 0.0, (80.0,)), points[0][2:], points[1], points[2])
        rows = privacy_accuracy.rows(learned)
        assert len(rows) == 1 + 12 + 14 + 14
        assert len({row.work for row in rows}) == len(rows)
        local = next(row for row in rows if row.work == "digits, 1,000 clients, epsilon 1: local, Gaussian")
        assert (local.ours, local.peer, local.spread) == (60.0, 80.0, (50.0, 70.0))
        privacy_picture.draw(learned, tmp_path / "privacy.png")
        assert (tmp_path / "privacy.png").read_bytes().startswith(b"\x89PNG")


class TestSmall:
    def test_uploads_are_whole_bodies(self) -> None:
        rows = privacy_small.measure(privacy_small.Sizes((1_000,), (100.0,), starts=()))
        scheme = reports_of(PrivacySection("signds", sign_eps=100.0))
        vector = np.zeros((1, 1_000), np.float32)
        vector[0, : scheme.plan(1_000).named] = 1.0
        (body,) = scheme.encode_batch(vector, [np.random.default_rng(0)]).bodies
        assert rows[0].ours == UPLOAD_OVERHEAD + 1 + len(body)
        assert rows[0].peer == UPLOAD_OVERHEAD + 4_000
        assert "no meaningful privacy" in rows[0].note

    def test_a_job_starts_with_what_it_says_of_its_privacy(self) -> None:
        seconds, said = privacy_small.start_s("local, Gaussian")
        assert seconds > 0.0
        assert "pld, epsilon 4.5" in said

    @pytest.mark.slow
    @pytest.mark.parametrize("name", privacy_small.STARTS)
    def test_every_start_is_a_sound_job(self, name: str) -> None:
        assert privacy_small.start_s(name)[0] > 0.0


@pytest.mark.slow
def test_the_command_prints_rows_of_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny = privacy.Measures(
        privacy_secagg.Sizes((CLIENTS,), (500,), (0.25,), 0.25, (CLIENTS,), rounds=1),
        privacy_accuracy.Sizes((8.0,), (), 60, 8.0, (60, 80), (13,), wide_clients=60, seeds=(0,)),
        privacy_small.Sizes((1_000,), starts=("local, Gaussian",), repeats=1),
    )
    monkeypatch.setattr(privacy, "QUICK", tiny)
    # The thread limits of children are not to outlive this test.
    monkeypatch.setattr(privacy, "limit_threads", lambda environ: None)
    plot = tmp_path / "privacy.png"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "privacy", "--quick", "--json", "--plot", str(plot)])
    assert command.main() == 0
    works = [row["work"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert len(set(works)) == len(works)
    for start in ("secagg, 12", "secagg+, 12", "digits, 60 clients, epsilon 8", "digits, epsilon 8, 80 clients",
                  "digits, epsilon 16, 60 clients, 985 weights", "SignDS upload", "accounting when"):  # fmt: skip
        assert any(work.startswith(start) for work in works), start
    assert plot.read_bytes().startswith(b"\x89PNG")
