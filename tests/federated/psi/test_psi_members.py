"""Ids beyond memory: the same set, in an order that the key alone makes; folders come back to a mark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.psi.ids import IdRule, IdsRefused, normalise
from federated.psi.members import MemoryFolder, MemoryMembers, spool

TEXTS = st.lists(st.text("abcxyz ", max_size=3), max_size=60)


@given(TEXTS, st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=40)
def test_spooled_are_those_of_memory(texts: list[str], chunk: int, first: int) -> None:
    key = bytes(range(32))
    ids = normalise(texts, IdRule())
    memory = MemoryMembers(ids, key)
    spooled = spool(iter(texts), IdRule(), MemoryFolder(), key)
    assert len(spooled) == len(memory) == len(ids)
    assert list(spooled.chunks(chunk)) == list(memory.chunks(chunk))
    assert list(spooled.chunks(chunk, first)) == list(memory.chunks(chunk, first))
    positions = np.arange(0, len(ids), 2)
    (one, rows), (other, other_rows) = memory.take(positions), spooled.take(positions)
    assert one == other
    assert rows.tolist() == other_rows.tolist()
    assert spooled.complaint == ids.complaint


def test_spooling_refuses_what_is_no_id() -> None:
    with pytest.raises(IdsRefused, match="row 2"):
        spool(["a", "\0"], IdRule(), MemoryFolder(), bytes(32))


def test_folder_comes_back() -> None:
    folder = MemoryFolder()
    folder.append("a", b"12")
    mark = folder.mark()
    folder.append("a", b"3")
    folder.append("b", b"4")
    folder.back_to(mark)
    assert (folder.read("a"), folder.read("b")) == (b"12", b"")
    other = MemoryFolder()
    other.back_to(mark)
    assert other.read("a") == b"12"
    with pytest.raises(ValueError, match="cut short"):
        other.back_to(mark[:-1])
