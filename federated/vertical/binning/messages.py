"""The messages of joint binning: kinds, fields, bounds.

``key``     guest to hosts: its public key, rows, numbers a row, least rows of a bin.
``offer``   host to guest: how many bins each of its columns has, and how many rows each bin, in a secret order.
``events``  guest to hosts: in how many rounds sums are sent, copies of each number, and all labels, encrypted.
``sums``    host to guest, in each round: the masked sums of the next bins.
``told``    guest to host: what it hears of its columns.
"""

from __future__ import annotations

from typing import Final

from federated.vertical.histograms.lanes import MOST_CIPHERTEXT, MOST_KEY, MOST_LANES
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Arr, Blobs, Bytes, Expected, Int

KEY: Final = "binning key"
OFFER: Final = "binning offer"
EVENTS: Final = "binning events"
SUMS: Final = "binning sums"
TOLD: Final = "binning told"

MOST_ROWS: Final = 20_000_000
MOST_BINS_IN_ALL: Final = 200_000
"""Of a host's columns together."""
MOST_ROUNDS: Final = 16
"""A checkpoint after each."""
MOST_INPUTS: Final = 100_000

SEEN: Final = {
    KEY: "the guest's public key, how many rows there are, and how many numbers each row has (one less than classes)",
    OFFER: "how many columns a host has, how many bins each has and how many rows each bin has; columns and bins in an"
    " order that is secret and new in each job. No names, no edges, no rows",
    EVENTS: "nothing but sizes: labels are encrypted under the guest's key, which no host has",
    SUMS: "how many rows of each class each anonymous bin has, so how well each anonymous column tells classes apart;"
    " of no row in which bin it is (each bin has least_rows rows or more). But a second job with other bins, or with"
    " some rows less, tells the difference: of one row left out, in which bins it is. A guest that breaks the protocol"
    " could encrypt other numbers than labels, from whose sums it reads which rows a bin has",
    TOLD: "which of its columns are kept, where columns are selected (so which have much information on the label);"
    " with tell = iv also how much each has on the class that it tells best, in steps of .001 up to 3; with tell = woe"
    " also the share of each class among the rows of each of its bins, in steps: of a nearly pure bin that is the label"
    " of nearly all its rows, and where bins of several columns overlap, likely labels of single rows. Refused where"
    " all of it could hold all labels",
}

KEY_FIELDS: Final[dict[str, Expected]] = {
    "public": Bytes(MOST_KEY),
    "rows": Int(1, MOST_ROWS),
    "lanes": Int(1, MOST_LANES),
    "least": Int(1, MOST_ROWS),
}
OFFER_FIELDS: Final[dict[str, Expected]] = {
    "bins": Arr("<i8", (None,), MOST_COLUMNS),
    "rows": Arr("<i8", (None,), MOST_BINS_IN_ALL),
}
EVENT_FIELDS: Final[dict[str, Expected]] = {
    "rounds": Int(1, MOST_ROUNDS),
    "copies": Int(1, 2**13),
    "cipher": Blobs(MOST_INPUTS, MOST_CIPHERTEXT),
}


def sum_fields(ciphertexts: int) -> dict[str, Expected]:
    """``sums`` of a round."""
    return {"cipher": Blobs(ciphertexts, MOST_CIPHERTEXT, least=ciphertexts)}


def told_fields(columns: int, bins: int, classes: int, tell: str) -> dict[str, Expected]:
    """``told`` for a host with so many columns and bins; ``classes`` are weighed."""
    return {
        "iv": Arr("<f8", (0 if tell == "nothing" else columns,)),
        "woe": Arr("<f8", (bins if tell == "woe" else 0, classes)),
        "kept": Arr("|b1", (columns,)),
    }


def part(count: int, rounds: int, number: int) -> slice:
    """Which of ``count`` bins are summed in round ``number``: all of them in ``rounds``, in order."""
    return slice(count * number // rounds, count * (number + 1) // rounds)
