"""Scans of one bucket: pinned rows, the table at an earlier offset, and where to go on."""

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    Closed,
    CorruptView,
    CutTooOld,
    Deposed,
    InvalidInput,
    LogGap,
    OffsetOutOfRange,
    Retryable,
    StorageFull,
    UnknownColumn,
)
from foundation.ids import BucketId, Token
from locks.column_locks.acquisition import plan_acquisition
from locks.column_locks.records import LockRecord
from locks.encoding.offsets import Offsets
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.database import Pin
from merge_engine.bucket.log import Log
from merge_engine.bucket.masked_rows import cut_segments, finished_rows
from merge_engine.bucket.masks import load_mask
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.storage.scratch import Scratch
from recovery.reader.bucket_scan import BucketScan, open_scan, open_snapshot_scan
from recovery.reader.committed_lookup import Asked, committed_lookup
from recovery.reader.cut import BucketCut
from tests.conftest import SUMS, BucketFactory, batch, pay, rows_of, schema_of
from tests.support.buckets import ADDED, DROPPED, EAGER, RENAMED, delete, put
from tests.support.cuts import cut_at

HERE = BucketId(0, 3)
A, B = (SUMS.column(name).id for name in "ab")
Records = dict[str, LockRecord]
Row = tuple[Any, ...]


def ready(offset: int, *columns: int) -> LockRecord:
    """Return the record of a live lock that committed at this offset."""
    offsets = Offsets({HERE: offset})
    return LockRecord(held=True, ready=True, epoch=1, columns=columns, offsets=offsets)


def latest(bucket: Bucket) -> BucketScan:
    return open_scan(bucket, None)


def committed(bucket: Bucket, records: Records | None = None, **options: Any) -> BucketScan:
    return open_scan(bucket, cut_at(HERE, records or {}), **options)


def rows(scan: BucketScan, **options: Any) -> list[Row]:
    """Return all rows that a scan shows; each batch has rows, and ends with its last key."""
    found: list[Row] = []
    codec = scan.history.key_codec
    for part in scan.batches(scan.history.current.value_columns, **options):
        found += [tuple(row.values()) for row in part.data.to_pylist()]
        [last] = codec.decode(pa.array([part.last_key], pa.binary()))
        assert last.to_pylist() == [found[-1][0]]
        assert 0 < part.data.num_rows <= options.get("batch_rows", 50_000)
    assert [row[0] for row in found] == sorted({row[0] for row in found})
    return found


def encoded(bucket: Bucket, key: int) -> bytes:
    [only] = bucket.history.key_codec.encode([pa.array([key], pa.int64())]).to_pylist()
    assert isinstance(only, bytes)
    return only


def fill(bucket: Bucket, count: int) -> None:
    put(bucket, owner="me", k=list(range(count)), a=list(range(count)))


# Pinned rows


def test_an_empty_bucket_has_no_rows(bucket: Bucket) -> None:
    assert rows(latest(bucket)) == rows(committed(bucket)) == []
    assert (latest(bucket).offset, committed(bucket).offset) == (1, 1)
    assert rows(latest(bucket), after=encoded(bucket, 3), limit=2) == []


@pytest.mark.parametrize("batch_rows", [1, 2, 7, 10, 11])
def test_all_rows_come_once_in_key_order_whatever_the_batches(
    bucket: Bucket, batch_rows: int
) -> None:
    put(bucket, k=[5, -3, 0, 2**62, -(2**62), 7, 1, 2, 3, 4], a=list(range(10)))
    scan = latest(bucket)
    found = rows(scan, batch_rows=batch_rows)
    assert len(found) == 10
    assert found == rows(scan, batch_rows=batch_rows), "a second pass is served by seeking"


def test_rows_that_are_large_come_in_smaller_batches(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket, 100)
    monkeypatch.setattr("merge_engine.bucket.pinned_rows._CHUNK_ROWS", 4)
    monkeypatch.setattr("merge_engine.bucket.pinned_rows._ENOUGH_BYTES", 200)
    scan = latest(bucket)
    for _ in range(2):
        parts = list(scan.batches(SUMS.value_columns))
        assert len(parts) > 5
        assert sum(part.data.num_rows for part in parts) == 100


