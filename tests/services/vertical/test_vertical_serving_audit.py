"""The audit log of joint inference: bounded, keyed, whole lines only, and nothing is answered without it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.app import main
from services.vertical.config import ConfigRefused
from services.vertical.serving.audit import (
    MARK,
    REFUSALS,
    AuditFull,
    AuditLog,
    entries,
    marks_in,
    older,
)
from services.vertical.serving.process import serve_party
from services.vertical.serving.quota import Quota
from tests.support.vertical_serving import ask, audit, serving, trained

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


def test_the_log_is_bounded_and_keyed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, 4_096)
    for place in range(200):
        log.write("bank", place, log.marks([b"a"]), "answered")
    assert log.size() == path.stat().st_size + log.older.stat().st_size
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["rows"] == 199
    assert path.stat().st_size <= 4_096
    assert older(path).stat().st_size <= 4_096
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"audit.jsonl", "audit.jsonl.1", "audit.key", "audit.lock"}
    assert all(not (tmp_path / name).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) for name in names)
    again, other = AuditLog(path, 4_096), AuditLog(tmp_path / "other" / "audit.jsonl", 4_096)
    assert again.marks([b"a"]) == lines[0]["ids"] != other.marks([b"a"])
    assert again.marks([b"b", b"a"]) == again.marks([b"b"]) + again.marks([b"a"])
    assert len(again.marks([b"a"])) == MARK
    again.close()
    other.close()


def test_a_text_in_a_line_ends_no_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", 4_096)
    forged = 'x"}\n{"who": "bank"}\r\u2028\u0085\ud800\x00'
    log.write("shop", 1, "", "answered", request_id=forged)
    log.close()
    (line,) = (tmp_path / "audit.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["request_id"] == forged


def test_what_a_cut_left_of_a_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, 4_096)
    log.write("bank", 1, "", "answered")
    log.close()
    with path.open("ab") as file:
        file.write(b'{"at": "2026-')
    log = AuditLog(path, 4_096)
    log.write("bank", 2, "", "answered")
    log.close()
    assert [entry["rows"] for entry in entries(path)] == [1, 2]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, 4_096)
    log.write("bank", 1, "", "answered")
    written, room = os.write, [10, 0]

    def write(file: int, body: Any) -> int:
        if not (left := room.pop(0)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, body[:left])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            log.write("bank", 2, "", "answered")
    log.write("bank", 3, "", "answered")
    log.close()
    assert [json.loads(line)["rows"] for line in path.read_text().splitlines()] == [1, 3]


@pytest.mark.parametrize("full", ["bank", "shop"])
def test_nothing_is_answered_that_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    append = AuditLog._append

    def fails(self: AuditLog, entry: dict[str, Any]) -> None:
        if self._path.parents[1].name == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, entry)

    monkeypatch.setattr(AuditLog, "_append", fails)
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        reply = httpx.post(f"{url}/v1/predictions", json={"ids": ["5"]}, timeout=20)
    if full == "bank":
        assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
        assert reply.headers["retry-after"] == "5"
    else:
        assert (reply.json()["hosts"], reply.json()["degraded"]) == ({"shop": "refused"}, True)


def test_young_lines_are_not_forgotten_where_that_is_asked(tmp_path: Path) -> None:
    now = [datetime.now(UTC)]
    log = AuditLog(tmp_path / "audit.jsonl", 4_096, keep_s=3_600.0, now=lambda: now[0])
    places = itertools.count()
    with pytest.raises(AuditFull, match="too young to be forgotten"):
        fill(lambda: log.write("bank", next(places), "", "answered"))
    written = list(entries(tmp_path / "audit.jsonl"))
    assert [entry["rows"] for entry in written] == list(range(len(written)))
    now[0] += timedelta(hours=2)
    log.write("bank", 1, "", "answered")
    assert log.size() < 2 * 4_096
    log.close()


def fill(write: Callable[[], None]) -> None:
    for _ in range(200):
        write()


def test_refusals_without_end_push_no_answer_out(tmp_path: Path) -> None:
    path, now = tmp_path / "audit.jsonl", [0.0]
    log = AuditLog(path, 2**16, monotonic=lambda: now[0])
    log.write("bank", 1, "", "answered")
    for _ in range(10_000):
        log.refuse("bank", 0, "malformed")
    log.refuse("bank", 0, "too-many")
    now[0] = 61.0
    log.refuse("bank", 0, "malformed")
    log.close()
    found = list(entries(path))
    assert [entry["outcome"] for entry in found].count("malformed") == REFUSALS + 2
    assert found[0]["outcome"] == "answered"
    assert [entry["requests"] for entry in found if "requests" in entry] == [10_000 - REFUSALS]


def test_several_processes_write_one_log_and_turn_it_over(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    one, other = AuditLog(path, 4_096), AuditLog(path, 4_096)
    for place in range(60):
        (one if place % 3 else other).write("bank", place, "", "answered")
    assert older(path).exists()
    rows = [entry["rows"] for entry in entries(path)]
    assert rows == list(range(60 - len(rows), 60))
    assert len(rows) > 30
    path.unlink()
    one.write("bank", 60, "", "answered")
    assert [json.loads(line)["rows"] for line in path.read_text().splitlines()] == [60]
    one.close()
    other.close()


def test_recent_lines_are_read_from_the_end(tmp_path: Path) -> None:
    now = [NOON]
    log = AuditLog(tmp_path / "audit.jsonl", 2**17, now=lambda: now[0])
    for place in range(2_000):
        now[0] = NOON + timedelta(seconds=place)
        log.write("bank", place, "", "answered")
    assert log.older.exists()
    assert [entry["rows"] for entry in log.recent(60)] == list(range(1_999, 1_938, -1))
    log.close()


def test_a_host_answers_so_many_rows_a_minute() -> None:
    now = [0.0]
    quota = Quota(60, lambda: now[0])
    assert quota.take("bank", 50)
    assert not quota.take("bank", 20)
    assert quota.take("other", 20)
    now[0] = 30.0
    assert quota.take("bank", 10)
    now[0] = 60.0
    assert not quota.take("bank", 50)  # rows of the first second count for all of it
    now[0] = 61.0
    assert quota.take("bank", 50)
    assert not quota.take("bank", 1)


def test_no_minute_holds_more_rows_than_allowed_however_they_are_asked_for() -> None:
    now, taken = [0.0], []
    quota = Quota(100, lambda: now[0])
    for step in range(3_000):
        now[0] = step * 0.1
        if quota.take("bank", 7):
            taken.append(now[0])
    assert max(7 * sum(at <= one < at + 60 for one in taken) for at in taken) <= 100
    assert len(taken) > 50


def test_a_restart_gives_no_rows_back(tmp_path: Path) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n', host="most_rows_a_minute = 3\n")
    with serving(parties["bank"]) as url:
        with serving(parties["shop"]):
            assert ask(url, "5", "6")["hosts"] == {"shop": "answered"}
            assert ask(url, "5", "6")["hosts"] == {"shop": "too-many"}
        with serving(parties["shop"]):
            assert ask(url, "5", "6")["hosts"] == {"shop": "too-many"}
            assert ask(url, "7")["hosts"] == {"shop": "answered"}


def headwater(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fl", "vertical", *arguments])
    assert not ended.value.code


def test_every_id_is_found_again_at_both_parties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    with serving(parties["shop"]), serving(parties["bank"]) as url:
        first = ask(url, "5", "7")
        second = ask(url, "7", "99")
    lines = {name: audit(prepared) for name, prepared in parties.items()}
    assert [len(marks_in(entry)) for entry in lines["bank"]] == [2, 2]
    assert [len(marks_in(entry)) for entry in lines["shop"]] == [2, 1]
    for name in parties:
        for one, expected in (("7", [first, second]), ("5", [first]), ("6", [])):
            arguments = ("audit", one, "--config", str(tmp_path / name / "party.toml"), "--format", "json")
            headwater(*arguments)
            found = json.loads(capsys.readouterr().out)
            assert [entry["request_id"] for entry in found] == [reply["request_id"] for reply in expected]
    headwater("audit", "--config", str(tmp_path / "shop" / "party.toml"))
    assert "answered" in capsys.readouterr().out


def test_a_log_that_cannot_hold_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match="audit_bytes must be at least 1604096"):
        trained(tmp_path, serve='most_ids = 100_000\naudit_bytes = "1MiB"\n')


def test_a_log_that_cannot_be_used_is_named_at_the_start(tmp_path: Path) -> None:
    parties = trained(tmp_path)
    parties["bank"].config.party.state.joinpath("audit.key").write_bytes(b"short")
    with pytest.raises(ConfigRefused, match=r"audit\.key is not a key of 32 bytes"):
        serve_party(parties["bank"], threading.Event())
