"""Updates as bodies and back."""

from __future__ import annotations

import numpy as np
import pytest

from federated.compression import BodyRefused, make_scheme
from federated.payload import decode_update, encode_update, most_payload, shared_seed

NAMES = ("difference", "control")
SIZE = 300


def vectors(seed: int = 0, names: tuple[str, ...] = NAMES) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=SIZE).astype(np.float32) for name in names}


@pytest.mark.parametrize(
    "written", ["", "quantise:8,deflate", "top_k:0.1,quantise:1,deflate", "random_mask:0.4:shared"]
)
def test_the_server_reads_what_the_client_knows_it_reads(written: str) -> None:
    scheme = make_scheme(written) if written else None
    sent = encode_update(scheme, vectors(), np.random.default_rng(1), None, 7)
    read = decode_update(scheme, sent.body, NAMES, SIZE, 7)
    assert len(sent.body) <= most_payload(scheme, 2, SIZE)
    for name in NAMES:
        np.testing.assert_array_equal(read[name], sent.decoded[name])


def test_one_vector_alone_is_its_bytes_and_nothing_else() -> None:
    one = vectors(names=("difference",))
    assert encode_update(None, one, np.random.default_rng(1)).body == one["difference"].tobytes()


def test_residuals_are_what_was_not_sent_for_each_vector() -> None:
    scheme = make_scheme("top_k:0.1,quantise:1,deflate")
    wanted = vectors()
    first = encode_update(scheme, wanted, np.random.default_rng(1))
    second = encode_update(scheme, wanted, np.random.default_rng(2), first.residuals)
    for name in NAMES:
        np.testing.assert_allclose(first.decoded[name] + first.residuals[name], wanted[name], atol=1e-6)
        total = first.decoded[name] + second.decoded[name] + second.residuals[name]
        np.testing.assert_allclose(total, 2 * wanted[name], atol=1e-5)


@pytest.mark.parametrize("body", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x04\0\0\0abcd", b"\0" * (8 * SIZE)])
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(BodyRefused):
        decode_update(None, body, NAMES, SIZE)


def test_what_is_not_finite_is_never_sent() -> None:
    bad = vectors()
    bad["control"][3] = np.nan
    with pytest.raises(ValueError, match="control"):
        encode_update(None, bad, np.random.default_rng(1))


def test_all_clients_of_an_iteration_know_one_seed() -> None:
    assert shared_seed(3, 5) == shared_seed(3, 5)
    assert len({shared_seed(3, iteration) for iteration in range(50)}) == 50
