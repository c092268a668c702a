"""Scans and look-ups of a bucket."""

from collections.abc import Sequence

import pyarrow as pa
import pytest

from foundation.errors import Closed, UnknownColumn
from merge_engine.bucket.view import Read, View
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Column
from tests.conftest import BucketFactory, batch, rows_of
from tests.support.buckets import DROPPED, EAGER, add, delete

# Scans


def test_a_scan_of_an_empty_bucket_has_no_rows(bucket_factory: BucketFactory) -> None:
    assert list(bucket_factory().scan()) == []


def test_a_scan_gives_all_rows_in_key_order_in_batches(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=EAGER)
    keys = [5, -3, 0, 2**62, -(2**62), 7, 1]
    add(bucket, keys, list(range(7)))
    add(bucket, [0, 8], [10, 10])
    batches = list(bucket.scan(batch_size=3))
    assert [part.num_rows for part in batches] == [3, 3, 2]
    found = pa.Table.from_batches(batches)
    assert found.column("k").to_pylist() == sorted([*keys, 8])
    assert found.schema.names == ["k", "a", "b"]


def test_a_scan_shows_only_the_columns_asked_for(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    [only] = bucket.scan(["b"])
    assert only.to_pylist() == [{"k": 1, "b": None}]
    with pytest.raises(UnknownColumn, match="no column 'aa'; did you mean 'a'"):
        list(bucket.scan(["aa"]))


def test_a_scan_stands_still_while_the_bucket_is_written(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=EAGER)
    add(bucket, [1, 2, 3], [1, 2, 3])
    scan = bucket.scan(batch_size=1)
    seen = next(scan).to_pylist()
    add(bucket, [2, 4, 5], [100, 100, 100])
    delete(bucket, 3)
    bucket.flush()
    seen += [row for part in scan for row in part.to_pylist()]
    assert [(row["k"], row["a"]) for row in seen] == [(1, 1), (2, 2), (3, 3)]
    assert list(rows_of(bucket)) == [1, 2, 4, 5]


def test_a_scan_goes_on_under_the_schema_it_began_with(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    scan = bucket.scan(batch_size=1)
    next(scan)
    bucket.evolve(SchemaHistory(DROPPED))
    assert [part.to_pylist() for part in scan] == [[{"k": 2, "a": 2, "b": None}]]


def test_a_bucket_can_be_opened_again_after_a_scan_was_left_in_the_middle(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    scan = bucket.scan(batch_size=1)
    next(scan)
    del scan
    bucket.close()
    assert len(rows_of(bucket_factory())) == 2


# Look-ups


def test_a_lookup_answers_in_the_order_asked_with_nulls_where_there_is_no_row(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    found = bucket.lookup(batch(k=[2, 9, 1, 2]), ["a"])
    assert found.to_pydict() == {"k": [2, 9, 1, 2], "a": [2, None, 1, 2]}
    nothing = bucket.lookup(batch(k=pa.array([], pa.int64())))
    assert (nothing.num_rows, nothing.schema.names) == (0, ["k", "a", "b"])


def test_a_look_up_beside_a_close_is_told_that_it_was_closed(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory(options=EAGER)
    add(bucket, [1], [1])
    bucket.flush()
    bucket.close()
    bucket = bucket_factory(options=EAGER)
    real = View.read

    def read(view: View, keys: Sequence[pa.Array], columns: Sequence[Column] | None = None) -> Read:
        bucket.close()
        return real(view, keys, columns)

    monkeypatch.setattr(View, "read", read)
    with pytest.raises(Closed, match="was closed meanwhile"):
        bucket.lookup(batch(k=[1]))
