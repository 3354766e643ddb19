"""Ranges of keys by their beginning, in the order of their bytes."""

from __future__ import annotations


def after(prefix: bytes) -> bytes:
    """The least bytes that stand after every key that starts with ``prefix`` (UTF-8 holds no byte 0xff)."""
    return prefix + b"\xff"
