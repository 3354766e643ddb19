"""The benchmark of private set intersection: sets are as said, results are checked, rows say what was measured."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("rbcl", reason="the extra `vertical` is not installed")

from benchmarks import __main__ as command
from benchmarks import psi, psi_openmined, psi_work
from benchmarks.psi_openmined import Intersected
from benchmarks.psi_sets import Pair, make_pair, make_three
from benchmarks.psi_work import FIRST, SECOND, Protocol, WrongIntersection, intersect, intersect_several
from federated.psi.terms import Wants
from federated.vertical.parties import Alone

TINY = psi.Sizes(rsa=4, ids=60, large=0, small=5, three=20, rounds=1, rsa_aim=None)


def here(protocol: Protocol, first: int, second: int) -> psi_work.Run:
    """As ``psi.intersected``, in this process alone."""
    return intersect(protocol, make_pair(first, second, min(first, second) // 2), Alone())


class TestSets:
    def test_they_share_what_is_said(self) -> None:
        pair = make_pair(7, 4, 3)
        assert (len(set(pair.first)), len(set(pair.second))) == (7, 4)
        assert len(set(pair.first) & set(pair.second)) == 3

    def test_more_in_common_than_there_is(self) -> None:
        with pytest.raises(ValueError, match="cannot share 5"):
            make_pair(7, 4, 5)

    def test_three_share_what_is_said_and_two_more(self) -> None:
        sets = [set(one) for one in make_three(10, 4)]
        assert [len(one) for one in sets] == [10, 10, 10]
        assert len(sets[0] & sets[1] & sets[2]) == 4
        assert len(sets[0] & sets[1]) == 8
        assert sets[1] & sets[2] == sets[0] & sets[2] == sets[0] & sets[1] & sets[2]
        with pytest.raises(ValueError, match="cannot share 6"):
            make_three(10, 6)


class TestRuns:
    @pytest.mark.parametrize("wants", ["ids", "count"])
    def test_three_parties_are_checked_too(self, wants: Wants) -> None:
        found = intersect_several(make_three(10, 4), 4, Alone(), wants)
        assert set(found.sent) == {"party 1", "party 2", "party 3"}
        assert found.seconds > 0.0
        with pytest.raises(WrongIntersection, match="share 3"):
            intersect_several(make_three(10, 4), 3, Alone(), wants)

    @pytest.mark.parametrize("protocol", ["ecdh", "unbalanced"])
    def test_seconds_bytes_and_memory_are_those_of_the_run(self, protocol: Protocol) -> None:
        small, large = here(protocol, 10, 20), here(protocol, 10, 200)
        assert small.seconds > small.before >= 0.0
        assert (large.before > 0.0) == (protocol == "unbalanced")
        assert set(large.sent) == {FIRST, SECOND}
        # 180 ids more of the second party: elements of 32 bytes, or values of a filter of 30 bits.
        least = 180 * (32 if protocol == "ecdh" else 30 / 8)
        assert large.sent[SECOND] - small.sent[SECOND] >= least
        assert large.bytes == sum(large.sent.values())
        assert large.turns >= 3
        assert large.peak > 2**20

    def test_a_count_alone_tells_no_ids(self) -> None:
        assert here("count", 10, 20).bytes > 30 * 32
        with pytest.raises(WrongIntersection, match="share 2"):
            intersect("count", Pair(["a", "b"], ["b", "c"], 2), Alone())

    def test_another_intersection_is_no_figure(self) -> None:
        with pytest.raises(WrongIntersection, match="share 2"):
            intersect("ecdh", Pair(["a", "b"], ["b", "c"], 2), Alone())


class TestRows:
    def test_without_openmined_rows_name_the_command_that_installs_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(psi, "intersected", here)
        monkeypatch.setattr(psi_openmined, "available", lambda: False)
        seconds, _, size = psi.measure_ecdh(TINY)
        assert (seconds.aim, seconds.peer, seconds.ratio, seconds.met) == (2.0, None, None, None)
        assert "pip install -r benchmarks/peers/psi/requirements.lock" in seconds.note
        assert size.peer is None

    @pytest.mark.skipif(not psi_openmined.available(), reason=psi_openmined.INSTALL)
    def test_openmined_intersects_the_same_sets(self) -> None:
        with psi_openmined.openmined() as peer:
            found = peer(20, 30, 10)
            assert isinstance(found, Intersected)
            assert found.seconds > 0.0
            assert found.bytes > 33 * (20 + 20 + 30)
            with pytest.raises(psi_openmined.OpenMinedFailed):
                peer(20, 30, 31)

    def test_a_peer_in_the_same_run_gives_the_ratio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = here("ecdh", 4, 4)
        run = psi_work.Run(2.0, 0.0, slow.sent, slow.turns, slow.peak)
        monkeypatch.setattr(psi, "intersected", lambda *wanted: run)
        monkeypatch.setattr(psi_openmined, "available", lambda: True)

        class Peer:
            def __enter__(self) -> psi_openmined.Intersect:
                return lambda first, second, common: Intersected(5.0, 1_000)

            def __exit__(self, *error: object) -> None:
                return None

        monkeypatch.setattr(psi_openmined, "openmined", Peer)
        seconds, operation, size = psi.measure_ecdh(TINY)
        assert (seconds.ratio, seconds.met) == (2.5, True)
        # Two cores for 2 s, one for 5 s, and 240 multiplications.
        assert operation.ours == pytest.approx(4e6 / 240)
        assert operation.peer == pytest.approx(5e6 / 240)
        assert size.peer == 1e-3

    def test_the_aim_of_rsa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = psi_work.Run(91.0, 0.0, {FIRST: 1, SECOND: 1}, 3, 1)
        monkeypatch.setattr(psi, "intersected", lambda *wanted: run)
        row, _ = psi.measure_rsa(psi.Sizes())
        assert (row.aim, row.met) == (90.0, False)
        row, _ = psi.measure_rsa(TINY)
        assert (row.aim, row.met) == (None, None)


@pytest.mark.slow
def test_the_command_prints_rows_of_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = psi.Sizes(rsa=20, ids=200, large=400, small=5, three=40, rounds=1, rsa_aim=None)
    monkeypatch.setattr(psi, "QUICK", tiny)
    # The thread limits of children are not to outlive this test.
    monkeypatch.setattr(psi, "limit_threads", lambda environ: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "psi", "--quick", "--json"])
    assert command.main() == 0
    works = [row["work"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert len(set(works)) == len(works)
    for start in (
        "ristretto255",
        "ECDH, 200",
        "ECDH, 400",
        "oblivious",
        "unbalanced, 5",
        "three",
        "RSA-2048, 20",
    ):
        assert any(work.startswith(start) for work in works), start
