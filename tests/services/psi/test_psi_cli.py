"""``headwater fl psi`` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federated.psi.kind import PsiOptions
from federated.vertical.tables import TableRefused, read_table
from services.cli.app import main
from services.cli.exits import Exit
from services.psi.files import read_ids
from services.psi.trial import intersect


def headwater(*arguments: str) -> int:
    """The exit code of a command."""
    try:
        main(["fl", "psi", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for name, first in (("a", 0), ("b", 30), ("c", 35)):
        path = tmp_path / f"{name}.csv"
        path.write_text("id,x\n" + "".join(f"u{at},1\n" for at in range(first, first + 40)))
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("protocol", ["ecdh", "ot", "unbalanced"])
def test_two_files(
    protocol: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*files[:2], "--protocol", protocol, "--cores", "1", "--out", str(tmp_path / "out")]
    assert headwater("run", *arguments) == Exit.OK
    assert "10" in capsys.readouterr().out
    written = [(tmp_path / "out" / f"{name}.common.csv").read_text().splitlines() for name in "ab"]
    assert [line.split(",")[0] for line in written[0]] == [line.split(",")[0] for line in written[1]]
    assert written[0][:2] == ["id,row", "u30,31"]
    assert written[1][1] == "u30,1"


def test_three_files_as_json(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main_arguments = ["--format", "json", "fl", "psi", "run", *files, "--cores", "1"]
    with pytest.raises(SystemExit) as end:
        main(main_arguments)
    assert not end.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["protocol"] == "several"
    assert [one["common"] for one in report["parties"]] == [5, 5, 5]
    assert all(one["bytes"] > 0 for one in report["sent"])


def test_processes_and_disk_give_the_same(files: list[str], tmp_path: Path) -> None:
    named = {"a": Path(files[0]), "b": Path(files[1])}
    one = intersect(named, PsiOptions(chunk=16))
    other = intersect(named, PsiOptions(chunk=16), cores=2, disk=tmp_path / "disk")
    for name in "ab":
        assert one.found[name].ids == other.found[name].ids
        assert one.found[name].count == 10
    assert one.sent == other.sent
    with pytest.raises(ValueError, match="empty at the beginning"):
        intersect(named, PsiOptions(), disk=tmp_path / "disk")


@pytest.mark.parametrize(("protocol", "again"), [("rsa", "sign_own"), ("unbalanced", "owned")])
def test_what_is_kept_is_not_done_again(
    protocol: str, again: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", *files[:2], "--protocol", protocol, "--cores", "1", "--keep", str(tmp_path / "kept")]
    assert headwater(*arguments) == Exit.OK
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "kept").iterdir())
    module = "federated.psi.signatures" if protocol == "rsa" else "federated.psi.unbalanced"
    key = (tmp_path / "kept" / "signer-2048").read_bytes() if protocol == "rsa" else b""

    def twice(*given: object, **more: object) -> None:
        raise AssertionError("done again")

    with monkeypatch.context() as patched:
        patched.setattr(f"{module}.{again}", twice)
        assert headwater(*arguments) == Exit.OK
        # Another set: what is new in it is done.
        files[1], files[2] = files[2], files[1]
        arguments[2] = files[1]
        with pytest.raises(AssertionError, match="done again"):
            main(["fl", "psi", *arguments])
    assert headwater(*arguments) == Exit.OK
    assert not key or (tmp_path / "kept" / "signer-2048").read_bytes() == key


def test_kept_files_of_other_options_or_damaged(files: list[str], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    arguments = ["run", *files[:2], "--protocol", "unbalanced", "--cores", "1", "--keep", str(kept)]
    assert headwater(*arguments) == Exit.OK
    assert headwater(*arguments, "--filter-bits", "40") == Exit.OK
    assert {"prepared-30", "prepared-40"} <= {file.name for file in kept.iterdir()}
    (kept / "prepared-30").write_bytes(b"nothing")
    assert headwater(*arguments) == Exit.REFUSED
    # The file of another name is as good as a damaged one.
    (kept / "prepared-30").write_bytes((kept / "prepared-40").read_bytes())
    assert headwater(*arguments) == Exit.REFUSED


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.csv"
    path.write_text("id\na\nb \n b\n")
    assert headwater("check", str(path)) == Exit.CHECK_FAILED
    assert "row 3 ('b')" in capsys.readouterr().out
    path.write_text("id\na\nA\n")
    assert headwater("check", str(path)) == Exit.OK
    assert headwater("check", str(path), "--case", "fold") == Exit.CHECK_FAILED
    assert headwater("check", str(path), "--case", "Fold") == Exit.USAGE
    path.write_text("id\n7\n8.0\n")
    capsys.readouterr()
    assert headwater("check", str(path)) == Exit.CHECK_FAILED
    assert "row 2 ('8.0')" in capsys.readouterr().out
    path.write_text("id\na\x07\n")
    assert headwater("check", str(path)) == Exit.CHECK_FAILED


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "FILE"], Exit.USAGE),
        (["run", "FILE", "FILE", "--protocol", "carrier-pigeon"], Exit.USAGE),
        (["run", "FILE", "FILE", "--protocol", "rsa", "--bits", "1024"], Exit.USAGE),
        (["run", "FILE", "FILE", "--case", "upper"], Exit.USAGE),
        (["run", "FILE", "missing.csv"], Exit.BAD_INPUT),
        (["run", "FILE", "FILE", "--id", "name"], Exit.BAD_INPUT),
    ],
)
def test_refusals(
    arguments: list[str], code: Exit, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert headwater(*(files[0] if one == "FILE" else one for one in arguments)) == code
    assert capsys.readouterr().err


def test_reading(tmp_path: Path) -> None:
    parquet = tmp_path / "ids.parquet"
    pq.write_table(pa.Table.from_pydict({"id": ["a", None, "b"], "x": [1, 2, 3]}), parquet)
    assert list(read_ids(parquet)) == ["a", "", "b"]
    with pytest.raises(TableRefused, match="no column 'name'"):
        list(read_ids(parquet, "name"))
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("id;x\na;1\n")
    with pytest.raises(TableRefused, match="parted by ';'"):
        list(read_ids(wrong))
    wrong.write_text("id,x\na,1\nb\n")
    with pytest.raises(TableRefused, match="line 3: 1 cells"):
        list(read_ids(wrong))
    wrong.write_bytes(b"id\n\xff\n")
    with pytest.raises(TableRefused, match="UTF-8"):
        list(read_ids(wrong))
    (tmp_path / "wrong.parquet").write_bytes(b"nothing")
    with pytest.raises(TableRefused, match="no Parquet"):
        list(read_ids(tmp_path / "wrong.parquet"))


@pytest.mark.parametrize("cells", [[7.0, None], [b"a"], [True], [["a"]]])
def test_ids_that_became_something_else_are_refused(tmp_path: Path, cells: list[Any]) -> None:
    path = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"id": cells}), path)
    for read in (lambda: list(read_ids(path)), lambda: list(read_table(path).ids)):
        with pytest.raises(TableRefused, match=r"row 1: .* is of type (float|bytes|bool|list); .* as text"):
            read()
    pq.write_table(pa.table({"id": [7, 8]}), path)
    assert list(read_ids(path)) == list(read_table(path).ids) == ["7", "8"]
