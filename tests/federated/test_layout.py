"""Fields of a model in one vector, and what averaging may do to each kind."""

from __future__ import annotations

import numpy as np
import pytest

from federated import (
    Bounds,
    Contribution,
    Field,
    Layout,
    Perceptron,
    Sum,
    WeightsMismatch,
    layout_of,
    make_strategy,
)

NORMALISED = {
    "dense.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "norm.weight": np.ones(3, np.float32),
    "norm.running_mean": np.array([1.0, 2.0, 3.0], np.float32),
    "norm.running_var": np.array([0.5, 1.0, 2.0], np.float32),
    "norm.num_batches_tracked": np.array(7, np.int64),
    "positions": np.array([2, 0, 1], np.int64),
}


def test_arrays_survive_the_vector_in_values_shapes_and_types() -> None:
    layout = layout_of(NORMALISED)
    assert [field.kind for field in layout.fields] == [
        "weight",
        "weight",
        "statistic",
        "statistic",
        "counter",
        "constant",
    ]
    vector = layout.flatten(NORMALISED)
    assert vector.dtype == np.float32
    assert vector.shape == (layout.size,) == (19,)
    for name, array in layout.unflatten(vector).items():
        assert array.dtype == NORMALISED[name].dtype
        np.testing.assert_array_equal(array, NORMALISED[name])
    layout.views(vector)["norm.weight"][1] = 9.0
    assert vector[layout.slices["norm.weight"]][1] == 9.0


def test_what_does_not_fit_is_refused_by_name() -> None:
    layout = layout_of(NORMALISED)
    with pytest.raises(WeightsMismatch, match=r"norm\.weight: shape"):
        layout.flatten({**NORMALISED, "norm.weight": np.ones(4, np.float32)})
    with pytest.raises(WeightsMismatch, match=r"names differ: .*extra"):
        layout.flatten({**NORMALISED, "extra": np.ones(1)})
    layout.flatten({**NORMALISED, "norm.num_batches_tracked": np.array(2**24)})
    with pytest.raises(WeightsMismatch, match="num_batches_tracked: an integer above"):
        layout.flatten({**NORMALISED, "norm.num_batches_tracked": np.array(2**24 + 1)})
    for wrong in (np.zeros(18, np.float32), np.zeros(19), np.zeros((1, 19), np.float32)):
        with pytest.raises(WeightsMismatch, match=r"float32 \[19\]"):
            layout.unflatten(wrong)
    with pytest.raises(ValueError, match="same name"):
        Layout((Field("a", (1,)), Field("a", (2,))))
    with pytest.raises(ValueError, match="kind"):
        Field("a", (1,), kind="buffer")  # type: ignore[arg-type]


def test_the_fingerprint_knows_names_shapes_types_kinds_and_order() -> None:
    plain = Layout((Field("a", (2, 3)), Field("b", (3,))))
    others = [
        Layout((Field("b", (3,)), Field("a", (2, 3)))),
        Layout((Field("a", (3, 2)), Field("b", (3,)))),
        Layout((Field("a", (2, 3)), Field("c", (3,)))),
        Layout((Field("a", (2, 3), "float16"), Field("b", (3,)))),
        plain.localise(lambda name: name == "b"),
    ]
    prints = {layout.fingerprint() for layout in [plain, *others]}
    assert len(prints) == 6
    assert {len(mark) for mark in prints} == {8}
    assert Layout((Field("a", (2, 3)), Field("b", (3,)))).fingerprint() == plain.fingerprint()


def averaged(layout: Layout, start: np.ndarray, moves: list[np.ndarray], name: str = "fedavg") -> np.ndarray:
    """One iteration of clients with weights 1, 3, … whose vectors move from ``start`` as told."""
    strategy = make_strategy(name, server_rate=0.5)
    total = Sum(layout.size, Bounds(10, strategy.largest_weight), strategy.summed)
    for place, move in enumerate(moves):
        difference = layout.conceal(move.copy())
        total.add(Contribution({"difference": difference}, 2.0 * place + 1.0, 1, 10 * (place + 1), 0.0))
    return strategy.apply(strategy.init(layout, start), total).weights


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedavgm"])
def test_statistics_are_means_of_values_counters_the_largest_and_constants_the_servers(name: str) -> None:
    layout = layout_of(NORMALISED)
    start = layout.flatten(NORMALISED)
    moves = [np.full(layout.size, 0.25, np.float32), np.full(layout.size, -0.5, np.float32)]
    after = layout.unflatten(averaged(layout, start, moves, name))
    values = [layout.unflatten(start + move) for move in moves]
    for statistic in ("norm.running_mean", "norm.running_var"):
        mean = (values[0][statistic] + 3.0 * values[1][statistic]) / 4.0
        np.testing.assert_allclose(after[statistic], mean, rtol=1e-6)
    assert after["norm.num_batches_tracked"] == 7 + 20
    np.testing.assert_array_equal(after["positions"], NORMALISED["positions"])
    # The server's rate of one half applies to what is trained alone.
    if name == "fedavg":
        np.testing.assert_allclose(after["norm.weight"], 1.0 + 0.5 * (0.25 - 1.5) / 4.0, rtol=1e-6)


def test_a_running_variance_never_falls_below_zero_and_a_counter_stops_where_float32_is_exact() -> None:
    layout = layout_of({**NORMALISED})
    start = layout.flatten({**NORMALISED, "norm.num_batches_tracked": np.array(2**24 - 5)})
    after = layout.unflatten(averaged(layout, start, [np.full(layout.size, -5.0, np.float32)]))
    np.testing.assert_array_equal(after["norm.running_var"], 0.0)
    np.testing.assert_allclose(after["norm.running_mean"], [-4.0, -3.0, -2.0])
    assert after["norm.num_batches_tracked"] == 2**24


def test_local_fields_stay_on_the_device_and_on_the_server() -> None:
    layout = layout_of(NORMALISED).localise(lambda name: name.startswith("norm.running"))
    start = layout.flatten(NORMALISED)
    kept = start + 1.0
    begun = layout.unflatten(layout.with_local(start, kept))
    np.testing.assert_array_equal(begun["norm.running_mean"], NORMALISED["norm.running_mean"] + 1.0)
    np.testing.assert_array_equal(begun["norm.weight"], NORMALISED["norm.weight"])
    assert layout.with_local(start, None) is start
    concealed = layout.unflatten(layout.conceal(np.ones(layout.size, np.float32)))
    assert {name for name, array in concealed.items() if array.any()} == {"dense.weight", "norm.weight"}
    after = layout.unflatten(averaged(layout, start, [np.ones(layout.size, np.float32)]))
    np.testing.assert_array_equal(after["norm.running_mean"], NORMALISED["norm.running_mean"])


def test_a_plain_model_needs_no_masks() -> None:
    layout = Perceptron(3, (4,), 2).layout()
    assert layout.only_weights
    difference = np.ones(layout.size, np.float32)
    assert layout.conceal(difference) is difference
    assert difference.all()
    assert not layout_of(NORMALISED).only_weights
