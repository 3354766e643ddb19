"""The item table as a job's model: what a device trains in a round is its update, and its data are item numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federated.device import LocalTraining, device_generator, local_update
from federated.models import make_model
from federated.recommendation import device_rows, device_update, load_known
from federated.recommendation.model import ItemTable

ITEMS, DIM = 12, 4
KNOWN = np.array([7, 2, 3], np.int64)


def item_model(**options: object) -> ItemTable:
    made = make_model("items", features=ITEMS, classes=ITEMS, dim=DIM, **options)
    assert isinstance(made, ItemTable)
    return made


@pytest.mark.parametrize("objective", ["softmax", "squares"])
def test_one_step_of_a_device_is_its_update_of_the_recommendation_rounds(objective: str) -> None:
    model = item_model(objective=objective)
    start = model.initial(np.random.default_rng(0))
    inputs, labels = device_rows(KNOWN, ITEMS)
    generator = device_generator(0, 1, 1)
    found = local_update(model, model.layout(), start, inputs, labels, LocalTraining(rate=0.5), generator)
    wanted = device_update(model.objective, start.reshape(ITEMS, DIM), KNOWN)
    np.testing.assert_allclose(
        found.vectors["difference"], 0.5 * wanted.vectors["difference"], rtol=1e-4, atol=1e-7
    )
    assert found.examples == 1
    assert (np.abs(found.vectors["difference"].reshape(ITEMS, DIM)).max(axis=1) > 0).all(), "every row moves"


def test_several_devices_at_once_give_the_mean_of_each() -> None:
    model = item_model()
    vector = model.initial(np.random.default_rng(0))
    rows = [device_rows(np.array(known), ITEMS) for known in ([0, 1], [5], [2, 9, 11])]
    each = [model.loss_and_gradient(vector, *one) for one in rows]
    inputs, labels = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    loss, gradient = model.loss_and_gradient(vector, inputs, labels)
    assert loss == pytest.approx(np.mean([one[0] for one in each]), rel=1e-5)
    np.testing.assert_allclose(gradient, np.mean([one[1] for one in each], axis=0), rtol=1e-4, atol=1e-7)


def test_rounds_teach_what_goes_together_and_what_is_known_is_not_recommended() -> None:
    """Devices like even or odd items: the rest of its own kind comes first for a device that knows three of them."""
    model = item_model(temperature=0.1)
    vector = model.initial(np.random.default_rng(0))
    generator = np.random.default_rng(1)
    liked = [generator.choice(np.arange(n % 2, ITEMS, 2), 4, replace=False) for n in range(20)]
    inputs, labels = (
        np.concatenate(parts) for parts in zip(*(device_rows(one, ITEMS) for one in liked), strict=True)
    )
    for _ in range(200):
        vector -= 0.1 * model.loss_and_gradient(vector, inputs, labels)[1]
    asked, _ = device_rows(np.array([0, 2, 4]), ITEMS)
    (scores,) = model.logits(vector, asked)
    order = np.argsort(-scores)
    assert sorted(order[:3].tolist()) == [6, 8, 10]
    assert sorted(order[-3:].tolist()) == [0, 2, 4]
    assert model.metrics(vector, asked, np.array([int(order[0])])).right == 1


def test_a_devices_file_holds_numbers_or_ids(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", items=KNOWN)
    (tmp_path / "mine.txt").write_text("film-7\nfilm-2\nsomething else\nfilm-3\n")
    ids = tuple(f"film-{n}" for n in range(ITEMS))
    for name in ("mine.npz", "mine.txt"):
        inputs, labels = load_known(tmp_path / name, ids, ITEMS)
        assert np.flatnonzero(inputs[0]).tolist() == [2, 3, 7]
        assert labels.tolist() == [3]


@pytest.mark.parametrize(
    ("known", "why"), [([], "nothing to teach"), ([12], "none of the 12"), ([-1], "none of the 12")]
)
def test_items_that_are_none_are_refused(known: list[int], why: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", items=np.array(known, np.int64))
    with pytest.raises(ValueError, match=why):
        load_known(tmp_path / "mine.npz", (), ITEMS)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros(3))
    np.savez(tmp_path / "b.npz", items=np.zeros((2, 2)))
    for name, why in (("a.npz", "no array items"), ("b.npz", "whole numbers"), ("c.csv", "neither")):
        with pytest.raises(ValueError, match=why):
            load_known(tmp_path / name, (), ITEMS)


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="none of softmax, squares"):
        item_model(objective="hinge")
    with pytest.raises(ValueError, match="unexpected keyword argument 'temperature'"):
        item_model(objective="squares", temperature=0.1)
    for option, value in (("temperature", "warm"), ("steps", 2.5), ("regularisation", True)):
        with pytest.raises(ValueError, match=f"{option} must be a"):
            item_model(**{option: value})
    with pytest.raises(ValueError, match="a column for each"):
        make_model("items", features=3, classes=ITEMS)
    with pytest.raises(ValueError, match="at least one item"):
        make_model("items", features=0, classes=0)
