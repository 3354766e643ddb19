"""Data sets: MovieLens from either packaging, the generated one, folders, and the way into the log."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from featurestore.schema import default_schema
from services.datasets import download, movielens
from services.datasets.dataset import Dataset
from services.datasets.download import Source, obtain_movielens, user_cache
from services.datasets.errors import DatasetDamaged, DatasetUnavailable
from services.datasets.generated import generate
from services.datasets.importer import (
    NotProcessed,
    append_events,
    entity_events,
    interaction_events,
    wait_processed,
)
from services.datasets.open import GENERATED_WARNING, open_dataset
from services.events import Interaction, ItemEvent, UserEvent, decode_event, partition_key
from services.messagelog.contract import Lag, Message, MessageLog, partition_of


@pytest.fixture(scope="module")
def real() -> Dataset:
    """The genuine data, over the network on the first run and from the user's cache after."""
    try:
        return obtain_movielens(user_cache(os.environ))
    except DatasetUnavailable as error:
        pytest.skip(f"MovieLens-100K cannot be had here: {error}")


@pytest.fixture(scope="module")
def small() -> Dataset:
    return generate(seed=3, users=20, items=60, interactions=500)


class TestMovieLens:
    def test_shape(self, real: Dataset) -> None:
        assert (len(real.users), len(real.items), len(real.interactions)) == (943, 1_682, 100_000)
        assert real.digest() == movielens.DIGEST
        assert np.bincount(real.interactions.value.astype(int)).tolist() == [
            0,
            6110,
            11370,
            27145,
            34174,
            21201,
        ]
        assert not real.generated

    @pytest.mark.parametrize(
        ("row", "attributes"),
        [
            (0, {"title": "Toy Story", "categories": ["Animation", "Children's", "Comedy"], "year": 1995}),
            (266, {"title": "unknown", "categories": []}),
            (542, {"title": "Misérables, Les", "categories": ["Drama", "Musical"], "year": 1995}),
            (1372, {"title": "Good Morning", "categories": [], "year": 1971}),
            (
                1411,
                {
                    "title": "Land Before Time III: The Time of the Great Giving",
                    "categories": ["Animation", "Children's"],
                    "year": 1995,
                },
            ),
        ],
    )
    def test_films_with_odd_titles(self, real: Dataset, row: int, attributes: dict[str, object]) -> None:
        assert real.items.ids[row] == str(row + 1)
        assert real.items.attributes[row] == attributes

    def test_users(self, real: Dataset) -> None:
        assert real.users.attributes[0] == {"age": 24, "gender": "M", "occupation": "technician"}

    def test_split_in_time_leaves_the_known_number_of_test_users(self, real: Dataset) -> None:
        """153 users with a like in the last tenth, 77 of them without one before (figures of record)."""
        before, after = real.split(0.9)
        liked = [part.interactions.liked((), 4.0) for part in (before, after)]
        tested = set(after.interactions.user[liked[1]].tolist())
        trained = set(before.interactions.user[liked[0]].tolist())
        assert (len(before.interactions), len(tested), len(tested - trained)) == (90_000, 153, 77)

    def test_both_packagings_give_the_same_records(self, real: Dataset) -> None:
        again = movielens.read_grouplens(as_grouplens(real))
        assert again.digest() == real.digest()
        assert again.items.attributes == real.items.attributes


