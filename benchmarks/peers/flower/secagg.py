"""What Flower's SecAgg+ is made of, timed one by one on request, in its own environment (``requirements.lock``).

    python -m benchmarks.peers.flower.secagg

Each line on standard input is a JSON object {"work": NAME, ...numbers}; each line on standard output the seconds that
one took, the best of what fits into a tenth of a second, and the bytes that it gave (0 where none travel). The calls
are those of ``flwr.client.mod.secaggplus_mod`` and ``flwr.server.workflow.SecAggPlusWorkflow``, in their order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen, share_keys_plaintext_concat
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from benchmarks.samples import best_s

MODULUS = 2**32
ONE_CHUNK = 15  # bytes, which Flower pads to the 16 of one polynomial

Work = Callable[[], Any]


def vector(length: int) -> list[Any]:
    """Masked parameters as the mod makes them: the factor, then the values."""
    values = np.random.default_rng(0).integers(0, MODULUS, length, dtype=np.int64)
    return factor_combine(1, [values])


def expand(length: int) -> tuple[Work, int]:
    """A mask out of its seed, added to a vector."""
    total, seed = vector(length), os.urandom(32)
    return lambda: parameters_addition(total, pseudo_rand_gen(seed, MODULUS, [one.shape for one in total])), 0


def take(length: int) -> tuple[Work, int]:
    """A client's masked vector read and added, by the server."""
    total = vector(length)
    bodies = [ndarray_to_bytes(one) for one in vector(length)]
    return lambda: parameters_addition(total, [bytes_to_ndarray(body) for body in bodies]), 0


def send(length: int) -> tuple[Work, int]:
    """A masked vector reduced and written, by the client."""
    masked = parameters_subtraction(vector(length), vector(length))

    def work() -> list[bytes]:
        return [ndarray_to_bytes(one) for one in parameters_mod(masked, MODULUS)]

    return work, sum(map(len, work()))


def keys() -> tuple[Work, int]:
    """Both key pairs of a client, as bytes."""

    def work() -> tuple[bytes, ...]:
        pairs = [generate_key_pairs(), generate_key_pairs()]
        secret = [private_key_to_bytes(key) for key, _ in pairs]
        public = [public_key_to_bytes(key) for _, key in pairs]
        return (*secret, *public)

    return work, sum(map(len, work()[2:]))


def _pair() -> tuple[bytes, bytes]:
    secret, _ = generate_key_pairs()
    _, public = generate_key_pairs()
    return private_key_to_bytes(secret), public_key_to_bytes(public)


def agree() -> tuple[Work, int]:
    """A key of two."""
    secret, public = _pair()
    return lambda: generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(public)), 0


def split(shares: int, threshold: int) -> tuple[Work, int]:
    """One polynomial's shares."""
    return lambda: create_shares(os.urandom(ONE_CHUNK), threshold, shares), 0


def combine(shares: int, threshold: int) -> tuple[Work, int]:
    """One polynomial's constant from all ``shares`` that came back, as the workflow asks for it."""
    given = create_shares(os.urandom(ONE_CHUNK), threshold, shares)
    return lambda: combine_shares(given), 0


def _sealed() -> tuple[bytes, bytes]:
    secret, public = _pair()
    key = generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(public))
    share = 4 + 16 * chunks(32)
    plain = share_keys_plaintext_concat(1, 2, bytes(share), bytes(4 + 16 * chunks(len(secret))))
    return key, plain


def seal() -> tuple[Work, int]:
    """One neighbour's two shares encrypted."""
    key, plain = _sealed()
    return lambda: encrypt(key, plain), len(encrypt(key, plain))


def unseal() -> tuple[Work, int]:
    """The same decrypted."""
    key, plain = _sealed()
    body = encrypt(key, plain)
    return lambda: decrypt(key, body), 0


def chunks(secret_bytes: int) -> int:
    """The polynomials of a secret: one for 16 bytes after PKCS 7's padding."""
    return secret_bytes // 16 + 1


def secret() -> tuple[Work, int]:
    """A secret key written as it is shared."""
    key, _ = generate_key_pairs()
    return lambda: private_key_to_bytes(key), len(private_key_to_bytes(key))


WORKS: dict[str, Callable[..., tuple[Work, int]]] = {
    "expand": expand,
    "take": take,
    "send": send,
    "keys": keys,
    "agree": agree,
    "split": split,
    "combine": combine,
    "seal": seal,
    "unseal": unseal,
    "secret": secret,
}


def main() -> None:
    """Until the end of input."""
    for line in sys.stdin:
        wanted = json.loads(line)
        work, size = WORKS[wanted.pop("work")](**wanted)
        print(json.dumps([best_s(work), size]), flush=True)


if __name__ == "__main__":
    main()
