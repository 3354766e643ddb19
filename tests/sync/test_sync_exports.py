"""What ``sync`` exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sync


def test_every_public_name_exists() -> None:
    assert {name for name in sync.__all__ if getattr(sync, name, None) is None} == set()
    assert sorted(sync._HOME) == sorted(sync.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sync.nonsense


def test_describing_tables_and_placing_keys_loads_no_compiler() -> None:
    code = "import sys, sync; sync.shard_of, sync.TableSpec, sync.Push; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_warm_up_runs() -> None:
    sync.warm_up()
