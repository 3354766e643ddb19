"""Which parts of a job go together with its protection, and why the others do not: one table.

A row is a reason why a job is unsound, or None. ``require_sound`` raises the first that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from federated.privacy.section import DISTRIBUTED, LOCAL, PrivacySection, SecureAggregationSection

NOISY_STRATEGIES: Final = frozenset(
    {"fedavg", "fedsgd", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad"}
)
"""Strategies that use the mean difference alone: what noise protects is all that they see."""


class Unsound(ValueError):
    """Parts of a job that do not go together with its protection; the message says which, why, and what to change."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a job decides whether its protection is sound."""

    privacy: PrivacySection
    secure: SecureAggregationSection
    strategy: str
    needs: Literal["sum", "updates"]
    mode: str
    selection: str
    upload: str
    """The upload's compression scheme, "" for none."""
    shared_support: bool
    """Whether all clients of a round send the same coordinates, without entropy coding."""

    @property
    def noisy(self) -> bool:
        """Whether there is a mechanism."""
        return self.privacy.mechanism != "none"

    @property
    def masked(self) -> bool:
        """Whether updates travel under secure aggregation."""
        return self.secure.protocol != "none"


Rule = Callable[[Facts], str | None]


def require_sound(facts: Facts) -> None:
    """Raise Unsound for the first rule that ``facts`` break."""
    for rule in RULES:
        reason = rule(facts)
        if reason is not None:
            raise Unsound(reason)


def _updates_under_masks(facts: Facts) -> str | None:
    if facts.masked and facts.needs == "updates":
        return f"secure aggregation shows the sum alone, and {facts.strategy} compares single updates; take norm_bound"
    return None


def _buffered_under_masks(facts: Facts) -> str | None:
    if facts.masked and facts.mode == "buffered":
        return "masks cancel within one cohort, and buffered rounds have none; take rounds.mode sync or over_selection"
    return None


def _support_under_masks(facts: Facts) -> str | None:
    if facts.masked and facts.upload and not facts.shared_support:
        return (
            f"compression {facts.upload!r} sends other coordinates or lengths for each client, which masks do not "
            'hide; take "random_mask:…:shared"'
        )
    return None


def _distributed_compressed(facts: Facts) -> str | None:
    if facts.privacy.mechanism in DISTRIBUTED and facts.upload:
        return (
            f"{facts.privacy.mechanism}: its noise is sized for whole steps of all coordinates, which compression "
            "would scale; leave compression.upload out"
        )
    return None


def _distributed_without_masks(facts: Facts) -> str | None:
    if facts.privacy.mechanism in DISTRIBUTED and not facts.masked:
        return (
            f"{facts.privacy.mechanism}: one device's noise is too small to protect it alone; "
            "set secure_aggregation.protocol"
        )
    return None


def _strategy_under_noise(facts: Facts) -> str | None:
    mechanism = facts.privacy.mechanism
    if mechanism == "signds" or facts.strategy == "signds":
        if (mechanism, facts.strategy) != ("signds", "signds"):
            return "mechanism signds and strategy signds go together only: reports are signs, not differences"
        return None
    local = mechanism in LOCAL
    if facts.noisy and facts.strategy not in NOISY_STRATEGIES and not (local and facts.needs == "updates"):
        return (
            f"{facts.strategy} sends more than the clipped difference, which {mechanism} would not protect; "
            f"take one of {', '.join(sorted(NOISY_STRATEGIES))}"
        )
    return None


def _signs_under_masks(facts: Facts) -> str | None:
    if facts.privacy.mechanism == "signds" and (facts.masked or facts.upload):
        return "a SignDS report is a few coordinates and private by itself: masks or compression would only enlarge it"
    return None


def _buffered_signs(facts: Facts) -> str | None:
    if facts.strategy == "signds" and facts.mode == "buffered":
        return (
            "SignDS devices compare their magnitude with a threshold of one version, and buffered rounds count the "
            "answers of several together; take rounds.mode sync or over_selection"
        )
    return None


