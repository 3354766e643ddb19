"""Federations by name and from files: what they hold, and what is said about files that cannot be read."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from services.datasets.dataset import Dataset
from services.datasets.download import user_cache
from services.datasets.errors import BadRows, DatasetDamaged, DatasetError, DatasetUnavailable
from services.datasets.federations import open_federation
from services.datasets.federations.movies import item_features, read_ratings
from services.datasets.federations.owned import last_of_each
from services.datasets.federations.text import speeches
from services.datasets.generated import generate
from services.datasets.open import GENERATED_WARNING


def open_(name: Path | str, **asked: object):  # type: ignore[no-untyped-def]
    return open_federation(str(name), Path("unused"), **asked)[0]  # type: ignore[arg-type]


class TestByName:
    def test_digits_are_divided_among_few_and_augmented_among_many(self) -> None:
        few, many = open_("digits", clients=50), open_("digits", clients=51)
        assert few.augmentation is None
        assert few.counts.sum() + few.held_out.sizes.sum() == 1_438
        assert set(many.counts.tolist()) == {20}
        assert len(few.test_labels) == len(many.test_labels) == 359
        assert np.array_equal(few.test_inputs, many.test_inputs)
        assert few.test_inputs.max() == 1.0
        # No training image is a test image.
        images = {row.tobytes() for row in few.inputs}
        assert not images & {row.tobytes() for row in few.test_inputs}

    def test_the_same_arguments_give_the_same_federation_and_another_seed_another(self) -> None:
        for name in ("digits", "breast-cancer"):
            one, same, other = (
                open_(name, clients=12, seed=seed, partition="dirichlet:1") for seed in (4, 4, 5)
            )
            assert np.array_equal(one.training.rows, same.training.rows)
            assert np.array_equal(one.client(3).inputs, same.client(3).inputs)
            assert not np.array_equal(one.training.rows, other.training.rows)

    def test_breast_cancer_is_standardised_by_its_training_rows(self) -> None:
        made = open_("breast-cancer", clients=5)
        assert made.inputs.shape == (456, 30)
        assert np.abs(made.inputs.mean(axis=0)).max() < 1e-5
        assert made.inputs.std(axis=0) == pytest.approx(1.0, abs=1e-4)
        assert np.abs(made.test_inputs.mean(axis=0)).max() > 0.01

    def test_without_scikit_learn_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *rest: object) -> object:
            if name.startswith("sklearn"):
                raise ImportError(name)
            return real(name, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(DatasetUnavailable, match=r"headwater\[datasets\]"):
            open_("digits")

    def test_movielens_is_one_client_a_user(self) -> None:
        made, notes = open_federation("ml-100k", user_cache(os.environ))
        assert made.clients == 943
        assert made.ids is not None
        assert made.ids[0] == "1"
        assert made.classes == 2
        assert made.counts.sum() + made.held_out.sizes.sum() == 100_000
        assert not notes or notes[0] == GENERATED_WARNING

    def test_what_means_nothing_is_refused(self) -> None:
        for asked, message in (
            ({"clients": 60, "partition": "label:11"}, "11 classes a client"),
            ({"partition": "fair"}, "'fair' is no partition"),
            ({"clients": 0}, "at least one client"),
            ({"clients": -3, "partition": "label:2"}, "cannot hold 10 classes"),
            ({"seed": -1}, "non-negative"),
            ({"partition": "user"}, "nobody owns the rows of digits"),
        ):
            with pytest.raises(DatasetError, match=message):
                open_("digits", **asked)
        with pytest.raises(DatasetError, match=r"neither a data set \(digits, breast-cancer, ml-100k\)"):
            open_("digit")
        with pytest.raises(DatasetError, match="456 rows cannot give 500 clients"):
            open_("breast-cancer", clients=500)


class TestRatings:
    @pytest.fixture
    def dataset(self) -> Dataset:
        return generate(users=40, items=200, interactions=2_000)

    def test_the_latest_of_each_users_ratings_are_held_out(self, dataset: Dataset) -> None:
        owned = read_ratings(dataset)
        assert owned.held_out is not None
        times = dataset.interactions.timestamp_ms
        for user in range(40):
            mine = owned.owners == user
            held = owned.held_out & mine
            assert held.sum() == mine.sum() // 5
            assert times[mine & ~held].max() <= times[held].min()

    def test_a_user_likes_what_it_gave_four_or_more(self, dataset: Dataset) -> None:
        owned = read_ratings(dataset, "items")
        assert np.array_equal(owned.labels == 1, dataset.interactions.value >= 4)
        assert np.array_equal(owned.inputs[:, 0], dataset.interactions.item)

    def test_features_are_categories_and_the_year(self, dataset: Dataset) -> None:
        features = item_features(dataset)
        names = sorted({name for row in dataset.items.attributes for name in row["categories"]})  # type: ignore[union-attr]
        row = dataset.items.attributes[7]["categories"]
        assert [names[column] for column in np.flatnonzero(features[7, :-1])] == sorted(row)  # type: ignore[arg-type,type-var]

    def test_ratings_can_be_dealt_to_others_for_comparison(self, dataset: Dataset) -> None:
        made = read_ratings(dataset).federation(9, 1, "iid")
        assert made.clients == 9
        assert made.counts.sum() + made.held_out.sizes.sum() == 2_000


def test_the_last_by_time_keep_the_order_of_the_source_among_equals() -> None:
    marks = last_of_each(np.array([0, 1, 0, 0, 1, 1]), np.array([5, 1, 5, 5, 1, 0]), 0.34)
    assert marks.tolist() == [False, False, False, True, True, False]


PLAY = """A play
ANNA: Good morning to you, and to everyone else here.
Bad day?
BERT:
It is not, I thank you for the question, Anna. And you, how is it?

