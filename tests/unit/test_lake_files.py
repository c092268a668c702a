"""The files of a copy: written, cut, read without dead rows, and searched for keys."""

import datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore
from pyroaring import BitMap64

from foundation.errors import CorruptLake
from foundation.ids import BucketId
from merge_engine.encoding.keys import KeyCodec
from merge_engine.storage.objects import LocalStorage, ObjectStorage, RemoteStorage
from sink.lake import files
from sink.lake.fields import lake_fields
from sink.lake.files import (
    FileWriter,
    conformed,
    encoded_keys,
    find_keys,
    read_rows,
    sorted_by_key,
)
from sink.lake.state import LakeFile, step_of
from tests.conftest import SUMS
from tests.support.lakes import sums, with_dead, write_rows

BUCKET = BucketId(3, 14)
LONG = KeyCodec([pa.int64()])


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    if request.param == "local":
        return LocalStorage(tmp_path / "lake")
    return RemoteStorage(MemoryStore(), "some/lake")


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_ROWS", 10)


# Writing


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("sizes", [[], [0], [1], [10], [11], [3, 3, 3, 3], [25, 7], [9, 2, 30, 0]])
def test_files_are_cut_at_so_many_rows_and_nothing_is_lost(
    storage: ObjectStorage, sizes: list[int]
) -> None:
    writer = FileWriter(storage, BUCKET, 5, lake_fields(SUMS, states=False).arrow)
    keys = iter(range(1000))
    for size in sizes:
        writer.add(sums([next(keys) for _ in range(size)]))
    made = writer.close()
    total = sum(sizes)
    assert [one.rows for one in made] == [10] * (total // 10) + [total % 10] * bool(total % 10)
    assert [one.bounds for one in made] == [
        (start, min(start + 10, total) - 1) for start in range(0, total, 10)
    ]
    assert storage.names() == sorted(one.name for one in made)
    found = [key for one in made for key in read_rows(storage, one)["k"].to_pylist()]
    assert found == [*range(total)]
    for one in made:
        assert (one.bucket, step_of(one.name)) == (BUCKET, 5)
        assert one.size == len(storage.read(one.name))


def test_files_are_cut_at_so_many_bytes(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 1000)
    writer = FileWriter(storage, BUCKET, 0, lake_fields(SUMS, states=False).arrow)
    for start in range(0, 400, 20):
        writer.add(sums([*range(start, start + 20)]).to_batches()[0])
    assert [one.rows for one in writer.close()] == [42] * 9 + [22]


def test_columns_that_rows_do_not_have_are_null_and_others_are_left_out(
    storage: ObjectStorage,
) -> None:
    rows = pa.table({"b": pa.array([7], pa.int32()), "x": ["?"], "k": pa.array([1], pa.int16())})
    [file] = write_rows(storage, rows)
    assert read_rows(storage, file).to_pylist() == [{"k": 1, "a": None, "b": 7}]
    fields = pq.ParquetFile(objects_file(storage, file)).schema_arrow
    assert fields == lake_fields(SUMS, states=False).arrow


def objects_file(storage: ObjectStorage, file: LakeFile) -> pa.BufferReader:
    return pa.BufferReader(storage.read(file.name))


EVERYTHING: dict[pa.DataType, list[Any]] = {
    pa.int64(): [1, 2, 3],
    pa.bool_(): [True, None, False],
    pa.int8(): [-128, None, 127],
    pa.float32(): [0.5, None, float("inf")],
    pa.decimal128(38, 10): [Decimal("1.5"), None, Decimal(-(10**20))],
    pa.string(): ["", None, "größe"],
    pa.binary(): [b"\x00", None, b""],
    pa.date32(): [datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31)],
    pa.timestamp("us"): [datetime.datetime(1969, 1, 1), None, datetime.datetime(2026, 1, 1, 1, 1)],
    pa.timestamp("us", "UTC"): [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), None, None],
    pa.list_(pa.list_(pa.int32())): [[[1], [], None], None, []],
    pa.map_(pa.string(), pa.decimal128(5, 2)): [[("a", Decimal("1.25"))], None, []],
    pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))]): [
        {"x": None, "y": ["a", None]},
        None,
        {"x": 1, "y": None},
    ],
}