@pytest.mark.parametrize("committed_too", [False, True])
def test_writes_deletes_and_inserts_that_come_later_are_not_seen(
    bucket_factory: BucketFactory, committed_too: bool
) -> None:
    bucket = bucket_factory(options=EAGER)
    put(bucket, k=[1, 2, 3, 4], a=[1, 2, 3, 4])
    scan = committed(bucket) if committed_too else latest(bucket)
    batches = scan.batches(SUMS.value_columns, batch_rows=1)
    seen = [next(batches).data.to_pylist()[0]["k"]]
    put(bucket, k=[0, 2, 5], a=[10, 10, 10])
    delete(bucket, 3, 4)
    put(bucket, k=[4], a=[100])
    bucket.flush()
    seen += [part.data.to_pylist()[0]["k"] for part in batches]
    assert seen == [1, 2, 3, 4]
    expected = [(key, key, None) for key in (1, 2, 3, 4)]
    assert rows(scan) == rows(scan, batch_rows=3) == expected
    assert rows(scan, after=encoded(bucket, 0)) == expected
    assert list(rows_of(bucket)) == [0, 1, 2, 4, 5]


def test_to_go_on_behind_any_key_gives_every_row_once(bucket: Bucket) -> None:
    put(bucket, owner="me", k=list(range(0, 40, 2)), a=list(range(20)))
    offset = bucket.end_offset
    delete(bucket, 0, 10, 12, 38, owner="me")
    put(bucket, owner="me", k=[-1, 4, 11, 39], a=[1, 1, 1, 1])
    scan = committed(bucket, {"me": ready(offset, A)})
    whole = rows(scan)
    assert [row[0] for row in whole] == list(range(0, 40, 2))
    for key in range(-2, 41):
        behind = rows(scan, after=encoded(bucket, key), batch_rows=3)
        assert [row for row in whole if row[0] <= key] + behind == whole


def test_who_goes_on_behind_an_earlier_key_soon_has_the_fast_iterator_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket, 40)
    scan = latest(bucket)
    broken_off = scan.batches([], batch_rows=4)
    for _ in range(4):
        next(broken_off)
    seeks: list[bytes | None] = []
    read_behind = PinnedRows._read_after

    def counted(pinned: PinnedRows, after: bytes | None, count: int) -> Any:
        seeks.append(after)
        return read_behind(pinned, after, count)

    monkeypatch.setattr(PinnedRows, "_read_after", counted)
    found = rows(scan, after=encoded(bucket, 9), batch_rows=5)
    assert [row[0] for row in found] == list(range(10, 40))
    assert seeks[:-1] == [encoded(bucket, 9), encoded(bucket, 14)], "and one at the end"


def test_two_passes_at_the_same_time_do_not_disturb_each_other(bucket: Bucket) -> None:
    fill(bucket, 20)
    scan = latest(bucket)
    both = [scan.batches(SUMS.value_columns, batch_rows=size) for size in (3, 3)]
    seen: list[list[int]] = [[], []]
    for first, second in zip(*both, strict=True):
        seen[0] += first.data.column("k").to_pylist()
        seen[1] += second.data.column("k").to_pylist()
    assert seen == [list(range(20))] * 2


def test_a_limit_is_kept_and_the_rest_follows_behind_the_last_key(bucket: Bucket) -> None:
    fill(bucket, 10)
    offset = bucket.end_offset
    delete(bucket, 2, 3, 4, columns=["a"], owner="me")
    scan = committed(bucket, {"me": ready(offset, A)})
    for limit in range(1, 12):
        seen: list[int] = []
        after = None
        while True:
            parts = list(scan.batches([], after=after, limit=limit, batch_rows=4))
            if not parts:
                break
            page = [key for part in parts for key in part.data.column("k").to_pylist()]
            assert len(page) == min(limit, 10 - len(seen))
            seen, after = seen + page, parts[-1].last_key
        assert seen == list(range(10))
    assert list(scan.batches([], limit=0)) == []
    with pytest.raises(InvalidInput, match="a scan of -1 rows"):
        scan.batches([], limit=-1)
    with pytest.raises(InvalidInput, match="in batches of 0"):
        scan.batches([], batch_rows=0)


