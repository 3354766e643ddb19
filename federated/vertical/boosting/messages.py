"""The messages of joint boosting: kinds, fields, bounds. The order within a tree stands in ``guest``.

``key``       guest to hosts: its public key, rows, lanes a row, the rule's least rows.
``offer``     host to guest: how many candidates and columns it has.
``gradients`` guest to hosts: copies for each node whose sums are asked, and the nodes' ciphertexts.
``sums``      host to guest, for each such node and candidate, in the tree's secret order: ``refs`` (a place among the
              sums, or NOTHING, ALL or WITHHELD), ``allowed`` (bit 0: in this node, bit 1: in its sibling), ciphertexts.
``splits``    guest to hosts, for each node of the level: LEFT_ALONE, OTHERS, or YOURS, then with the candidates of the
              best gain.
``sides``     host to guest, for each of its own: a new split's id, an opaque column, and which rows go left.
``children``  guest to hosts: which rows go left in each node that is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.histograms.lanes import MOST_CIPHERTEXT, MOST_KEY, MOST_LANES, Bools
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Arr, Blobs, Bytes, Expected, Int

KEY: Final = "boosting key"
OFFER: Final = "boosting offer"
GRADIENTS: Final = "boosting gradients"
SUMS: Final = "boosting sums"
SPLITS: Final = "boosting splits"
SIDES: Final = "boosting sides"
CHILDREN: Final = "boosting children"

NOTHING, ALL, WITHHELD = -1, -2, -3
"""Places from the end of the sums with three rows after them: zeros, the node's total, zeros."""
LEFT_ALONE, OTHERS, YOURS = 0, 1, 2
MOST_ROWS: Final = 20_000_000
MOST_CANDIDATES: Final = 200_000

SEEN: Final = {
    KEY: "the guest's public key, how many rows there are, how many numbers each row has (two for two classes or a"
    " number, two a class else: so the number of classes), and the least rows of a node",
    OFFER: "how many columns a host has and how many ways it can split by them",
    GRADIENTS: "nothing but sizes: the gradients are encrypted under the guest's key, which no host has",
    SUMS: "the sums of gradients and second derivatives of the rows that each of the host's candidates sends left, in"
    " an order that changes with each tree, and which candidates leave too few rows on a side. No edges, no rows, no"
    " names; candidates that share a sum are of one column, until the next tree's order. But the guest knows each row's"
    " gradients: where two candidates differ by few rows (in a node below the root; at the root by the least rows or"
    " more), it can search for rows whose numbers add up to the difference",
    SPLITS: "which nodes are split by the receiver's own candidates, and which candidates share the best gain",
    SIDES: "which rows go left by the host's split, which of its columns (by a number that stands for it) it is by, and"
    " its id; no edge and no name",
    CHILDREN: "which rows stand together in a node: a host so learns which rows a tree that was grown on the labels"
    " puts together, and what other parties' splits do to them",
}

KEY_FIELDS: Final[dict[str, Expected]] = {
    "public": Bytes(MOST_KEY),
    "rows": Int(1, MOST_ROWS),
    "lanes": Int(2, MOST_LANES),
    "least": Int(1, MOST_ROWS),
}
OFFER_FIELDS: Final[dict[str, Expected]] = {
    "candidates": Int(0, MOST_CANDIDATES),
    "columns": Int(0, MOST_COLUMNS),
}


def gradient_fields(nodes: int) -> dict[str, Expected]:
    """``gradients`` for so many nodes."""
    return {"copies": Arr("<i4", (nodes,)), "cipher": Blobs(100_000, MOST_CIPHERTEXT)}


def sum_fields(nodes: int, candidates: int) -> dict[str, Expected]:
    """``sums`` for so many nodes, of a host with so many candidates."""
    return {
        "refs": Arr("<i4", (nodes, candidates)),
        "allowed": Arr("|u1", (nodes, candidates)),
        "cipher": Blobs(nodes * candidates, MOST_CIPHERTEXT),
    }


def split_fields(nodes: int) -> dict[str, Expected]:
    """``splits`` for a level of so many nodes; ``best`` are ``ties[i]`` candidates for each of YOURS."""
    return {
        "owner": Arr("|u1", (nodes,)),
        "ties": Arr("<i4", (None,), nodes),
        "best": Arr("<i4", (None,), nodes * MOST_CANDIDATES),
    }


def side_fields(nodes: int, rows: int) -> dict[str, Expected]:
    """``sides`` of so many nodes with so many rows together: their bits one after another."""
    return {
        "split": Arr("<i4", (nodes,)),
        "column": Arr("<i4", (nodes,)),
        "left": Arr("|u1", (-(-rows // 8),)),
    }


def child_fields(rows: int) -> dict[str, Expected]:
    """``children``: bits of the rows of all nodes that are split, one after another."""
    return {"left": Arr("|u1", (-(-rows // 8),))}


def pieces(bits: npt.NDArray[np.uint8], sizes: Sequence[int]) -> list[Bools]:
    """The bits of each node, bool [n], from one packed row of all."""
    flat = np.unpackbits(bits, count=sum(sizes)).astype(np.bool_)
    return np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
