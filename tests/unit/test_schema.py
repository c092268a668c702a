"""Schemas: look-up, evolution by id, what readers see, the stored form and its invariants."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import SchemaError, UnknownColumn, UnknownFormat
from merge_engine.aggregates.registry import AggFunction
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema


@pytest.fixture
def schema() -> Schema:
    return (
        SchemaBuilder()
        .column("day", pa.date32())
        .agg_column("orders", pa.int64(), AggFunction.COUNT)
        .column("customer_id", pa.int64())
        .agg_column("tags", pa.string(), AggFunction.STRING_AGG, delimiter="|")
        .primary_key("customer_id", "day")
        .partitioned_by("day")
        .build()
    )


def test_ids_count_from_one_in_the_order_of_declaration(schema: Schema) -> None:
    assert [(column.id, column.name) for column in schema.columns] == [
        (1, "day"),
        (2, "orders"),
        (3, "customer_id"),
        (4, "tags"),
    ]
    assert (schema.version, schema.next_column_id) == (1, 5)


def test_columns_are_found_by_role(schema: Schema) -> None:
    assert schema.names == ("day", "orders", "customer_id", "tags")
    assert [column.name for column in schema.key_columns] == ["customer_id", "day"]
    assert [column.name for column in schema.partition_columns] == ["day"]
    assert [column.name for column in schema.value_columns] == ["orders", "tags"]


def test_columns_are_found_by_name_and_by_id(schema: Schema) -> None:
    assert schema.column("tags").id == 4
    assert schema.column_by_id(4) is schema.column("tags")
    assert schema.column_by_id(5) is None


def test_an_unknown_name_is_an_error_with_the_nearest_one(schema: Schema) -> None:
    with pytest.raises(UnknownColumn) as caught:
        schema.column("Order")
    assert str(caught.value) == "the table has no column 'Order'; did you mean 'orders'?"
    with pytest.raises(UnknownColumn, match="'xyz'; it has day, orders, customer_id, tags"):
        schema.column("xyz")


def test_readers_see_the_declared_types_and_keys_that_are_not_null(schema: Schema) -> None:
    assert schema.arrow_schema().equals(
        pa.schema(
            [
                pa.field("day", pa.date32(), nullable=False),
                pa.field("orders", pa.int64()),
                pa.field("customer_id", pa.int64(), nullable=False),
                pa.field("tags", pa.string()),
            ]
        )
    )


def test_a_schema_can_be_read_at_a_glance(schema: Schema) -> None:
    assert str(schema).splitlines() == [
        "version 1",
        "  day          DATE    key, partition",
        "  orders       BIGINT  count",
        "  customer_id  BIGINT  key",
        "  tags         STRING  string_agg(delimiter='|')",
    ]


def test_equal_schemas_are_equal_and_hash_alike(schema: Schema) -> None:
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert hash(again) == hash(schema)
    assert schema.rename_column("tags", "labels") != schema


class TestEvolution:
    def test_an_added_column_gets_the_next_id_and_version(self, schema: Schema) -> None:
        evolved = schema.add_column("total", "DECIMAL(18,2)", "sum")
        added = evolved.column("total")
        assert (added.id, added.type) == (5, pa.decimal128(18, 2))
        assert added.function is not None
        assert added.function.name == "sum"
        assert (evolved.version, evolved.next_column_id) == (2, 6)
        assert evolved.columns[:4] == schema.columns
        assert schema.version == 1

    def test_an_added_column_takes_parameters(self, schema: Schema) -> None:
        evolved = schema.add_column("notes", "STRING", AggFunction.STRING_AGG, delimiter=";")
        function = evolved.column("notes").function
        assert function is not None
        assert function.parameters == {"delimiter": ";"}

    def test_an_added_column_may_order_by_a_column_of_the_table(self, schema: Schema) -> None:
        evolved = schema.add_column("status", "STRING", "last_value", order_by="day")
        function = evolved.column("status").function
        assert function is not None
        assert (function.order_by, function.order_type) == ("day", pa.date32())

    def test_an_id_is_never_given_again(self, schema: Schema) -> None:
        evolved = schema.drop_column("tags").add_column("tags", "STRING", "max")
        assert evolved.column("tags").id == 5
        assert evolved.column_by_id(4) is None
        assert (evolved.version, evolved.next_column_id) == (3, 6)

    def test_a_version_that_rows_cannot_name_is_refused(self, schema: Schema) -> None:
        last = replace(schema, version=65_535)
        with pytest.raises(SchemaError, match="version is 65536, and stored rows can name"):
            last.rename_column("tags", "labels")

    def test_a_renamed_column_keeps_its_id_and_place(self, schema: Schema) -> None:
        evolved = schema.rename_column("customer_id", "customer").rename_column("orders", "Orders")
        assert evolved.names == ("day", "Orders", "customer", "tags")
        assert evolved.column("customer").id == 3
        assert evolved.primary_key == schema.primary_key
        assert evolved.version == 3

    def test_a_function_goes_on_ordering_by_a_column_that_is_renamed(self, schema: Schema) -> None:
        ordered = schema.add_column("status", "STRING", "last_value", order_by="day")
        renamed = ordered.rename_column("day", "date")
        function = renamed.column("status").function
        assert function is not None
        assert (function.order_by, function.order_type) == ("date", pa.date32())
        assert Schema.from_json(renamed.to_json()) == renamed

    def test_an_order_of_the_input_alone_stays_when_columns_are_renamed(
        self, schema: Schema
    ) -> None:
        ordered = schema.add_column("status", "STRING", "last_value", order_by="at")
        assert ordered.rename_column("day", "date").column("status").function == (
            ordered.column("status").function
        )

    def test_a_column_may_take_the_name_that_its_function_orders_by(self, schema: Schema) -> None:
        ordered = schema.add_column("seen", "TIMESTAMP", "last_value", order_by="at")
        renamed = ordered.rename_column("seen", "at")
        assert Schema.from_json(renamed.to_json()) == renamed

    def test_a_schema_from_before_orders_were_checked_is_read(self, schema: Schema) -> None:
        ordered = schema.add_column("status", "STRING", "last_value", order_by="at")
        with pytest.raises(SchemaError, match="'at' as TIMESTAMP, but column 'at' takes STRING"):
            ordered.rename_column("status", "at")
        stored = ordered.to_json().replace('"name": "status"', '"name": "at"')
        assert Schema.from_json(stored).names == (*schema.names, "at")

    @pytest.mark.parametrize("name", ["customer_id", "day"])
    def test_a_key_column_cannot_be_dropped(self, schema: Schema, name: str) -> None:
        with pytest.raises(SchemaError, match=f"'{name}' is in the primary key and cannot be"):
            schema.drop_column(name)

    def test_the_last_value_column_cannot_be_dropped(self, schema: Schema) -> None:
        with pytest.raises(SchemaError, match="column 'orders' is the last value column"):
            schema.drop_column("tags").drop_column("orders")

    def test_an_unknown_column_cannot_be_dropped_or_renamed(self, schema: Schema) -> None:
        with pytest.raises(UnknownColumn, match="did you mean 'tags'"):
            schema.drop_column("tag")
        with pytest.raises(UnknownColumn, match="did you mean 'tags'"):
            schema.rename_column("tag", "label")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("orders", "column 'orders' is declared twice"),
            ("ORDERS", "columns 'orders' and 'ORDERS' differ in upper and lower case only"),
            ("_operation", "names that start with '_' are reserved"),
            ("", "a column is named ''"),
        ],
    )
    def test_a_new_name_follows_the_rules(self, schema: Schema, name: str, message: str) -> None:
        with pytest.raises(SchemaError, match=message):
            schema.add_column(name, "BIGINT", "sum")
        with pytest.raises(SchemaError, match=message):
            schema.rename_column("tags", name)

    def test_a_wrong_type_or_function_names_the_column(self, schema: Schema) -> None:
        with pytest.raises(SchemaError, match="column 'total': type uint8 is not supported"):
            schema.add_column("total", pa.uint8(), "sum")
        with pytest.raises(SchemaError, match="total"):
            schema.add_column("total", "BIGINT", "summ")
        with pytest.raises(SchemaError, match="total"):
            schema.add_column("total", "STRING", "sum")


def stored(schema: Schema, **changes: Any) -> str:
    document = json.loads(schema.to_json()) | changes
    return json.dumps({name: value for name, value in document.items() if value is not None})


class TestStoredForm:
    def test_is_what_the_module_says(self, schema: Schema) -> None:
        assert json.loads(schema.to_json()) == {
            "format": 1,
            "version": 1,
            "next_column_id": 5,
            "primary_key": [3, 1],
            "partition_by": [1],
            "columns": [
                {"id": 1, "name": "day", "type": "DATE"},
                {
                    "id": 2,
                    "name": "orders",
                    "type": "BIGINT",
                    "function": "count",
                    "parameters": {},
                },
                {"id": 3, "name": "customer_id", "type": "BIGINT"},
                {
                    "id": 4,
                    "name": "tags",
                    "type": "STRING",
                    "function": "string_agg",
                    "parameters": {"delimiter": "|"},
                },
            ],
        }

    def test_of_a_newer_version_is_refused_as_such(self, schema: Schema) -> None:
        with pytest.raises(UnknownFormat, match=r"of format 2, this release reads 1; .*: upgrade"):
            Schema.from_json(stored(schema, format=2))

    @pytest.mark.parametrize(
        "field",
        ["format", "version", "next_column_id", "primary_key", "partition_by", "columns"],
    )
    def test_without_a_field_is_refused_by_name(self, schema: Schema, field: str) -> None:
        with pytest.raises(SchemaError, match=f"the stored schema has no '{field}'"):
            Schema.from_json(stored(schema, **{field: None}))

    @pytest.mark.parametrize("field", ["id", "type", "parameters"])
    def test_without_a_field_of_a_column_is_refused_by_name(
        self, schema: Schema, field: str
    ) -> None:
        columns = json.loads(schema.to_json())["columns"]
        del columns[1][field]
        message = f"column 'orders' of the stored schema has no '{field}'"
        with pytest.raises(SchemaError, match=message):
            Schema.from_json(stored(schema, columns=columns))

    def test_with_a_column_that_has_no_name_is_refused(self, schema: Schema) -> None:
        with pytest.raises(SchemaError, match="a column of the stored schema has no 'name'"):
            Schema.from_json(stored(schema, columns=[{"id": 1}]))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "the stored schema is not JSON"),
            ("{", "the stored schema is not JSON"),
            ("[]", "the stored schema is not a JSON object"),
        ],
    )
    def test_that_is_not_a_json_object_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(SchemaError, match=message):
            Schema.from_json(text)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": "1"}, "'version' of the stored schema is '1', not of type int"),
            ({"version": True}, "'version' of the stored schema is True, not of type int"),
            ({"columns": {}}, "'columns' of the stored schema is {}, not of type list"),
            ({"columns": [1]}, "a column of the stored schema is not a JSON object"),
            ({"columns": []}, "ids of no column"),
            ({"version": 0}, "version is 0; versions start at 1"),
            ({"next_column_id": 4}, "are not between 1 and next_column_id"),
            ({"primary_key": []}, "there is no primary key"),
            ({"primary_key": [3, 1, 9]}, "has ids of no column"),
            ({"primary_key": [3, 1, [1]]}, "has ids of no column"),
            ({"primary_key": [3, 1, 3]}, "a column stands twice in the primary key"),
            ({"primary_key": [3, 1, 2]}, "column 'orders' is in the primary key and has the"),
            ({"primary_key": [1]}, "column 'customer_id' has no aggregate function"),
            ({"partition_by": [2]}, "are not all in the primary key"),
            ({"partition_by": [1, 1]}, "a column stands twice"),
        ],
    )
    def test_that_breaks_an_invariant_is_refused(
        self, schema: Schema, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(SchemaError) as caught:
            Schema.from_json(stored(schema, **changes))
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ({"id": 2}, "are not unique"),
            ({"id": 0}, "are not between 1 and"),
            ({"name": "orders"}, "column 'orders' is declared twice"),
            ({"type": "STRNIG"}, "did you mean 'STRING'"),
            ({"function": "string_age"}, "string_agg"),
            ({"parameters": {"x": 1}}, "x"),
        ],
    )
    def test_with_a_broken_column_is_refused(
        self, schema: Schema, column: dict[str, Any], message: str
    ) -> None:
        columns = json.loads(schema.to_json())["columns"]
        columns[3] |= column
        with pytest.raises(SchemaError) as caught:
            Schema.from_json(stored(schema, columns=columns))
        assert message in str(caught.value)


def test_a_column_and_its_function_agree_on_the_type(schema: Schema) -> None:
    wrong = replace(schema.column("tags"), type=pa.binary())
    with pytest.raises(SchemaError, match="'tags' is BINARY, but its function string_agg gives"):
        replace(schema, columns=(*schema.columns[:3], wrong))


def test_a_key_cannot_be_a_number_with_rounding(schema: Schema) -> None:
    wrong = replace(schema.column("customer_id"), type=pa.float64())
    columns = (*schema.columns[:2], wrong, schema.columns[3])
    with pytest.raises(SchemaError, match="column 'customer_id' is DOUBLE and in the primary key"):
        replace(schema, columns=columns)
