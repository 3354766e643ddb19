"""Downloads: client and server hold the same bits, whatever was skipped; few bytes; wrong bases and bytes refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.compression import (
    BaseUnknown,
    BodyRefused,
    DownloadChain,
    Grid,
    Held,
    difference,
    receive,
    snap,
)
from federated.compression.download import MAX_BITS, base_of
from federated.layout import Field, Layout

NETWORK = [64 * 64, 64, 64 * 10, 10]


def make_weights(grid: Grid, seed: int, scale: float = 0.15) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(grid.dimension) * scale).astype(np.float32)


def assert_same(left: Held, right: Held) -> None:
    assert left.version == right.version
    np.testing.assert_array_equal(left.exponents, right.exponents)
    np.testing.assert_array_equal(left.codes, right.codes)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8, 9, 16, MAX_BITS]),
    st.lists(st.tuples(st.floats(-8, 4), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_a_client_that_skips_versions_holds_the_servers_bits(
    bits: int, moves: list[tuple[float, bool]], seed: int
) -> None:
    grid = Grid.of([70, 1, 29], bits, chunk=32)
    generator = np.random.default_rng(seed)
    weights = make_weights(grid, seed)
    chain = DownloadChain.begin(grid, weights, keep=4)
    held = receive(grid, chain.body_for(None))
    for power, fetches in moves:
        # From tiny steps to weights that leave every scale they had, and pieces that become zero.
        weights = (weights + generator.standard_normal(100) * 10.0**power).astype(np.float32)
        if power > 3:
            weights[:32] = 0.0
        chain.publish(weights)
        if fetches:
            held = receive(
                grid,
                chain.body_for(held.version),
                None if base_of(chain.body_for(held.version)) is None else held,
            )
            assert_same(held, chain.newest)
            np.testing.assert_array_equal(held.vector(grid), chain.vector())
    assert_same(receive(grid, chain.body_for(None)), chain.newest)


@pytest.mark.parametrize("bits", [4, 8, 12, 20])
def test_rounding_stays_within_half_a_step_and_does_not_add_up(bits: int) -> None:
    grid = Grid.of([300, 300], bits, chunk=100)
    weights = make_weights(grid, 1)
    chain = DownloadChain.begin(grid, weights)
    generator = np.random.default_rng(2)
    for _ in range(50):
        weights = (weights + generator.standard_normal(600) * 1e-3).astype(np.float32)
        chain.publish(weights)
        for start in range(0, 600, 100):
            part = slice(start, start + 100)
            # A step is at most four times the smallest that would do: a power of two, kept while half would do.
            step = 4.0 * np.abs(weights[part]).max() / (2 ** (bits - 1) - 1)
            assert np.abs(chain.vector()[part] - weights[part]).max() <= step / 2
    assert chain.newest.version == 50


def test_a_body_is_less_than_a_quarter_of_float32_and_a_difference_much_less() -> None:
    grid = Grid.of(NETWORK)
    weights = make_weights(grid, 1)
    chain = DownloadChain.begin(grid, weights)
    whole = len(chain.body_for(None))
    assert 4 * grid.dimension / whole > 4.3
    generator = np.random.default_rng(2)
    change = generator.standard_normal(grid.dimension) * generator.exponential(size=grid.dimension) * 0.005
    chain.publish((weights + change).astype(np.float32))
    assert 4 * grid.dimension / len(chain.body_for(0)) > 10.0
    # Whoever holds the newest version is told so in next to nothing.
    assert len(chain.body_for(1)) < 100
    assert max(whole, len(chain.body_for(None))) <= grid.most_bytes()


def test_too_old_a_base_gets_the_whole_model_and_memory_stays_bounded() -> None:
    grid = Grid.of([200])
    chain = DownloadChain.begin(grid, make_weights(grid, 0), keep=3)
    for seed in range(1, 8):
        chain.publish((make_weights(grid, 0) + make_weights(grid, seed, 0.001)).astype(np.float32))
    bases = {base: base_of(chain.body_for(base)) for base in (None, 0, 3, 4, 6, 7, 99)}
    assert bases == {None: None, 0: None, 3: None, 4: 4, 6: 6, 7: 7, 99: None}
    assert len(chain._held) == 3
    assert len(chain._bodies) <= 5


def test_a_difference_longer_than_the_model_is_not_sent() -> None:
    grid = Grid.of([2_000], 4)
    spiked = np.zeros(2_000, np.float32)
    spiked[0] = 1.0
    chain = DownloadChain.begin(grid, make_weights(grid, 0))
    chain.publish(spiked)
    assert base_of(chain.body_for(0)) is None
    np.testing.assert_array_equal(receive(grid, chain.body_for(0)).vector(grid), spiked)


def test_another_base_than_the_servers_is_noticed() -> None:
    grid = Grid.of([100])
    chain = DownloadChain.begin(grid, make_weights(grid, 0))
    first = chain.newest
    chain.publish(make_weights(grid, 0) + np.float32(0.01))
    body = chain.body_for(0)
    assert_same(receive(grid, body, first), chain.newest)
    with pytest.raises(BaseUnknown, match="not held"):
        receive(grid, body)
    with pytest.raises(BaseUnknown, match="not held"):
        receive(grid, body, chain.newest)
    # The same number, from a server that was restored from an older state and went on differently.
    other = snap(grid, make_weights(grid, 5), 0)
    with pytest.raises(BodyRefused):
        receive(grid, body, other)


def test_statistics_and_counters_keep_their_precision_beside_coarse_weights() -> None:
    layout = Layout(
        (
            Field("layer.weight", (50, 4)),
            Field("norm.running_var", (4,), kind="statistic"),
            Field("norm.batches", (), "int64", "counter"),
        )
    )
    grid = Grid.for_layout(layout, bits=4)
    others = np.array([1e-3, 7.5, 123.4, 1e4, 16_777_215], np.float32)
    weights = np.concatenate([make_weights(Grid.of([200]), 1), others])
    held = receive(grid, DownloadChain.begin(grid, weights).body_for(None))
    vector = held.vector(grid)
    assert vector[-1] == 16_777_215
    np.testing.assert_allclose(vector[200:204], weights[200:204], atol=1e4 * 2.0**-23)
    assert 0.0 < np.abs(vector[:200] - weights[:200]).max() < 0.1


def test_another_server_takes_a_version_over_from_its_stored_body() -> None:
    grid = Grid.of(NETWORK)
    first = DownloadChain.begin(grid, make_weights(grid, 0))
    second = DownloadChain(grid, receive(grid, first.body_for(None)))
    first.publish(make_weights(grid, 0) + np.float32(0.003))
    second.adopt(receive(grid, first.body_for(None)))
    assert second.body_for(0) == first.body_for(0)
    assert second.publish(make_weights(grid, 3)) == first.publish(make_weights(grid, 3)) == 2
    assert second.body_for(None) == first.body_for(None)
    with pytest.raises(ValueError, match="version 1 after 2"):
        second.adopt(snap(grid, make_weights(grid, 0), 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**61])
def test_weights_that_no_grid_holds_are_refused(bad: float) -> None:
    grid = Grid.of([10])
    weights = make_weights(grid, 0)
    weights[3] = bad
    with pytest.raises(ValueError, match="NaN or too large"):
        snap(grid, weights, 0)
    with pytest.raises(ValueError, match="for a grid of 10"):
        snap(grid, weights[:9], 0)


def test_grids_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one piece"):
        Grid.of([])
    for bits in (1, 26):
        with pytest.raises(ValueError, match="2 to 25 bits"):
            Grid.of([10], bits)
    with pytest.raises(ValueError, match="keep at least 0"):
        DownloadChain.begin(Grid.of([1]), np.zeros(1, np.float32), keep=-1)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.sampled_from([4, 8, MAX_BITS]), st.data())
def test_any_bytes_are_refused_or_are_the_servers_version(
    whole: bool, bits: int, data: st.DataObject
) -> None:
    grid = Grid.of([40, 3], bits, chunk=16)
    base = snap(grid, make_weights(grid, 0), 5)
    new = snap(grid, make_weights(grid, 1), 6, base)
    body = bytearray(difference(grid, new, None if whole else base))
    kind = data.draw(st.sampled_from(["cut", "longer", "changed", "foreign"]))
    if kind == "cut":
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    elif kind == "longer":
        body += data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "changed":
        # Past the version in the head, which the checksum does not cover.
        place = data.draw(st.integers(2, len(body) - 1))
        body[place] ^= data.draw(st.integers(1, 255))
    else:
        body[2:] = data.draw(st.binary(max_size=200))
    try:
        held = receive(grid, bytes(body), base)
    except BodyRefused:
        return
    assert kind not in ("cut", "longer")
    assert_same(held, new)
