"""Folders of bytes, in memory and on disk: one class of tests for both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from federated.psi.ecdh import ecdh
from federated.psi.ids import IdRule
from federated.psi.members import Folder, MemoryFolder, spool
from federated.psi.pool import TagPool
from federated.psi.terms import Terms
from federated.vertical.parties import run_local
from services.psi.disk import DiskFolder, FolderDamaged
from tests.support.psi import check, expected

ONE, OTHER = [f"u{at}" for at in range(40)], [f"u{at}" for at in range(25, 60)]


@pytest.fixture(params=["memory", "disk"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Folder]:
    """Makes the folder; once more, as after a restart."""
    return MemoryFolder if request.param == "memory" else lambda: DiskFolder(tmp_path / "folder")


class TestFolder:
    def test_grows_and_forgets(self, reopen: Callable[[], Folder]) -> None:
        folder = reopen()
        assert folder.read("a") == b""
        folder.append("a", b"12")
        folder.append("a", b"3")
        assert folder.read("a") == b"123"
        folder.remove("a")
        folder.remove("never-there")
        assert folder.read("a") == b""

    def test_comes_back_to_a_mark(self, reopen: Callable[[], Folder]) -> None:
        folder = reopen()
        folder.append("a", b"12")
        mark = folder.mark()
        folder.append("a", b"3")
        folder.append("b", b"4")
        again = reopen()
        again.back_to(mark)
        assert (again.read("a"), again.read("b")) == (b"12", b"")


def test_what_is_shorter_than_its_mark_is_named(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    folder.append("a", b"12")
    mark = folder.mark()
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(FolderDamaged, match="shorter than 2"):
        folder.back_to(mark)
    with pytest.raises(ValueError, match="no name"):
        folder.append("../a", b"")


def test_on_disk_is_for_its_owner_alone(tmp_path: Path) -> None:
    DiskFolder(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0


def test_sets_on_disk_resumed_in_new_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("federated.psi.pool.IN_MEMORY", 10)  # so that tags lie in 256 buckets
    assert TagPool(MemoryFolder(), "x", 8, 11).buckets == 256

    def roles(run: str, states: dict[str, bytes | None]) -> dict[str, Any]:
        made = {}
        for name, peer, texts in (("a", "b", ONE), ("b", "a", OTHER)):

            def arrange(key: bytes, texts: list[str] = texts, name: str = name) -> Any:
                return spool(texts, IdRule(), DiskFolder(tmp_path / f"{run}-{name}-ids"), key)

            folder = DiskFolder(tmp_path / f"{name}-tags")
            made[name] = ecdh(
                peer, arrange, Terms(chunk=7), first=name == "a", folder=folder, state=states[name]
            )
        return made

    whole = run_local(roles("first", {"a": None, "b": None}))
    states: dict[str, bytes | None] = {name: whole.checkpoints[name][3] for name in "ab"}
    again = run_local(roles("again", states), label=3)
    for outcome in (whole, again):
        check(outcome.results["a"], ONE, expected(ONE, OTHER))
        check(outcome.results["b"], OTHER, expected(ONE, OTHER))
    assert (
        max(len(state) for state in whole.checkpoints["a"].values()) < 16_384
    )  # sizes of files, not their bytes


def test_a_mark_is_on_disk_with_all_that_it_stands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    folder = DiskFolder(tmp_path / "folder")
    for name in ("a", "b", "a"):
        folder.append(name, b"1")
    folder.mark()
    inodes = {name: (tmp_path / "folder" / name).stat().st_ino for name in ("", "a", "b")}
    assert sorted(synced) == sorted(inodes.values())
    synced.clear()
    folder.append("b", b"2")
    folder.mark()
    assert sorted(synced) == sorted((inodes[""], inodes["b"]))
