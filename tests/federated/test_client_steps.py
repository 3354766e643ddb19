"""The device's loop without a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from federated.privacy.mechanisms import make_protection
from federated.privacy.randomness import SeededRandomness
from federated.privacy.section import Mechanism, PrivacySection
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


@pytest.mark.parametrize("mechanism", ["local_gaussian", "local_laplace", "central_gaussian"])
@pytest.mark.parametrize("protects", ["difference", "weights"])
def test_under_a_mechanism_a_report_of_nothing_hides_that_training_diverged(
    tmp_path: Path, mechanism: Mechanism, protects: Literal["difference", "weights"]
) -> None:
    layout = make_model("softmax", features=4, classes=2).layout()
    protection = make_protection(PrivacySection(mechanism=mechanism, protects=protects, epsilon=1000.0))
    model = np.full(layout.size, 0.01, "<f4").tobytes()
    sent = []
    for value in (np.nan, 0.0):
        folder = DeviceFolder(tmp_path / str(value))
        terms = Terms("job", 1, protection=protection)
        source = SeededRandomness(np.random.default_rng(1))
        device = Device("7", terms, Diverges(layout, value), folder, 0.0, lambda: 0.5, randomness=source)
        device.next(0.0)
        device.received(Answer(200, encode_reply(Admitted(1, 0, TICKETS.issue("7", 1), 100.0), 0.0)), 0.0)
        device.next(0.0)
        device.received(Answer(200, encode_model(0, 0, model, Instructions(), {})), 0.0)
        assert isinstance(device.next(0.0), Train)
        device.train(1.0)
        pending = folder.pending()
        assert pending is not None
        assert isinstance(device.next(1.0), Call)
        assert device.spent.diverged == int(np.isnan(value))
        sent.append((pending.body, pending.loss, pending.examples, pending.steps))
    assert sent[0] == sent[1]