def _amplified(facts: Facts) -> str | None:
    if facts.selection == "poisson" and facts.privacy.mechanism != "central_gaussian":
        return (
            "selection poisson thins out rounds for the sake of central_gaussian's accounting; "
            "nothing else earns from it"
        )
    return None


def _buffered_sum(facts: Facts) -> str | None:
    if facts.privacy.mechanism == "central_gaussian" and facts.mode == "buffered":
        return (
            "a fast client may stand in one buffer twice, and central_gaussian's noise is for one update of each; take "
            "rounds.mode sync or over_selection"
        )
    return None


def _adaptive_clip(facts: Facts) -> str | None:
    privacy = facts.privacy
    if privacy.clipping != "adaptive" or not facts.noisy:
        return None
    if privacy.mechanism != "central_gaussian":
        return (
            f"an adaptive clip follows a noised count of clients, which {privacy.mechanism} does not have; "
            'set privacy.clipping = "fixed" or take central_gaussian'
        )
    if privacy.per_layer:
        return "an adaptive clip follows one norm: set privacy.per_layer = false"
    if facts.masked:
        return (
            "the count that an adaptive clip follows is not noised inside the sum of secure aggregation: "
            'set privacy.clipping = "fixed"'
        )
    if facts.upload:
        return (
            f"compression {facts.upload!r} lengthens updates, and the server clips them again by a fixed clip only: "
            'set privacy.clipping = "fixed", or leave compression.upload out'
        )
    return None


def _clipped_weights(facts: Facts) -> str | None:
    if facts.noisy and facts.privacy.protects == "weights" and facts.privacy.mechanism not in LOCAL:
        return (
            f"{facts.privacy.mechanism} divides by a fixed number of clients, and weights of fewer would shrink: "
            'set privacy.protects = "difference"'
        )
    return None


def _compressed_sum(facts: Facts) -> str | None:
    if facts.privacy.mechanism == "central_gaussian" and facts.masked and facts.upload:
        return (
            f"compression {facts.upload!r} lengthens updates, and under masks the server cannot clip them again as "
            "central_gaussian needs: leave compression.upload out"
        )
    return None


def _not_its_own(facts: Facts) -> str | None:
    """Numbers that somebody relies on, and that the mechanism does not look at."""
    privacy, usual = facts.privacy, PrivacySection()
    mechanism = privacy.mechanism
    if mechanism == "none":
        if privacy.budget_epsilon:
            return "a budget without a mechanism is not kept by anything: set privacy.mechanism"
        for name in ("epsilon", "delta", "noise_multiplier"):
            if getattr(privacy, name) != getattr(usual, name):
                return f"privacy.{name} without a mechanism protects nobody: set privacy.mechanism"
        return None
    one_report = (privacy.epsilon, privacy.delta) != (usual.epsilon, usual.delta)
    if mechanism == "signds" and (one_report or privacy.protects == "weights"):
        return (
            "SignDS reports signs of differences, at privacy.sign_eps and privacy.magnitude_epsilon: leave epsilon, "
            "delta and protects out"
        )
    if mechanism not in LOCAL and one_report:
        return (
            f"privacy.epsilon and privacy.delta are of one local report: {mechanism} takes noise_multiplier, and "
            "budget_epsilon and budget_delta say where the job ends"
        )
    if mechanism in LOCAL and privacy.noise_multiplier != usual.noise_multiplier:
        return f"{mechanism} adds the noise that its epsilon asks for: leave privacy.noise_multiplier out"
    return None


def _masks_not_on(facts: Facts) -> str | None:
    if not facts.masked and (facts.secure.malicious or facts.secure.registrar):
        return (
            "secure_aggregation.malicious and registrar without a protocol mask nothing: set "
            "secure_aggregation.protocol to secagg or secagg+"
        )
    return None


RULES: Final[Sequence[Rule]] = (
    _updates_under_masks,
    _buffered_under_masks,
    _support_under_masks,
    _distributed_compressed,
    _distributed_without_masks,
    _strategy_under_noise,
    _signs_under_masks,
    _buffered_signs,
    _amplified,
    _buffered_sum,
    _adaptive_clip,
    _clipped_weights,
    _compressed_sum,
    _not_its_own,
    _masks_not_on,
)
