"""Sums of edges: all of their uploads count, or none does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.rounds import DRAW, Bench, digest

from federated.rounds import Accepted, Phase, Refused

SUM = digest("a sum")


def together(bench: Bench, *clients: str, iteration: int = 1) -> dict[str, object]:
    requests = [bench.upload_request(client, iteration, "a sum") for client in clients]
    return dict(bench.desk.handle_together(requests, bench.now, DRAW))


def test_all_count_in_their_order_and_close_the_iteration() -> None:
    bench = Bench.of(start_fl_job_threshold=5, update_model_ratio=0.8)
    bench.admit("a", "b", "c", "d", "e")
    bench.accept("e")
    assert together(bench, "c", "a", "b") == {}
    header = bench.desk.header()
    assert (header.uploads, header.phase) == (4, Phase.AGGREGATING)
    task = bench.desk.claim("server", bench.now)
    assert task is not None
    assert [(slot.client, slot.digest == SUM) for slot in bench.desk.slots(task)] == [
        ("e", False), ("c", True), ("a", True), ("b", True),
    ]  # fmt: skip


def test_a_sum_may_pass_the_threshold_since_it_cannot_be_cut() -> None:
    bench = Bench.of(start_fl_job_threshold=5, update_model_ratio=0.4)
    bench.admit("a", "b", "c", "d", "e")
    bench.accept("e")
    assert together(bench, "a", "b", "c") == {}
    assert bench.desk.header().uploads == 4


def test_somebody_who_is_counted_is_named_and_nobody_counts() -> None:
    bench = Bench.of(start_fl_job_threshold=4, update_model_ratio=1)
    bench.admit("a", "b", "c", "d")
    bench.accept("b")
    wrong = together(bench, "a", "b", "c")
    assert list(wrong) == ["b"]
    assert isinstance(wrong["b"], Refused)
    assert wrong["b"].code == "different_body"
    assert bench.desk.header().uploads == 1
    assert together(bench, "a", "c") == {}
    assert bench.desk.header().uploads == 3


def test_a_repeated_sum_counts_once() -> None:
    bench = Bench.of(start_fl_job_threshold=3, update_model_ratio=1)
    bench.admit("a", "b", "c")
    assert together(bench, "a", "b") == {}
    wrong = together(bench, "a", "b")
    assert [(client, reply.repeated) for client, reply in wrong.items() if isinstance(reply, Accepted)] == [
        ("a", True), ("b", True),
    ]  # fmt: skip
    assert bench.desk.header().uploads == 2


def test_strangers_and_late_ones_are_named() -> None:
    bench = Bench.of(start_fl_job_threshold=2, update_model_ratio=0.5)
    bench.admit("a", "b")
    assert list(together(bench, "a", "stranger")) == ["stranger"]
    bench.accept("a")
    wrong = together(bench, "b")
    assert isinstance(wrong["b"], Refused)
    assert wrong["b"].code == "late"


def test_buffered_jobs_take_no_sums() -> None:
    bench = Bench.of(mode="buffered", buffer_size=2)
    with pytest.raises(ValueError, match="synchronous"):
        together(bench, "a")


def test_a_client_named_twice_in_one_sum_does_not_count_twice() -> None:
    bench = Bench.of(start_fl_job_threshold=4, update_model_ratio=1)
    bench.admit("a", "b", "c", "d")
    wrong = together(bench, "a", "b", "a")
    assert list(wrong) == ["a"]
    assert bench.desk.header().uploads == 0


def test_what_is_no_id_is_named_without_a_look_at_the_store() -> None:
    bench = Bench.of(start_fl_job_threshold=4)
    requests = [bench.upload_request("a", 1), replace(bench.upload_request("a", 1), client="\ud800")]
    wrong = bench.desk.handle_together(requests, bench.now, DRAW)
    assert list(wrong) == ["\ud800"]
