"""Ciphertexts that no honest party makes, as SEAL stores them."""

from __future__ import annotations

import struct

from tenseal import sealapi

from federated.vertical.ckks import stored

_HEADER = struct.Struct("<HBBBBHQ")


def transparent(context: sealapi.SEALContext, cipher: sealapi.Ciphertext) -> bytes:
    """Of the level of ``cipher``, which is of BFV and not transformed, and nothing but zeros: anybody can read it."""
    head = _HEADER.unpack_from(stored(cipher))

    def framed(body: bytes) -> bytes:
        return _HEADER.pack(*head[:4], 0, 0, _HEADER.size + len(body)) + body

    numbers = cipher.size() * cipher.poly_modulus_degree() * cipher.coeff_modulus_size()
    sizes = (cipher.size(), cipher.poly_modulus_degree(), cipher.coeff_modulus_size())
    data = framed(struct.pack("<Q", numbers) + bytes(8 * numbers))
    return framed(struct.pack("<4Q?3QdQ", *cipher.parms_id(), False, *sizes, cipher.scale, 1) + data)
