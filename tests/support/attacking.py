"""A small setting to attack: rows that overlap, a network of a few hundred weights."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from federated.attacks.lineup import Around, Contender, protected
from federated.attacks.setting import Setting
from federated.device import LocalTraining
from federated.models import make_model
from federated.privacy.section import PrivacySection, SecureAggregationSection

CANDIDATES = 200
SECURE = SecureAggregationSection(protocol="secagg")


@lru_cache(maxsize=1)
def setting() -> Setting:
    """200 candidates and 400 further rows of 12 features in 4 classes."""
    generator = np.random.default_rng(20)
    labels = generator.integers(0, 4, 600)
    centres = generator.normal(0.0, 1.0, (4, 12))
    inputs = (centres[labels] + generator.normal(0.0, 1.0, (600, 12))).astype(np.float32)
    model = make_model("perceptron", features=12, classes=4, hidden=[8])
    return Setting(
        model,
        model.initial(np.random.default_rng(21)),
        LocalTraining(steps=1, batch_size=0),
        0,
        inputs[:CANDIDATES],
        labels[:CANDIDATES],
        inputs[CANDIDATES:],
        labels[CANDIDATES:],
    )


def lines(section: PrivacySection, clients: int = 5, iterations: int = 1) -> list[Contender]:
    """The lines of one mechanism."""
    generator = np.random.default_rng(22)
    alike = setting().strangers(setting().draw(generator, 100, 1))
    return list(protected(Around(setting(), clients, iterations, alike), section, SECURE))
