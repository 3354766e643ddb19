"""Declaring features: the built-in schema, schema files, fingerprints, and checking attributes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featurestore import (
    Cell,
    Encoder,
    Feature,
    Schema,
    SchemaError,
    SchemaMismatch,
    Value,
    default_schema,
    read_status,
)
from featurestore.cells import pack
from featurestore.schema_file import parse_features

NOW = 1_700_000_000_000
USER_ID = Feature("user", "user_id", "categorical", source="@id")


def messages(entity: str, **attributes: object) -> dict[str, str]:
    return {error.path: error.message for error in default_schema().validate(entity, attributes)}


def test_the_built_in_schema_serves_films() -> None:
    schema = default_schema()
    assert [f.name for f in schema.of("user")] == [
        "user_id", "age_group", "gender", "occupation", "recent_items", "likes_total",
    ]  # fmt: skip
    assert schema.columns("user").width == (4, 1, 1)
    assert schema.columns("item").width == (2, 4, 1)
    assert schema.half_lives("item") == (86_400.0, 7 * 86_400.0, 30 * 86_400.0)
    assert schema.feature("user", "recent_items").key_space == "item_id"
    film = {"title": "Fargo (1996)", "categories": ["Crime", "Drama"], "year": 1996}
    assert schema.validate("item", film) == []
    assert schema.validate("user", {"age": 24, "gender": "M", "occupation": "writer", "zip": "85711"}) == []


def test_everything_is_optional_and_anything_else_is_accepted() -> None:
    assert messages("item") == {}
    assert (
        messages("item", year=None, categories=None, price=9.5, tags=["a"], sizes=[1, 2.5], in_stock=True)
        == {}
    )


def test_the_columns_say_where_the_id_is() -> None:
    assert default_schema().columns("item").id_column == 0
    assert default_schema().columns("context").id_column is None


# --- fingerprints


def test_the_fingerprint_is_fixed() -> None:
    # It is stored with every snapshot and sample: where this changes, what was learned is refused.
    assert default_schema().fingerprint == "d3d551abfe20a6c6eccea3b5240eac65"
    assert Schema([USER_ID]).fingerprint == "a5b4808c16348ca8e0022107a3bc4d5c"


def test_every_change_of_a_feature_changes_the_fingerprint() -> None:
    number = Feature("item", "price", "number")
    likes = Feature("item", "likes", "counter", half_life_s=60)
    variants = [
        number, replace(number, mean=1), replace(number, std=2), replace(number, transform="log1p"),
        replace(number, default=3), replace(number, ttl_s=5), replace(number, source="cost"),
        replace(number, name="cost"), replace(number, entity="user"), replace(number, kind="counter"),
        likes, replace(likes, half_life_s=61),
    ]  # fmt: skip
    assert len({Schema([variant]).fingerprint for variant in variants}) == len(variants)
    assert Schema([number, likes]).fingerprint != Schema([likes, number]).fingerprint


def test_the_same_declaration_has_the_same_fingerprint_however_its_numbers_are_written() -> None:
    whole = Schema([Feature("item", "price", "number", mean=3, std=2, default=1)])
    floats = Schema([Feature("item", "price", "number", mean=3.0, std=2.0, default=1.0)])
    assert whole.fingerprint == floats.fingerprint
    assert whole == floats


def test_a_mismatch_names_both_fingerprints() -> None:
    schema = default_schema()
    schema.require(schema.fingerprint)
    with pytest.raises(SchemaMismatch) as caught:
        schema.require("abc")
    assert (caught.value.expected, caught.value.found) == (schema.fingerprint, "abc")
    assert "abc" in str(caught.value)
    assert schema.fingerprint in str(caught.value)


# --- files


def test_a_file_gives_what_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(
        """
        [item.item_id]
        kind = "categorical"
        source = "@id"
        [item.price]
        kind = "number"
        mean = 10
        std = 2.5
        transform = "log1p"
        ttl = "1.5h"
        [item.likes]
        kind = "counter"
        half_life = "2d"
        [user.recent]
        kind = "list"
        table = "item_id"
        default = ["a", "b"]
        """
    )
    assert Schema.load(path).features == (
        Feature("item", "item_id", "categorical", source="@id"),
        Feature("item", "price", "number", mean=10.0, std=2.5, transform="log1p", ttl_s=5_400.0),
        Feature("item", "likes", "counter", half_life_s=172_800.0),
        Feature("user", "recent", "list", table="item_id", default=("a", "b")),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[item.x]\nkind = 'nubmer'", ["item.x", "kind", "'nubmer'", "did you mean 'number'"]),
        ("[item.x]\nkind = 'number'\nmaen = 3", ["item.x", "maen = 3", "did you mean 'mean'"]),
        ("[itme.x]\nkind = 'number'", ["'itme'", "did you mean 'item'"]),
        ("[item.x]\nmean = 3", ["item.x", "kind is missing"]),
        ("[item.x]\nkind = 'number'\nstd = 0", ["item.x", "std = 0"]),
        ("[item.x]\nkind = 'number'\nstd = 'a'", ["item.x", "std = 'a'", "a number"]),
        ("[item.x]\nkind = 'number'\nmean = nan", ["item.x", "mean = nan"]),
        ("[item.x]\nkind = 'number'\nttl = '3 weeks'", ["item.x", "ttl = '3 weeks'", "'30d'"]),
        ("[item.x]\nkind = 'number'\ndefault = 'a'", ["item.x", "default = 'a'", "number"]),
        ("[item.x]\nkind = 'number'\nbuckets = [1]", ["item.x", "buckets", "categorical"]),
        ("[item.x]\nkind = 'categorical'\nbuckets = [2, 1]", ["item.x", "[2.0, 1.0]", "ascending"]),
        ("[item.x]\nkind = 'categorical'\nmean = 1", ["item.x", "mean"]),
        ("[item.x]\nkind = 'number'\nhalf_life = '1d'", ["item.x", "half_life", "counter"]),
        ("[item.x]\nkind = 'number'\ntable = 'y'", ["item.x", "table = 'y'"]),
        ("[item.x]\nkind = 'list'\nmax_values = 1.5", ["item.x", "max_values = 1.5", "whole"]),
        ("[item.x]\nkind = 'list'\nmax_values = 0", ["item.x", "max_values = 0"]),
        ("[item.x]\nkind = 'list'\nmanaged = 1", ["item.x", "managed = 1", "true or false"]),
        ("[item.'a@b']\nkind = 'list'", ["item.a@b", "name"]),
        ("[item.x]\nkind = 'number'\nsource = '@id'", ["item.x", "source = '@id'"]),
        ("[item.x]\nkind = 'list'\ntable = 'usr_id'\n[user.user_id]\nkind = 'categorical'",
         ["item.x", "table = 'usr_id'", "did you mean 'user_id'"]),
        ("[item.x]\nkind = 'list'\n[user.x]\nkind = 'list'", ["item.x", "user.x", "share"]),
        ("item = 3", ["item = 3", "table"]),
        ("[item", ["TOML"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_key_value_and_suggestion(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(text)
    with pytest.raises(SchemaError) as caught:
        Schema.load(path)
    for part in [*expected, "schema.toml"]:
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"none\.toml"):
        Schema.load(tmp_path / "none.toml")


def test_a_feature_may_share_keys_only_where_it_says_so() -> None:
    features = parse_features("[item.x]\nkind='list'\n[user.x]\nkind='list'\ntable='x'")
    assert Schema(features).feature("user", "x").key_space == "x"


def test_a_feature_cannot_be_declared_twice() -> None:
    with pytest.raises(SchemaError, match="user_id is declared twice"):
        Schema([USER_ID, USER_ID])


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(SchemaError, match="did you mean 'gender'"):
        default_schema().feature("user", "gendr")
    with pytest.raises(SchemaError, match="did you mean 'user'"):
        default_schema().of("users")


# --- attributes


@pytest.mark.parametrize(
    ("entity", "attributes", "path", "part"),
    [
        ("user", {"age": "24"}, "age", "number"),
        ("user", {"age": True}, "age", "number"),
        ("user", {"age": float("nan")}, "age", "finite"),
        ("user", {"age": 2**63}, "age", "64 bits"),
        ("user", {"gender": ["M"]}, "gender", "list"),
        ("user", {"gender": "x" * 5_000}, "gender", "4096 bytes"),
        ("user", {"gender": "\ud800"}, "gender", "Unicode"),
        ("item", {"categories": "Drama"}, "categories", "list"),
        ("item", {"categories": ["a", None]}, "categories[1]", "text or a number"),
        ("item", {"categories": ["a", ["b"]]}, "categories[1]", "a list"),
        ("item", {"categories": ["a", 1]}, "categories", "mixes"),
        ("item", {"categories": ["a"] * 1_025}, "categories", "1024"),
        ("item", {"other": {"a": 1}}, "other", "object"),
        ("item", {"other": float("inf")}, "other", "finite"),
        ("item", {"other": [1.0, float("nan")]}, "other[1]", "finite"),
        ("item", {"likes_7d": 5}, "likes_7d", "platform"),
        ("user", {"recent_items": ["a"]}, "recent_items", "platform"),
        ("user", {"seen": "x"}, "seen", "platform"),
        ("item", {"stats@0": "x"}, "stats@0", "@"),
        ("item", {"": "x"}, "", "1 to 64"),
        ("item", {"a\0": "x"}, "a\0", "control"),
        ("item", {"x" * 65: "x"}, "x" * 65, "1 to 64"),
    ],
)
def test_a_wrong_attribute_is_named(entity: str, attributes: dict[str, object], path: str, part: str) -> None:
    (error,) = default_schema().validate(entity, attributes)
    assert error.path == path
    assert part in error.message


def test_every_wrong_attribute_is_named_at_once() -> None:
    assert set(messages("user", age="x", gender="F", occupation=["a"], likes_total=1)) == {
        "age", "occupation", "likes_total",
    }  # fmt: skip


def test_too_many_attributes_are_refused() -> None:
    assert messages("item", **{f"a{n}": 1 for n in range(128)}) == {}
    assert "128" in messages("item", **{f"a{n}": 1 for n in range(129)})[""]


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["age", "gender", "occupation", "zip", "x"]) | st.text(), json))
def test_validation_never_fails_and_what_passes_can_be_encoded_and_stored(
    attributes: dict[str, object],
) -> None:
    schema = default_schema()
    errors = schema.validate("user", attributes)
    if not errors:
        cells = {
            name: schema.cell("user", name, cast(Value, value), NOW) for name, value in attributes.items()
        }
        assert all(pack(name, cell) for name, cell in cells.items())
        assert len(Encoder(schema).encode("user", ["u"], [cells], NOW)) == 1


def test_a_cell_takes_the_ttl_of_its_attribute() -> None:
    schema = Schema(
        [Feature("item", "price_group", "categorical", source="price", buckets=(1.0,), ttl_s=1.5)]
    )
    assert schema.cell("item", "price", 3, NOW) == Cell(3, NOW, 1_500)
    assert schema.cell("item", "other", 3, NOW) == Cell(3, NOW, 0)


def test_the_status_of_a_cell() -> None:
    assert read_status(None, NOW) == "not_found"
    assert read_status(Cell(None, NOW), NOW) == "null"
    assert read_status(Cell(0, NOW), NOW) == "present"
    assert read_status(Cell(1, NOW, 10), NOW + 9) == "present"
    assert read_status(Cell(1, NOW, 10), NOW + 10) == "expired"
    assert read_status(Cell(None, NOW, 10), NOW + 10) == "expired"


def test_importing_the_package_needs_numpy_alone() -> None:
    script = (
        "import sys; import featurestore; featurestore.Encoder(featurestore.default_schema());"
        "print(*{m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], capture_output=True, text=True, check=False, env=_paths()
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"__main__", "featurestore", "numpy"}


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(np.__file__).parents[1]}"}
