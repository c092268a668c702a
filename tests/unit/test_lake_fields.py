"""The columns of a copy: names that a lake can have, what they stand for, and types of Delta."""

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import InvalidInput
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from sink.lake.delta_schema import needed_features, protocol_of, schema_text
from sink.lake.fields import check_names, clashes, lake_fields
from sink.lake.state import Layout
from tests.conftest import SUMS, schema_of

MEAN = schema_of(a=(pa.int64(), "sum"), mean=(pa.float64(), "avg"))


def fields_of(schema: Schema, *, states: bool = False) -> pa.Schema:
    return lake_fields(schema, states=states).arrow


def test_a_copy_has_the_columns_of_the_table_with_the_key_first_and_never_null() -> None:
    schema = (
        SchemaBuilder()
        .agg_column("cents", pa.int64(), "sum")
        .column("id", pa.int64())
        .column("day", pa.date32())
        .agg_column("mean", pa.float64(), "avg")
        .primary_key("day", "id")
        .build()
    )
    fields = fields_of(schema)
    assert fields.names == ["day", "id", "cents", "mean"]
    assert [field.nullable for field in fields] == [False, False, True, True]
    assert lake_fields(schema, states=False).ids == {
        "day": "3",
        "id": "2",
        "cents": "1",
        "mean": "4",
    }


def test_states_are_columns_of_their_own_where_they_are_something_else() -> None:
    fields = lake_fields(MEAN, states=True)
    assert fields.arrow.names == ["k", "a", "mean", "mean_state"]
    assert fields.ids == {"k": "1", "a": "2", "mean": "3", "mean_state": "3:state"}
    assert pa.types.is_struct(fields.arrow.field("mean_state").type)


# Names


@pytest.mark.parametrize("wrong", [" ", ",", ";", "{", "}", "(", ")", "\n", "\t", "="])
def test_a_name_that_no_lake_can_have_is_refused_by_name(wrong: str) -> None:
    schema = schema_of(**{f"a{wrong}b": (pa.int64(), "sum")})
    with pytest.raises(InvalidInput, match=r"has '.*' in it, which no name in a lake may have"):
        check_names(lake_fields(schema, states=False))


@pytest.mark.parametrize(
    "kind",
    [
        pa.struct([("fine", pa.int64()), ("not fine", pa.int64())]),
        pa.list_(pa.struct([("not fine", pa.int64())])),
        pa.map_(pa.string(), pa.struct([("deep", pa.struct([("not fine", pa.int64())]))])),
        pa.list_(pa.list_(pa.struct([("not fine", pa.int64())]))),
    ],
)
def test_names_within_a_column_are_looked_at_too(kind: pa.DataType) -> None:
    schema = schema_of(c=(kind, "last_value"))
    with pytest.raises(InvalidInput, match="column 'c': 'not fine' has ' ' in it"):
        check_names(lake_fields(schema, states=False))


@pytest.mark.parametrize("name", ["größe", "a.b", "a-b", "日", "x_", "select"])
def test_other_names_are_fine(name: str) -> None:
    check_names(lake_fields(schema_of(**{name: (pa.int64(), "sum")}), states=True))


def test_names_within_a_column_that_differ_in_case_only_are_refused() -> None:
    """Columns that do so, no table has."""
    inner = pa.struct([("x", pa.int64()), ("X", pa.int64())])
    with pytest.raises(InvalidInput, match="'x' and 'X' differ in upper and lower case"):
        check_names(lake_fields(schema_of(c=(pa.list_(inner), "last_value")), states=False))


def test_a_column_that_is_called_as_the_states_of_another_is_refused_if_states_are_wanted() -> None:
    schema = schema_of(mean=(pa.float64(), "avg"), mean_state=(pa.int64(), "sum"))
    check_names(lake_fields(schema, states=False))
    with pytest.raises(InvalidInput, match="the states of 'mean' would be called 'mean_state'"):
        check_names(lake_fields(schema, states=True))
    other = schema_of(mean=(pa.float64(), "avg"), Mean_State=(pa.int64(), "sum"))
    with pytest.raises(InvalidInput, match="differ in upper and lower"):
        check_names(lake_fields(other, states=True))


