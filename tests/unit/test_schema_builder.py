"""Declaring a table: in code, by connector options and by DDL, and every way to get it wrong."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from foundation.errors import SchemaError
from merge_engine.aggregates.base import AggregateFunction
from merge_engine.aggregates.registry import AggFunction
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema


def function_of(schema: Schema, name: str) -> AggregateFunction:
    function = schema.column(name).function
    assert function is not None
    return function


def keyed() -> SchemaBuilder:
    return SchemaBuilder().column("id", pa.int64()).primary_key("id")


def valid() -> SchemaBuilder:
    return keyed().agg_column("orders", pa.int64(), AggFunction.COUNT)


def test_the_example_of_the_design_builds() -> None:
    schema = (
        SchemaBuilder()
        .column("customer_id", pa.int64())
        .agg_column("orders", pa.int64(), AggFunction.COUNT)
        .agg_column("revenue", pa.decimal128(18, 2), AggFunction.SUM)
        .agg_column(
            "last_status",
            pa.string(),
            AggFunction.LAST_VALUE_IGNORE_NULLS,
            order_by="event_time",
        )
        .agg_column("tags", pa.string(), AggFunction.STRING_AGG, delimiter="|")
        .agg_column("items", pa.list_(pa.string()), AggFunction.ARRAY_AGG, limit=100)
        .primary_key("customer_id")
        .build()
    )
    assert [column.name for column in schema.key_columns] == ["customer_id"]
    assert {
        column.name: function_of(schema, column.name).name for column in schema.value_columns
    } == {
        "orders": "count",
        "revenue": "sum",
        "last_status": "last_value_ignore_nulls",
        "tags": "string_agg",
        "items": "array_agg",
    }
    assert function_of(schema, "last_status").order_by == "event_time"
    assert function_of(schema, "items").parameters == {"limit": 100}


def test_types_and_functions_may_be_given_by_name() -> None:
    schema = (
        SchemaBuilder()
        .column("id", "bigint")
        .agg_column("total", "DECIMAL(18,2)", "Sum")
        .agg_column("status", "STRING", "last-value-ignore-nulls")
        .agg_column("tags", pa.large_string(), "LISTAGG")
        .primary_key("id")
        .build()
    )
    assert schema.column("total").type == pa.decimal128(18, 2)
    assert schema.column("tags").type == pa.string()
    assert function_of(schema, "status").name == "last_value_ignore_nulls"
    assert function_of(schema, "tags").name == "string_agg"


def test_the_order_of_the_key_is_that_of_primary_key() -> None:
    schema = (
        SchemaBuilder()
        .column("a", "INT")
        .column("b", "DATE")
        .agg_column("n", "BIGINT", "count")
        .primary_key("b", "a")
        .partitioned_by("b")
        .build()
    )
    assert schema.primary_key == (2, 1)
    assert schema.partition_by == (2,)


@pytest.mark.parametrize(
    "data_type",
    ["BOOLEAN", "TINYINT", "BIGINT", "DECIMAL(38,2)", "STRING", "BINARY", "DATE", "TIMESTAMP"],
)
def test_every_type_with_exact_equality_can_be_a_key(data_type: str) -> None:
    builder = SchemaBuilder().column("id", data_type, nullable=False).primary_key("id")
    assert builder.agg_column("n", "BIGINT", "count").build().names == ("id", "n")


class TestOrderType:
    def test_is_that_of_the_column_of_the_table_that_is_named(self) -> None:
        schema = (
            valid()
            .agg_column("status", "STRING", "last_value", order_by="seen")
            .agg_column("seen", "DATE", "max")
            .agg_column("by_key", "STRING", "last_value", order_by="id")
            .agg_column("latest", "TIMESTAMP_NTZ", "last_value", order_by="latest")
            .build()
        )
        assert function_of(schema, "status").order_type == pa.date32()
        assert function_of(schema, "by_key").order_type == pa.int64()
        assert function_of(schema, "latest").order_type == pa.timestamp("us")

    def test_is_the_input_type_where_the_result_has_another(self) -> None:
        schema = (
            valid()
            .agg_column("status", "STRING", "last_value", order_by="versions")
            .agg_column("versions", "ARRAY<INT>", "array_agg")
            .build()
        )
        assert function_of(schema, "status").order_type == pa.int32()

    def test_may_be_given(self) -> None:
        schema = valid().agg_column(
            "status", "STRING", "last_value", order_by="id", order_type="SMALLINT"
        )
        assert function_of(schema.build(), "status").order_type == pa.int16()

    def test_survives_storage(self) -> None:
        schema = valid().agg_column("status", "STRING", "last_value", order_by="id").build()
        assert Schema.from_json(schema.to_json()) == schema


Build = Callable[[], SchemaBuilder]


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (
            lambda: valid().column("total", "BIGINT"),
            "column 'total' has no aggregate function and is not in the primary key; declare it"
            " with agg_column(...), or add the option fields.total.agg",
        ),
        (
            lambda: SchemaBuilder().agg_column("id", "INT", "max").primary_key("id"),
            "column 'id' is in the primary key and cannot have a function; declare it with"
            " column(...) and without options",
        ),
        (
            lambda: valid().options({"fields.id.agg": "max"}),
            "column 'id' is in the primary key and cannot have a function; declare it with"
            " column(...) and without options",
        ),
        (
            lambda: valid().agg_column("total", pa.uint32(), "sum"),
            "column 'total': type uint32 is not supported; use BIGINT",
        ),
        (
            lambda: valid().agg_column("total", "BIGNIT", "sum"),
            "column 'total': cannot read 'BIGNIT': unknown type 'BIGNIT'; did you mean 'BIGINT'?",
        ),
        (
            lambda: valid().agg_column("orders", "INT", "sum"),
            "column 'orders' is declared twice; rename one of them",
        ),
        (
            lambda: valid().agg_column("Orders", "INT", "sum"),
            "columns 'orders' and 'Orders' differ in upper and lower case only, which Spark does"
            " not tell apart; rename one of them",
        ),
        (
            lambda: valid().agg_column("", "INT", "sum"),
            "a column is named ''; give it a name that is not empty",
        ),
        (
            lambda: valid().agg_column("_change_type", "INT", "sum"),
            "column '_change_type': names that start with '_' are reserved for columns that"
            " Tallybook adds, such as _change_type; choose another name",
        ),
        (
            lambda: valid().column("day", "DATE", nullable=True).primary_key("id", "day"),
            "column 'day' is in the primary key but declared nullable; declare it NOT NULL"
            " (nullable=False)",
        ),
        (
            lambda: valid().column("price", "DOUBLE").primary_key("price"),
            "column 'price' is DOUBLE and in the primary key, but equal numbers may differ in"
            " their last bits; use DECIMAL or BIGINT",
        ),
        (
            lambda: valid().column("parts", "ARRAY<INT>").primary_key("id", "parts"),
            "column 'parts' is ARRAY<INT> and cannot be in the primary key; use one column for"
            " each of its parts",
        ),
        (
            lambda: valid().column("parts", "MAP<INT, INT>").primary_key("id", "parts"),
            "column 'parts' is MAP<INT, INT> and cannot be in the primary key; use one column for"
            " each of its parts",
        ),
        (
            lambda: valid().column("parts", "STRUCT<a: INT>").primary_key("id", "parts"),
            "column 'parts' is STRUCT<a: INT> and cannot be in the primary key; use one column"
            " for each of its parts",
        ),
        (
            lambda: valid().primary_key(),
            "there is no primary key; name its columns with primary_key(...)",
        ),
        (
            SchemaBuilder,
            "there is no primary key; name its columns with primary_key(...)",
        ),
        (keyed, "there is no value column; add one with an aggregate function"),
        (
            lambda: valid().primary_key("idd"),
            "primary_key has 'idd', which is not declared; did you mean 'id'?",
        ),
        (
            lambda: valid().primary_key("id", "id"),
            "primary_key has 'id' twice; name it once",
        ),
        (
            lambda: valid().partitioned_by("dya"),
            "partitioned_by has 'dya', which is not declared",
        ),
        (
            lambda: valid().partitioned_by("orders"),
            "partition column 'orders' is not in the primary key; add it to the key, or partition"
            " by a column of it",
        ),
    ],
)
def test_a_mistake_is_an_error_that_names_the_column_and_the_way_out(
    builder: Build, message: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        builder().build()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("builder", "parts"),
    [
        (lambda: valid().agg_column("total", "INT", "summ"), ("total", "summ", "sum")),
        (lambda: valid().agg_column("total", "STRING", "sum"), ("total", "STRING")),
        (lambda: valid().agg_column("total", "INT", "sum", delimiter="|"), ("total", "delimiter")),
        (
            lambda: valid().agg_column("tags", "STRING", "string_agg", delimter="|"),
            ("tags", "delimter", "delimiter"),
        ),
        (
            lambda: valid().agg_column("tags", "STRING", "string_agg", limit="many"),
            ("tags", "limit"),
        ),
        (
            lambda: valid().agg_column("total", "INT", "sum", order_by="id"),
            ("total", "order_by"),
        ),
    ],
)
def test_what_the_function_refuses_names_the_column_too(
    builder: Build, parts: tuple[str, ...]
) -> None:
    with pytest.raises(SchemaError) as caught:
        builder().build()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


class TestOptions:
    def test_give_columns_their_functions_and_parameters(self) -> None:
        schema = (
            keyed()
            .column("orders", "BIGINT")
            .column("tags", "STRING")
            .column("items", "ARRAY<STRING>")
            .options(
                {
                    "fields.orders.agg": "count",
                    "fields.tags.agg": "string_agg",
                    "fields.tags.listagg.delimiter": "|",
                    "fields.items.agg": "ARRAY-AGG",
                    "fields.items.array_agg.limit": "100",
                }
            )
            .build()
        )
        assert function_of(schema, "orders").name == "count"
        assert function_of(schema, "tags").parameters == {"delimiter": "|"}
        assert function_of(schema, "items").parameters == {"limit": 100}

    def test_a_delimiter_that_looks_like_a_number_stays_text(self) -> None:
        schema = (
            keyed()
            .agg_column("tags", "STRING", "string_agg")
            .options({"fields.tags.string_agg.delimiter": "0"})
            .build()
        )
        assert function_of(schema, "tags").parameters == {"delimiter": "0"}

    def test_add_parameters_to_a_function_given_in_code(self) -> None:
        schema = (
            keyed()
            .agg_column("tags", "STRING", AggFunction.STRING_AGG, limit=3)
            .options({"fields.tags.agg": "listagg", "fields.tags.string_agg.delimiter": ";"})
            .build()
        )
        assert function_of(schema, "tags").parameters == {"delimiter": ";", "limit": 3}

    def test_find_their_column_in_any_case_as_spark_gives_them_in_lower_case(self) -> None:
        builder = keyed().column("firstSeen", "DATE").options({"fields.firstseen.agg": "min"})
        assert function_of(builder.build(), "firstSeen").name == "min"

    def test_may_be_for_columns_with_dots_in_their_names(self) -> None:
        schema = (
            keyed()
            .column("a", "STRING")
            .column("a.string_agg", "STRING")
            .column("a.b.c", "BIGINT")
            .options(
                {
                    "fields.a.agg": "string_agg",
                    "fields.a.string_agg.delimiter": "|",
                    "fields.a.string_agg.agg": "max",
                    "fields.a.b.c.agg": "sum",
                }
            )
            .build()
        )
        assert function_of(schema, "a").parameters == {"delimiter": "|"}
        assert function_of(schema, "a.string_agg").name == "max"
        assert function_of(schema, "a.b.c").name == "sum"

    def test_given_later_replace_those_given_earlier(self) -> None:
        builder = keyed().column("total", "INT")
        builder.options({"fields.total.agg": "min"}).options({"fields.total.agg": "max"})
        assert function_of(builder.build(), "total").name == "max"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"fields.order.agg": "sum"},
                "option 'fields.order.agg' is for a column 'order', which is not declared;"
                " did you mean 'orders'?",
            ),
            (
                {"fields.tag.string_agg.delimiter": "|"},
                "option 'fields.tag.string_agg.delimiter' is for a column 'tag', which is not"
                " declared; did you mean 'tags'?",
            ),
            (
                {"field.tags.agg": "sum"},
                "unknown option 'field.tags.agg'; options are fields.<column>.agg and"
                " fields.<column>.<function>.<parameter>",
            ),
            (
                {"fields.tags.aggregate": "sum"},
                "unknown option 'fields.tags.aggregate'; options are fields.<column>.agg and"
                " fields.<column>.<function>.<parameter>",
            ),
            (
                {"fields.tags.string_agg.": "sum"},
                "unknown option 'fields.tags.string_agg.'; options are fields.<column>.agg and"
                " fields.<column>.<function>.<parameter>",
            ),
            (
                {"fields.tags.agg": "max"},
                "column 'tags' is declared with string_agg, but the options say max; keep one of"
                " them",
            ),
            (
                {"fields.tags.array_agg.limit": "3"},
                "option 'fields.tags.array_agg.limit' is for array_agg, but column 'tags' has"
                " string_agg; drop the option",
            ),
            (
                {"fields.tags.string_agg.delimiter": ";"},
                "option 'fields.tags.string_agg.delimiter' gives column 'tags' a second"
                " delimiter; keep one",
            ),
            (
                {"fields.plain.string_agg.delimiter": ";"},
                "option 'fields.plain.string_agg.delimiter' is for column 'plain', which has no"
                " function; add fields.plain.agg",
            ),
        ],
    )
    def test_that_are_wrong_are_errors(self, options: dict[str, str], message: str) -> None:
        builder = (
            valid()
            .agg_column("tags", "STRING", "string_agg", delimiter="|")
            .column("plain", "STRING")
        )
        with pytest.raises(SchemaError) as caught:
            builder.options(options).build()
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"fields.tags.agg": "string_age"}, ("tags", "string_agg")),
            ({"fields.tags.agg": "string_agg", "fields.tags.string_age.limit": "1"}, ("tags",)),
            (
                {"fields.tags.agg": "string_agg", "fields.tags.string_agg.limit": "many"},
                ("tags", "limit", "many"),
            ),
            (
                {"fields.tags.agg": "string_agg", "fields.tags.string_agg.delimter": "|"},
                ("tags", "delimter"),
            ),
        ],
    )
    def test_that_the_function_refuses_name_the_column(
        self, options: dict[str, str], parts: tuple[str, ...]
    ) -> None:
        with pytest.raises(SchemaError) as caught:
            valid().column("tags", "STRING").options(options).build()
        assert all(part in str(caught.value) for part in parts), str(caught.value)


class TestOtherSources:
    OPTIONS = {"fields.orders.agg": "count"}  # noqa: RUF012

    def test_ddl_and_options_make_a_table(self) -> None:
        schema = (
            SchemaBuilder.from_ddl("customer_id BIGINT NOT NULL COMMENT 'who', orders BIGINT")
            .options(self.OPTIONS)
            .primary_key("customer_id")
            .build()
        )
        assert str(schema).splitlines()[1:] == [
            "  customer_id  BIGINT  key",
            "  orders       BIGINT  count",
        ]

    def test_an_arrow_schema_and_options_make_a_table(self) -> None:
        arrow = pa.schema(
            [pa.field("customer_id", pa.int64(), nullable=False), pa.field("orders", pa.int64())]
        )
        builder = SchemaBuilder.from_arrow(arrow).options(self.OPTIONS).primary_key("customer_id")
        assert builder.build().arrow_schema() == arrow

    def test_a_key_that_they_declare_nullable_is_an_error(self) -> None:
        message = "column 'id' is in the primary key but declared nullable; declare it NOT NULL"
        arrow = pa.schema([("id", pa.int64()), ("orders", pa.int64())])
        for builder in (
            SchemaBuilder.from_ddl("id BIGINT, orders BIGINT"),
            SchemaBuilder.from_arrow(arrow),
        ):
            with pytest.raises(SchemaError, match=message):
                builder.options(self.OPTIONS).primary_key("id").build()

    def test_ddl_that_cannot_be_read_is_an_error(self) -> None:
        with pytest.raises(SchemaError, match="a type is missing at the end"):
            SchemaBuilder.from_ddl("id BIGINT, orders")