def test_values_of_all_types_are_read_as_they_were_written(storage: ObjectStorage) -> None:
    fields = pa.schema([pa.field(f"c{number}", kind) for number, kind in enumerate(EVERYTHING)])
    rows = pa.table([pa.array(values, kind) for kind, values in EVERYTHING.items()], fields)
    writer = FileWriter(storage, BUCKET, 0, fields)
    writer.add(rows)
    writer.add(rows.slice(1, 1))
    [file] = writer.close()
    assert read_rows(storage, file) == pa.concat_tables([rows, rows.slice(1, 1)])
    assert read_rows(storage, with_dead(file, 0, 3)) == rows.slice(1)


@pytest.mark.parametrize(
    ("kind", "values", "bounds"),
    [
        (pa.int64(), [3, -7, 5], (-7, 5)),
        (pa.int8(), [3], (3, 3)),
        (pa.string(), ["a", "b"], None),
        (pa.date32(), [datetime.date(2026, 1, 1)], None),
    ],
)
def test_bounds_are_of_the_first_column_if_it_is_an_integer(
    storage: ObjectStorage, kind: pa.DataType, values: list[Any], bounds: tuple[int, int] | None
) -> None:
    fields = pa.schema([pa.field("first", kind, nullable=False), pa.field("k", pa.int64())])
    writer = FileWriter(storage, BUCKET, 0, fields)
    writer.add(pa.table({"first": pa.array(values, kind), "k": [9] * len(values)}))
    [file] = writer.close()
    assert file.bounds == bounds


def test_what_conforms_already_is_not_copied() -> None:
    fields = lake_fields(SUMS, states=False).arrow
    rows = pa.table({"k": [1], "a": [2], "b": [3]}, fields)
    assert conformed(rows, fields) == rows
    assert conformed(rows.to_batches()[0], fields) == rows


# Reading


@given(st.integers(1, 30), st.sets(st.integers(0, 29)))
def test_rows_are_read_without_the_dead_ones(count: int, dead: set[int]) -> None:
    storage = RemoteStorage(MemoryStore())
    dead = {one for one in dead if one < count}
    [file] = write_rows(storage, sums([*range(count)]))
    found = read_rows(storage, with_dead(file, *dead), ["k"])
    assert found["k"].to_pylist() == [one for one in range(count) if one not in dead]
    assert with_dead(file, *dead).live == found.num_rows


def test_columns_that_a_file_does_not_have_are_left(storage: ObjectStorage) -> None:
    [file] = write_rows(storage, sums([1, 2]))
    assert read_rows(storage, file, ["later", "a", "k"]).schema.names in (["a", "k"], ["k", "a"])
    assert read_rows(storage, with_dead(file, 0), ["k"]).to_pylist() == [{"k": 2}]


@pytest.mark.parametrize("dead", [[], [1]])
def test_rows_of_which_no_column_is_known_are_still_rows(
    storage: ObjectStorage, dead: list[int]
) -> None:
    [file] = write_rows(storage, sums([1, 2, 3]))
    assert read_rows(storage, with_dead(file, *dead), ["later"]).num_rows == 3 - len(dead)


def test_a_file_that_is_gone_is_told_by_its_name(storage: ObjectStorage) -> None:
    [file] = write_rows(storage, sums([1]))
    storage.delete([file.name])
    with pytest.raises(CorruptLake, match=rf"{file.name} of .* is gone, though the copy needs it"):
        read_rows(storage, file)
    with pytest.raises(CorruptLake, match="is gone"):
        find_keys(storage, file, ["k"], LONG, encoded_keys(sums([1]), ["k"], LONG))


def test_a_file_that_is_damaged_is_corrupt(storage: ObjectStorage) -> None:
    [file] = write_rows(storage, sums([*range(1000)]))
    data = storage.read(file.name)
    for damaged in (b"", data[:50], data[:-10], data[:20] + bytes(200) + data[220:], b"x" * 500):
        storage.delete([file.name])
        storage.create(file.name, damaged)
        with pytest.raises(CorruptLake, match=rf"{file.name} of .* cannot be read"):
            read_rows(storage, file)


