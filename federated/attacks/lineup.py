"""Mechanisms side by side: who attacks each, what they see, and what is claimed.

A mechanism may stand in several lines, since it does not protect against everybody alike: what a server sees of central
noise, for instance, are plain updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from federated.attacks.effects import (
    claimed,
    clip_by,
    noise_of,
    protection_of,
    quantised_sum,
    release_by,
)
from federated.attacks.likelihoods import unchanged
from federated.attacks.rates import Floats
from federated.attacks.setting import Setting
from federated.attacks.signs import SignsView
from federated.attacks.views import LocalNoise, Masked, Sent, Summed, View
from federated.compression import make_scheme
from federated.layout import Layout
from federated.privacy import noised
from federated.privacy.mechanisms import make_protection
from federated.privacy.section import DISTRIBUTED, LOCAL, PrivacySection, SecureAggregationSection
from federated.privacy.signds import plan_for
from federated.strategies.signds import SignVotes
from federated.weights import Array

SERVER: Final = "the server"
READER: Final = "who downloads the models"
ALL_BUT_ONE: Final = ", knowing all other updates"

NOTES: Final = {
    "none": "Plain updates tell everything: one step on one record names it.",
    "compression": "Compression is no protection: what is largest is kept, and names a record whose company is known.",
    "secagg": "Secure aggregation hides single updates, not their sum: whoever knows the others reads yours off "
    "it, and every released model is a function of sums.",
    "local_gaussian": "Local noise protects against everybody, the server included, and costs the most accuracy.",
    "local_laplace": "Laplace noise gives pure ε (δ = 0) for a clip in L1, where vectors of many coordinates are long: "
    "its noise drowns more.",
    "signds": "SignDS is as private as its ε: at its usual ε of 100 it has no meaningful privacy.",
    "central_gaussian": "Central noise protects against whoever sees the models; its server sees plain updates.",
    "distributed_gaussian": "Distributed noise hides even from the server what the sum would tell, while enough "
    "devices are honest.",
    "distributed_skellam": "Skellam noise does what distributed Gaussian noise does; sums of it are exactly Skellam.",
}
"""One sentence on what each mechanism buys and what not."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One line: ``mechanism`` and its ``label``; the ``adversary`` and what it ``sees``. ``epsilons`` and ``delta`` are
    claimed of one and of all iterations against this adversary: infinite where nothing is."""

    mechanism: str
    label: str
    adversary: str
    sees: str
    view: View
    epsilon: float = math.inf
    epsilon_at_end: float = math.inf
    delta: float = 0.0
    membership: bool = True
    """Whether it stands in the membership game, which knows no other client's update."""


@dataclass(frozen=True)
class Around:
    """What contenders share: the setting, how many ``clients`` a cohort has, how many ``iterations`` are seen, and
    updates ``alike`` [Q, D]."""

    setting: Setting
    clients: int
    iterations: int
    alike: Array

    @property
    def layout(self) -> Layout:
        """The model's."""
        return self.setting.model.layout()


def plain(around: Around, schemes: Sequence[str] = ()) -> Iterator[Contender]:
    """No mechanism, and compression by ``schemes``."""
    yield Contender("none", "plain", SERVER, "each update", Sent())
    for scheme in schemes:
        yield Contender(
            "compression", f"compression {scheme}", SERVER, "each body, decoded", Sent(make_scheme(scheme)),
            membership=False,
        )  # fmt: skip


def masked(around: Around, secure: SecureAggregationSection) -> Iterator[Contender]:
    """Secure aggregation alone."""
    label = "secagg"
    one = Masked(around.clients, secure.clip, secure.step_bits)
    yield Contender("secagg", label, SERVER, "one masked update", one, membership=False)
    total = Summed(partial(quantised_sum, secure), unchanged, 0.0, False)
    yield Contender("secagg", label, SERVER, f"the sum of {around.clients}", total)
    yield Contender(
        "secagg", label, SERVER + ALL_BUT_ONE, f"the sum of {around.clients}", replace(total, knows=True),
        membership=False,
    )  # fmt: skip


def protected(
    around: Around, section: PrivacySection, secure: SecureAggregationSection
) -> Iterator[Contender]:
    """The lines of one mechanism; what is claimed is at its ``budget_delta``."""
    if section.mechanism == "signds":
        yield _signs(around, section)
    elif section.mechanism in LOCAL:
        yield _local(around, section)
    elif section.mechanism == "central_gaussian":
        yield Contender(
            section.mechanism,
            label_of(section),
            SERVER,
            "each update (clipped)",
            _clipped_view(around, section),
        )
        yield from _sums(around, section, secure, READER)
    elif section.mechanism in DISTRIBUTED:
        yield from _sums(around, section, secure, SERVER)


def _local(around: Around, section: PrivacySection) -> Contender:
    protection = make_protection(section)
    assert isinstance(protection, noised.LocalNoise)
    view = LocalNoise(
        protection,
        around.layout,
        around.setting.start,
        clip_by(around.layout, section, around.setting.start),
        protection.scale,
    )
    return _with_claims(
        around, section, SecureAggregationSection(),
        Contender(section.mechanism, label_of(section), SERVER, "each report", view),
    )  # fmt: skip


def _signs(around: Around, section: PrivacySection) -> Contender:
    layout = around.layout
    plan = plan_for(
        layout.size, section.sign_k, section.sign_eps, section.sign_thr_ratio, section.sign_dim_out
    )
    tops = np.sort(around.alike, axis=1)[:, -plan.top :].mean(axis=1)
    threshold = float(np.median(tops))
    rate = SignVotes().server_rate * 2.0 * threshold * around.clients
    view = SignsView(section, layout, threshold, rate)
    return _with_claims(
        around, section, SecureAggregationSection(),
        Contender(section.mechanism, label_of(section), SERVER, "each report", view),
    )  # fmt: skip


def _sums(
    around: Around, section: PrivacySection, secure: SecureAggregationSection, adversary: str
) -> Iterator[Contender]:
    layout, start = around.layout, around.setting.start
    protection = protection_of(section, around.clients, secure.step_bits)
    sigma = noise_of(protection, layout)

    def release(updates: Array, generator: np.random.Generator) -> Floats:
        return release_by(protection, layout, start, updates, generator)

    view = Summed(release, clip_by(layout, section, start), sigma, False)
    sees = f"the noisy sum of {around.clients}"
    line = Contender(section.mechanism, label_of(section), adversary, sees, view)
    yield _with_claims(around, section, secure, line)
    informed = replace(
        line, adversary=adversary + ALL_BUT_ONE, view=replace(view, knows=True), membership=False
    )
    yield _with_claims(around, section, secure, informed)


def _clipped_view(around: Around, section: PrivacySection) -> View:
    return Sent(clipped=clip_by(around.layout, section, around.setting.start))


def _with_claims(
    around: Around, section: PrivacySection, secure: SecureAggregationSection, line: Contender
) -> Contender:
    one, all_of_them = (
        claimed(section, around.clients, secure.step_bits, around.layout.size, releases)
        for releases in (1, around.iterations)
    )
    return replace(line, epsilon=one, epsilon_at_end=all_of_them, delta=section.budget_delta)


def label_of(section: PrivacySection) -> str:
    """A mechanism with its size."""
    if section.mechanism == "signds":
        return f"signds eps {section.sign_eps + section.magnitude_epsilon:g}"
    if section.mechanism in LOCAL:
        return f"{section.mechanism} eps {section.epsilon:g}"
    return f"{section.mechanism} z {section.noise_multiplier:g}"
