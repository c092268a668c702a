"""Rows of keys that changed: from the records themselves where these have all columns, else asked.

No cluster: records are made up, and what is looked up is counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import PartitionGone
from foundation.ids import BucketId
from merge_engine.bucket.changelog import ChangeBatch, changelog_schema
from merge_engine.embedded.derived_calls import FOUND
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut
from server.client.cluster import Recipe
from sink.source import tasks
from sink.source.tasks import ReadUpserts, Wanted
from tests.conftest import SUMS
from tests.support.lakes import a_cut

FIRST, SECOND = BucketId(0, 0), BucketId(0, 1)
Record = tuple[str, int, int | None, int | None]
Rows = list[dict[str, Any]]


def records(
    *given: Record, changed: Sequence[str] = ("a", "b"), schema: Schema = SUMS
) -> pa.RecordBatch:
    """Return change records of one write: what it was, the key, and the values."""
    rows = [
        {
            "_change_type": kind,
            "_log_offset": number,
            "_changed_columns": list(changed),
            "k": key,
            "a": a,
            "b": b,
        }
        for number, (kind, key, a, b) in enumerate(given)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=changelog_schema(schema))


class Server:
    """What the tasks are told: records by bucket, and rows by key."""

    def __init__(self, schema: Schema = SUMS) -> None:
        self.schema = schema
        self.records: dict[BucketId, list[pa.RecordBatch]] = {}
        self.gone: set[BucketId] = set()
        self.rows: dict[int, tuple[int, int]] = {}
        self.asked: list[list[int]] = []
        self.states: list[tuple[str, ...]] = []

    def bucket_changes(
        self, _: object, since: Cut, until: Cut, bucket: BucketId
    ) -> Iterator[ChangeBatch]:
        assert since.is_before(until)
        yield from (ChangeBatch(one, 1) for one in self.records.get(bucket, []))
        if bucket in self.gone:
            raise PartitionGone("it was dropped")

    def look_up(
        self,
        _: object,
        keys: pa.Table,
        columns: Sequence[str],
        cut: Cut,
        *,
        states: Sequence[str],
        found: bool,
    ) -> pa.Table:
        assert found
        assert cut == a_cut(2)
        wanted = keys["k"].to_pylist()
        self.asked.append(wanted)
        self.states.append(tuple(states))
        rows = [
            {"k": key, FOUND: key in self.rows}
            | dict(zip("ab", self.rows.get(key, (None, None)), strict=True))
            for key in wanted
        ]
        fields = [("k", pa.int64()), *((name, pa.int64()) for name in columns)]
        return pa.Table.from_pylist(rows, schema=pa.schema([*fields, (FOUND, pa.bool_())]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    install(monkeypatch, made)
    return made


def install(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    history = SchemaHistory([server.schema])
    caller = SimpleNamespace(knowing=lambda _: history)
    remote = SimpleNamespace(refresh=lambda: None, caller=caller, name="orders")
    monkeypatch.setattr(Wanted, "remote", remote)
    monkeypatch.setattr(tasks, "bucket_changes", server.bucket_changes)
    monkeypatch.setattr(tasks, "look_up", server.look_up)


def reading(
    *buckets: BucketId, states: tuple[str, ...] = (), columns: tuple[str, ...] = ("a", "b")
) -> ReadUpserts:
    table: Any = SimpleNamespace(schema=SUMS, name="orders")
    wanted = Wanted(recipe=Recipe.of("zk:1"), table=table, columns=columns, states=states)
    return ReadUpserts(wanted=wanted, buckets=buckets or (FIRST,), since=a_cut(1), until=a_cut(2))


def found(task: ReadUpserts) -> dict[BucketId, Rows]:
    """Return the rows by bucket, in their order."""
    by_bucket: dict[BucketId, Rows] = {}
    for bucket, batch in task.by_bucket():
        assert set(batch.schema.names) == {"k", "a", "b", "_change_type"}
        by_bucket.setdefault(bucket, []).extend(batch.to_pylist())
    return by_bucket


def upsert(key: int, a: int | None, b: int | None) -> dict[str, Any]:
    return {"k": key, "a": a, "b": b, "_change_type": "upsert"}


def test_the_last_image_of_a_key_is_its_row_and_nothing_is_asked(server: Server) -> None:
    server.records[FIRST] = [
        records(("insert", 7, 1, 1), ("insert", 3, 5, None)),
        records(("update_preimage", 7, 1, 1), ("update_postimage", 7, 2, 3)),
        records(("insert", -1, 0, 0), ("update_preimage", 7, 2, 3), ("update_postimage", 7, 9, 9)),
    ]
    assert found(reading()) == {FIRST: [upsert(-1, 0, 0), upsert(3, 5, None), upsert(7, 9, 9)]}
    assert server.asked == []


def test_a_key_whose_last_image_is_a_delete_is_deleted_and_may_come_again(server: Server) -> None:
    server.records[FIRST] = [
        records(("insert", 1, 1, 1), ("delete", 2, 4, 4), ("delete", 3, 4, 4)),
        records(("delete", 1, 1, 1), ("insert", 3, 6, 6)),
    ]
    [rows] = found(reading()).values()
    gone = {"a": None, "b": None, "_change_type": "delete"}
    assert rows == [{"k": 1, **gone}, {"k": 2, **gone}, upsert(3, 6, 6)]
    assert server.asked == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_if_any_record_is_about_fewer_columns_all_keys_are_looked_up(
    server: Server, at: int
) -> None:
    whole = [records(("insert", 1, 1, 1)), records(("delete", 2, 1, 1))]
    part = records(("update_postimage", 5, 8, None), changed=["a"])
    server.records[FIRST] = [*whole[:at], part, *whole[at:]]
    server.rows = {1: (1, 1), 5: (8, 50)}
    assert found(reading()) == {
        FIRST: [
            upsert(1, 1, 1),
            {"k": 2, "a": None, "b": None, "_change_type": "delete"},
            upsert(5, 8, 50),
        ]
    }
    assert server.asked == [[1, 2, 5]]


def test_buckets_do_not_depend_on_each_other(server: Server) -> None:
    server.records = {
        FIRST: [records(("insert", 1, None, 1), changed=["b"])],
        SECOND: [records(("insert", 2, 2, 2))],
    }
    server.rows = {1: (10, 1)}
    assert found(reading(FIRST, SECOND)) == {FIRST: [upsert(1, 10, 1)], SECOND: [upsert(2, 2, 2)]}
    assert server.asked == [[1]]


def test_too_many_records_are_looked_up_in_portions(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_KEYS_AT_ONCE", 4)
    server.rows = {key: (key, -key) for key in range(20)}
    server.records[FIRST] = [records(*(("insert", key, 0, 0) for key in (3, 1))) for _ in range(2)]
    assert found(reading()) == {FIRST: [upsert(1, 0, 0), upsert(3, 0, 0)]}
    assert server.asked == []
    server.records[FIRST] += [records(*(("insert", key, 0, 0) for key in range(9, 0, -1)))]
    assert found(reading()) == {FIRST: [upsert(key, key, -key) for key in range(1, 10)]}
    assert server.asked == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]


def test_states_are_looked_up_for_records_have_none(server: Server) -> None:
    server.records[FIRST] = [records(("insert", 1, 1, 1))]
    server.rows = {1: (1, 1)}
    assert found(reading(states=("a",))) == {FIRST: [upsert(1, 1, 1)]}
    assert (server.asked, server.states) == ([[1]], [("a",)])


def test_who_wants_fewer_columns_than_records_have_is_given_rows_by_look_ups(
    server: Server,
) -> None:
    """What a record does not speak of may be of another owner."""
    server.records[FIRST] = [records(("insert", 1, 4, 4))]
    server.rows = {1: (4, 4)}
    [(_, batch)] = list(reading(columns=("a",)).by_bucket())
    assert batch.column("a").to_pylist() == [4]
    assert server.asked == [[1]]


def test_a_partition_that_was_dropped_has_what_was_read_of_it(server: Server) -> None:
    server.records = {FIRST: [records(("insert", 1, 1, 1))], SECOND: [records(("insert", 2, 2, 2))]}
    server.gone = {FIRST}
    task = reading(FIRST, SECOND)
    assert found(task) == {FIRST: [upsert(1, 1, 1)], SECOND: [upsert(2, 2, 2)]}
    with pytest.raises(PartitionGone):
        found(replace(task, all_or_nothing=True))


def test_where_nothing_changed_there_is_nothing(server: Server) -> None:
    server.records = {FIRST: [], SECOND: []}
    assert found(reading(FIRST, SECOND)) == {}


OPERATIONS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 9))),
        min_size=1,
        max_size=5,
        unique_by=lambda one: one[0],
    ),
    max_size=6,
)


@given(OPERATIONS)
def test_records_and_look_ups_tell_the_same(operations: list[list[tuple[int, int | None]]]) -> None:
    """Writes of whole rows, or deletes: as a dict has them at the end."""
    model: dict[int, int] = {}
    log: list[pa.RecordBatch] = []
    touched: set[int] = set()
    for write in operations:
        told: list[Record] = []
        for key, value in write:
            before = model.pop(key, None)
            if value is None and before is not None:
                told.append(("delete", key, before, before))
            elif value is not None and before is None:
                told.append(("insert", key, value, value))
            elif value is not None:
                told.append(("update_preimage", key, before, before))
                told.append(("update_postimage", key, value, value))
            if value is not None:
                model[key] = value
        touched |= {key for _, key, _, _ in told}
        if told:
            log.append(records(*told))
    with pytest.MonkeyPatch.context() as patch:
        server = Server()
        install(patch, server)
        server.records[FIRST] = log
        server.rows = {key: (value, value) for key, value in model.items()}
        by_records = found(reading())
        assert server.asked == []
        by_look_ups = found(reading(states=("a",)))
    assert _alike(by_records) == _alike(by_look_ups)
    assert _alike(by_records) == {key: model.get(key) for key in touched}


def _alike(rows: dict[BucketId, Rows]) -> dict[int, int | None]:
    """Return what rows say; of a delete, its values do not matter."""
    return {
        row["k"]: None if row["_change_type"] == "delete" else row["a"]
        for of_bucket in rows.values()
        for row in of_bucket
    }
