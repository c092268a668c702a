"""A value that is not what its type says is refused by name, wherever it stands in a batch."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import InvalidInput, InvalidKey, InvalidValue, Overflow, SchemaError
from merge_engine.bucket.segment import AggMode
from merge_engine.encoding.keys import KeyCodec
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from merge_engine.schema.types import parse_type
from recovery.embedded.table import Table
from tests.conftest import schema_of
from tests.support.unsound import NO_TEXT, damaged, decimals, hidden, nested, texts

NESTED, HIDDEN = nested(), hidden()
BOTH = texts([b"good", NO_TEXT])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "table"


def create(place: Path, schema: Schema) -> Table:
    return Table.create(place, schema, buckets=2)


def table_type(array: pa.Array) -> pa.DataType:
    if pa.types.is_fixed_size_list(array.type):
        return pa.list_(array.type.value_type)
    return parse_type(array.type)


def refused(table: Table, data: Any, column: str, **arguments: Any) -> None:
    """Put rows of the keys 7 and 8: the second is refused by column and key, and nothing stays."""
    with pytest.raises(InvalidValue, match=rf"^column '{column}', key k=8: ") as caught:
        table.put(data, **arguments)
    assert "nothing was written" in str(caught.value)
    assert caught.value.encoded_key == KeyCodec([pa.int64()]).encode([pa.array([8])])[0].as_py()
    assert table.to_arrow().num_rows == 0


@pytest.mark.parametrize("function", ["last_value", "count"])
@pytest.mark.parametrize("name", NESTED)
def test_text_that_is_not_utf_8_is_refused_in_every_type(
    name: str, function: str, place: Path
) -> None:
    array = NESTED[name]
    kind = pa.int64() if function == "count" else table_type(array)
    with create(place, schema_of(v=(kind, function), n=(pa.int64(), "sum"))) as table:
        refused(table, pa.table({"k": [7, 8], "v": array, "n": [1, 1]}), "v")
        table.put({"k": [7, 8], "n": [1, 1]})
        assert table.to_arrow().num_rows == 2


@pytest.mark.parametrize("name", HIDDEN)
def test_what_nobody_can_see_does_not_keep_a_batch_out(name: str, place: Path) -> None:
    array = HIDDEN[name]
    with create(place, schema_of(v=(table_type(array), "last_value"))) as table:
        table.put(pa.table({"k": [7, 8][: len(array)], "v": array}))
        found = table.lookup({"k": [7, 8][: len(array)]}).column("v").to_pylist()
        assert found[0] in ("good", ["good"], {"text": "good"})
        assert found[1:] in ([], [None], ["good"])
        assert table.to_arrow().num_rows == len(array)


def test_orders_operations_and_columns_that_are_not_written_are_looked_through(
    place: Path,
) -> None:
    schema = (
        SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("v", "STRING", "last_value", order_by="at", order_type="STRING")
        .agg_column("n", "BIGINT", "sum")
        .primary_key("k")
        .build()
    )
    good = {"k": [7, 8], "n": [1, 1]}
    with create(place, schema) as table:
        refused(table, pa.table({**good, "v": ["a", "b"], "at": BOTH}), "at")
        refused(table, pa.table({**good, "v": BOTH}), "v", columns=["n"])
        refused(table, pa.table({**good, "op": BOTH}), "op", operation_column="op")


@pytest.mark.parametrize("mode", [AggMode.MERGE_STATE, AggMode.REPLACE])
def test_states_are_looked_through(mode: AggMode, place: Path) -> None:
    schema = schema_of(v=(pa.string(), "string_agg"), d=(pa.decimal128(3, 0), "sum"))
    with create(place, schema) as table:
        states = pa.ListArray.from_arrays([0, 1, 2], BOTH)
        refused(table, pa.table({"k": [7, 8], "v": states}), "v", mode=mode)
        refused(table, pa.table({"k": [7, 8], "d": decimals()}), "d", mode=mode)


def test_numbers_of_more_digits_than_their_type_has_are_refused(place: Path) -> None:
    with create(place, schema_of(d=(pa.decimal128(9, 0), "sum"))) as table:
        refused(table, pa.table({"k": [7, 8], "d": decimals()}), "d")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("partitioned", [False, True])
def test_a_key_that_is_no_text_is_refused_with_its_row_and_its_bytes(
    partitioned: bool, kind: pa.DataType, place: Path
) -> None:
    builder = SchemaBuilder().column("k", "STRING").agg_column("n", "BIGINT", "sum")
    builder = builder.primary_key("k")
    schema = builder.partitioned_by("k").build() if partitioned else builder.build()
    keys = pa.table({"k": texts([b"good", NO_TEXT, NO_TEXT], kind)})
    words = r"'k' cannot be read in 2 of 3 rows, first in row 1 \(text that is not UTF-8: b'\\xff"
    with create(place, schema) as table:
        table.put({"k": ["good"], "n": [1]})
        for call in (table.lookup, table.delete):
            with pytest.raises(InvalidKey, match=words):
                call(keys)
        with pytest.raises(InvalidKey, match=words):
            table.put(keys.append_column("n", pa.array([1, 1, 1])))
        assert table.to_arrow().to_pylist() == [{"k": "good", "n": 1}]
        assert len(table.partitions() if partitioned else keys.slice(2)) == 1


def test_an_array_that_is_damaged_is_refused_before_anything_reads_it(place: Path) -> None:
    with create(place, schema_of(v=(pa.string(), "max"))) as table:
        for offsets in ((0, 1 << 30, 6), (0, 5, 1), (0, -5, 6)):
            with pytest.raises(InvalidInput, match="column 'v' is damaged: "):
                table.put(pa.table({"k": [7, 8], "v": damaged(*offsets)}))
        assert table.to_arrow().num_rows == 0


def test_a_key_that_python_has_no_date_for_can_be_named(place: Path) -> None:
    schema = (
        SchemaBuilder()
        .column("at", "TIMESTAMP")
        .agg_column("n", "TINYINT", "sum")
        .primary_key("at")
        .build()
    )
    late = pa.array([2**62], pa.int64()).view(pa.timestamp("us", tz="UTC"))
    with create(place, schema) as table:
        table.put(pa.table({"at": late, "n": pa.array([100], pa.int8())}))
        with pytest.raises(Overflow, match=r"column 'n', key at='.*4611686018427387904"):
            table.put(pa.table({"at": late, "n": pa.array([100], pa.int8())}))


# --- Half characters: Python's texts may have them, and nothing else takes them ------------------

HALF = "\ud800"


def test_half_a_character_is_refused_in_rows_and_in_the_names_of_partitions(place: Path) -> None:
    schema = (
        SchemaBuilder()
        .column("day", "STRING")
        .agg_column("n", "STRING", "max")
        .primary_key("day")
        .partitioned_by("day")
        .build()
    )
    with create(place, schema) as table:
        for data in ({"day": [HALF], "n": ["x"]}, [{"day": "x", "n": HALF}]):
            with pytest.raises(InvalidInput, match="cannot read this as a table"):
                table.put(data)
        with pytest.raises(InvalidInput, match="cannot read this as a table"):
            table.lookup({"day": [HALF]})
        for value in (HALF, 5):
            with pytest.raises(InvalidInput, match="is no value of partition column 'day'"):
                table.drop_partition(day=value)


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ((HALF, "STRING", "max"), {}),
        (("v", "STRING", "string_agg"), {"delimiter": HALF}),
        (("v", "STRING", "last_value"), {"order_by": HALF}),
        (("v", f"STRUCT<`{HALF}`: INT>", "last_value"), {}),
    ],
    ids=["a name", "a delimiter", "an order", "a field"],
)
def test_half_a_character_is_refused_in_a_schema(
    arguments: tuple[str, str, str], parameters: dict[str, str]
) -> None:
    builder = SchemaBuilder().column("k", "BIGINT").primary_key("k")
    with pytest.raises(SchemaError, match=r"ud800"):
        builder.agg_column(*arguments, **parameters).build()
