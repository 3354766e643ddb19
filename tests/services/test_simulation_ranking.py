"""What ``fl simulate`` says of an item table: ranking measures over all items, beside popular."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federated.data import Federation
from federated.data.federation import Shares
from federated.device import LocalTraining
from federated.models import make_model
from federated.recommendation import rank_held_out
from federated.recommendation.model import ItemTable
from federated.simulator.simulation import Row
from services.simulation.evaluate import evaluator, final_evaluation
from services.simulation.picture import draw
from services.simulation.ranking import K, Ranking, held_out_rows, popularity, rank
from services.simulation.report import Table, summary

ITEMS = 40
NOBODY = np.zeros(0, np.int64)


def federation(clients: int = 300, seed: int = 0) -> Federation:
    """Clients like even or odd items, 8 each, of which one is held out."""
    generator = np.random.default_rng(seed)
    liked = [generator.choice(np.arange(client % 2, ITEMS, 2), 8, replace=False) for client in range(clients)]
    rows = np.zeros((clients, ITEMS), np.float32)
    for row, items in zip(rows, liked, strict=True):
        row[items[:-1]] = 1.0
    numbers, ends = np.arange(2 * clients), np.arange(clients + 1)
    return Federation(
        "liked",
        np.concatenate([rows, rows]),
        np.array([items[-2] for items in liked] + [items[-1] for items in liked]),
        ITEMS,
        Shares(numbers[:clients], ends),
        Shares(numbers[clients:], ends),
        np.zeros((0, ITEMS), np.float32),
        NOBODY,
    )


def model() -> ItemTable:
    made = make_model("items", features=ITEMS, classes=ITEMS, dim=4, temperature=0.1)
    assert isinstance(made, ItemTable)
    return made


def taught(data: Federation) -> tuple[ItemTable, np.ndarray, np.ndarray]:
    """The model with its first weights and those after some rounds of all clients."""
    table = model()
    first = table.initial(np.random.default_rng(0))
    weights = first.copy()
    rows = data.rows(np.arange(data.clients))
    inputs, labels = rows.inputs[:, 0], rows.labels[:, 0]
    for _ in range(60):
        weights -= 0.1 * table.loss_and_gradient(weights, inputs, labels)[1]
    return table, first, weights


def test_the_measures_are_those_of_the_held_out_item_among_all_items_not_known() -> None:
    """Against the reference of the recommendation rounds, which is given the held-out item and all others."""
    data, scores = federation(), np.random.default_rng(1).normal(size=(300, ITEMS))
    known, wanted = (np.concatenate(part) for part in zip(*held_out_rows(data, np.arange(300)), strict=True))
    hidden = np.where(known > 0, -1e9, scores)
    others = hidden.copy()
    np.put_along_axis(others, wanted[:, None], -np.inf, axis=1)
    reference = rank_held_out(np.column_stack([hidden[np.arange(300), wanted], others]), K)
    left = iter([hidden[:256], hidden[256:]])
    found = rank(data, np.arange(300), lambda rows: next(left))
    assert found is not None
    assert (found.recall, found.ndcg) == pytest.approx((reference.hit_rate, reference.ndcg))
    assert 0.2 < reference.hit_rate < 0.4  # 10 of 33


def test_scores_that_are_not_finite_find_nothing() -> None:
    data = federation(20)
    assert rank(data, np.arange(20), lambda known: np.full(known.shape, np.nan)) == Ranking(0.0, 0.0)


def test_popular_counts_what_clients_train_on_and_shows_nothing_known() -> None:
    data = federation(10)
    rows = data.rows(np.arange(10)).inputs[:, 0]
    scores = popularity(data)(rows)
    assert (scores[rows > 0] == -1.0).all()
    np.testing.assert_array_equal(scores.max(axis=0), np.where(rows.all(axis=0), -1.0, rows.sum(axis=0)))


def test_a_taught_table_beats_popular_and_the_report_says_so(tmp_path: Path) -> None:
    data = federation()
    table, first, weights = taught(data)
    evaluate = evaluator(data, 0)(table)
    before, after = evaluate(first), evaluate(weights)
    assert set(after) == {"recall_at_10", "ndcg_at_10"}
    assert after["recall_at_10"] > before["recall_at_10"]
    final = final_evaluation(data, table, first, weights, LocalTraining(rate=0.1), 1.0, 0)
    ranking = final["ranking"]
    assert final["global_against_local"] is None
    assert (ranking["items"], ranking["held_out"]) == (ITEMS, 300)
    assert ranking["model"]["recall"] == after["recall_at_10"] > ranking["popular"]["recall"] + 0.2
    rows = [Row(1, 1, True, "", 5, 4, 0.0, 3.0, trained=4, loss=1.5, metrics=after)]
    text = summary(rows, final)
    assert any(
        line.startswith(f"300 held-out items among 40: Recall@10 {after['recall_at_10']:.3f}, NDCG@10 ")
        for line in text
    )
    assert not any("accuracy" in line or "%" in line for line in text)
    draw(rows, final, "items", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_where_no_client_holds_out_nobodys_rows_are_ranked_and_without_any_nothing_is_said() -> None:
    data = federation(20)
    nothing = Shares(NOBODY, np.zeros(21, np.int64))
    bare = Federation(
        "bare", data.inputs, data.labels, ITEMS, data.training, nothing, data.test_inputs, NOBODY
    )
    table = model()
    weights = table.initial(np.random.default_rng(0))
    assert evaluator(bare, 0)(table)(weights) == {}
    final = final_evaluation(bare, table, weights, weights, LocalTraining(rate=0.1), 1.0, 0)
    assert final["ranking"] is None
    tested = Federation(
        "tested", data.inputs, data.labels, ITEMS, data.training, nothing, data.inputs[20:], data.labels[20:]
    )
    assert evaluator(tested, 0)(table)(weights) == evaluator(data, 0)(table)(weights)


def test_rows_of_an_item_table_show_its_measures() -> None:
    row = Row(3, 3, True, "", 5, 4, 0.0, 3.0, loss=1.5, metrics={"recall_at_10": 0.25, "ndcg_at_10": 0.125})
    table = Table(ranks=True)
    assert table.columns() == ("#", "valid", "counted", "loss", "recall", "ndcg", "up", "down", "time")
    assert table.cells(row) == ("3", "yes", "4/5", "1.5000", "0.250", "0.125", "0 B", "0 B", "3.0 s")
    assert "loss 1.5000, Recall@10 0.250, NDCG@10 0.125, up 0 B" in table.line(row)
    assert "Recall@10" in table.legend()
    assert "accuracy" not in table.legend()
