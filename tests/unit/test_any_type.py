"""Functions that take values of any type take them however they are spelled."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from foundation.errors import WrongType
from merge_engine.merging.batch import read_keys
from merge_engine.merging.routing import route
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.types import in_table_type
from recovery.embedded.table import Table
from server.client.outgoing import as_one_table, to_messages
from tests.conftest import schema_of

KEYS = [1, 2, 3, 4]
TEXTS = pa.array(["a", None, "a", "b"])
STRUCTS = pa.array([{"a": "x"}, None, {"a": "y"}, {"a": None}], pa.struct([("a", pa.string())]))
SPELLED = {
    "strings": TEXTS,
    "large strings": TEXTS.cast(pa.large_string()),
    "views": TEXTS.cast(pa.string_view()),
    "dictionary": TEXTS.dictionary_encode(),
    "binary": TEXTS.cast(pa.binary()),
    "binary views": TEXTS.cast(pa.binary()).cast(pa.binary_view()),
    "large binary": TEXTS.cast(pa.large_binary()),
    "fixed size": pa.array([b"a", None, b"a", b"b"], pa.binary(1)),
    "views in a dictionary": pa.DictionaryArray.from_arrays(
        TEXTS.dictionary_encode().indices, pa.array(["a", "b"], pa.string_view())
    ),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4], TEXTS),
    "a part of runs": pa.RunEndEncodedArray.from_arrays(
        [9, 10, 11, 12], TEXTS.cast(pa.string_view())
    )[8:],
    "runs of a dictionary": pa.RunEndEncodedArray.from_arrays(
        [1, 2, 3, 4], TEXTS.dictionary_encode()
    ),
    "chunks": pa.chunked_array([TEXTS.slice(0, 1), TEXTS.slice(1)]).cast(pa.string_view()),
}
UNIONS = {
    "a sparse union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 1, 0], pa.int8()),
        [pa.array([1, None, None, 1]), pa.array(["x", None, "y", "x"])],
    ),
    "a dense union": pa.UnionArray.from_dense(
        pa.array([0, 1, 1, 0], pa.int8()),
        pa.array([1, 0, 1, 1], pa.int32()),
        [pa.array([None, 1]), pa.array([None, "y"])],
    ),
    "runs of lists": pa.RunEndEncodedArray.from_arrays(
        [1, 2, 4], pa.array([[1], None, [2]], pa.large_list(pa.int8()))
    ),
}


@pytest.mark.parametrize("function", ["count", "hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("name", SPELLED)
def test_a_text_counts_however_it_is_spelled(name: str, function: str, tmp_path: Path) -> None:
    schema = schema_of(v=(pa.int64(), function))
    with Table.create(tmp_path / "table", schema, buckets=3) as table:
        table.put(pa.table({"k": KEYS, "v": SPELLED[name]}))
        table.put(pa.table({"k": [1] * 4, "v": SPELLED[name]}))
        found = table.lookup({"k": KEYS}).column("v").to_pylist()
    assert found == ([4, 0, 1, 1] if function == "count" else [2, 0, 1, 1])


@pytest.mark.parametrize("name", UNIONS)
def test_a_null_in_a_union_or_in_runs_counts_as_nothing(name: str, tmp_path: Path) -> None:
    schema = schema_of(v=(pa.int64(), "count"))
    with Table.create(tmp_path / "table", schema, buckets=3) as table:
        table.put(pa.table({"k": KEYS, "v": UNIONS[name]}))
        table.put(pa.table({"k": [1] * 4, "v": UNIONS[name]}))
        table.put(pa.table({"k": [2, 3, 4], "v": UNIONS[name][1:]}))
        assert table.lookup({"k": KEYS}).column("v").to_pylist() == [4, 0, 2, 2]


def test_what_stands_for_texts_is_a_text_in_keys_values_lists_and_operations(
    tmp_path: Path,
) -> None:
    schema = (
        SchemaBuilder()
        .column("k", "STRING")
        .agg_column("v", "STRING", "last_value")
        .agg_column("many", "ARRAY<STRING>", "last_value")
        .primary_key("k")
        .build()
    )
    words = pl.Enum(["a", "b", "upsert", "delete"])
    with Table.create(tmp_path / "table", schema, buckets=3) as table:
        for kind in (pl.Categorical, words):
            rows = {"k": ["a", "b"], "v": ["b", None], "many": [["a", None], None]}
            kinds = {"k": kind, "v": kind, "many": pl.List(kind), "op": kind}
            put = pl.DataFrame(rows | {"op": ["upsert", "upsert"]}, schema=kinds)
            table.put(put, operation_column="op")
            found = table.lookup(put.select("k"))
            assert found.to_pylist() == pl.DataFrame(rows).to_dicts()
            delete = pl.DataFrame({"k": ["a"], "op": ["delete"]}, schema_overrides=kinds)
            table.put(delete, operation_column="op")
            table.delete(put.select("k"))
            assert table.to_arrow().num_rows == 0
        runs = pa.RunEndEncodedArray.from_arrays([2], ["a"])
        table.put(pa.table({"k": ["a", "b"], "v": runs}))
        table.delete(pa.table({"k": runs}))
        assert table.to_arrow().to_pylist() == [{"k": "b", "v": "a", "many": None}]


@pytest.mark.parametrize("function", ["count", "hll_sketch", "theta_sketch", "rbm32", "rbm64"])
def test_nothing_but_nulls_counts_as_nothing(function: str, tmp_path: Path) -> None:
    schema = schema_of(v=(pa.int64(), function))
    with Table.create(tmp_path / "table", schema, buckets=3) as table:
        table.put({"k": KEYS, "v": [None] * 4})
        table.put(pa.table({"k": KEYS, "v": pa.chunked_array([pa.nulls(4)])}))
        assert table.lookup({"k": KEYS}).column("v").to_pylist() == [0] * 4


def test_what_no_table_has_is_refused_or_taken_as_it_is(tmp_path: Path) -> None:
    unsigned = pa.array([2**64 - 1] * 4, pa.uint64())
    assert in_table_type(unsigned) is unsigned
    assert in_table_type(pa.chunked_array([], pa.uint64())).type == pa.uint64()
    with Table.create(tmp_path / "table", schema_of(v=(pa.int64(), "hll_sketch"))) as table:
        with pytest.raises(WrongType, match=r"hll_sketch takes .*, not STRUCT<a: STRING>"):
            table.put(pa.table({"k": KEYS, "v": STRUCTS}))
        table.put(pa.table({"k": KEYS, "v": unsigned}))


@pytest.mark.parametrize(
    "values", [*SPELLED.values(), STRUCTS, *UNIONS.values()], ids=[*SPELLED, "structs", *UNIONS]
)
def test_every_spelling_can_be_split_by_bucket_for_servers(values: pa.Array) -> None:
    schema = schema_of(v=(pa.int64(), "count"))
    data = pa.table({"k": KEYS, "v": values})
    arrow = as_one_table(data)
    routes = route(schema, read_keys(arrow, schema), 3)
    assert len(routes) > 1
    sent = [batch for target in routes for batch in to_messages(arrow, target, whole=False)]
    order = np.argsort(np.concatenate([batch.column("k").to_numpy() for batch in sent]))
    rows = [value for batch in sent for value in batch.column("v").to_pylist()]
    assert [rows[at] for at in order] == data.column("v").to_pylist()