def test_a_file_of_another_number_of_rows_than_the_log_says_is_corrupt(
    storage: ObjectStorage,
) -> None:
    """Dead rows are told by their numbers: those of another file would be others."""
    [file] = write_rows(storage, sums([1, 2, 3]))
    [other] = write_rows(storage, sums([1, 2]))
    data = storage.read(other.name)
    storage.delete([file.name])
    storage.create(file.name, data)
    for one in (file, with_dead(file, 0)):
        with pytest.raises(CorruptLake, match="has 2 rows, and not 3"):
            read_rows(storage, one)


# Searching


def test_keys_are_found_also_if_they_are_dead(storage: ObjectStorage) -> None:
    [file] = write_rows(storage, sums([5, 3, 9, -1]))
    wanted = encoded_keys(sums([9, 5, 100]), ["k"], LONG)
    assert find_keys(storage, file, ["k"], LONG, wanted) == BitMap64([0, 2])
    assert find_keys(storage, with_dead(file, 0), ["k"], LONG, wanted) == BitMap64([0, 2])
    nothing = encoded_keys(sums([]), ["k"], LONG)
    assert find_keys(storage, file, ["k"], LONG, nothing) == BitMap64()


TEXTS = st.text(st.sampled_from("a\x00ü"), max_size=3)


@given(
    st.lists(st.tuples(TEXTS, st.integers(-2, 2)), min_size=1, max_size=20, unique=True),
    st.lists(st.tuples(TEXTS, st.integers(-2, 2)), max_size=10),
)
def test_keys_of_several_columns_are_found(
    there: list[tuple[str, int]], wanted: list[tuple[str, int]]
) -> None:
    storage = RemoteStorage(MemoryStore())
    fields = pa.schema([("s", pa.string()), ("n", pa.int32()), ("v", pa.int64())])
    codec = KeyCodec([pa.string(), pa.int32()])

    def rows_of(keys: list[tuple[str, int]]) -> pa.Table:
        texts, numbers = [key[0] for key in keys], [key[1] for key in keys]
        return conformed(pa.table({"n": numbers, "s": pa.array(texts, pa.string())}), fields)

    writer = FileWriter(storage, BUCKET, 0, fields)
    writer.add(rows_of(there))
    [file] = writer.close()
    keys = encoded_keys(rows_of(wanted), ["s", "n"], codec)
    found = find_keys(storage, file, ["s", "n"], codec, keys)
    assert set(found) == {number for number, key in enumerate(there) if key in wanted}


def test_rows_are_sorted_as_tables_have_them() -> None:
    rows = pa.table({"k": [3, -1, 2], "a": [1, 2, 3]})
    assert sorted_by_key(rows, ["k"], LONG).to_pydict() == {"k": [-1, 2, 3], "a": [2, 3, 1]}


# Ranges


def test_of_a_file_in_an_object_store_only_the_columns_are_fetched_that_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = RemoteStorage(MemoryStore())
    fields = pa.schema([("k", pa.int64()), ("noise", pa.binary())])
    writer = FileWriter(storage, BUCKET, 0, fields)
    numbers = Random(14)
    noise = [numbers.randbytes(100) for _ in range(20_000)]
    writer.add(pa.table({"k": [*range(20_000)], "noise": noise}, fields))
    [file] = writer.close()
    fetched: list[int] = []
    get_range = obstore.get_range

    def counting(store: Any, path: str, *, start: int, end: int) -> Any:
        fetched.append(end - start)
        return get_range(store, path, start=start, end=end)

    def whole(*_: object) -> None:
        pytest.fail("the object is fetched as a whole")

    monkeypatch.setattr(obstore, "get_range", counting)
    monkeypatch.setattr(obstore, "get", whole)
    codec = KeyCodec([pa.int64()])
    keys = encoded_keys(pa.table({"k": [17, 19_999]}), ["k"], codec)
    assert find_keys(storage, file, ["k"], codec, keys) == BitMap64([17, 19_999])
    some = sum(fetched)
    fetched.clear()
    assert read_rows(storage, file).num_rows == 20_000
    assert sum(fetched) > 5 * some
    assert some < file.size / 3