def test_only_the_columns_asked_for_come_in_the_order_asked(bucket: Bucket) -> None:
    put(bucket, k=[1, 2], a=[1, 2], b=[3, 4])
    put(bucket, k=[3], a=[5])
    for scan, count in ((latest(bucket), 3), (committed(bucket, {"": ready(3, A)}), 2)):
        for names in (["b", "a"], ["a"], ["b"], []):
            [part] = scan.batches([SUMS.column(name) for name in names])
            assert part.data.schema.names == ["k", *names]
            assert part.data.to_pylist()[0] == {"k": 1} | {n: {"a": 1, "b": 3}[n] for n in names}
            assert part.data.num_rows == count


# Closing


def test_after_close_there_are_no_more_rows_and_the_bucket_can_be_opened_again(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    fill(bucket, 10)
    scan = latest(bucket)
    passes = [scan.batches([], batch_rows=2, after=after) for after in (None, encoded(bucket, 3))]
    for begun in passes:
        next(begun)
    scan.close()
    scan.close()
    for begun in [*passes, scan.batches([])]:
        with pytest.raises(Closed, match="begin another scan"):
            next(begun)
    bucket.close()
    assert len(rows_of(bucket_factory())) == 10


def test_a_bucket_that_is_closed_closes_its_scans(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    fill(bucket, 10)
    scan = latest(bucket)
    begun = scan.batches([], batch_rows=2)
    next(begun)
    bucket.close()
    again = bucket_factory()
    with pytest.raises(Closed):
        next(begun)
    assert len(rows_of(again)) == 10


def test_a_scan_that_nobody_has_any_more_does_not_hold_the_bucket(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    fill(bucket, 10)
    scan = latest(bucket)
    assert list(bucket._view._database._pins)
    del scan
    gc.collect()
    assert not list(bucket._view._database._pins)


def test_close_waits_for_the_batch_that_is_being_read(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket, 10)
    scan = latest(bucket)
    reading, closing = threading.Event(), threading.Event()
    read_on = PinnedRows._read_on

    def slowly(pinned: PinnedRows, count: int) -> tuple[list[bytes], list[bytes]]:
        reading.set()
        assert closing.wait(10)
        return read_on(pinned, count)

    def close() -> None:
        assert reading.wait(10)
        closing.set()
        scan.close()

    monkeypatch.setattr(PinnedRows, "_read_on", slowly)
    closer = threading.Thread(target=close)
    closer.start()
    batches = scan.batches([], batch_rows=4)
    assert next(batches).data.num_rows == 4
    closer.join(10)
    with pytest.raises(Closed):
        next(batches)


def test_a_scan_that_cannot_be_opened_holds_nothing(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory()
    held: list[Pin] = []

    def failing(_: Bucket) -> int:
        held.extend(bucket._view._database._pins)
        raise Retryable("no object store")

    monkeypatch.setattr(Bucket, "confirm", failing)
    with pytest.raises(Retryable, match="no object store"):
        committed(bucket)
    (rows,) = held
    assert isinstance(rows, PinnedRows)
    with pytest.raises(Closed):
        rows.read(None, 1)


# Damage


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bucket of some large files, closed."""
    directory = tmp_path_factory.mktemp("large")
    factory = BucketFactory(directory)
    bucket = factory(schema_of(text=(pa.string(), "last_value")))
    keys = list(range(20_000))
    bucket.put(batch(k=keys, text=[f"{key * 7919:040d}" for key in keys]))
    bucket.flush()
    bucket.close()
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize(("part", "batch_rows"), [(0.03, 1), (0.2, 3000), (0.5, 3000), (0.8, 7)])
@pytest.mark.parametrize("resumed", [False, True])
def test_flipped_bytes_in_the_middle_are_noticed(
    large: Path, tmp_path: Path, part: float, batch_rows: int, resumed: bool
) -> None:
    shutil.copytree(large / "bucket", tmp_path / "bucket")
    factory = BucketFactory(tmp_path)
    file = max(factory.view_path().glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    at = int(len(data) * part)
    data[at : at + 8] = bytes(byte ^ 0xFF for byte in data[at : at + 8])
    file.write_bytes(data)
    bucket = factory(schema_of(text=(pa.string(), "last_value")))
    scan = latest(bucket)
    after = encoded(bucket, -1) if resumed else None
    with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
        rows(scan, after=after, batch_rows=batch_rows)
    scan.close()
    bucket.close()


def test_a_row_that_is_none_is_noticed(bucket: Bucket) -> None:
    fill(bucket, 3)
    bucket._view.write_behind()
    with bucket._view._database.inside() as rdict:
        rdict[b"r" + encoded(bucket, 1)] = b"\x01"
    with pytest.raises(CorruptView, match="cannot be read"):
        rows(latest(bucket))


# The table at a cut


def test_changed_rows_have_their_old_states_deleted_ones_are_back_and_new_ones_are_not_there(
    bucket: Bucket,
) -> None:
    put(bucket, owner="me", k=[1, 2, 3, 4], a=[1, 2, 3, 4])
    put(bucket, owner="her", k=[0, 1, 3], b=[5, 10, 30])
    before = rows(latest(bucket))
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1, 0, 6, 9], a=[100, 100, 100, 100])
    delete(bucket, 6, columns=["a"], owner="me")
    delete(bucket, 2, columns=["a"], owner="me")
    delete(bucket, 3, columns=["a"], owner="me")
    delete(bucket, 3, columns=["b"], owner="her")
    put(bucket, owner="me", k=[1, 2], a=[100, 7])
    delete(bucket, 4, columns=["a"], owner="me")
    put(bucket, owner="her", k=[8], b=[1])
    scan = committed(bucket, {"me": ready(offset, A), "her": ready(offset, B)})
    for size in (1, 2, 3, 50):
        assert rows(scan, batch_rows=size) == before
    assert rows(latest(bucket)) != before


def test_rows_that_are_all_gone_are_back_in_batches(bucket: Bucket) -> None:
    fill(bucket, 25)
    offset = bucket.end_offset
    delete(bucket, *range(25), columns=["a"], owner="me")
    scan = committed(bucket, {"me": ready(offset, A)})
    assert rows(scan, batch_rows=10) == [(key, key, None) for key in range(25)]
    assert rows(scan, after=encoded(bucket, 22)) == [(23, 23, None), (24, 24, None)]
    assert rows(latest(bucket)) == []


def test_a_scan_in_the_middle_of_a_batch_that_is_undone_later(bucket: Bucket) -> None:
    fill(bucket, 3)
    offset = bucket.end_offset
    put(bucket, owner="me", k=[2, 3], a=[100, 100])
    put(bucket, owner="her", k=[1, 7], b=[1, 1])
    records = {"me": ready(offset, A), "her": ready(bucket.end_offset, B)}
    scan = committed(bucket, records)
    pay(bucket, "me", ["a"], offset)
    put(bucket, owner="me", k=[2], a=[40])
    expected = [(0, 0, None), (1, 1, 1), (2, 2, None), (7, None, 1)]
    # Whatever others have done since: her work is in the cut, and his is not.
    assert rows(scan) == rows(committed(bucket, records)) == expected


def test_undos_after_the_cut_are_masked_too(bucket: Bucket) -> None:
    fill(bucket, 3)
    offset = bucket.end_offset
    put(bucket, owner="her", k=[0, 5], b=[1, 1])
    put(bucket, owner="me", k=[1, 5], a=[100, 100])
    pay(bucket, "me", ["a"], offset)
    put(bucket, owner="me", k=[1], a=[5])
    scan = committed(bucket, {"her": ready(offset, B), "me": ready(offset, A)})
    assert rows(scan) == [(key, key, None) for key in range(3)]


def test_a_leader_that_was_deposed_before_the_cut_was_taken_does_not_answer(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket_factory(view="other view"), owner="me", k=[1], a=[1])
    with pytest.raises(Deposed):
        committed(bucket, {"me": ready(3, A)})


def test_segments_without_changes_mask_nothing(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    fill(bucket, 3)
    bucket.close()
    bucket = bucket_factory()
    put(bucket, owner="her", k=[1], b=[1])
    bucket.close()
    bucket = bucket_factory()
    scan = committed(bucket, {"her": ready(0, B)})
    assert rows(scan) == [(key, key, None) for key in range(3)]


def test_the_log_may_be_cleaned_once_the_scan_is_open(bucket: Bucket) -> None:
    fill(bucket, 3)
    put(bucket, owner="her", k=[1], b=[1])
    scan = committed(bucket, {"her": ready(0, B)})
    bucket.clean(bucket.end_offset)
    assert rows(scan) == [(key, key, None) for key in range(3)]
    with pytest.raises(CutTooOld):
        committed(bucket, {"her": ready(0, B)})


@pytest.mark.parametrize("by_keys", [True, False])
def test_undone_work_that_was_cleaned_is_no_loss_but_for_rows_that_have_it(
    bucket: Bucket, by_keys: bool
) -> None:
    """A reader that was paused after it pinned its rows has the work, and not its undo."""
    fill(bucket, 3)
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1, 7], a=[100, 100])
    cut = cut_at(HERE, {"me": ready(offset, A)})

    def meanwhile() -> None:
        pay(bucket, "me", ["a"], offset)
        bucket.clean(bucket.end_offset)

    def read(confirm: Callable[[], object] | None) -> list[Row]:
        if not by_keys:
            return rows(open_scan(bucket, cut, confirm=confirm))
        asked = Asked(bucket, cut, [pa.array([0, 1, 2], pa.int64())], confirm)
        [found] = committed_lookup([asked], SUMS.value_columns)
        return [tuple(row.values()) for row in found.to_pylist()]

    with pytest.raises(CutTooOld):
        read(meanwhile)
    assert read(None) == [(key, key, None) for key in range(3)]
    put(bucket, owner="me", k=[1], a=[5])
    assert read(None) == [(key, key, None) for key in range(3)]


def test_columns_that_were_added_dropped_or_renamed_since(bucket_factory: BucketFactory) -> None:
    def scans(name: str, history: SchemaHistory, **later: Any) -> tuple[Bucket, BucketScan]:
        bucket = bucket_factory(name=name)
        put(bucket, owner="me", k=[1, 2], a=[1, 2])
        put(bucket, owner="me", k=[1], b=[5])
        offset = bucket.end_offset
        put(bucket, owner="me", k=[1, 4], a=[1, 1])
        bucket.evolve(history)
        put(bucket, owner="me", **later)
        return bucket, committed(bucket, {"me": ready(offset, A, B)})

    _, scan = scans("added", SchemaHistory(ADDED), k=[2, 3], c=[7, 7])
    assert rows(scan) == rows(scan, batch_rows=1) == [(1, 1, 5, None), (2, 2, None, None)]
    _, scan = scans("renamed", SchemaHistory(RENAMED), k=[2, 3], total=[7, 7])
    assert rows(scan) == [(1, 1, 5), (2, 2, None)]
    bucket, scan = scans("dropped", SchemaHistory(DROPPED), k=[1, 2, 3], b=[7, 7, 7])
    assert rows(scan) == [(1, 5)], "a row with nothing but a dropped column is no row"
    with pytest.raises(UnknownColumn, match="'a' was dropped"):
        list(scan.batches([SUMS.column("a")]))
    assert rows(latest(bucket)) == [(1, 12), (2, 7), (3, 7)]


def test_rows_of_several_schema_versions_are_read_together(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    fill(bucket, 4)
    bucket.evolve(SchemaHistory(ADDED))
    put(bucket, owner="me", k=[1, 9], c=[7, 8])
    scan = latest(bucket)
    assert rows(scan)[1:3] == [(1, 1, None, 7), (2, 2, None, None)]
    [part] = scan.batches([ADDED[-1].column("c")])
    assert part.data.column("c").to_pylist() == [None, 7, None, None, 8]


def test_keys_of_text_and_states_that_are_nested(bucket_factory: BucketFactory) -> None:
    schema = (
        SchemaBuilder()
        .column("name", pa.string())
        .column("part", pa.string())
        .agg_column("items", pa.list_(pa.string()), "array_agg")
        .agg_column("mean", pa.float64(), "avg")
        .primary_key("name", "part")
        .build()
    )
    bucket = bucket_factory(schema)
    names = ["", "a", "a\0", "a\0b", "b", "b" * 50]
    data = batch(name=names, part=names[::-1], items=names, mean=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    bucket.put(data, owner="me")
    before = [part.to_pylist() for part in bucket.scan()]
    offset = bucket.end_offset
    bucket.put(data.slice(1, 3), owner="me")
    gone = batch(name=names[3:5], part=names[::-1][3:5], op=["delete"] * 2)
    bucket.put(gone, operation_column="op", owner="me")
    new = batch(name=["\0", "z"], part=["", ""], items=["x", "y"], mean=[1.0, 1.0])
    bucket.put(new, owner="me")
    ids = [column.id for column in schema.value_columns]
    scan = committed(bucket, {"me": ready(offset, *ids)})
    for size in (1, 2, 4, 10):
        parts = list(scan.batches(schema.value_columns, batch_rows=size))
        assert [row for part in parts for row in part.data.to_pylist()] == before[0]
        last = [part.last_key for part in parts]
        assert last == sorted(last)


def test_a_mask_cuts_segments_at_the_ends_of_its_range(bucket: Bucket) -> None:
    fill(bucket, 2)
    start = put(bucket, owner="me", k=[1, 2, 3, 4], a=[10, 10, 10, 10]).base_offset
    put(bucket, owner="me", k=[1, 2, 3, 4], a=[10, 10, 10, 10])
    history, offset, pinned = bucket.pin()
    log = Log(bucket._log._storage)
    segments = cut_segments(log.segments(start + 2, offset), start + 2, offset)
    mask = load_mask(segments, history)
    [(_, data)] = finished_rows(pinned, history, [SUMS.column("a")], mask=mask)
    assert data.column("a").to_pylist() == [0, 11, 10]
    pinned.close()


@pytest.mark.parametrize("run_bytes", [1, 1_000, 100_000])
def test_a_mask_of_any_size_shows_what_was_committed(bucket: Bucket, run_bytes: int) -> None:
    """In memory or in many runs on disk, of one batch or of many."""
    fill(bucket, 500)
    before = rows(latest(bucket))
    offset = bucket.end_offset
    for number in range(12):
        fill(bucket, 500)
        more = list(range(600, 900, number + 1))
        put(bucket, owner="me", k=more, a=[1] * len(more))
        delete(bucket, *range(number, 500, 7), columns=["a"], owner="me")
    records = {"me": ready(offset, A)}
    scan = committed(bucket, records, mask_run_bytes=run_bytes)
    assert rows(scan) == before
    for key in (3, 250, 498, 700):
        rest = rows(scan, after=encoded(bucket, key), batch_rows=70)
        assert rest == [row for row in before if row[0] > key]


def test_rows_that_only_a_mask_has_come_in_batches_of_the_size_asked_for(bucket: Bucket) -> None:
    fill(bucket, 500)
    before = rows(latest(bucket))
    offset = bucket.end_offset
    delete(bucket, *range(500), columns=["a"], owner="me")
    scan = committed(bucket, {"me": ready(offset, A)}, mask_run_bytes=1_000)
    batches = [batch.data for batch in scan.batches(SUMS.value_columns, batch_rows=50)]
    assert max(batch.num_rows for batch in batches) <= 50
    assert sum(batch.num_rows for batch in batches) == len(before)
    scan.close()


def test_a_mask_that_finds_no_room_says_so_and_frees_what_it_took(
    bucket: Bucket, tmp_path: Path
) -> None:
    fill(bucket, 500)
    offset = bucket.end_offset
    for _ in range(6):
        fill(bucket, 500)
    scratch = Scratch(tmp_path / "scratch", max_bytes=10_000)
    with pytest.raises(StorageFull, match=r"scratch files in .* more than 10,000 bytes"):
        committed(bucket, {"me": ready(offset, A)}, mask_run_bytes=1, scratch=scratch)
    gc.collect()
    assert scratch.used_bytes == 0
    assert list((tmp_path / "scratch").iterdir()) == []


def test_images_of_very_many_segments_are_put_together(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merge_engine.bucket.masks._MOST_PARTS", 3)
    fill(bucket, 2)
    offset = bucket.end_offset
    for key in range(20):
        put(bucket, owner="me", k=[key % 7], a=[1])
    scan = committed(bucket, {"me": ready(offset, A)})
    assert rows(scan) == [(0, 0, None), (1, 1, None)]


def test_the_owner_of_a_debt_is_masked_until_it_is_paid(bucket: Bucket) -> None:
    fill(bucket, 2)
    offset = bucket.end_offset
    put(bucket, owner="me", k=[0, 5], a=[10, 10])
    taken = plan_acquisition(
        "heir", [A], {"me": ready(offset, A)}, epoch=9, ttl_ms=1, query_id="", stamp=bytes(16)
    )
    records = {"heir": taken.record, **taken.taken_over}
    assert rows(committed(bucket, records)) == [(0, 0, None), (1, 1, None)]


# Snapshots


def test_a_checkpoint_is_scanned_by_anybody_while_its_bucket_goes_on(
    bucket_factory: BucketFactory, tmp_path: Path
) -> None:
    bucket = bucket_factory()
    fill(bucket, 3)
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1, 9], a=[100, 100])
    delete(bucket, 2, columns=["a"], owner="me")
    directory = tmp_path / "copies" / "checkpoint"
    bucket.checkpoint(directory)
    end = bucket.end_offset
    fill(bucket, 30)
    files = {path: path.stat().st_size for path in directory.glob("*.sst")}
    place: dict[str, Any] = {"storage": bucket_factory.storage(), "history": bucket.history}
    cut = cut_at(HERE, {"me": ready(offset, A)})
    scans = [open_snapshot_scan(directory, cut, **place) for _ in range(2)]
    for scan in scans:
        assert rows(scan) == [(key, key, None) for key in range(3)]
        assert rows(scan, after=encoded(bucket, 1)) == [(2, 2, None)]
    as_it_was = open_snapshot_scan(directory, None, **place)
    expected = [(0, 0, None), (1, 101, None), (9, 100, None)]
    assert (as_it_was.offset, rows(as_it_was)) == (end, expected)
    for scan in (*scans, as_it_was):
        scan.close()
        scan.close()
        with pytest.raises(Closed):
            rows(scan)
    assert files == {path: path.stat().st_size for path in directory.glob("*.sst")}
    shutil.copytree(directory, bucket_factory.view_path(view="restored"))
    assert rows_of(bucket_factory(view="restored"))[29] == (29, None)


def test_a_checkpoint_serves_any_cut_that_the_log_is_there_for(
    bucket_factory: BucketFactory, tmp_path: Path
) -> None:
    """Of before it was made, of then, and of later, whoever goes on meanwhile."""
    bucket = bucket_factory(options=BucketOptions(roll_up_segments=3))
    directory = tmp_path / "checkpoint"
    seen: list[tuple[BucketCut, list[Row]]] = []

    def note() -> None:
        cut = cut_at(HERE, {name: ready(bucket.end_offset, at) for name, at in owners.items()})
        seen.append((cut, rows(latest(bucket))))

    owners = {"me": A, "her": B}
    for number in range(6):
        note()
        put(bucket, owner="me", token=Token(1, number), k=[number, 1], a=[1, 10])
        delete(bucket, number - 1, columns=["a"], owner="me")
        if number == 3:
            bucket.checkpoint(directory)
        put(bucket, owner="her", token=Token(1, number), k=[number, 7], b=[1, 10])
        if number == 4:  # What is undone, and its undo, are both after the checkpoint.
            offset = bucket.end_offset
            put(bucket, owner="me", token=Token(1, 99), k=[1, 2, 3], a=[1, 1, 1])
            pay(bucket, "me", ["a"], offset)
    note()
    # By a lock that no cut knows.
    put(bucket, owner="new", token=Token(2, 0), k=[1, 9], a=[500, 500])
    for number, (cut, expected) in enumerate(seen * 2):
        if number == len(seen):  # And then again, with the log in larger objects.
            bucket.roll_up(bucket.end_offset)
            assert any(name.endswith(".rolled") for name in bucket_factory.storage().names())
        assert rows(open_scan(bucket, cut)) == expected
        scan = open_snapshot_scan(
            directory,
            cut,
            storage=bucket_factory.storage(),
            history=bucket.history,
            mask_run_bytes=1,
        )
        assert rows(scan) == expected
        scan.close()


def test_a_checkpoint_needs_the_log_that_the_cut_needs(
    bucket_factory: BucketFactory, tmp_path: Path
) -> None:
    bucket = bucket_factory(options=BucketOptions(behind_max_offsets=1))
    fill(bucket, 3)
    offset = bucket.end_offset
    fill(bucket, 3)
    directory = tmp_path / "checkpoint"
    bucket.checkpoint(directory)
    fill(bucket, 3)
    history = bucket.history

    def scan(at: int, name: str = "bucket") -> BucketScan:
        cut = cut_at(HERE, {"me": ready(at, A)})
        storage = bucket_factory.storage(name)
        return open_snapshot_scan(directory, cut, storage=storage, history=history)

    with pytest.raises(LogGap, match="the log ends at 0"):
        scan(offset, "other")
    for at in (offset, bucket.end_offset):
        scan(at).close()
    bucket.clean(offset + 3)
    with pytest.raises(CutTooOld):
        scan(offset)
    scan(bucket.end_offset).close()
    bucket.clean(bucket.end_offset)
    with pytest.raises(OffsetOutOfRange, match="is not in the log"):
        scan(bucket.end_offset)
