"""Folders of users, items and events: three formats, one data set, errors with their lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from featurestore.schema import default_schema
from services.datasets import generated
from services.datasets.dataset import Dataset
from services.datasets.errors import BadRows, DatasetError
from services.datasets.folder import read_folder
from services.datasets.open import open_dataset


class TestFolder:
    USERS = "user_id,age,gender\nanna,31,F\nben,,M\n"
    ITEMS = 'item_id,title,categories,year\nx,"Comma, the film",Drama|War,1999\ny,Second,,\n'
    EVENTS = (
        "user_id,item_id,action,value,timestamp\n"
        "anna,x,like,,2024-03-01T12:00:00Z\n"
        "cleo,z,,4.5,1709294400\n"
        "anna,x,like,,2024-03-01T12:00:00Z\n"
    )

    def write(self, folder: Path, **files: str) -> Path:
        for name, text in files.items():
            base, _, suffix = name.partition("_")
            (folder / f"{base}.{suffix}").write_text(text, encoding="utf-8")
        return folder

    def read(self, folder: Path, skip_bad: bool = False) -> tuple[Dataset, tuple[str, ...]]:
        return read_folder(folder, default_schema(), skip_bad=skip_bad)

    def errors(self, folder: Path) -> list[str]:
        with pytest.raises(BadRows) as caught:
            self.read(folder)
        return [str(error) for error in caught.value.errors]

    def test_csv(self, tmp_path: Path) -> None:
        self.write(tmp_path, users_csv=self.USERS, items_csv=self.ITEMS, events_csv=self.EVENTS)
        dataset, notes = self.read(tmp_path)
        assert notes == ()
        assert dataset.users.ids == ("anna", "ben", "cleo")
        assert dataset.users.attributes == ({"age": 31, "gender": "F"}, {"gender": "M"}, {})
        assert dataset.items.attributes[0] == {
            "title": "Comma, the film", "categories": ["Drama", "War"], "year": 1999,
        }  # fmt: skip
        assert dataset.items.ids == ("x", "y", "z")
        seen = dataset.interactions
        assert seen.actions == ("like", "rating")
        assert seen.timestamp_ms.tolist() == [1_709_294_400_000] * 3
        assert np.isnan(seen.value).tolist() == [True, False, True]

    def test_ids_depend_on_the_row_alone_and_count_repeats(self, tmp_path: Path) -> None:
        self.write(tmp_path, events_csv=self.EVENTS)
        first = self.read(tmp_path)[0].interactions.event_id.tolist()
        assert first[2] == f"{first[0]}/2"
        lines = self.EVENTS.splitlines(keepends=True)
        self.write(tmp_path, events_csv=lines[0] + "".join(reversed(lines[1:])))
        assert sorted(self.read(tmp_path)[0].interactions.event_id) == sorted(first)

    def test_all_formats_say_the_same(self, tmp_path: Path) -> None:
        rows = [
            {"user_id": "a", "item_id": "x", "action": "like", "timestamp_ms": 1_000},
            {"user_id": "b", "item_id": "y", "value": 3.0, "event_id": "e1", "timestamp_ms": 2_000},
        ]
        items = [{"item_id": "x", "categories": ["A", "B"], "year": 2001}]
        digests = []
        for format_ in ("jsonl", "parquet", "csv"):
            folder = tmp_path / format_ / "data"
            folder.mkdir(parents=True)
            if format_ == "jsonl":
                (folder / "events.jsonl").write_text("\n".join(map(json.dumps, rows)))
                (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
            elif format_ == "parquet":
                columns = [
                    ("user_id", pa.string()),
                    ("item_id", pa.string()),
                    ("action", pa.string()),
                    ("value", pa.float64()),
                    ("event_id", pa.string()),
                    ("timestamp_ms", pa.int64()),
                ]
                table = pa.Table.from_pylist(rows, schema=pa.schema(columns))
                pa.parquet.write_table(table, folder / "events.parquet")
                pa.parquet.write_table(pa.Table.from_pylist(items), folder / "items.parquet")
            else:
                (folder / "events.csv").write_text(
                    "user_id,item_id,action,value,event_id,timestamp_ms\na,x,like,,,1000\nb,y,,3.0,e1,2000\n"
                )
                (folder / "items.csv").write_text("item_id,categories,year\nx,A|B,2001\n")
            digests.append(self.read(folder)[0].digest())
        assert len(set(digests)) == 1

    @pytest.mark.parametrize(
        ("file", "text", "expected"),
        [
            ("events_csv", "user_id,item_id,action,timestamp\na,x,like\n", "events.csv:2: has 3 fields"),
            (
                "events_csv",
                "user_id,item_id,action,timestamp\n,x,like,1\n",
                "events.csv:2: user_id is missing",
            ),
            ("events_csv", "user_id,item_id,timestamp\na,x,1\n", "events.csv:2: action is missing"),
            ("events_csv", "user_id,item_id,action\na,x,like\n", "events.csv:2: timestamp is missing"),
            (
                "events_csv",
                "user_id,item_id,action,timestamp\na,x,l,noon\n",
                "events.csv:2: timestamp 'noon'",
            ),
            ("events_csv", "user_id,item_id,action,timestamp\na,x,l,2024-01-01\n", "has no time zone"),
            ("events_csv", "user_id,item_id,action,timestamp_ms\na,x,l,-1\n", "is no time after 1970"),
            ("events_csv", "user_id,item_id,action,timestamp_ms\na,x,l,1e300\n", "is no time after 1970"),
            ("events_csv", "user_id,item_id,value,timestamp\na,x,nan,1\n", "value is not a finite number"),
            ("events_csv", "user_id,item_id,acton,timestamp\na,x,like,1\n", "did you mean"),
            ("events_csv", 'user_id,item_id,action,timestamp\na,"x"y,like,1\n', "events.csv:2:"),
            ("events_jsonl", '{"user_id": "a"\n', "events.jsonl:1: is not JSON"),
            ("events_jsonl", "\n[1]\n", "events.jsonl:2: is not a JSON object"),
            ("events_jsonl", '{"user_id": "a", "value": NaN}\n', "NaN is not a JSON number"),
            ("events_jsonl", '{"user_id": "a\\u0000", "item_id": "x"}\n', "is not an id"),
            ("events_jsonl", json.dumps({"user_id": "a" * 257, "item_id": "x"}), "is not an id"),
            ("events_jsonl", json.dumps({"user_id": ["a"], "item_id": "x"}), "is not an id"),
            (
                "events_jsonl",
                '{"user_id":"a","item_id":"x","value":' + "9" * 400 + ',"timestamp":1}',
                "not a finite",
            ),
            ("users_csv", "user_id,age\na,old\n", "users.csv:2: age 'old' is not a number"),
            (
                "users_csv",
                "user_id,age\na,1\nb,2\na,3\n",
                "users.csv:4: user_id 'a' already stands in line 2",
            ),
            ("users_jsonl", '{"user_id": "a", "age": "old"}\n', "users.jsonl:1: age 'old' is not a number"),
            ("items_jsonl", '{"item_id": "a", "tags": {"b": 1}}\n', "items.jsonl:1: tags is dict"),
            ("items_csv", "item_id,likes_1d\na,3\n", "items.csv:2:"),
        ],
    )
    def test_errors_name_file_and_line(self, tmp_path: Path, file: str, text: str, expected: str) -> None:
        self.write(tmp_path, **{file: text})
        (error,) = self.errors(tmp_path)
        assert expected in error

    def test_parquet_errors_name_the_row(self, tmp_path: Path) -> None:
        rows = [{"item_id": "a", "year": "1999"}, {"item_id": "", "year": "2000"}]
        pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "items.parquet")
        assert self.errors(tmp_path)[0].startswith("items.parquet:2: item_id ''")

    def test_twenty_errors_are_shown_and_all_are_counted(self, tmp_path: Path) -> None:
        text = "user_id,item_id,action,timestamp\n" + "a,x,like,1\n" + "a,x,like,noon\n" * 33
        self.write(tmp_path, events_csv=text)
        with pytest.raises(BadRows, match="and 13 more") as caught:
            self.read(tmp_path)
        assert (len(caught.value.errors), caught.value.total) == (20, 33)
        dataset, notes = self.read(tmp_path, skip_bad=True)
        assert len(dataset.interactions) == 1
        assert notes[0].startswith("33 wrong rows were passed over")

    def test_a_multi_line_cell_keeps_line_numbers_right(self, tmp_path: Path) -> None:
        self.write(tmp_path, items_csv='item_id,title\na,"two\nlines"\n,none\n')
        assert self.errors(tmp_path) == ["items.csv:4: item_id is missing"]

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({}, "has none of users, items, events"),
            ({"users_csv": "user_id\n", "users_jsonl": ""}, "has both"),
            ({"users_csv": "user_id,user_id\n"}, "name each column once"),
            ({"users_csv": "\n"}, "name each column once"),
            ({"items_parquet": "no"}, "not a Parquet file"),
        ],
    )
    def test_files_that_cannot_be_used(self, tmp_path: Path, files: dict[str, str], message: str) -> None:
        self.write(tmp_path, **files)
        with pytest.raises(DatasetError, match=message):
            self.read(tmp_path)

    def test_latin_1_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "items.csv").write_bytes("item_id,title\na,Caf\u00e9\n".encode("latin-1"))
        with pytest.raises(DatasetError, match="not UTF-8"):
            self.read(tmp_path)

    def test_by_name(self, tmp_path: Path) -> None:
        self.write(tmp_path, events_csv=self.EVENTS)
        assert open_dataset(str(tmp_path), tmp_path)[0].name == tmp_path.name
        assert open_dataset(generated.NAME, tmp_path)[0].generated
        with pytest.raises(DatasetError, match="neither a data set"):
            open_dataset("ml-1m", tmp_path)
