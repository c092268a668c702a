"""The closed type system: names, what is normalised or refused, and lossless conversion."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import SchemaError, WrongType
from merge_engine.schema.types import conform, parse_type, type_name

TIMESTAMP = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BOOLEAN", pa.bool_()),
        ("TINYINT", pa.int8()),
        ("byte", pa.int8()),
        ("SmallInt", pa.int16()),
        ("SHORT", pa.int16()),
        ("INT", pa.int32()),
        ("integer", pa.int32()),
        (" BIGINT ", pa.int64()),
        ("LONG", pa.int64()),
        ("FLOAT", pa.float32()),
        ("REAL", pa.float32()),
        ("DOUBLE", pa.float64()),
        ("DECIMAL(18, 2)", pa.decimal128(18, 2)),
        ("DEC(5)", pa.decimal128(5, 0)),
        ("NUMERIC", pa.decimal128(10, 0)),
        ("STRING", pa.string()),
        ("VARCHAR(20)", pa.string()),
        ("CHAR(3)", pa.string()),
        ("BINARY", pa.binary()),
        ("DATE", pa.date32()),
        ("TIMESTAMP", TIMESTAMP),
        ("TIMESTAMP_LTZ", TIMESTAMP),
        ("TIMESTAMP_NTZ", pa.timestamp("us")),
        ("ARRAY<INT>", pa.list_(pa.int32())),
        ("MAP<STRING, ARRAY<DEC(3,1)>>", pa.map_(pa.string(), pa.list_(pa.decimal128(3, 1)))),
        ("STRUCT<a: INT, b STRING>", pa.struct([("a", pa.int32()), ("b", pa.string())])),
        ("struct<`a ``b`: INT NOT NULL COMMENT 'x, y'>", pa.struct([("a `b", pa.int32())])),
        ("STRUCT<date: DATE>", pa.struct([("date", pa.date32())])),
    ],
)
def test_spark_names_are_read_in_any_case(name: str, expected: pa.DataType) -> None:
    assert parse_type(name).equals(expected, check_metadata=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BIGNIT", "cannot read 'BIGNIT': unknown type 'BIGNIT'; did you mean 'BIGINT'?"),
        ("ARRAY<STRNIG>", "unknown type 'STRNIG'; did you mean 'STRING'?"),
        ("XYZZY", "unknown type 'XYZZY'; use one of ARRAY, BIGINT, "),
        ("INTERVAL DAY TO SECOND", "'INTERVAL'; use INT with the months, or BIGINT with the micro"),
        ("", "a type is missing at the end"),
        ("INT INT", "'INT' was not expected"),
        ("ARRAY<INT", "'>' was expected, not 'the end'"),
        ("MAP<INT>", "',' was expected, not '>'"),
        ("ARRAY", "'<' was expected"),
        ("VARCHAR", "'(' was expected"),
        ("VARCHAR(n)", "'n' is not a number"),
        ("INT;", "cannot read ';'"),
        ("STRUCT<>", "'>' is not a name"),
        ("STRUCT<a INT, a INT>", "each with a name of its own"),
        ("DECIMAL(39,0)", "DECIMAL(39,0) needs a precision of 1 to 38"),
        ("DECIMAL(0)", "DECIMAL(0,0) needs a precision of 1 to 38"),
        ("DECIMAL(3,4)", "DECIMAL(3,4) needs a precision of 1 to 38 and a scale of 0 to the"),
        ("MAP<MAP<INT, INT>, INT>", "a map's key cannot have a map in it"),
        ("MAP<ARRAY<MAP<INT, INT>>, INT>", "a map's key cannot have a map in it"),
        ("ARRAY<" * 1000 + "INT" + ">" * 1000, "nested more than 64 deep"),
    ],
)
def test_text_that_is_no_type_is_refused_with_the_part_that_is_wrong(
    name: str, message: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_type(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.timestamp("us", tz="Europe/Berlin"), TIMESTAMP),
        (pa.timestamp("us"), pa.timestamp("us")),
        (pa.decimal32(5, 2), pa.decimal128(5, 2)),
        (pa.decimal64(5, 2), pa.decimal128(5, 2)),
        (pa.large_list(pa.large_string()), pa.list_(pa.string())),
        (pa.list_view(pa.int8()), pa.list_(pa.int8())),
        (pa.large_list_view(pa.int8()), pa.list_(pa.int8())),
        (pa.list_(pa.field("element", pa.int8(), nullable=False)), pa.list_(pa.int8())),
        (pa.map_(pa.int8(), pa.int8(), keys_sorted=True), pa.map_(pa.int8(), pa.int8())),
        (
            pa.struct([pa.field("a", pa.string_view(), nullable=False, metadata={"k": "v"})]),
            pa.struct([("a", pa.string())]),
        ),
    ],
)
def test_arrow_types_that_mean_the_same_become_the_plain_one(
    given: pa.DataType, expected: pa.DataType
) -> None:
    assert parse_type(given).equals(expected, check_metadata=True)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (pa.uint8(), "SMALLINT"),
        (pa.uint16(), "INT"),
        (pa.uint32(), "BIGINT"),
        (pa.uint64(), "DECIMAL(20,0)"),
        (pa.float16(), "FLOAT"),
        (pa.time32("s"), "BIGINT"),
        (pa.time64("us"), "BIGINT"),
        (pa.duration("us"), "BIGINT"),
        (pa.timestamp("ns"), "timestamp('us')"),
        (pa.timestamp("ms", tz="UTC"), "timestamp('us')"),
        (pa.date64(), "DATE"),
        (pa.month_day_nano_interval(), "INT with the months, and BIGINT with the microseconds"),
        (pa.decimal256(10, 2), "DECIMAL(p,s)"),
        (pa.decimal128(5, -2), "DECIMAL(p,s) with 0 <= s <= p <= 38"),
        (pa.decimal128(5, 6), "DECIMAL(p,s) with 0 <= s <= p <= 38"),
        (pa.null(), "the type that the values will have"),
        (pa.binary(4), "BINARY"),
        (pa.list_(pa.int8(), 3), "ARRAY"),
        (pa.list_(pa.uint8()), "SMALLINT"),
        (pa.struct([("a", pa.map_(pa.string(), pa.float16()))]), "FLOAT"),
    ],
)
def test_other_arrow_types_are_refused_with_what_to_use_instead(
    given: pa.DataType, instead: str
) -> None:
    with pytest.raises(SchemaError, match="is not supported; use") as caught:
        parse_type(given)
    assert instead in str(caught.value)


def test_a_type_without_a_counterpart_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"type extension<arrow.uuid> is not supported$"):
        parse_type(pa.uuid())


def test_something_that_is_no_type_at_all_is_refused() -> None:
    with pytest.raises(SchemaError, match="<class 'int'> is not a type; give a pyarrow type or"):
        parse_type(int)


def test_names_are_sparks() -> None:
    data_type = pa.struct(
        [
            ("a", pa.map_(pa.string(), pa.decimal128(18, 2))),
            ("b c", pa.list_(TIMESTAMP)),
        ]
    )
    assert type_name(data_type) == (
        "STRUCT<a: MAP<STRING, DECIMAL(18,2)>, `b c`: ARRAY<TIMESTAMP>>"
    )
    assert type_name(pa.timestamp("ns")) == "timestamp[ns]"


LOSSLESS: list[tuple[list[Any], pa.DataType, pa.DataType]] = [
    ([1, None], pa.int8(), pa.int64()),
    ([255], pa.uint8(), pa.int16()),
    ([2**32 - 1], pa.uint32(), pa.int64()),
    ([-(2**15)], pa.int16(), pa.float32()),
    ([-(2**31)], pa.int32(), pa.float64()),
    ([2**32 - 1], pa.uint32(), pa.float64()),
    ([1.5, None], pa.float32(), pa.float64()),
    ([1.5], pa.float16(), pa.float32()),
    ([-128], pa.int8(), pa.decimal128(3, 0)),
    ([-(2**63)], pa.int64(), pa.decimal128(21, 2)),
    ([2**64 - 1], pa.uint64(), pa.decimal128(20, 0)),
    ([Decimal("9.99")], pa.decimal128(3, 2), pa.decimal128(5, 3)),
    ([Decimal("9.99")], pa.decimal256(3, 2), pa.decimal128(3, 2)),
    (["a", None, ""], pa.large_string(), pa.string()),
    (["a", None, ""], pa.string_view(), pa.string()),
    (["a", None, "a"], pa.dictionary(pa.int8(), pa.string()), pa.string()),
    ([b"a"], pa.large_binary(), pa.binary()),
    ([b"a"], pa.binary_view(), pa.binary()),
    ([b"ab"], pa.binary(2), pa.binary()),
    ([1, 2], pa.dictionary(pa.int8(), pa.int16()), pa.int64()),
    ([None, None], pa.null(), pa.map_(pa.string(), pa.int8())),
    ([datetime(2024, 5, 1)], pa.timestamp("s"), pa.timestamp("us")),
    ([datetime(2024, 5, 1)], pa.timestamp("ms"), pa.timestamp("us")),
    ([datetime(2024, 5, 1, 0, 0, 0, 7)], pa.timestamp("ns"), pa.timestamp("us")),
    ([[1, None], None, []], pa.list_(pa.int8()), pa.list_(pa.int64())),
    ([["a"], None], pa.large_list(pa.large_string()), pa.list_(pa.string())),
    ([[1], None, [2, 3]], pa.list_view(pa.int8()), pa.list_(pa.int64())),
    ([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2), pa.list_(pa.int64())),
    ([[1]], pa.list_(pa.field("element", pa.int8(), nullable=False)), pa.list_(pa.int8())),
    ([[None]], pa.list_(pa.null()), pa.list_(pa.date32())),
    (
        [[("a", 1)], None, [], [("b", None), ("c", 3)]],
        pa.map_(pa.large_string(), pa.int8()),
        pa.map_(pa.string(), pa.int64()),
    ),
    (
        [{"a": 1, "b": "x"}, None, {"a": None, "b": None}],
        pa.struct([("b", pa.string_view()), ("a", pa.int8())]),
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
    ),
]


@pytest.mark.parametrize(("values", "source", "target"), LOSSLESS)
def test_values_become_the_declared_type_if_every_value_of_their_type_fits(
    values: list[Any], source: pa.DataType, target: pa.DataType
) -> None:
    # Not all types can be made from Python values directly.
    array = (
        pa.array(values, source.value_type).dictionary_encode()
        if (pa.types.is_dictionary(source))
        else pa.array(values, source)
    )
    repeated = pa.chunked_array([array, array[1:], array[:0]])
    for given, expected in (
        (array, values),
        (array[1:], values[1:]),
        (repeated, values + values[1:]),
    ):
        result = conform(given, target, column="c")
        result.validate(full=True)
        assert isinstance(result, pa.Array)
        assert result.type.equals(target, check_metadata=True)
        assert result.to_pylist() == expected


def test_no_chunks_become_an_empty_array() -> None:
    result = conform(pa.chunked_array([], pa.int8()), pa.int64(), column="c")
    assert result.equals(pa.array([], pa.int64()))


def test_values_of_the_declared_type_are_not_copied() -> None:
    array = pa.array([1, 2])
    assert conform(array, pa.int64(), column="c") is array


def test_time_zones_become_utc_and_keep_the_instant() -> None:
    array = pa.array([0, 3600], pa.timestamp("s", tz="Asia/Tokyo"))
    result = conform(array, TIMESTAMP, column="at")
    assert result.type == TIMESTAMP
    assert result.to_pylist() == [
        datetime(1970, 1, 1, 0, tzinfo=UTC),
        datetime(1970, 1, 1, 1, tzinfo=UTC),
    ]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (pa.int64(), pa.int32()),
        (pa.uint32(), pa.int32()),
        (pa.uint64(), pa.int64()),
        (pa.int32(), pa.float32()),
        (pa.int64(), pa.float64()),
        (pa.float64(), pa.float32()),
        (pa.float64(), pa.int64()),
        (pa.bool_(), pa.int8()),
        (pa.int8(), pa.bool_()),
        (pa.int8(), pa.decimal128(2, 0)),
        (pa.int64(), pa.decimal128(20, 2)),
        (pa.decimal128(5, 2), pa.decimal128(5, 3)),
        (pa.decimal128(5, 2), pa.decimal128(9, 1)),
        (pa.decimal128(5, 2), pa.float64()),
        (pa.float64(), pa.decimal128(38, 10)),
        (pa.string(), pa.int64()),
        (pa.int64(), pa.string()),
        (pa.string(), pa.binary()),
        (pa.binary(), pa.string()),
        (pa.date32(), TIMESTAMP),
        (TIMESTAMP, pa.date32()),
        (pa.timestamp("us"), TIMESTAMP),
        (TIMESTAMP, pa.timestamp("us")),
        (pa.list_(pa.int64()), pa.list_(pa.int8())),
        (pa.int64(), pa.list_(pa.int64())),
        (pa.list_(pa.int64()), pa.int64()),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int8())),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())])),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("a", pa.int8())])),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8()), ("b", pa.int8())])),
        (pa.struct([("a", pa.int8())]), pa.map_(pa.string(), pa.int8())),
    ],
)
def test_a_cast_that_could_lose_something_is_refused_whatever_the_values(
    source: pa.DataType, target: pa.DataType
) -> None:
    with pytest.raises(WrongType) as caught:
        conform(pa.nulls(1, source), target, column="total")
    assert str(caught.value) == (
        f"column 'total' is {type_name(target)}, but the batch has"
        f" {type_name(source)}; cast it first"
    )


def test_a_struct_with_the_same_field_twice_is_refused() -> None:
    twice = pa.struct([("a", pa.int8()), ("a", pa.int8())])
    with pytest.raises(WrongType, match="column 'c' is STRUCT<a: TINYINT>, but the batch has"):
        conform(pa.nulls(1, twice), pa.struct([("a", pa.int8())]), column="c")


def test_the_message_has_the_names_that_a_spark_user_knows() -> None:
    with pytest.raises(WrongType) as caught:
        conform(pa.array(["1"], pa.large_string()), pa.int64(), column="orders")
    assert str(caught.value) == (
        "column 'orders' is BIGINT, but the batch has STRING; cast it first"
    )


def test_nanoseconds_that_do_not_divide_are_refused() -> None:
    with pytest.raises(WrongType) as caught:
        conform(pa.array([1000, 1001], pa.timestamp("ns")), pa.timestamp("us"), column="at")
    message = str(caught.value)
    assert message.startswith(
        "column 'at' is TIMESTAMP_NTZ, but the batch has timestamp[ns] with values that do not fit"
    )
    assert message.endswith("truncate or filter them first")


def test_a_time_stamp_out_of_range_is_refused() -> None:
    with pytest.raises(WrongType, match=r"column 'at' .* with values that do not fit"):
        conform(pa.array([2**62], pa.timestamp("s")), pa.timestamp("us"), column="at")


def test_values_hidden_under_a_null_struct_do_not_matter() -> None:
    hidden = pa.StructArray.from_arrays(
        [pa.array([1000, 1001], pa.timestamp("ns"))], names=["at"], mask=pa.array([False, True])
    )
    result = conform(hidden, pa.struct([("at", pa.timestamp("us"))]), column="c")
    assert result.to_pylist() == [{"at": datetime(1970, 1, 1, 0, 0, 0, 1)}, None]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([2**63 - 1, None]), [float(2**63), None]),
        (pa.array([2**64 - 1], pa.uint64()), [float(2**64)]),
        (pa.array([Decimal("1.10")]), [1.1]),
        (pa.array([1.5], pa.float32()), [1.5]),
    ],
)
def test_any_number_may_become_a_double_where_rounding_is_allowed(
    array: pa.Array, expected: list[float | None]
) -> None:
    result = conform(array, pa.float64(), column="average", allow_rounding=True)
    assert result.to_pylist() == expected


@pytest.mark.parametrize(
    ("array", "target"),
    [
        (pa.array(["1"]), pa.float64()),
        (pa.array([True]), pa.float64()),
        (pa.array([date(2024, 5, 1)]), pa.float64()),
        (pa.array([1]), pa.int8()),
        (pa.array([[1]]), pa.list_(pa.float64())),
    ],
)
def test_rounding_is_for_numbers_that_become_doubles_only(
    array: pa.Array, target: pa.DataType
) -> None:
    with pytest.raises(WrongType, match="cast it first"):
        conform(array, target, column="average", allow_rounding=True)
