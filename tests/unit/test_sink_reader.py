"""Rows on their way through the sink: exactly the bad ones are set aside, or shown in an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InvalidKey, InvalidValue
from merge_engine.merging.local_aggregation import fold_locally
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from sink.quarantine import Quarantine
from sink.rows import REASON, InputColumns, Read, RowReader
from tests.conftest import schema_of
from tests.support.unsound import NO_TEXT, texts

KINDS = [pa.string(), pa.large_string()]


def schema() -> Schema:
    return (
        SchemaBuilder()
        .column("k", "STRING")
        .agg_column("v", "STRING", "string_agg")
        .agg_column("last", "STRING", "last_value", order_by="at", order_type="STRING")
        .agg_column("n", "BIGINT", "count")
        .primary_key("k")
        .build()
    )


def reader(*, set_aside: bool, fold: bool = True) -> RowReader:
    written = ("v", "last", "n")
    columns = InputColumns(schema=schema(), written=written, renamed={}, operation="op")
    return RowReader(columns, fold=fold, set_aside=set_aside)


def rows(kind: pa.DataType, **bad: list[bytes]) -> pa.Table:
    """Return three rows of one key, with these columns instead of good ones."""
    good: dict[str, Any] = {
        "k": [b"a"] * 3,
        "v": [b"1", b"2", b"3"],
        "last": [b"x", b"y", b"z"],
        "n": [b"", b"", b""],
        "at": [b"1", b"2", b"3"],
        "op": [b"upsert"] * 3,
    }
    return pa.table({name: texts(values, kind) for name, values in (good | bad).items()})


def read(data: pa.Table, **settings: Any) -> Read:
    return reader(set_aside=True, **settings).read(data, {})


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["k", "v", "last", "n", "at", "op"])
def test_only_the_rows_with_text_that_is_not_utf_8_are_set_aside(
    column: str, kind: pa.DataType, fold: bool
) -> None:
    values = rows(kind).column(column).cast(pa.binary()).to_pylist()
    data = rows(kind, **{column: [values[0], NO_TEXT, values[2]]})
    found = read(data, fold=fold)
    assert found.refused.num_rows == 1
    assert found.refused.column(REASON)[0].as_py().startswith(f"column '{column}' has text that is")
    assert found.refused.column(column).cast(pa.binary()).to_pylist() == [NO_TEXT]
    assert not found.refused_keys
    states = found.rows.data
    assert isinstance(states, pa.Table)
    states.validate(full=True)
    expected = ["1", "3"]
    got = states.column("v").to_pylist()
    assert got == ([expected] if fold else expected)


def test_rows_that_are_bad_for_other_reasons_are_set_aside_beside_them(tmp_path: Path) -> None:
    data = pa.concat_tables(
        [
            rows(pa.string(), v=[NO_TEXT, b"2", b"3"], op=[b"upsert", b"upsert", b"merge"]),
            pa.table({"k": pa.array([None], pa.string()), "op": ["upsert"]}),
        ],
        promote_options="default",
    )
    found = read(data)
    assert found.refused.num_rows == 3
    place = Quarantine(path=str(tmp_path), table="t", owner="etl", batch=1, epoch=1)
    [path] = place.publish([place.stage(found.refused)])
    kept = pq.read_table(path)
    assert kept.schema.field("v").type == pa.binary()
    assert kept.schema.field("last").type == pa.string()
    assert kept.column("v").to_pylist() == [NO_TEXT, None, b"3"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_batch_shows_the_row_as_bytes(kind: pa.DataType) -> None:
    data = rows(kind, v=[b"1", NO_TEXT, b"3"])
    with pytest.raises(InvalidValue, match=r"^column 'v', key k='a': text.*\. A row of it: ") as e:
        reader(set_aside=False).read(data, {})
    assert "'v': b'\\xff\\xfeA', 'last': 'y'" in str(e.value)
    data = rows(kind, k=[b"a", b"a", NO_TEXT])
    with pytest.raises(InvalidKey, match=r"^key column 'k' cannot be read in 1 of 3 rows") as key:
        reader(set_aside=False).read(data, {})
    assert "A row of it: {'k': b'\\xff\\xfeA', 'v': '3'" in str(key.value)


def test_many_keys_that_are_refused_are_found_in_few_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = []

    def counted(data: pa.Table, *arguments: Any, **settings: Any) -> Any:
        folded.append(data.num_rows)
        return fold_locally(data, *arguments, **settings)

    monkeypatch.setattr("sink.rows.fold_locally", counted)
    bitmaps = schema_of(v=(pa.int64(), "rbm32"), w=(pa.int8(), "sum"))
    columns = InputColumns(schema=bitmaps, written=("v", "w"), renamed={})
    keys = np.repeat(np.arange(2_000), 2)
    values = np.where(keys % 40 == 7, -keys, keys)
    values[1::2] = 1
    sums = np.where(keys % 50 == 3, 100, 1).astype(np.int8)
    data = pa.table({"k": keys, "v": values, "w": sums})
    found = RowReader(columns, fold=True, set_aside=True).read(data, {})
    bad = sorted({*range(7, 2_000, 40), *range(3, 2_000, 50)})
    assert found.refused.column("k").to_pylist() == [key for key in bad for _ in range(2)]
    for key, reason in zip(found.refused["k"].to_pylist(), found.refused[REASON], strict=True):
        assert f"key k={key}: " in reason.as_py()
    assert len(found.refused_keys) == len(bad)
    assert isinstance(found.rows.data, pa.Table)
    assert found.rows.data.num_rows == 2_000 - len(bad)
    # One by one, it would be as many folds of all rows as keys are refused.
    assert sum(folded) < 20 * len(data)
