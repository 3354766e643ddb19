"""RSA's secret power by the libcrypto of OpenSSL 3, through ctypes: ``cryptography`` signs with padding alone.

A third of the time of ``gmpy2.powmod_sec``, and safer: exponents and numbers are blinded inside, the time does not
depend on them, and a faulty half of the Chinese remainder theorem is noticed and mended before anything is returned.

The library is the one that Python's own ``ssl`` is linked to, so that it is there and patched where Python is; where it
is not (no OpenSSL, LibreSSL, older than 3) ``found`` says so and ``power`` goes another way.

    LibcryptoFailed   a call failed; OpenSSL's own reasons are in the message
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

# Names of the library whose interface is OpenSSL 3's; their number is raised with the interface.
_NAMES: Final = ("libcrypto.so.3", "libcrypto.3.dylib")
_LEAST_VERSION: Final = 0x30000000
_NO_PADDING: Final = 3
_REASON_BYTES: Final = 256
_MOST_REASONS: Final = 16  # As many as OpenSSL keeps for a thread.

_Handle = ctypes.c_void_p
_INTERFACE: Final = {
    "OpenSSL_version_num": (ctypes.c_ulong, []),
    "OpenSSL_version": (ctypes.c_char_p, [ctypes.c_int]),
    "ERR_get_error": (ctypes.c_ulong, []),
    "ERR_error_string_n": (None, [ctypes.c_ulong, ctypes.c_char_p, ctypes.c_size_t]),
    "d2i_AutoPrivateKey": (_Handle, [_Handle, ctypes.POINTER(_Handle), ctypes.c_long]),
    "EVP_PKEY_get_size": (ctypes.c_int, [_Handle]),
    "EVP_PKEY_free": (None, [_Handle]),
    "EVP_PKEY_CTX_new": (_Handle, [_Handle, _Handle]),
    "EVP_PKEY_CTX_free": (None, [_Handle]),
    "EVP_PKEY_decrypt_init": (ctypes.c_int, [_Handle]),
    "EVP_PKEY_CTX_set_rsa_padding": (ctypes.c_int, [_Handle, ctypes.c_int]),
    "EVP_PKEY_decrypt": (
        ctypes.c_int,
        [_Handle, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_char_p, ctypes.c_size_t],
    ),
}


class LibcryptoFailed(RuntimeError):
    """A call of OpenSSL failed; the message has its reasons."""


class Libcrypto:
    """The loaded library. Raises OSError where there is none of this name, AttributeError for another interface,
    LibcryptoFailed for another library or an older version."""

    def __init__(self, name: str) -> None:
        library = ctypes.CDLL(name)
        for function, (result, arguments) in _INTERFACE.items():
            known = getattr(library, function)
            known.restype, known.argtypes = result, arguments
        self._library = library
        self.name = name
        self.version: str = library.OpenSSL_version(0).decode(errors="replace")
        if not self.version.startswith("OpenSSL ") or library.OpenSSL_version_num() < _LEAST_VERSION:
            raise LibcryptoFailed(f"{self.version}: OpenSSL 3 is needed")

    @contextmanager
    def opened(self, key: bytes, width: int) -> Iterator[Callable[[bytes], bytes]]:
        """The power of the RSA ``key`` (DER) on numbers of ``width`` bytes below its modulus; for one thread.

        Raises LibcryptoFailed, as each call of it does for a number that is none.
        """
        library = self._library
        with contextlib.ExitStack() as held:
            at = _Handle(ctypes.cast(ctypes.c_char_p(key), _Handle).value)
            pkey = self._there(
                library.d2i_AutoPrivateKey(None, ctypes.byref(at), len(key)), "reading the key"
            )
            held.callback(library.EVP_PKEY_free, pkey)
            if (size := library.EVP_PKEY_get_size(pkey)) != width:
                raise LibcryptoFailed(f"a key of {size} bytes, not {width}")
            context = self._there(library.EVP_PKEY_CTX_new(pkey, None), "making a context")
            held.callback(library.EVP_PKEY_CTX_free, context)
            self._done(library.EVP_PKEY_decrypt_init(context), "beginning")
            self._done(library.EVP_PKEY_CTX_set_rsa_padding(context, _NO_PADDING), "turning padding off")
            out, length = ctypes.create_string_buffer(width), ctypes.c_size_t()

            def raised(number: bytes) -> bytes:
                if len(number) != width:
                    raise LibcryptoFailed(f"a number of {len(number)} bytes, not {width}")
                length.value = width
                self._done(
                    library.EVP_PKEY_decrypt(context, out, ctypes.byref(length), number, width), "raising"
                )
                if length.value != width:
                    raise LibcryptoFailed(f"raising gave {length.value} bytes, not {width}")
                return out.raw

            yield raised

    def _there(self, handle: int | None, what: str) -> _Handle:
        if not handle:
            raise LibcryptoFailed(f"{what}: {self._reasons()}")
        return _Handle(handle)

    def _done(self, code: int, what: str) -> None:
        if code != 1:
            raise LibcryptoFailed(f"{what}: {self._reasons()}")

    def _reasons(self) -> str:
        """OpenSSL's reasons of this thread, taken away: whoever calls it next (``ssl``, say) must not find them."""
        reasons: list[str] = []
        text = ctypes.create_string_buffer(_REASON_BYTES)
        while len(reasons) < _MOST_REASONS and (code := self._library.ERR_get_error()):
            self._library.ERR_error_string_n(code, text, len(text))
            reasons.append(text.value.decode(errors="replace"))
        return "; ".join(reasons) or "OpenSSL gives no reason"


@cache
def found() -> Libcrypto | None:
    """The library; None where there is none that fits."""
    # What ssl has loaded is found by its name, wherever it lies.
    with contextlib.suppress(ImportError):
        import ssl  # noqa: F401
    for name in _NAMES:
        with contextlib.suppress(OSError, AttributeError, LibcryptoFailed):
            return Libcrypto(name)
    return None