# What names stand for


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (lambda schema: schema, None),
        (lambda schema: schema.add_column("c", "BIGINT", "sum"), None),
        (lambda schema: schema.drop_column("b"), None),
        (lambda schema: schema.rename_column("b", "c"), "'b' was renamed to 'c'"),
        (lambda schema: schema.rename_column("k", "key"), "'k' was renamed to 'key'"),
        (
            lambda schema: schema.drop_column("b").add_column("b", "STRING", "last_value"),
            "'b' is another column than the one that was called so",
        ),
        (
            lambda schema: (
                schema.rename_column("a", "x").rename_column("b", "a").rename_column("x", "b")
            ),
            "'b' is another column than the one that was called so",
        ),
        (
            lambda schema: schema.drop_column("b").rename_column("a", "b"),
            "'b' is another column than the one that was called so",
        ),
        (lambda schema: schema.rename_column("a", "x").rename_column("x", "a"), None),
    ],
)
def test_files_can_be_read_as_long_as_names_mean_the_same(
    alter: Callable[[Schema], Schema], why: str | None
) -> None:
    before = lake_fields(SUMS, states=False).ids
    assert clashes(before, lake_fields(alter(SUMS), states=False)) == why


def test_a_name_of_a_column_that_was_dropped_before_is_not_free() -> None:
    columns = {**lake_fields(SUMS, states=False).ids, "c": "9"}
    added = lake_fields(SUMS.add_column("c", "BIGINT", "sum"), states=False)
    assert clashes(columns, added) == "'c' is another column than the one that was called so"


def test_states_that_are_not_wanted_any_more_do_not_clash() -> None:
    with_states = lake_fields(MEAN, states=True)
    assert clashes(with_states.ids, lake_fields(MEAN, states=False)) is None
    renamed = lake_fields(MEAN.rename_column("mean", "m"), states=True)
    assert clashes(with_states.ids, renamed) == "'mean' was renamed to 'm'"


# Types


def delta_type(kind: pa.DataType) -> Any:
    text = json.loads(schema_text(pa.schema([pa.field("c", kind)])))
    assert text["type"] == "struct"
    [field] = text["fields"]
    assert (field["name"], field["nullable"], field["metadata"]) == ("c", True, {})
    return field["type"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (pa.bool_(), "boolean"),
        (pa.int8(), "byte"),
        (pa.int16(), "short"),
        (pa.int32(), "integer"),
        (pa.int64(), "long"),
        (pa.float32(), "float"),
        (pa.float64(), "double"),
        (pa.decimal128(38, 10), "decimal(38,10)"),
        (pa.string(), "string"),
        (pa.binary(), "binary"),
        (pa.date32(), "date"),
        (pa.timestamp("us"), "timestamp_ntz"),
        (pa.timestamp("us", "UTC"), "timestamp"),
        (
            pa.list_(pa.decimal128(5, 0)),
            {"type": "array", "elementType": "decimal(5,0)", "containsNull": True},
        ),
        (
            pa.map_(pa.string(), pa.list_(pa.int8())),
            {
                "type": "map",
                "keyType": "string",
                "valueType": {"type": "array", "elementType": "byte", "containsNull": True},
                "valueContainsNull": True,
            },
        ),
        (
            pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.date32())]),
            {
                "type": "struct",
                "fields": [
                    {"name": "x", "type": "long", "nullable": False, "metadata": {}},
                    {"name": "y", "type": "date", "nullable": True, "metadata": {}},
                ],
            },
        ),
    ],
)
def test_each_type_of_a_table_is_one_of_deltas(kind: pa.DataType, told: Any) -> None:
    assert delta_type(kind) == told


@pytest.mark.parametrize(
    "kind", [pa.uint64(), pa.time64("us"), pa.list_(pa.uint8()), pa.decimal256(50, 2), pa.null()]
)
def test_a_type_that_delta_cannot_have_is_refused_with_its_column(kind: pa.DataType) -> None:
    with pytest.raises(InvalidInput, match=r"column 'c' is .*, which a Delta table cannot have"):
        delta_type(kind)


@pytest.mark.parametrize(
    ("kind", "layout", "features"),
    [
        (pa.int64(), Layout.REWRITE, set()),
        (pa.timestamp("us", "UTC"), Layout.REWRITE, set()),
        (pa.int64(), Layout.VECTORS, {"deletionVectors"}),
        (pa.timestamp("us"), Layout.REWRITE, {"timestampNtz"}),
        (pa.list_(pa.timestamp("us")), Layout.VECTORS, {"timestampNtz", "deletionVectors"}),
        (pa.map_(pa.string(), pa.timestamp("us")), Layout.REWRITE, {"timestampNtz"}),
        (pa.struct([("timestamp_ntz", pa.int8())]), Layout.REWRITE, set()),
    ],
)
def test_readers_need_just_what_is_there(
    kind: pa.DataType, layout: Layout, features: set[str]
) -> None:
    assert needed_features(pa.schema([("timestamp_ntz", kind)]), layout) == features


def test_a_protocol_with_features_tells_writers_of_columns_that_are_never_null() -> None:
    assert protocol_of(frozenset()) == {"minReaderVersion": 1, "minWriterVersion": 2}
    assert protocol_of(frozenset({"deletionVectors"})) == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "invariants"],
    }
