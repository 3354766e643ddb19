"""What the figures of a joint job say of its protection, in words for whoever has to judge it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

MEANINGS: Final[Mapping[str, str]] = {
    "protection": "what stands between a party's rows and its peers",
    "encryption": "homomorphic encryption of what is sent; bits by the tables of the Homomorphic Encryption Standard",
    "mask_bits": "what a key holder decrypts is under masks of so many bits",
    "mask_distance_log2": "log2 of the statistical distance, at most, of all that a key holder decrypts in the job from"
    " noise; smaller is better",
    "row_mask_distance_log2": "the same of the masked residuals of rows; smaller is better",
    "noise_over_error": "how many times the noise that a key holder adds exceeds the encryption's own error, which"
    " would tell of its key; larger is better",
    "equations_per_row": "linear equations that a party's gradients of an epoch are for each unknown residual; at 1"
    " they would tell all",
    "sums a common row": "numbers that a party's gradients are in all steps together, for each common row; where they"
    " are many, they tell what the row is hidden for",
    "noise": "standard deviation of the noise, over what one row can change",
    "epsilon": "differential privacy of a row over the whole training; smaller is better",
    "delta": "with which epsilon may fail",
    "epsilon of an answer": "differential privacy of a row in one joint answer",
}
NO_ROWS: Final = "it has no rows that would need any"
NONE: Final = "none named by its kind of job: what a party receives is in the table of what it saw"


def is_protection(figure: str) -> bool:
    """Whether a figure tells of protection."""
    return figure in MEANINGS or figure.startswith("bits ")


def protections(parties: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    """Party, what, value and meaning, of parties' reports."""
    for name, one in parties.items():
        found = {key: value for key, value in one["figures"].items() if is_protection(key)}
        if not found:
            yield name, "protection", "", NO_ROWS if one["role"] == "coordinator" else NONE
        for key, value in found.items():
            yield name, key, value, MEANINGS.get(key, "bits of information on the guest's labels")
