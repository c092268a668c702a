"""Definitions of functions: names, types, parameters, and how they are stored."""

import json
from typing import Any

import pyarrow as pa
import pytest

import merge_engine.aggregates
from foundation.errors import SchemaError
from merge_engine.aggregates.base import AggregateFunction
from merge_engine.aggregates.registry import AggFunction, find_function
from tests.support.aggregates import MAP, UTC, build


@pytest.mark.parametrize(
    "name", ["last_value_ignore_nulls", "LAST-VALUE-IGNORE-NULLS", " Last_Value_ignore-nulls"]
)
def test_names_are_found_whatever_their_case_and_hyphens(name: str) -> None:
    assert find_function(name, column="c") is AggFunction.LAST_VALUE_IGNORE_NULLS


def test_listagg_is_string_agg() -> None:
    assert find_function("LISTAGG", column="c") is AggFunction.STRING_AGG
    assert AggFunction.__members__["LISTAGG"] is AggFunction.STRING_AGG
    assert find_function(AggFunction.SUM, column="c") is AggFunction.SUM


def test_an_unknown_name_is_an_error_with_the_column_and_the_nearest_name() -> None:
    with pytest.raises(SchemaError, match=r"column 'tags'.*'string_ag'.*did you mean 'string_agg'"):
        find_function("string_ag", column="tags")
    with pytest.raises(SchemaError, match=r"column 'tags'.*'zzz'.*known are .*sum"):
        find_function("zzz", column="tags")
    with pytest.raises(SchemaError, match="column 'tags'"):
        find_function(None, column="tags")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("sum", pa.string(), "sum cannot have type STRING; it can be TINYINT"),
        ("product", pa.decimal128(38, 2), "DECIMAL of at most 37 digits"),
        ("count", pa.int32(), "it can be BIGINT"),
        ("avg", pa.int64(), "it can be DOUBLE and DECIMAL"),
        ("max", pa.list_(pa.int64()), "ARRAY<BIGINT>; it can be BOOLEAN, numbers"),
        ("bool_or", pa.int64(), "it can be BOOLEAN"),
        ("string_agg", pa.binary(), "it can be STRING"),
        ("array_agg", pa.string(), "it can be ARRAY<T>"),
        ("merge_map", pa.string(), "it can be MAP<K,V>"),
        ("rbm32", pa.int32(), r"it can be BIGINT \(reads as a count\)"),
    ],
)
def test_a_type_that_the_function_cannot_have_is_an_error(
    name: str, kind: pa.DataType, text: str
) -> None:
    with pytest.raises(SchemaError, match=f"^column 'c': .*{text}"):
        build(name, kind)


@pytest.mark.parametrize(
    ("name", "kind", "parameters", "text"),
    [
        ("sum", pa.int64(), {"limit": 1}, "sum has no parameter 'limit'; it has none"),
        ("string_agg", pa.string(), {"size": 1}, "no parameter 'size'; it has delimiter, limit"),
        ("string_agg", pa.string(), {"delimiter": 1}, "'delimiter' of string_agg: 1 is not a text"),
        ("string_agg", pa.string(), {"limit": "many"}, "'many' is not a whole number"),
        ("string_agg", pa.string(), {"limit": "-1"}, "'-1' is not a whole number"),
        ("string_agg", pa.string(), {"limit": 0}, "0 is not a whole number from 1 on"),
        ("string_agg", pa.string(), {"limit": True}, "True is not a whole number"),
        ("string_agg", pa.string(), {"limit": 1.0}, "1.0 is not a whole number"),
        ("hll_sketch", pa.int64(), {"lg_k": 22}, "22 is not a whole number from 4 to 21"),
        ("last_value", pa.int64(), {"order_by": ""}, "'' is not the name of a column"),
        ("last_value", pa.int64(), {"order_type": "BIGINT"}, "order_type needs order_by"),
        ("last_value", pa.int64(), {"order_by": "t", "order_type": "WORD"}, "WORD"),
        (
            "last_value",
            pa.int64(),
            {"order_by": "t", "order_type": "ARRAY<BIGINT>"},
            "order_type ARRAY<BIGINT> has no order",
        ),
    ],
)
def test_a_wrong_parameter_is_an_error_that_names_the_column(
    name: str, kind: pa.DataType, parameters: dict[str, Any], text: str
) -> None:
    with pytest.raises(SchemaError, match=f"^column 'c': .*{text}"):
        build(name, kind, **parameters)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (build("string_agg", pa.string(), delimiter=",", limit="100"), {"limit": 100}),
        (build("string_agg", pa.string(), delimiter="|"), {"delimiter": "|"}),
        (build("array_agg", pa.list_(pa.int64()), limit=7), {"limit": 7}),
        (build("last_value", pa.int64(), order_by="t", order_type=UTC), {"order_by": "t"}),
        (
            build("last_value", pa.int64(), order_by="t", order_type=pa.decimal128(5, 1)),
            {"order_by": "t", "order_type": "DECIMAL(5,1)"},
        ),
        (build("hll_sketch", pa.int64(), lg_k="12"), {}),
        (build("theta_sketch", pa.binary(), lg_k="10"), {"lg_k": 10}),
        (build("merge_map", MAP), {}),
    ],
    ids=repr,
)
def test_parameters_are_stored_as_json_and_give_the_same_function_again(
    given: AggregateFunction, stored: dict[str, Any]
) -> None:
    assert given.parameters == stored
    loaded = json.loads(json.dumps(given.parameters))
    assert build(given.name, given.result_type, **loaded) == given
    assert hash(build(given.name, given.result_type, **loaded)) == hash(given)


def test_functions_that_differ_in_a_parameter_are_not_equal() -> None:
    assert build("string_agg", pa.string(), limit=1) != build("string_agg", pa.string(), limit=2)
    assert build("sum", pa.int64()) != build("sum", pa.int32())
    assert build("sum", pa.int64()) != build("product", pa.int64())


def test_the_package_exports_what_it_says() -> None:
    exported = merge_engine.aggregates.__all__
    assert exported == sorted(exported)
    assert all(hasattr(merge_engine.aggregates, name) for name in exported)
