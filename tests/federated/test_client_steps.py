"""The device's loop without a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from federated.client_device import Device
from federated.client_folder import DeviceFolder
from federated.client_http import Answer, Call
from federated.client_steps import Terms, Train, Wait
from federated.compression import make_scheme
from federated.device import ControlVariates, Instructions, Update
from federated.layout import Layout
from federated.models import make_model
from federated.rounds import Admitted, Tickets
from federated.weights import Array
from federated.wire import encode_model, encode_reply

TICKETS = Tickets("job", b"k" * 32)


@dataclass
class Diverges:
    """Training that comes to ``value`` somewhere."""

    layout: Layout
    value: float

    def train(
        self, start: Array, instructions: Instructions, iteration: int, control: ControlVariates | None
    ) -> Update:
        vectors: Mapping[str, Array] = {"difference": np.zeros_like(start)}
        vectors["difference"][3] = self.value
        return Update(vectors, examples=4, steps=1, loss=self.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", ["", "top_k:0.5,quantise:1,deflate"])
def test_training_that_diverges_is_thrown_away_and_tried_again_later(
    tmp_path: Path, value: float, scheme: str
) -> None:
    layout = make_model("softmax", features=4, classes=2).layout()
    folder = DeviceFolder(tmp_path)
    terms = Terms("job", 1, make_scheme(scheme) if scheme else None)
    device = Device("7", terms, Diverges(layout, value), folder, 0.0, lambda: 0.5)
    model = np.ones(layout.size, "<f4").tobytes()
    assert isinstance(device.next(0.0), Call)
    device.received(Answer(200, encode_reply(Admitted(1, 0, TICKETS.issue("7", 1), 100.0), 0.0)), 0.0)
    assert isinstance(device.next(0.0), Call)
    device.received(Answer(200, encode_model(0, 0, model, Instructions(), {})), 0.0)
    assert isinstance(device.next(0.0), Train)
    device.train(1.0)
    step = device.next(1.0)
    assert isinstance(step, Wait)
    assert 1.0 < step.until <= 61.0
    assert device.spent.diverged == 1
    assert folder.pending() is None
    assert folder.memory().residuals == {}
    again = device.next(step.until)
    assert isinstance(again, Call)
    assert again.path.endswith("/start")