def as_grouplens(dataset: Dataset, drop: str = "") -> bytes:
    """``dataset`` in GroupLens' packaging, with its odd titles and encoding."""
    seen = dataset.interactions
    items = []
    for id_, row in zip(dataset.items.ids, dataset.items.attributes, strict=True):
        categories = row["categories"]
        assert isinstance(categories, list)
        flags = ["1" if genre in categories else "0" for genre in movielens.GENRES]
        year = f" ({row['year']})" if "year" in row else ""
        video = " (V)" if id_ == "1412" else ""
        items.append("|".join([id_, f"{row['title']}{year}{video}", "01-Jan-1995", "", "http://x", *flags]))
    users = [
        f"{id_}|{row['age']}|{row['gender']}|{row['occupation']}|00000"
        for id_, row in zip(dataset.users.ids, dataset.users.attributes, strict=True)
    ]
    data = "".join(
        f"{dataset.users.ids[user]}\t{dataset.items.ids[item]}\t{int(value)}\t{ms // 1_000}\n"
        for user, item, value, ms in zip(
            seen.user.tolist(),
            seen.item.tolist(),
            seen.value.tolist(),
            seen.timestamp_ms.tolist(),
            strict=True,
        )
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in (("u.data", data), ("u.item", "\n".join(items)), ("u.user", "\n".join(users))):
            if name != drop:
                archive.writestr(f"ml-100k/{name}", text.encode("latin-1"))
    return out.getvalue()


class TestReadingDamage:
    def test_not_an_archive(self) -> None:
        with pytest.raises(DatasetDamaged, match="archive"):
            movielens.read_wheel(b"no zip")

    def test_a_missing_member(self, small: Dataset) -> None:
        with pytest.raises(DatasetDamaged, match=r"u\.user"):
            movielens.read_grouplens(as_grouplens(small, drop="u.user"))

    def test_an_unknown_film(self, small: Dataset) -> None:
        archive = as_grouplens(small)
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(archive)) as good, zipfile.ZipFile(out, "w") as bad:
            for name in good.namelist():
                text = good.read(name)
                bad.writestr(name, text + b"1\t999\t5\t881250949\n" if name.endswith("u.data") else text)
        with pytest.raises(DatasetDamaged, match="names a user or a film"):
            movielens.read_grouplens(out.getvalue())


