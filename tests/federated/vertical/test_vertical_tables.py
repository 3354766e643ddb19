"""A party's table: read, refused with names, written back, aligned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federated.vertical.tables import Table, TableRefused, read_table, write_csv

CSV = "id,y,age,sum\n a ,1,3,1.5\nb,0,n/a,-2\nü,1,NA,0\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_csv_with_labels_and_missing_values(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, CSV), label_column="y")
    assert (table.ids, table.names) == (("a", "b", "ü"), ("age", "sum"))
    np.testing.assert_array_equal(table.features, [[3, 1.5], [np.nan, -2], [np.nan, 0]])
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]
    copy = tmp_path / "copy.csv"
    write_csv(table, copy)
    again = read_table(copy, label_column="y")
    np.testing.assert_array_equal(again.features, table.features)
    assert (again.ids, again.digest()) == (table.ids, table.digest())


def test_parquet_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"id": [1, 2], "age": [3.0, None]}), path)
    table = read_table(path)
    assert (table.ids, table.labels) == (("1", "2"), None)
    np.testing.assert_array_equal(table.features, [[3.0], [np.nan]])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("id,x,x\n1,2,3\n", r"of the same: \['x'\]"),
        ("key,x\n1,2\n", "no column 'id'"),
        ("id,x\n1\n", "line 2: 1 cells, 2 columns"),
        ("id,x\n1,two\n", "row 1, column 'x': 'two'"),
        ("id;x\n1;2\n", "parted by ';'"),
        ('id,x,since,n\n1,"2,5",03.04.2020,1\n', "a decimal comma: write a point.; row 1, column 'since'"),
        ("id,x\n1,inf\n", "row 1, column 'x': 'inf'"),
        ("id,x\n1,0\n ,0\n", r"no id in 1 rows, such as rows \[2\]"),
        ("id,x\n1,0\n1,0\n", r"1 ids stand more than once, such as \['1'\]"),
        ('id,x\n1,"\n', "no CSV"),
    ],
)
def test_what_is_no_table_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(TableRefused, match=why):
        read_table(write(tmp_path, text))


def test_a_missing_label_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableRefused, match=r"no label in rows \[1\]"):
        read_table(write(tmp_path, "id,y\n1,\n"), label_column="y")
    with pytest.raises(TableRefused, match=r"column 'y': 'yes' is no finite number\. Labels are numbers"):
        read_table(write(tmp_path, "id,y\n1,yes\n"), label_column="y")
    with pytest.raises(TableRefused, match="cannot be read"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "no.parquet").write_bytes(b"no")
    with pytest.raises(TableRefused, match="no Parquet"):
        read_table(tmp_path / "no.parquet")


def test_aligning_takes_rows_in_the_given_order() -> None:
    table = Table(("a", "b", "c"), np.arange(3.0).reshape(3, 1), ("x",), np.arange(3.0))
    found = table.align(["c", "a"])
    assert found.ids == ("c", "a")
    assert found.features.ravel().tolist() == [2.0, 0.0]
    assert found.digest() != table.align(["a", "c"]).digest()
    with pytest.raises(ValueError, match=r"1 ids are not in the table, such as \['d'\]"):
        table.align(["d"])
