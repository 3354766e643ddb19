"""From the settings of a model to the tables that are declared: every process makes the same ones."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from support.batches import SCHEMA, SMALL

from models.parameters import DENSE
from models.training import RecommenderModel
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server.declarations import Declaration, settle_declaration
from services.parameter_server.types import ModelMismatch
from services.settings.load import load_settings
from services.settings.model import ModelSettings
from services.settings.problems import SettingsError
from services.tables import table_specs
from sync.spec import TableSpec

NEEDS = RecommenderModel(SCHEMA, SMALL).needs


def settings_of(*overrides: str) -> ModelSettings:
    return load_settings(overrides=[f"model.{override}" for override in overrides]).settings.model


def split(settings: ModelSettings) -> tuple[tuple[TableSpec, ...], TableSpec]:
    *embeddings, dense = table_specs(NEEDS, settings)
    assert dense.name == DENSE
    return tuple(embeddings), dense


def test_unless_told_otherwise_everything_is_kept() -> None:
    embeddings, dense = split(settings_of())
    assert {spec.optimiser.kind for spec in embeddings} == {"rowwise_adagrad"}
    assert dense.optimiser.kind == "adagrad"
    assert {(spec.admission, spec.expiry_s, spec.l2, spec.clip) for spec in (*embeddings, dense)} == {
        (1, 0, 0, 0)
    }
    assert {spec.guard for spec in (*embeddings, dense)} == {1_000.0}


def test_settings_reach_the_tables_that_they_are_for() -> None:
    embeddings, dense = split(
        settings_of(
            "embedding_optimiser=adam", "embedding_l2=0.01", "embedding_clip=2", "admission=3", "expiry=30d",
            "dense_optimiser=sgd", "dense_l2=0.5", "dense_clip=7", "guard=50", "seed=9",
        )
    )  # fmt: skip
    for spec in embeddings:
        assert (spec.optimiser.kind, spec.l2, spec.clip) == ("adam", 0.01, 2.0)
        assert (spec.admission, spec.expiry_s, spec.guard, spec.initialiser.seed) == (3, 30 * 86_400, 50.0, 9)
    assert (dense.optimiser.kind, dense.l2, dense.clip) == ("sgd", 0.5, 7.0)
    # Dense weights are all there always.
    assert (dense.admission, dense.expiry_s, dense.guard, dense.initialiser.seed) == (1, 0, 50.0, 9)


@pytest.mark.parametrize(("text", "seconds"), [("", 0), ("500ms", 1), ("1.2s", 2), ("7d", 604_800)])
def test_an_expiry_is_whole_seconds_and_never_without_one(text: str, seconds: int) -> None:
    embeddings, _ = split(settings_of(f"expiry={text}"))
    assert {spec.expiry_s for spec in embeddings} == {seconds}


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("guard=0.5",), "model.guard"),
        (("guard=inf",), "model.guard"),
        (("admission=256",), "model.admission"),
        (("expiry=100000d",), "model.expiry"),
        (("embedding_optimiser=sgd", "embedding_rate=1", "embedding_l2=1.5"), "model.embedding_l2"),
        (("dense_optimiser=ftrl", "dense_rate=1e-9"), "model.dense_rate"),
        (("embedding_optimiser=adma",), "model.embedding_optimiser"),
    ],
)
def test_what_a_table_cannot_be_is_refused_with_its_setting(overrides: tuple[str, ...], name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings_of(*overrides)
    assert [problem.name for problem in refused.value.problems] == [name]


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"])
def test_every_kind_that_the_settings_know_is_one_of_the_tables(kind: str) -> None:
    embeddings, dense = split(settings_of(f"embedding_optimiser={kind}", f"dense_optimiser={kind}"))
    assert {spec.optimiser.kind for spec in (*embeddings, dense)} == {kind}


def test_a_model_that_was_declared_otherwise_names_both(tmp_path: Path) -> None:
    with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
        settle_declaration(store, Declaration("main", "fp", table_specs(NEEDS, settings_of())))
        other = Declaration("main", "fp", table_specs(NEEDS, settings_of("admission=2", "expiry=1d")))
        with pytest.raises(ModelMismatch) as refused:
            settle_declaration(store, other)
    assert "admission 1 was declared, this one is 2" in str(refused.value)
    assert "expiry_s 0 was declared, this one is 86400" in str(refused.value)
    assert "dense" not in str(refused.value)