class TestObtaining:
    """The order of cache and sources, with sources that are files here."""

    @pytest.fixture(autouse=True)
    def _small_is_genuine(self, small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(download, "DIGEST", movielens.read_grouplens(as_grouplens(small)).digest())

    @pytest.fixture
    def archive(self, small: Dataset) -> bytes:
        return as_grouplens(small)

    @staticmethod
    def source(archive: bytes, fetch: Callable[[], bytes], name: str = "here") -> Source:
        checksum = f"sha256:{hashlib.sha256(archive).hexdigest()}"
        return Source(name, f"{name}.zip", checksum, fetch, movielens.read_grouplens)

    def unreachable(self) -> bytes:
        raise DatasetUnavailable("no route")

    def test_the_next_source_is_asked_and_the_cache_after(self, archive: bytes, tmp_path: Path) -> None:
        asked: list[int] = []

        def fetch() -> bytes:
            asked.append(1)
            return archive

        sources = [self.source(archive, self.unreachable, "far"), self.source(archive, fetch)]
        for _ in range(2):
            assert len(obtain_movielens(tmp_path / "cache", sources).interactions) == 500
        assert asked == [1]
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["here.zip"]

    def test_a_damaged_cache_is_fetched_anew(self, archive: bytes, tmp_path: Path) -> None:
        (tmp_path / "here.zip").write_bytes(archive[:-1])
        obtain_movielens(tmp_path, [self.source(archive, lambda: archive)])
        assert (tmp_path / "here.zip").read_bytes() == archive

    def test_a_damaged_download_is_refused_and_not_cached(self, archive: bytes, tmp_path: Path) -> None:
        with pytest.raises(DatasetUnavailable, match="sha256 is"):
            obtain_movielens(tmp_path, [self.source(archive, lambda: archive + b"x")])
        assert not list(tmp_path.iterdir())

    def test_right_checksum_but_other_records(
        self, archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(download, "DIGEST", "0" * 64)
        with pytest.raises(DatasetUnavailable, match="records have digest"):
            obtain_movielens(tmp_path, [self.source(archive, lambda: archive)])

    def test_a_cache_that_cannot_be_written_is_no_failure(self, archive: bytes, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert obtain_movielens(tmp_path / "file" / "cache", [self.source(archive, lambda: archive)])

    def test_every_reason_is_named_and_the_stand_in_is_loud(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sources = [self.source(b"", self.unreachable, name) for name in ("one", "two")]
        with pytest.raises(DatasetUnavailable, match=r"(?s)one: no route.*two: no route"):
            obtain_movielens(tmp_path, sources)
        monkeypatch.setattr(
            "services.datasets.open.obtain_movielens", lambda cache: obtain_movielens(cache, sources)
        )
        dataset, notes = open_dataset("ml-100k", tmp_path)
        assert dataset.generated
        assert notes[0] == GENERATED_WARNING
        assert "no route" in notes[1]
        with pytest.raises(DatasetUnavailable):
            open_dataset("ml-100k", tmp_path, allow_generated=False)

    def test_user_cache_follows_xdg(self) -> None:
        assert user_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/headwater")
        assert user_cache({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "headwater"


class _Files(BaseHTTPRequestHandler):
    """Serves what the test put into ``body``; 404 where that is empty."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.body else 404)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no access log."""


class TestFetching:
    @pytest.fixture
    def url(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            monkeypatch.setattr(
                download, "GROUPLENS_URL", f"http://127.0.0.1:{server.server_address[1]}/x.zip"
            )
            yield download.GROUPLENS_URL
            server.shutdown()
            thread.join()

    def test_a_whole_file_or_nothing(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_Files, "body", b"x" * 100_000)
        assert download.fetch_grouplens() == b"x" * 100_000
        monkeypatch.setattr(download, "_MAX_BYTES", 1_000)
        with pytest.raises(DatasetUnavailable, match="more than 1000 bytes"):
            download.fetch_grouplens()

    def test_refusals_are_reasons(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(DatasetUnavailable, match="404"):
            download.fetch_grouplens()
        monkeypatch.setattr(download, "GROUPLENS_URL", "http://127.0.0.1:1/x.zip")
        with pytest.raises(DatasetUnavailable, match="refused"):
            download.fetch_grouplens()

    def test_pip_that_finds_nothing_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        with pytest.raises(DatasetUnavailable, match=r"pip did not get recbole==1\.2\.1: ERROR"):
            download.fetch_wheel()


class TestGenerated:
    def test_full_size(self) -> None:
        dataset = generate()
        assert (len(dataset.users), len(dataset.items), len(dataset.interactions)) == (943, 1_682, 100_000)
        assert dataset.generated
        assert 0.4 < dataset.interactions.liked((), 4.0).mean() < 0.65

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32), st.integers(2, 30), st.integers(60, 120), st.integers(0, 20))
    def test_laws(self, seed: int, users: int, items: int, extra: int) -> None:
        dataset = generate(seed, users, items, users * (20 + extra // 2))
        seen = dataset.interactions
        assert len(seen) == users * (20 + extra // 2)
        assert len(set(zip(seen.user.tolist(), seen.item.tolist(), strict=True))) == len(seen)
        assert np.bincount(seen.user, minlength=users).min() >= 20
        assert set(seen.value.tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0}
        assert generate(seed, users, items, len(seen)).digest() == dataset.digest()
        assert generate(seed + 1, users, items, len(seen)).digest() != dataset.digest()
        for entity, table in (("user", dataset.users), ("item", dataset.items)):
            assert not [p for row in table.attributes for p in default_schema().validate(entity, dict(row))]

    def test_users_have_tastes(self) -> None:
        """What a user likes is concentrated on fewer genres than likes dealt out at random."""
        dataset = generate(seed=1, users=100, items=1_000, interactions=4_000)
        seen = dataset.interactions
        liked = seen.take(np.flatnonzero(seen.liked((), 4.0)))
        flags = np.array(
            [
                [genre in str(row["categories"]) for genre in movielens.GENRES]
                for row in dataset.items.attributes
            ]
        )

        def concentration(user: NDArray[np.int32]) -> float:
            counts = np.zeros((100, len(movielens.GENRES)))
            np.add.at(counts, user, flags[liked.item])
            shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
            return float((shares**2).sum(axis=1).mean())

        dealt_out = np.random.default_rng(0).permutation(liked.user)
        assert concentration(liked.user) > 1.4 * concentration(dealt_out)

    def test_no_room(self) -> None:
        with pytest.raises(ValueError, match="do not fit"):
            generate(users=10, items=10, interactions=100)


class TestSplitAndShift:
    @settings(max_examples=50, deadline=None)
    @given(fraction=st.floats(0, 1), at_ms=st.integers(0, 2**42))
    def test_laws(self, small: Dataset, fraction: float, at_ms: int) -> None:
        before, after = small.split(fraction)
        ids = [*before.interactions.event_id, *after.interactions.event_id]
        assert sorted(ids) == sorted(small.interactions.event_id)
        if len(before.interactions) and len(after.interactions):
            assert before.interactions.timestamp_ms.max() <= after.interactions.timestamp_ms.min()
        shifted = small.shift_to(at_ms, fraction)
        assert shifted.split_time_ms(fraction) == at_ms
        gaps = np.diff(shifted.interactions.timestamp_ms)
        np.testing.assert_array_equal(gaps, np.diff(small.interactions.timestamp_ms))

    def test_ties_keep_the_order_of_the_source(self, small: Dataset) -> None:
        tied = replace(
            small,
            interactions=replace(
                small.interactions, timestamp_ms=small.interactions.timestamp_ms // 10**12 * 10**12
            ),
        )
        assert tied.in_time_order().interactions.event_id.tolist() == tied.interactions.event_id.tolist()

    def test_bounds(self, small: Dataset) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            small.split(1.1)


@dataclass
class FakeLog:
    """A producer, and a group that gets through so many messages each time it is looked at."""

    per_look: int = 10**9
    messages: list[Message] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    looks: int = 0

    def append(self, messages: Sequence[Message]) -> list[int]:
        offsets = []
        for message in messages:
            offsets.append(self.ends.get(message.partition, 0))
            self.ends[message.partition] = offsets[-1] + 1
        self.messages += messages
        return offsets

    def close(self) -> None: ...

    def lag(self, group: str, topic: str) -> list[Lag]:
        self.looks += 1
        return [
            Lag(partition, min(end, self.looks * self.per_look), end, 0, 0.0)
            for partition, end in self.ends.items()
        ]


class TestImporting:
    def test_events_carry_everything_in_order(self, small: Dataset) -> None:
        log = FakeLog()
        done: list[int] = []
        events = itertools.chain(entity_events(small), interaction_events(small))
        imported = append_events(
            events, log, topic="events", partitions=4, now_ms=lambda: 77, batch=64, progress=done.append
        )
        assert imported.events == sum(done) == len(log.messages) == 20 + 60 + 500
        assert dict(imported.ends) == log.ends
        back = [decode_event(message.value) for message in log.messages]
        assert [type(event) for event in back] == [ItemEvent] * 60 + [UserEvent] * 20 + [Interaction] * 500
        assert back[0] == ItemEvent(
            "1", dict(small.items.attributes[0]), event_id="generated-100k/item/1",
            timestamp_ms=int(small.interactions.timestamp_ms.min()),
        )  # fmt: skip
        last, seen = back[-1], small.interactions
        assert last == Interaction(
            small.users.ids[seen.user[-1]], small.items.ids[seen.item[-1]], "rating", value=seen.value[-1],
            event_id=seen.event_id[-1], timestamp_ms=int(seen.timestamp_ms[-1]),
        )  # fmt: skip
        for message, event in zip(log.messages, back, strict=True):
            assert message.accepted_at_ms == 77
            assert message.partition == partition_of(partition_key(event), 4)

    def test_a_second_import_has_the_same_ids(self, small: Dataset) -> None:
        first, second = (
            [event.event_id for event in itertools.chain(entity_events(data), interaction_events(data))]
            for data in (small, small.shifted(10**6))
        )
        assert first == second
        assert len(set(first)) == len(first)

    def test_wait_returns_when_all_is_processed(self) -> None:
        log = FakeLog(per_look=3, ends={0: 10, 1: 4})
        done: list[int] = []
        wait_processed(
            as_log(log),
            "g",
            "events",
            {0: 10, 1: 4},
            timeout_s=1.0,
            progress=done.append,
            sleep=lambda _: None,
        )
        assert log.looks == 4
        assert sum(done) == 14

    def test_wait_gives_up_when_nothing_moves_and_not_before(self) -> None:
        now = [0.0]

        def sleep(_: float) -> None:
            now[0] += 1.0

        log = FakeLog(per_look=0, ends={0: 10})
        with pytest.raises(NotProcessed, match="0 of 10"):
            wait_processed(
                as_log(log), "g", "events", {0: 10}, timeout_s=5.0, clock=lambda: now[0], sleep=sleep
            )
        assert 5 < now[0] < 8
        now[0] = 0.0
        log = FakeLog(per_look=1, ends={0: 100})
        wait_processed(as_log(log), "g", "events", {0: 100}, timeout_s=5.0, clock=lambda: now[0], sleep=sleep)
        assert now[0] > 90


def as_log(fake: FakeLog) -> MessageLog:
    """Only ``lag`` is asked of it."""
    return cast(MessageLog, fake)
