"""The newest rows of a bucket in memory: found, read, changed, and dropped as columns."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from foundation.errors import StorageFull, StorageUnavailable
from foundation.failpoints import arm
from foundation.ids import Token
from foundation.parallel import in_turn
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.put_to_all import commit_held, held, plan_held
from merge_engine.bucket.row_writer import RowWriter
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows, state_types
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import fold
from merge_engine.working_set import columns
from merge_engine.working_set import key_ids as numbers
from merge_engine.working_set.block import Block, Keys, prepare_rows
from merge_engine.working_set.columns import make_column, prepare
from merge_engine.working_set.index import ABSENT, Index
from merge_engine.working_set.key_ids import key_ids, keys_of
from merge_engine.working_set.memory import Memory
from merge_engine.working_set.working_set import WorkingSet
from tests.conftest import SUMS, BucketFactory, batch, rows_of, schema_of
from tests.support.buckets import ADDED, DROPPED, EAGER, delete, open_view

MANY = 12_000
# So that a put of many rows is written at once, beside what comes next.
SOON = BucketOptions(behind_max_offsets=4000)
NO_KEYS = [pa.array([], pa.int64())]
TYPES = {1: pa.int64(), 2: pa.string()}


def encoded(*columns: Sequence[Any]) -> pa.BinaryArray:
    arrays = [pa.array(column) for column in columns]
    return KeyCodec([array.type for array in arrays]).encode(arrays)


def found(block: Block, keys: pa.BinaryArray, *, exact: bool) -> list[int]:
    slots: list[int] = block.find(Keys.of(keys, exact=exact)).tolist()
    return slots


# Keys and their numbers


def test_keys_of_eight_bytes_are_their_own_numbers() -> None:
    keys = encoded([-1, 0, 5, 2**62])
    ids = key_ids(keys, exact=True)
    assert ids.tolist() == sorted(ids.tolist())
    assert keys_of(ids).equals(keys)


@pytest.mark.parametrize("offset", [0, 3])
def test_other_keys_are_hashed_by_all_of_their_bytes(offset: int) -> None:
    texts = [b"", b"a", b"a\x00", b"\x00a", b"a" * 8, b"a" * 9, b"b" * 300, b"b" * 301, b"c" * 257]
    keys = pa.array([b"x"] * offset + texts, pa.binary())[offset:]
    ids = key_ids(keys, exact=False)
    assert len(set(ids.tolist())) == len(texts)
    alone = [int(key_ids(pa.array([text], pa.binary()), exact=False)[0]) for text in texts]
    assert ids.tolist() == alone, "what is beside a key does not matter"


# The index


def test_an_index_finds_what_was_inserted_and_nothing_else() -> None:
    rng = np.random.default_rng(15)
    ids = rng.permutation(np.arange(40_000, dtype=np.uint64) * np.uint64(2**32))
    index, inserted = Index(), 0
    for count in (1, 0, 499, 12_000, 7_500):  # It grows several times.
        index.insert(ids, inserted, count)
        inserted += count
        assert index.find(ids[:inserted], ids).tolist() == list(range(inserted))
        assert (index.find(ids[inserted:], ids) == ABSENT).all()


def test_numbers_that_begin_at_the_same_place_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = np.arange(300, dtype=np.uint64)
    index = Index()
    monkeypatch.setattr(index, "_first_places", lambda wanted: np.full(len(wanted), 1020))
    index.insert(ids, 0, 200)
    slots = index.find(ids, ids).tolist()
    assert slots == [*range(200), *[ABSENT] * 100]


def test_keys_that_share_a_number_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "key_hashes", lambda keys: np.full(len(keys), 7, np.uint64))
    block = Block(TYPES, exact=False)
    keys = encoded(["a", "b", "c", "d"])
    block.insert(Keys.of(keys[:3], exact=False), None)
    assert found(block, keys, exact=False) == [0, 1, 2, ABSENT]
    assert found(block, keys[1:2], exact=False) == [1]


# Columns


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [1, None, -3, 2**62]),
    (pa.bool_(), [True, None, False, True]),
    (pa.decimal128(30, 2), [None, 1, 2, 10**20]),
    (pa.float64(), [1.5, None, float("inf"), -0.0]),
    (pa.struct([("a", pa.int64()), ("b", pa.float64())]), [{"a": 1, "b": None}, None] * 2),
    (pa.string(), ["", None, "drei", "vier" * 100]),
    (pa.list_(pa.string()), [["a", None], [], None, ["b"] * 50]),
    (pa.struct([("a", pa.string())]), [{"a": "x"}, {"a": None}, None, {"a": ""}]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], [], None, [("b", None)]]),
]


@pytest.mark.parametrize(("data_type", "values"), VALUES, ids=[str(one) for one, _ in VALUES])
def test_a_column_gives_back_what_was_written_last(
    data_type: pa.DataType, values: list[Any]
) -> None:
    states = pa.array(values, data_type)
    column = make_column(data_type, 4)
    assert column.read(np.arange(4)).equals(pa.nulls(4, data_type))
    column.write(np.array([3, 1, 2]), prepare(states[1:], np.ones(3, bool)))
    column.grow(9)
    column.write(np.array([1, 8]), prepare(states[:2], np.ones(2, bool)))
    expected = pa.array([None, values[0], values[3], values[1], values[1]], data_type)
    slots = np.array([0, 1, 2, 3, 8])
    assert column.read(slots).equals(expected)
    many = column.read(np.tile(slots, 20))  # Few are read in another way.
    assert many.equals(pa.concat_arrays([expected] * 20))
    column.write(np.array([2]), prepare(states[3:], np.zeros(1, bool)))
    assert column.read(np.array([2])).null_count == 1, "what is not touched is null"


def test_a_column_of_texts_that_change_often_does_not_grow_for_ever() -> None:
    column = make_column(pa.string(), 100)
    slots, touched = np.arange(100), np.ones(100, bool)
    for turn in range(200):
        states = pa.array([f"{turn} {slot} " + "x" * 1000 for slot in range(100)])
        column.write(slots, prepare(states, touched))
        assert column.read(slots).equals(states)
    assert column.nbytes < 4 << 20
    for turn in range(200):
        column.write(slots[:1], prepare(pa.array([str(turn)]), touched[:1]))
    assert column.read(slots)[:2].to_pylist() == ["199", "199 1 " + "x" * 1000]


def test_a_column_that_changes_often_keeps_its_buffers_until_less_is_in_use() -> None:
    column = make_column(pa.string(), 1000)
    slots, touched = np.arange(1000), np.ones(1000, bool)

    def write(turns: int, size: int) -> None:
        for turn in range(turns):
            rows = slots[turn % 3 :: 3]
            states = pa.array([f"{turn} {slot} " + "x" * size for slot in rows])
            column.write(rows, prepare(states, touched[rows]))
            assert column.read(rows).equals(states)

    write(30, 5000)
    with mock.patch.object(columns, "grown") as grown:
        write(30, 5000)
    assert not grown.called
    assert column.nbytes > 10 << 20
    write(3, 10)
    assert column.nbytes < 2 << 20


# Blocks


@pytest.mark.parametrize("exact", [True, False])
def test_a_block_keeps_rows_by_key(exact: bool) -> None:
    keys = encoded(list(range(2000))) if exact else encoded([f"key {i}" for i in range(2000)])
    block = Block(TYPES, exact=exact)
    rows = StoredRows(
        np.array([[True, i % 2 == 0] for i in range(2000)]),
        [pa.array(range(2000), pa.int64()), pa.array([str(i) for i in range(2000)])],
    )
    block.insert(Keys.of(keys[:500], exact=exact), None)
    block.insert(Keys.of(keys[500:], exact=exact), rows.reordered(np.arange(500, 2000)))
    assert block.dirty_rows == 0
    slots = block.find(Keys.of(keys, exact=exact))
    assert slots.tolist() == list(range(2000))
    read = block.read(slots[498:502], [1, 0])
    assert read.touched.tolist() == [[False, False], [False, False], [True, True], [False, True]]
    assert read.states[0].to_pylist() == [None, None, "500", None]
    assert read.states[1].to_pylist() == [None, None, 500, 501]
    one = prepare_rows([1], StoredRows(np.array([[True]]), [pa.array(["new"])]))
    block.write(np.array([501]), one)
    copy = block.copy_dirty()
    block.taken()
    assert not block.may_be_dropped
    later = prepare_rows([1], StoredRows(np.array([[True]]), [pa.array(["later"])]))
    block.write(np.array([501]), later)
    block.write(np.array([502]), one)
    # Rows are made of a copy after others have changed.
    assert (copy.slots.tolist(), copy.keys.encoded.to_pylist()) == ([501], [keys[501].as_py()])
    assert [state.to_pylist() for state in copy.rows().states] == [[501], ["new"]]
    block.not_written(copy.slots)
    assert block.dirty_rows == 2
    block.taken()
    block.written()
    assert block.may_be_dropped


def test_a_block_is_filled_before_the_next_begins_which_has_as_much_room() -> None:
    rows = WorkingSet(SchemaHistory([SUMS]), block_bytes=1 << 20)
    blocks: list[Block] = []
    for start in range(0, 100_000, 1000):
        block = rows.insert(rows.keys(encoded(range(start, start + 1000))), None).block
        if block not in blocks:
            blocks.append(block)
    full, after = blocks[:-1], blocks[1:]
    assert full
    assert all(block.nbytes <= 1 << 20 for block in blocks)
    assert all(block.capacity - len(block) < 1000 for block in full)
    assert all(block.capacity == full[0].capacity for block in after)
    assert rows.locate(rows.keys(encoded(range(100_000)))).missing().tolist() == []


def test_a_bucket_that_gave_way_begins_small_again() -> None:
    rows = WorkingSet(SchemaHistory([SUMS]), block_bytes=1 << 20)
    rows.insert(rows.keys(encoded(range(10_000))), None)
    rows.retire_oldest()
    block = rows.insert(rows.keys(encoded(range(10_000, 10_001))), None).block
    assert block.capacity < 10_000


# Views


def wide(count: int, start: int = 0) -> pa.RecordBatch:
    return batch(k=list(range(start, start + count)), a=list(range(count)), b=[1] * count)


SMALL = BucketOptions(working_set_bytes=1 << 20, behind_max_bytes=300_000)


def sums(bucket: Bucket, count: int) -> tuple[int, int]:
    rows = bucket.lookup(batch(k=list(range(count))))
    return sum(rows["a"].to_pylist()), sum(rows["b"].to_pylist())


def test_many_rows_go_to_disk_as_a_file_and_come_back(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=SOON)
    bucket.put(wide(MANY))
    bucket.put(wide(MANY, 10))
    bucket.put(batch(k=[3], op=["delete"]), operation_column="op")
    bucket.flush()
    before = list(bucket.scan())
    assert sum(len(one) for one in before) == MANY + 10 - 1
    bucket.close()
    assert not list(bucket_factory.view_path().glob("behind*"))
    again = bucket_factory(options=SOON)
    assert list(again.scan()) == before
    assert again.lookup(batch(k=[3, 4])).to_pydict() == {
        "k": [3, 4],
        "a": [None, 4],
        "b": [None, 1],
    }


def test_memory_stays_in_its_budget_and_rows_that_were_dropped_are_read_again(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=SMALL)
    for start in range(0, 60_000, 5_000):
        bucket.put(wide(5_000, start))
        bucket._view._behind.end()
        assert bucket._view.nbytes < 2 << 20
    bucket.put(wide(60_000))
    assert sums(bucket, 60_000) == (60_000 * 59_999 // 2 + 12 * 5_000 * 4_999 // 2, 2 * 60_000)
    bucket._view.write_behind()
    bucket.put(wide(10))
    assert bucket._view.nbytes < 2 << 20


def test_few_rows_are_counted_however_often_they_were_written(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=EAGER)
    for _ in range(8):
        bucket.put(batch(k=[1, 2], a=[1, 1], b=[1, 1]), owner="job")
    assert bucket.estimated_rows() == 2
    bucket.close()
    bucket = bucket_factory(options=EAGER)
    assert bucket.estimated_rows() == 2, "all are in RocksDB, and none in memory"
    bucket.put(batch(k=[2, 3], a=[1, 1], b=[1, 1]))
    assert bucket.estimated_rows() == 3, "one is in both"
    delete(bucket, 1)
    delete(bucket, 3)
    assert bucket.estimated_rows() == 1, "what was deleted is in memory, with nothing in it"


def test_a_bucket_gives_way_unless_somebody_has_it(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=SMALL, memory=Memory(1 << 30))
    bucket.put(wide(10))
    # Whoever has it may have planned something, and that is the same thread.
    with bucket.exclusive():
        assert bucket._view.retire(by_holder=False) == 0
    assert bucket._view.retire(by_holder=False) > 0


def test_buckets_share_one_budget_and_the_idle_one_gives_way(
    bucket_factory: BucketFactory,
) -> None:
    memory = Memory(2 << 20)
    idle = bucket_factory(options=SMALL, name="idle", memory=memory)
    busy = bucket_factory(options=SMALL, name="busy", memory=memory)
    idle.put(wide(10_000))
    had = idle._view.nbytes
    for start in range(0, 80_000, 2_000):
        busy.put(wide(2_000, start))
    assert idle._view.nbytes < had
    assert sums(idle, 10_000) == (10_000 * 9_999 // 2, 10_000)
    busy.close()
    assert memory.used_bytes == idle._view.nbytes


class _Member:
    """A working set of one byte, which counts how often it is asked for that."""

    def __init__(self) -> None:
        self.last_used = self.asked = 0
        self.retiring_bytes = 0

    @property
    def nbytes(self) -> int:
        self.asked += 1
        return 1

    def drop_retired(self, *, by_holder: bool) -> None:
        raise AssertionError(f"nothing retires, and {by_holder=}")

    def retire(self, *, by_holder: bool) -> int:
        raise AssertionError(f"there is room, and {by_holder=}")


def test_the_use_of_one_bucket_costs_the_same_however_many_there_are() -> None:
    memory = Memory(1 << 20)
    members = [_Member() for _ in range(1_000)]
    for member in members:
        memory.join(member)
    for member in members:
        memory.used(member)
    assert {member.asked for member in members} == {1}


def test_a_put_to_several_buckets_does_not_drop_what_it_has_planned(
    bucket_factory: BucketFactory,
) -> None:
    """All of them are planned before the first one writes, here all in one thread."""
    memory = Memory(1)
    buckets = [bucket_factory(name=name, memory=memory) for name in ("one", "two", "three")]
    codec = buckets[0].history.key_codec
    for _ in range(3):
        rows = read_batch(wide(5), SUMS, BucketOptions())
        updates = [fold(rows, codec)] * 3
        with held(buckets):
            commit_held(
                buckets, plan_held(buckets, updates, in_turn, owner="", token=None), in_turn
            )
    assert [sums(bucket, 5) for bucket in buckets] == [(30, 15)] * 3


def test_rows_that_change_leave_a_block_that_retires_and_others_go_with_it(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=BucketOptions(behind_few_rows=0))
    view = bucket._view
    bucket.put(wide(100))
    begun, go_on = threading.Event(), threading.Event()

    def held_up() -> None:
        begun.set()
        assert go_on.wait(180)

    with arm("view.file_made", held_up), bucket.exclusive():
        assert view.retire(by_holder=True) > 0
        assert begun.wait(180)
        bucket.put(wide(10))  # While it is being written.
        assert view.retiring_bytes
        assert sums(bucket, 100) == (4950 + 45, 110)
        go_on.set()
        view._behind.end()
        view.drop_retired(by_holder=True)
    assert [len(block) for block in view._rows._blocks] == [10]
    assert sums(bucket, 100) == (4950 + 45, 110)
    bucket.flush()
    bucket_factory.crash(into="copy")
    assert sums(bucket_factory(name="copy"), 100) == (4950 + 45, 110)


@pytest.mark.parametrize("later", [5, 0])
def test_a_block_that_retires_and_could_not_be_written_is_written_without_what_has_moved(
    bucket_factory: BucketFactory, later: int
) -> None:
    bucket = bucket_factory(options=BucketOptions(behind_few_rows=0))
    view = bucket._view
    bucket.put(wide(100))
    begun, go_on = threading.Event(), threading.Event()

    def full() -> None:
        begun.set()
        assert go_on.wait(180)
        raise StorageFull("no room")

    with arm("view.file_made", full), bucket.exclusive():
        assert view.retire(by_holder=True) > 0
        assert begun.wait(180)
        bucket.put(wide(10))
        view.load(encoded(list(range(10, 20))))  # Rows that move, and do not change.
        go_on.set()
        view._behind.end()
    assert view.dirty_rows == 100
    if later:  # Rows that are dirty in the block that retires move with their dirt.
        bucket.put(wide(later, 50))
        assert view.dirty_rows == 100
    bucket.flush()
    bucket_factory.crash(into="copy")
    expected = (4950 + 45 + later * (later - 1) // 2, 110 + later)
    assert sums(bucket_factory(name="copy"), 100) == sums(bucket, 100) == expected


@pytest.mark.parametrize("few", [0, 1 << 20])
def test_rows_that_could_not_be_written_are_written_from_where_they_have_moved_to_last(
    bucket_factory: BucketFactory, few: int
) -> None:
    """They moved twice meanwhile, and changed after the second time: the copy between is older."""
    schema = schema_of(a=(pa.int64(), "max"))
    options = BucketOptions(behind_few_rows=0)
    bucket = bucket_factory(schema, options=options)
    view = bucket._view
    keys = list(range(100))
    bucket.put(batch(k=keys, a=[5] * 100))
    with mock.patch.object(view._rows, "_block_bytes", 1):  # That block is full.
        bucket.put(batch(k=[1_000], a=[1]))
    begun, go_on = threading.Event(), threading.Event()

    def full() -> None:
        begun.set()
        assert go_on.wait(180)
        raise StorageFull("no room")

    with arm("view.file_made", full), bucket.exclusive():
        assert view.retire(by_holder=True) > 0
        assert begun.wait(180)
        bucket.put(batch(k=keys, a=[1] * 100))  # Changes nothing, but they move.
        assert view.retire(by_holder=True) > 0
        bucket.put(batch(k=keys, a=[9] * 100))
        assert len(view._rows._blocks) == 3
        go_on.set()
        view._behind.end()
    assert view.dirty_rows == 101, "each once"
    view._behind._options = view._behind.writer._options = BucketOptions(behind_few_rows=few)
    bucket.flush()
    bucket_factory.crash(into="copy")
    assert rows_of(bucket_factory(schema, name="copy")) == {
        **dict.fromkeys(keys, (9,)),
        1_000: (1,),
    }


@pytest.mark.parametrize("where", ["copy_dirty", "taken", "written"])
def test_a_write_that_is_interrupted_is_made_good_by_the_next(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    bucket = bucket_factory()
    bucket.put(wide(10), owner="me", token=Token(1, 1))
    real = getattr(WorkingSet, where)

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkingSet, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        bucket.flush()
    monkeypatch.undo()
    bucket.flush()
    bucket_factory.crash(into="copy")
    shutil.rmtree(bucket_factory.log_path("copy"))
    copy = open_view(bucket_factory.view_path("copy"), "test")
    keys = [pa.array(range(10), pa.int64())]
    assert copy.read(keys).rows.states[0].to_pylist() == list(range(10))
    last = copy.meta.token("me")
    assert last is not None
    assert last.token == Token(1, 1)
    copy.close()


@pytest.mark.parametrize("versions", [ADDED, DROPPED], ids=["added", "dropped"])
def test_rows_in_memory_go_on_under_a_new_schema(
    bucket_factory: BucketFactory, versions: list[Any]
) -> None:
    bucket = bucket_factory()
    bucket.put(wide(3))
    bucket.evolve(SchemaHistory(versions))
    column = "c" if versions is ADDED else "b"
    bucket.put(batch(**{"k": [1], column: [10]}))
    expected = {"b": [1, 1, 1], "a": [0, 1, 2], "c": [None, 10, None]}
    if versions is DROPPED:
        expected = {"b": [1, 11, 1]}
    in_memory = bucket.lookup(batch(k=[0, 1, 2])).to_pydict()
    assert in_memory == {"k": [0, 1, 2], **expected}
    bucket.close()
    again = bucket_factory(versions)
    assert again.lookup(batch(k=[0, 1, 2])).to_pydict() == in_memory


def test_a_write_that_fails_beside_puts_is_made_good_by_the_next(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory(options=SOON)
    write = RowWriter.write

    def full(writer: RowWriter, *arguments: Any, **more: Any) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(RowWriter, "write", full)
    bucket.put(wide(MANY))
    bucket._view._behind.end()
    bucket.put(wide(5))
    assert sums(bucket, MANY) == (MANY * (MANY - 1) // 2 + 10, MANY + 5)
    with pytest.raises(StorageFull):
        bucket.flush()
    monkeypatch.setattr(RowWriter, "write", write)
    bucket.flush()
    bucket_factory.crash(into="copy")
    copy = bucket_factory(name="copy")
    assert copy._view.applied == bucket.end_offset + 1  # Its own term.
    assert list(copy.scan()) == list(bucket.scan())


def test_what_goes_wrong_beside_puts_fails_none_of_them(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has them already. Also where Python ends, and nothing is started any more."""
    bucket = bucket_factory(options=SOON)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(RowWriter, "write", broken)
        bucket.put(wide(MANY))
        bucket._view._behind.end()
        bucket.put(wide(MANY))
    bucket._view._behind.end()
    with monkeypatch.context() as patch:
        patch.setattr(bucket._view._memory.background, "submit", broken)
        bucket.put(wide(MANY))
        assert bucket._view.dirty_rows == 0, "it was written at once"
    assert sums(bucket, MANY)[1] == 3 * MANY


