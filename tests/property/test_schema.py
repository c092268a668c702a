"""Types survive their names, schemas their stored form, and ids any history of evolution."""

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import SchemaError
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import conform, parse_type, type_name

# The first call of an Arrow kernel loads it, which takes longer than all the others.
patient = settings(deadline=None)

KEY_TYPES = st.sampled_from(
    [
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.string(),
        pa.binary(),
        pa.date32(),
        pa.timestamp("us"),
        pa.timestamp("us", tz="UTC"),
    ]
) | st.integers(1, 38).flatmap(
    lambda precision: st.builds(pa.decimal128, st.just(precision), st.integers(0, precision))
)
MAP_KEYS = KEY_TYPES | st.lists(KEY_TYPES, min_size=1, max_size=2).map(
    lambda types: pa.struct([(f"part {number}", each) for number, each in enumerate(types)])
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(
        st.tuples(TEXT, inner), min_size=1, max_size=3, unique_by=lambda pair: pair[0]
    )
    return inner.map(pa.list_) | st.builds(pa.map_, MAP_KEYS, inner) | fields.map(pa.struct)


TYPES = st.recursive(
    KEY_TYPES | st.sampled_from([pa.float32(), pa.float64()]), nested, max_leaves=5
)


def other_spelling(data_type: pa.DataType) -> pa.DataType:
    """Return a type of the same values that no table has, as far as there is one."""
    if pa.types.is_map(data_type):
        inside = (other_spelling(data_type.key_type), other_spelling(data_type.item_type))
        return pa.map_(*inside, keys_sorted=True)
    if pa.types.is_list(data_type):
        return pa.large_list(pa.field("element", other_spelling(data_type.value_type)))
    if pa.types.is_struct(data_type):
        fields = [pa.field(each.name, other_spelling(each.type), False) for each in data_type]
        return pa.struct(fields)
    if pa.types.is_timestamp(data_type) and data_type.tz:
        return pa.timestamp("us", tz="Asia/Tokyo")
    return {pa.string(): pa.string_view(), pa.binary(): pa.large_binary()}.get(data_type, data_type)


@patient
@given(TYPES)
def test_a_type_is_read_back_from_its_name(data_type: pa.DataType) -> None:
    assert parse_type(type_name(data_type)).equals(data_type, check_metadata=True)


@patient
@given(TYPES)
def test_a_type_of_the_same_values_becomes_the_type_of_the_table(data_type: pa.DataType) -> None:
    assert parse_type(other_spelling(data_type)).equals(data_type, check_metadata=True)
    assert parse_type(data_type).equals(data_type, check_metadata=True)


@patient
@given(TYPES, st.integers(0, 3))
def test_values_of_another_spelling_conform(data_type: pa.DataType, length: int) -> None:
    # Lists of nulls reach the elements, which nulls alone would not.
    spelled = other_spelling(data_type)
    offsets = pa.array([0, length, length], pa.int32())
    values = pa.ListArray.from_arrays(offsets, pa.nulls(length, spelled))
    result = conform(values, pa.list_(data_type), column="c")
    result.validate(full=True)
    assert result.type.equals(pa.list_(data_type), check_metadata=True)
    assert result.to_pylist() == [[None] * length, []]


@patient
@given(st.text(st.sampled_from("INTARYMP<>(),:`'3 structdecimal"), max_size=20))
def test_any_text_is_a_type_or_a_schema_error(text: str) -> None:
    try:
        data_type = parse_type(text)
    except SchemaError:
        return
    assert parse_type(type_name(data_type)) == data_type


# A function, a type that it takes, and parameters.
VALUES: list[tuple[str, pa.DataType, dict[str, Any]]] = [
    ("sum", pa.int64(), {}),
    ("sum", pa.decimal128(20, 4), {}),
    ("count", pa.int64(), {}),
    ("avg", pa.float64(), {}),
    ("max", pa.timestamp("us", tz="UTC"), {}),
    ("last_value", pa.struct([("a b", pa.int8())]), {}),
    ("last_value", pa.string(), {"order_by": "key 0"}),
    ("first_value_ignore_nulls", pa.string(), {"order_by": "at", "order_type": "BIGINT"}),
    ("string_agg", pa.string(), {"delimiter": "'\"\\ü", "limit": 7}),
    ("array_agg", pa.list_(pa.binary()), {"limit": 3}),
    ("merge_map", pa.map_(pa.string(), pa.int64()), {}),
]
NAMES = TEXT.filter(lambda name: bool(name.strip()) and not name.startswith(("_", "key ")))


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    builder = SchemaBuilder()
    keys = [f"key {number}" for number in range(draw(st.integers(1, 3)))]
    for name in keys:
        builder.column(name, draw(KEY_TYPES))
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.casefold))
    for name in names:
        function, data_type, parameters = draw(st.sampled_from(VALUES))
        builder.agg_column(name, data_type, function, **parameters)
    builder.primary_key(*draw(st.permutations(keys)))
    return builder.partitioned_by(*keys[: draw(st.integers(0, len(keys)))]).build()


@patient
@given(schemas())
def test_a_schema_is_read_back_from_its_stored_form(schema: Schema) -> None:
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.arrow_schema().equals(schema.arrow_schema(), check_metadata=True)
    assert str(again) == str(schema)


def _definition(column: Column) -> tuple[object, ...]:
    """Return what a column is for ever, but for the name of what orders it."""
    if column.function is None:
        return (column.type,)
    parameters = {k: v for k, v in column.function.parameters.items() if k != "order_by"}
    return column.type, column.function.name, parameters


def _order_by(column: Column) -> str | None:
    return None if column.function is None else column.function.order_by


@patient
@given(schemas(), st.data())
def test_an_id_means_the_same_column_through_any_evolution(
    schema: Schema, data: st.DataObject
) -> None:
    definitions = {column.id: _definition(column) for column in schema.columns}
    orders = {column.id: _order_by(column) for column in schema.columns}
    for step in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from(schema.names))
        action = data.draw(st.sampled_from(["add", "drop", "rename"]))
        try:
            if action == "add":
                evolved = schema.add_column(f"column {step}", "BIGINT", "sum")
            elif action == "drop":
                evolved = schema.drop_column(name)
            else:
                evolved = schema.rename_column(name, f"column {step}")
        except SchemaError:
            assert action == "drop"  # of a key or of the last value column
            continue
        assert evolved.version == schema.version + 1
        assert evolved.next_column_id == schema.next_column_id + (action == "add")
        for column in evolved.columns:
            assert definitions.setdefault(column.id, _definition(column)) == _definition(column)
            if action == "rename" and orders.get(column.id) == name:
                orders[column.id] = f"column {step}"  # It follows the column that orders it.
            assert orders.setdefault(column.id, None) == _order_by(column)
        added = {column.id for column in evolved.columns} - {each.id for each in schema.columns}
        assert added == ({schema.next_column_id} if action == "add" else set())
        assert Schema.from_json(evolved.to_json()) == evolved
        schema = evolved
