"""The version of the model that a device holds is the server's, or is asked for anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federated.client_folder import DeviceFolder
from federated.client_held import HeldModel
from federated.compression import BaseUnknown
from federated.device import Instructions
from federated.wire import ReceivedModel, digest_of

WEIGHTS = np.arange(5, dtype=np.float32)


def whole(weights: np.ndarray) -> ReceivedModel:
    return ReceivedModel(3, 0, weights.astype("<f4").tobytes(), Instructions(), {})


def same(weights: np.ndarray) -> ReceivedModel:
    """What a server answers to a device that says it holds the version."""
    return ReceivedModel(3, 4, digest_of(weights.astype("<f4").tobytes()), Instructions(), {})


def test_what_is_held_is_not_sent_again(tmp_path: Path) -> None:
    HeldModel(DeviceFolder(tmp_path), None, 5).take(whole(WEIGHTS))
    again = HeldModel(DeviceFolder(tmp_path), None, 5)
    assert again.version == 3
    np.testing.assert_array_equal(again.take(same(WEIGHTS)), WEIGHTS)


def test_another_model_of_the_same_number_is_not_trained_from(tmp_path: Path) -> None:
    """The file is damaged, or a job of this name began anew."""
    held = HeldModel(DeviceFolder(tmp_path), None, 5)
    held.take(whole(WEIGHTS + 1))
    with pytest.raises(BaseUnknown):
        held.take(same(WEIGHTS))
    assert held.version is None
    np.testing.assert_array_equal(held.take(whole(WEIGHTS)), WEIGHTS)