def test_puts_go_on_while_rows_are_written_and_look_ups_see_them(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=SOON)
    begun, go_on = threading.Event(), threading.Event()

    def held_up() -> None:
        begun.set()
        assert go_on.wait(180)

    with arm("view.file_made", held_up):
        bucket.put(wide(MANY))
        assert begun.wait(180)
        bucket.put(wide(MANY))  # Neither waits for the other.
        assert sums(bucket, MANY) == (MANY * (MANY - 1), 2 * MANY)
        go_on.set()
        bucket.flush()
    bucket_factory.crash(into="copy")
    assert sums(bucket_factory(name="copy"), MANY) == (MANY * (MANY - 1), 2 * MANY)


def test_a_database_that_does_not_keep_up_is_waited_for_and_then_reported(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory(options=BucketOptions(stall_deadline_s=0.02))
    bucket.put(wide(MANY))
    monkeypatch.setattr("merge_engine.bucket.row_writer._MANY_FILES", 0)
    with pytest.raises(StorageUnavailable, match="does not keep up"):
        bucket._view.write_behind()
    monkeypatch.undo()
    bucket.flush()
    assert sums(bucket, MANY)[1] == MANY


def test_a_put_reads_and_writes_only_its_own_columns(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = schema_of(**{f"c{i}": (pa.int64(), "sum") for i in range(20)})
    bucket = bucket_factory(schema)
    bucket.put(batch(k=[1, 2], c3=[1, 2], c7=[3, 4]))
    read: list[list[int]] = []
    real = Block.read

    def noted(block: Block, slots: Any, positions: Any) -> StoredRows:
        read.append(list(positions))
        return real(block, slots, positions)

    monkeypatch.setattr(Block, "read", noted)
    bucket.put(batch(k=[1, 2], c7=[1, 1]))
    assert read == [[7]]
    monkeypatch.undo()
    assert bucket.lookup(batch(k=[1])).select(["c3", "c7"]).to_pylist() == [{"c3": 1, "c7": 4}]


def test_a_new_bucket_does_not_ask_the_disk_for_what_was_never_there(
    bucket_factory: BucketFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory(SUMS)
    monkeypatch.setattr("merge_engine.bucket.database.Database.get", None)
    bucket.put(wide(10))
    assert sums(bucket, 10) == (45, 10)
    assert bucket.lookup(batch(k=[99]))["a"].to_pylist() == [None]


def test_no_keys_are_no_rows_of_just_the_columns_that_were_asked_for(
    bucket_factory: BucketFactory,
) -> None:
    schema = schema_of(a=(pa.int64(), "sum"), b=(pa.string(), "string_agg"))
    view = bucket_factory(schema)._view
    nothing = pa.array([], pa.binary())
    for rows in (
        view.read(NO_KEYS, schema.value_columns[1:]).rows,
        view.rows(view.load(nothing), [1]),
    ):
        assert rows.touched.shape == (0, 1)
        assert [state.type for state in rows.states] == list(state_types(schema).values())[1:]
    assert view.read(NO_KEYS).rows.touched.shape == (0, 2)
