"""The CSV that devices and simulations read alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federated.client_run import load_rows
from federated.labelled import MOST_PROBLEMS, RowsRefused, read_labelled
from services.datasets.federations.tables import read_folder


def write(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_header_names_the_label_wherever_it_stands(tmp_path: Path) -> None:
    found = read_labelled(write(tmp_path, "\ufeffb,label,a\n1.5,yes,2\n\n-3,no,4e2\n"))
    assert found.features == ("b", "a")
    assert found.labels == ("yes", "no")
    np.testing.assert_array_equal(found.inputs, np.array([[1.5, 2], [-3, 400]], np.float32))
    assert found.clients == ()


def test_without_a_header_the_last_column_is_the_label(tmp_path: Path) -> None:
    found = read_labelled(write(tmp_path, "1,2,0\n3,4,1\n"))
    assert (found.features, found.labels) == (("feature 0", "feature 1"), ("0", "1"))
    np.testing.assert_array_equal(found.inputs, np.array([[1, 2], [3, 4]], np.float32))


def test_a_column_of_clients_is_a_feature_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "user,a,y\n7,1,0\n8,2,1\n")
    assert read_labelled(path).features == ("user", "a")
    asked = read_labelled(path, by_client=True)
    assert (asked.features, asked.clients) == (("a",), ("7", "8"))
    with pytest.raises(RowsRefused, match="none of client, client_id, user, user_id"):
        read_labelled(write(tmp_path, "a,y\n1,0\n"), by_client=True)
    with pytest.raises(
        RowsRefused, match="names no columns, of which one must be client, client_id, user or"
    ):
        read_labelled(write(tmp_path, "1,0\n"), by_client=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,label\n", "has a header but no row"),
        ("a,b\n1,2\n", ":1: has the columns a, b, but none of label, target, y"),
        ("label\n1\n", ":1: there is no column beside 'label'"),
        ("5\n6\n", ":1: has one column"),
        ("a,a,label\n1,2,3\n", ":1: the first line must name each column once"),
        ("a,,label\n1,2,3\n", ":1: the first line must name each column once"),
        ("a,label\n1,0\n1,2,3\n", ":3: has 3 fields where the first line has 2"),
        ("a,label\n,0\n", ":2: field 1 is empty"),
        ("a,label\n1,\n", ":2: field 2 is empty"),
        ("a,label\nnan,0\n", ":2: a feature is no finite 32-bit number: 'nan'"),
        ("a,label\n1e39,0\n", ":2: a feature is no finite 32-bit number: '1e39'"),
        ("1,2,0\n1,many,0\n", ":2: a feature is no finite 32-bit number: 'many'"),
        ('a,label\n"1,0\n', "unexpected end of data"),
    ],
)
def test_what_is_no_table_of_labelled_rows_says_why(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RowsRefused) as caught:
        read_labelled(write(tmp_path, text))
    assert says in str(caught.value)


def test_other_bytes_than_utf_8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a,label\n1,\xff\n")
    with pytest.raises(RowsRefused, match="is not UTF-8"):
        read_labelled(tmp_path / "rows.csv")


def test_of_many_wrong_rows_the_first_are_told_and_all_counted(tmp_path: Path) -> None:
    with pytest.raises(RowsRefused, match=r":2: .*\(and 49 more\)") as caught:
        read_labelled(write(tmp_path, "a,label\n" + "x,0\n" * 50))
    assert [line for line, _ in caught.value.problems] == list(range(2, 2 + MOST_PROBLEMS))
    assert caught.value.total == 50


@pytest.mark.parametrize("label", ["yes", "-1", "1.5", "nan", "inf", "1e300", "9" * 30, "²"])
def test_a_device_takes_whole_numbers_as_labels_alone(tmp_path: Path, label: str) -> None:
    with pytest.raises(RowsRefused, match="is no whole number from 0"):
        load_rows(write(tmp_path, f"a,label\n1,0\n2,{label}\n"))


@pytest.mark.parametrize(
    "text", ["a,label,b\n1,0,2\n3,1,4\n5,2,6\n", "1,2,0\n3,4,1\n5,6,2\n", "1e0,2,0.0\n3,4,1.0e+00\n5,6,2\n"]
)
def test_a_device_and_a_simulation_read_the_same_of_one_file(tmp_path: Path, text: str) -> None:
    inputs, labels = load_rows(write(tmp_path, text))
    simulated = read_folder(tmp_path)
    np.testing.assert_array_equal(inputs, simulated.inputs)
    np.testing.assert_array_equal(inputs, np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    np.testing.assert_array_equal(labels, [0, 1, 2])
    np.testing.assert_array_equal(labels, simulated.labels)
