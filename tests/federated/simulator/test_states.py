"""Client state in a file: lazily made, bounded, and as the last checkpoint knew it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federated.simulator.states import ClientStates, StatesFull


def rows(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, np.float32)[:, None], 5, axis=1)


def test_rows_are_zero_until_they_are_put_and_cost_nothing_before(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "c", 100_000, 5, 1 << 20)
    clients = np.array([7, 99_999])
    assert not states.get(clients).any()
    assert (tmp_path / "c").stat().st_size == 0
    states.put(clients, rows(1, 2))
    np.testing.assert_array_equal(states.get(np.array([99_999, 3, 7])), rows(2, 0, 1))
    assert states.held == 2
    assert (tmp_path / "c").stat().st_size == 2 * 20
    states.put(clients, rows(3, 4))  # not checkpointed in between: the same slots
    assert (tmp_path / "c").stat().st_size == 2 * 20
    states.close()


def test_what_was_written_after_a_checkpoint_is_not_seen_by_who_resumes_from_it(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "c", 10, 5, 1 << 20)
    clients = np.arange(4)
    states.put(clients, rows(1, 2, 3, 4))
    slots = states.checkpoint()
    states.committed()
    for times in range(3):
        states.put(clients[1:], rows(20, 30, 40) + times)
    states.put(np.array([8]), rows(80))
    states.close()  # killed here

    resumed = ClientStates(tmp_path / "c", 10, 5, 1 << 20, slots)
    np.testing.assert_array_equal(resumed.get(np.arange(10)), rows(1, 2, 3, 4, 0, 0, 0, 0, 0, 0))
    resumed.put(clients[:1], rows(9))
    np.testing.assert_array_equal(resumed.get(clients), rows(9, 2, 3, 4))
    resumed.close()


def test_slots_of_older_checkpoints_are_used_again(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "c", 10, 5, 8 * 20)
    clients = np.arange(4)
    for times in range(20):
        states.put(clients, rows(1, 2, 3, 4) * times)
        states.checkpoint()
        states.committed()
    assert (tmp_path / "c").stat().st_size <= 8 * 20
    np.testing.assert_array_equal(states.get(clients), rows(1, 2, 3, 4) * 19)
    states.close()


def test_the_bound_is_kept_and_says_what_to_raise(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "c", 10, 5, 3 * 20 + 19)
    states.put(np.arange(3), rows(1, 2, 3))
    with pytest.raises(StatesFull, match=r"60 bytes of client state: raise simulation\.state_bytes"):
        states.put(np.array([3]), rows(4))
    np.testing.assert_array_equal(states.get(np.arange(4)), rows(1, 2, 3, 0))
    states.close()


def test_slots_of_another_population_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are not those of 10 clients"):
        ClientStates(tmp_path / "c", 10, 5, 100, np.zeros(9, np.int32))