ANNA.
I would not say so. There is rain, and there is wind.
CARL: No.
"""


class TestText:
    def test_speeches_of_both_spellings_are_found(self) -> None:
        said = speeches(PLAY)
        assert said["ANNA"].startswith("Good morning to you, and to everyone else here.\nBad day?\nI would")
        assert said["BERT"].startswith("It is not")
        assert "A play" not in "".join(said.values())

    def test_windows_stay_with_their_speaker_and_the_end_is_held_out(self, tmp_path: Path) -> None:
        path = tmp_path / "play.txt"
        path.write_text(PLAY)
        made = open_(path, context=5)
        assert made.ids == ("ANNA", "BERT"), "Carl says too little"
        said = speeches(PLAY)
        alphabet = ["?", *sorted(set(said["ANNA"] + said["BERT"]))]
        for client, name in enumerate(made.ids):
            words, data = said[name], made.client(client)
            rows = np.concatenate([data.inputs, data.held_inputs])
            labels = np.concatenate([data.labels, data.held_labels])
            windows = {"".join(alphabet[code] for code in (*row, label)) for row, label in zip(rows, labels)}  # noqa: B905
            assert windows == {words[start : start + 6] for start in range(len(words) - 5)}
            # What is guessed in the held-out part comes after all that was trained on.
            end = "".join(alphabet[code] for code in data.held_labels)
            assert sorted(end) == sorted(words[-len(data.held_labels) :])
        assert made.inputs.base is not None, "windows are views of the characters"

    def test_a_text_without_speakers_says_what_it_needs(self, tmp_path: Path) -> None:
        path = tmp_path / "prose.txt"
        path.write_text("It was a dark and stormy night; the rain fell in torrents.\n")
        with pytest.raises(DatasetError, match=r"prose.txt: nobody says.*'SPEAKER:'"):
            open_(path)
        path.write_bytes(b"ANNA: \xff\xfe")
        with pytest.raises(DatasetError, match="is not UTF-8"):
            open_(path)

    def test_overlapping_windows_are_not_dealt_out(self, tmp_path: Path) -> None:
        (tmp_path / "play.txt").write_text(PLAY)
        with pytest.raises(DatasetError, match="overlap within a user"):
            open_(tmp_path, context=5, partition="iid", clients=2)


class TestFolders:
    def write(self, folder: Path, name: str, rows: list[str], header: str = "a,b,label") -> Path:
        path = folder / name
        path.write_text("\n".join([header, *rows]) + "\n")
        return path

    def test_a_csv_a_client_and_test_rows(self, tmp_path: Path) -> None:
        self.write(tmp_path, "north.csv", [f"{row},1,yes" for row in range(10)])
        self.write(tmp_path, "south.csv", [f"{row},2,no" for row in range(5)])
        self.write(tmp_path, "test.csv", ["7,7,yes"])
        made = open_(tmp_path)
        assert made.ids == ("north", "south")
        assert made.counts.tolist() == [8, 4]
        assert made.test_inputs.tolist() == [[7.0, 7.0]]
        assert set(made.client(0).labels.tolist()) == {1}, "classes by the alphabet: no, yes"

    def test_an_npz_a_client(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            np.savez(tmp_path / f"{name}.npz", inputs=np.ones((6, 2, 3)), labels=np.arange(6) % 2)
        made = open_(tmp_path)
        assert made.ids == ("a", "b")
        assert made.features == 6

    def test_one_csv_with_a_client_column(self, tmp_path: Path) -> None:
        rows = [f"{'mw'[row % 2]},{row},{row % 3}" for row in range(20)]
        path = self.write(tmp_path, "all.csv", rows, "client_id,a,target")
        made = open_(path)
        assert made.ids == ("m", "w")
        assert sorted(made.client(1).inputs[:, 0].tolist() + made.client(1).held_inputs[:, 0].tolist()) == [
            float(row) for row in range(1, 20, 2)
        ]
        assert open_(path, clients=4, partition="iid").clients == 4

    def test_wrong_rows_are_named_by_file_and_line(self, tmp_path: Path) -> None:
        self.write(
            tmp_path, "north.csv", ["1,2,yes", "1,many,no", "nan,1,no", "1,,no", "1,2,3,4", "1e99,1,no"]
        )
        with pytest.raises(BadRows) as caught:
            open_(tmp_path)
        assert [(error.file, error.line) for error in caught.value.errors] == [
            ("north.csv", line) for line in range(3, 8)
        ]

    @pytest.mark.parametrize(
        ("header", "rows", "message"),
        [
            ("a,b", ["1,2"], "none of label, target, y"),
            ("label", ["1"], "no column beside 'label'"),
            ("a,label", [], "has a header but no row"),
            ("a,label", ["1,yes"], "all labels are 'yes'"),
        ],
    )
    def test_a_file_that_is_no_table_says_why(
        self, tmp_path: Path, header: str, rows: list[str], message: str
    ) -> None:
        self.write(tmp_path, "north.csv", rows, header)
        with pytest.raises(DatasetError, match=message):
            open_(tmp_path)

    def test_clients_must_agree_in_their_features(self, tmp_path: Path) -> None:
        self.write(tmp_path, "north.csv", ["1,2,yes", "1,2,no"])
        self.write(tmp_path, "south.csv", ["1,yes"], "a,label")
        with pytest.raises(DatasetDamaged, match=r"south.csv has the features a, but north.csv a, b"):
            open_(tmp_path)

    def test_pickles_and_other_archives_are_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        np.savez(path, inputs=np.array([[object()]]), labels=np.array([0]))
        with pytest.raises(DatasetDamaged, match="no npz of plain arrays"):
            open_(tmp_path)
        path.write_bytes(b"PK nothing")
        with pytest.raises(DatasetDamaged, match="no npz of plain arrays"):
            open_(tmp_path)
        np.savez(path, x=np.ones(3))
        with pytest.raises(DatasetDamaged, match=r"np.savez\(path, inputs=x, labels=y\)"):
            open_(tmp_path)

    def test_an_unknown_folder_says_what_is_known(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match="holds no data that are known"):
            open_(tmp_path)


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    )


class TestMnist:
    def write(self, folder: Path, rows: int = 200) -> None:
        generator = np.random.default_rng(0)
        for part, count in (("train", rows), ("t10k", 20)):
            images = generator.integers(0, 256, (count, 6, 6))
            (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 10))

    def test_the_four_files_gzipped_or_not(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        made = open_(tmp_path, clients=4, partition="label:5")
        assert made.inputs.shape == (200, 36)
        assert 0.99 < made.inputs.max() <= 1.0
        assert len(made.test_labels) == 20
        assert open_(tmp_path, clients=100).augmentation is not None

    def test_damage_is_named_and_bounded(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        labels = tmp_path / "train-labels-idx1-ubyte"
        whole = labels.read_bytes()
        for body, message in (
            (whole[:-1], "announces 200 bytes, but holds 199"),
            (whole + b"x", "holds more"),
            (b"\x89PNG" + whole, "does not begin like an idx file"),
            (struct.pack(">HBB4I", 0, 8, 4, *[2**32 - 1] * 4), "at most"),
            (struct.pack(">HBBH", 0, 8, 1, 0), "ends within its header"),
            (idx(np.zeros(7)), "train has images"),
        ):
            labels.write_bytes(body)
            with pytest.raises(DatasetDamaged, match=message):
                open_(tmp_path)
        labels.unlink()
        with pytest.raises(DatasetError, match=r"lacks train-labels-idx1-ubyte \(or .gz\)"):
            open_(tmp_path)
        self.write(tmp_path)
        (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b\x08 not deflate")
        with pytest.raises(DatasetError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
            open_(tmp_path)


class TestLeaf:
    def write(self, folder: Path, part: str, users: dict[str, int]) -> Path:
        path = folder / part / "all_data_0.json"
        path.parent.mkdir(exist_ok=True)
        data = {
            user: {"x": [[float(row), 0.5] for row in range(count)], "y": [row % 3 for row in range(count)]}
            for user, count in users.items()
        }
        path.write_text(json.dumps({"users": [*users], "num_samples": [*users.values()], "user_data": data}))
        return path

    def test_a_users_test_rows_are_held_out_and_strangers_are_the_test(self, tmp_path: Path) -> None:
        self.write(tmp_path, "train", {"f1": 6, "f2": 3, "nothing": 0})
        self.write(tmp_path, "test", {"f1": 2, "stranger": 4})
        made = open_(tmp_path)
        assert made.ids == ("f1", "f2")
        assert made.counts.tolist() == [6, 3]
        assert made.held_out.sizes.tolist() == [2, 0]
        assert len(made.test_labels) == 4

    def test_files_alone_have_a_part_held_out(self, tmp_path: Path) -> None:
        self.write(tmp_path, ".", {"f1": 10, "f2": 5})
        made = open_(tmp_path)
        assert made.held_out.sizes.tolist() == [2, 1]
        assert len(made.test_labels) == 3

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "has no object 'user_data'"),
            ('{"user_data": {"f1": {"x": [[1]]}}}', "user f1 lacks the lists"),
            ('{"user_data": {"f1": {"x": [[1]], "y": []}}}', "has 1 rows and 0 labels"),
            ('{"user_data": {"f1": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "not rows of numbers of one length"),
            ('{"user_data": {"f1": {"x": [[NaN]], "y": [0]}}}', "no finite number"),
            ('{"user_data": {"f1": {"x": ["to be"], "y": ["?"]}}}', "for text give the play"),
            ('{"user_data": {}}', "has no users with rows"),
            (
                '{"user_data": {"f1": {"x": [[1]], "y": [0]}, "f2": {"x": [[1, 2]], "y": [1]}}}',
                "user f2 has rows of 2 features, others of 1",
            ),
        ],
    )
    def test_damage_is_named_with_file_and_user(self, tmp_path: Path, body: str, message: str) -> None:
        path = self.write(tmp_path, "train", {"f1": 1})
        path.write_text(body)
        with pytest.raises(DatasetDamaged, match=message):
            open_(tmp_path)
