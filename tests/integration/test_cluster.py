"""A cluster as its users see it: tables, puts, look-ups, changelog, partitions, schema, status."""

import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    InvalidInput,
    InvalidKey,
    LockHeld,
    NotFenced,
    NotLeader,
    Overflow,
    PartitionGone,
    SealedBatch,
    StaleLeaders,
    TableExists,
    UnknownColumn,
    UnknownTable,
)
from foundation.ids import BucketId, LeadKey, Token
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import Answers, Grant, GrantedRows, Terms
from recovery.writer.rows import Rows
from server.client.cluster import Cluster, connect
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from server.launch.local_cluster import LocalCluster
from server.protocol.puts import PutAnswer
from tests.support.zookeeper_server import wait_until


def build_schema(*, partitioned: bool) -> Schema:
    builder = (
        SchemaBuilder()
        .column("day", pa.string())
        .column("id", pa.int64())
        .agg_column("orders", pa.int64(), "sum")
        .agg_column("status", pa.string(), "last_value")
        .primary_key("day", "id")
    )
    return (builder.partitioned_by("day") if partitioned else builder).build()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), servers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with local.connect() as client:
        yield client


@pytest.fixture
def create(
    cluster: Cluster, request: pytest.FixtureRequest
) -> Iterator[Callable[..., RemoteTable]]:
    created: list[str] = []

    def create(*, partitioned: bool = False, **arguments: Any) -> RemoteTable:
        name = f"{request.node.name}-{len(created)}".replace("[", "-").replace("]", "")
        created.append(name)
        return cluster.create_table(name, build_schema(partitioned=partitioned), **arguments)

    yield create
    for name in created:
        if name in cluster.list_tables():
            cluster.drop_table(name, force=True)


@pytest.fixture
def table(create: Callable[..., RemoteTable]) -> RemoteTable:
    return create(column_locks=False)


def rows_of(table: RemoteTable, keys: int = 30, **arguments: Any) -> dict[int, Any]:
    found = table.lookup({"day": ["mo"] * keys, "id": list(range(keys))}, **arguments)
    return {row["id"]: row["orders"] for row in found.to_pylist() if row["orders"] is not None}


def put(table: RemoteTable, amounts: dict[int, int], **arguments: Any) -> Any:
    return table.put(rows(amounts), **arguments)


def rows(amounts: dict[int, int]) -> dict[str, list[Any]]:
    return {"day": ["mo"] * len(amounts), "id": list(amounts), "orders": list(amounts.values())}


# Tables


def test_a_table_is_created_once_found_by_name_and_dropped_with_its_data(
    cluster: Cluster, table: RemoteTable
) -> None:
    put(table, {1: 5})
    assert rows_of(cluster.table(table.name)) == {1: 5}
    with pytest.raises(TableExists, match=f"there is a table {table.name} already"):
        cluster.create_table(table.name, table.schema)
    cluster.drop_table(table.name)
    with pytest.raises(UnknownTable, match=f"there is no table {table.name}; the tables are"):
        cluster.table(table.name)
    again = cluster.create_table(table.name, table.schema, column_locks=False)
    assert again.table_id != table.table_id
    assert rows_of(again) == {}


@pytest.mark.parametrize("buckets", [0, -1, 2**21])
def test_an_impossible_number_of_buckets_is_refused(
    create: Callable[..., RemoteTable], buckets: int
) -> None:
    with pytest.raises(Exception, match="a table has 1 to 1,048,576 buckets"):
        create(buckets=buckets)


# Writing and reading


def test_puts_merge_and_lookups_answer_in_the_order_asked(table: RemoteTable) -> None:
    result = put(table, {number: number for number in range(20)})
    assert (result.rows, result.changed) == (20, 20)
    put(table, {3: 100, 4: 100})
    found = table.lookup({"day": ["mo"] * 4, "id": [4, 99, 3, 4]}, ["orders"])
    assert found.to_pylist() == [
        {"day": "mo", "id": 4, "orders": 104},
        {"day": "mo", "id": 99, "orders": None},
        {"day": "mo", "id": 3, "orders": 103},
        {"day": "mo", "id": 4, "orders": 104},
    ]
    table.delete({"day": ["mo"], "id": [4]})
    assert 4 not in rows_of(table)
    assert table.lookup({"day": [], "id": []}).num_rows == 0
    assert table.put([]).rows == 0


def test_a_token_counts_once_in_every_bucket(table: RemoteTable) -> None:
    for _ in range(3):
        put(table, dict.fromkeys(range(20), 1), owner="me", token=Token(1, 1))
    assert rows_of(table) == dict.fromkeys(range(20), 1)


def test_bad_input_is_named_as_by_the_embedded_table(table: RemoteTable) -> None:
    put(table, {1: 2**62})
    ends = table.end_offsets()
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (Overflow, "column 'orders', key day='mo', id=1", {"id": [1], "orders": [2**62]}),
        (InvalidKey, "key column 'id' is null", {"id": [None], "orders": [1]}),
        (UnknownColumn, "no column 'order'; did you mean 'orders'", {"id": [1], "order": [1]}),
    ]
    for kind, message, columns in bad:
        with pytest.raises(kind, match=message):
            table.put({"day": ["mo"], **columns})
    with pytest.raises(UnknownColumn, match="did you mean 'orders'"):
        table.lookup({"day": ["mo"], "id": [1]}, ["order"])
    with pytest.raises(InvalidInput, match="isolation is 'committed' or 'latest', not 'dirty'"):
        table.lookup({"day": ["mo"], "id": [1]}, isolation="dirty")
    assert table.end_offsets() == ends


def test_dictionaries_and_chunks_are_taken(table: RemoteTable) -> None:
    day = pa.chunked_array([pa.array(["mo"]).dictionary_encode()] * 2)
    data = pa.table({"day": day, "id": pa.chunked_array([[1], [2]]), "orders": [1, 2]})
    table.put(data)
    assert rows_of(table) == {1: 1, 2: 2}


def test_the_changelog_tells_every_change_and_where_to_go_on(table: RemoteTable) -> None:
    put(table, {1: 1, 2: 2})
    put(table, {1: 10})
    seen: dict[int, list[tuple[str, int]]] = {}
    following = {}
    for key in table.bucket_ids():
        changes = table.changelog(key)
        for batch in changes:
            for row in batch.to_pylist():
                seen.setdefault(row["id"], []).append((row["_change_type"], row["orders"]))
        following[key] = changes.next_offset
    assert seen[2] == [("insert", 2)]
    assert seen[1] == [("insert", 1), ("update_preimage", 1), ("update_postimage", 11)]
    assert following == table.end_offsets()
    put(table, {1: 100})
    later = [
        row
        for key in following
        for batch in table.changelog(key, following[key])
        for row in batch.to_pylist()
    ]
    assert [row["orders"] for row in later] == [11, 111]
    with pytest.raises(Exception, match="is not in the log"):
        list(table.changelog(BucketId(0, 0), 999))


def test_many_threads_share_one_client(table: RemoteTable) -> None:
    with ThreadPoolExecutor(8) as pool:
        puts = [pool.submit(put, table, dict.fromkeys(range(10), 1)) for _ in range(40)]
        looks = [pool.submit(rows_of, table) for _ in range(20)]
        for future in (*puts, *looks):
            future.result()
    assert rows_of(table) == dict.fromkeys(range(10), 40)


def test_a_table_and_its_cluster_are_pickled_by_address(
    cluster: Cluster, table: RemoteTable
) -> None:
    put(table, {1: 1})
    copy: RemoteTable = pickle.loads(pickle.dumps(table))
    try:
        assert rows_of(copy) == {1: 1}
    finally:
        copy.close()
    with pickle.loads(pickle.dumps(cluster)) as again:
        assert table.name in again.list_tables()


# Partitions and schema


def test_partitions_come_with_the_rows_and_go_when_dropped(
    create: Callable[..., RemoteTable],
) -> None:
    table = create(partitioned=True, column_locks=False, buckets=2)
    table.put({"day": ["mo", "tu", "tu"], "id": [1, 1, 2], "orders": [1, 2, 3]})
    assert table.partitions().to_pylist() == [{"day": "mo"}, {"day": "tu"}]
    keys = {"day": ["mo", "tu", "we"], "id": [1, 1, 1]}
    assert table.lookup(keys).column("orders").to_pylist() == [1, 2, None]
    before = set(table.bucket_ids())
    table.drop_partition(day="tu")
    assert table.lookup(keys).column("orders").to_pylist() == [1, None, None]
    table.put({"day": ["tu"], "id": [1], "orders": [7]})
    assert table.lookup(keys).column("orders").to_pylist() == [1, 7, None]
    assert len(set(table.bucket_ids()) - before) == 2  # Another partition, not the old one.
    with pytest.raises(InvalidInput, match="there is no partition"):
        table.drop_partition(day="we")


def test_a_fence_does_not_wait_for_the_leader_of_a_partition_that_was_dropped(
    create: Callable[..., RemoteTable],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is dropped between the look at the partitions and the fence."""
    table = create(partitioned=True, buckets=2)
    table.create_partition(day="mo")
    table.create_partition(day="tu")
    fence, dropping = RemoteAccess.fence, ["mo"]

    def drop_and_fence(access: RemoteAccess, *arguments: Any) -> Answers[int]:
        if dropping:
            table.drop_partition(day=dropping.pop())
            wait_until(lambda: not _is_led(table, 1), "nobody leads the dropped partition")
        return fence(access, *arguments)

    monkeypatch.setattr(RemoteAccess, "fence", drop_and_fence)
    with (
        caplog.at_level(logging.INFO),
        table.writer(owner_id="etl", columns=["orders"]) as writer,
    ):
        assert "etl tries again: the partitions with ids [1]" in caplog.text
        assert writer.progress.starts == 2
        assert writer.write(0, {"day": ["mo", "tu"], "id": [1, 1], "orders": [1, 2]})
    assert sorted(table.to_arrow(["orders"])["orders"].to_pylist()) == [1, 2]


def test_an_undo_without_locks_does_not_wait_for_a_partition_that_was_dropped(
    create: Callable[..., RemoteTable],
) -> None:
    table = create(partitioned=True, column_locks=False, buckets=2)
    table.put({"day": ["mo", "tu"], "id": [1, 1], "orders": [1, 2]}, owner="etl", token=Token(1, 0))
    offsets = dict.fromkeys(table.bucket_ids(), 0)
    table.drop_partition(day="mo")
    [gone] = {bucket.partition for bucket in set(offsets) - set(table.bucket_ids())}
    wait_until(lambda: not _is_led(table, gone), "nobody leads the dropped partition")
    with pytest.raises(PartitionGone, match="were dropped meanwhile"):
        table.undo("etl", ["orders"], offsets)
    table.undo("etl", ["orders"], dict.fromkeys(table.bucket_ids(), 0))
    assert table.to_arrow().num_rows == 0


def _is_led(table: RemoteTable, partition: int) -> bool:
    leaders = table.caller.cluster.coordinator.leaders
    keys = [LeadKey(table.table_id, BucketId(partition, number)) for number in range(2)]
    return bool(leaders.holders(keys))


def test_a_partition_that_another_client_made_anew_is_found(
    create: Callable[..., RemoteTable], cluster: Cluster
) -> None:
    table = create(partitioned=True, column_locks=False, buckets=2)
    other = cluster.table(table.name)
    keys = {"day": ["mo"], "id": [1]}
    put(table, {1: 1})
    put(other, {1: 1})
    table.drop_partition(day="mo")
    # The servers hear of it a moment later.
    wait_until(lambda: other.lookup(keys).column("orders").to_pylist() == [None], "the drop")
    put(other, {1: 5})
    assert table.lookup(keys).column("orders").to_pylist() == [5]
    other.drop_partition(day="mo")
    put(table, {1: 7})
    wait_until(lambda: other.lookup(keys).column("orders").to_pylist() == [7], "the new one")


def test_a_client_with_a_stale_schema_goes_on_with_it(cluster: Cluster, table: RemoteTable) -> None:
    stale = cluster.table(table.name)
    put(table, {1: 1})
    table.add_column("peak", pa.int64(), "max")
    table.rename_column("orders", "sales")
    table.put({"day": ["mo"], "id": [1], "sales": [1], "peak": [9]})
    assert rows_of(stale) == {1: 2}
    put(stale, {1: 5})
    [row] = table.lookup({"day": ["mo"], "id": [1]}).to_pylist()
    assert row == {"day": "mo", "id": 1, "sales": 7, "status": None, "peak": 9}
    table.drop_column("sales")
    table.lookup({"day": ["mo"], "id": [1]})  # The server hears of it now, if not before.
    with pytest.raises(UnknownColumn, match="'orders' was dropped meanwhile"):
        put(stale, {1: 5})
    stale.add_column("more", pa.int64(), "sum")
    assert stale.schema.names == ("day", "id", "status", "peak", "more")


# Column locks


class Holder:
    """A lock's holder that goes the way of the protocol, step by step."""

    def __init__(self, cluster: Cluster, table: RemoteTable, owner: str) -> None:
        self.access = RemoteAccess(cluster, table)
        self.lock = cluster.coordinator.locks.acquire(table.definition.table, owner, ["orders"])
        self.writer = Writer(owner, self.lock.epoch)
        fenced = self.access.fence(self.writer, self.lock.columns, table.bucket_ids())
        self.terms = fenced.results
        ended = self.access.end_recovery(self.writer, self.terms)
        self.lock.ready(ended.results, ended.sessions)

    def put(self, amounts: dict[int, int], batch: int = 0) -> Any:
        grant = Grant(
            writer=self.writer,
            owner=self.writer.owner,
            token=Token(self.lock.epoch, batch),
            terms=self.terms,
        )
        return self.access.put(GrantedRows(grant, Rows(data=rows(amounts), columns=["orders"])))

    def commit(self, batch: int = 0) -> None:
        sealed = self.access.seal(self.writer, self.terms, batch)
        self.lock.commit(batch, sealed.results, sealed.sessions)


def test_a_table_with_column_locks_is_written_by_their_holders_only(
    create: Callable[..., RemoteTable], cluster: Cluster
) -> None:
    table = create()
    with pytest.raises(NotFenced, match="this table has column locks: write to it through"):
        put(table, {1: 1})
    holder = Holder(cluster, table, "me")
    holder.put({1: 1})
    with pytest.raises(LockHeld):
        cluster.drop_table(table.name)
    with pytest.raises(LockHeld, match=r"columns orders of table .* are held by `me`"):
        table.drop_column("orders")
    table.drop_column("orders", force=True)
    assert table.schema.names == ("day", "id", "status")


def test_a_writer_goes_on_with_its_columns_whatever_has_their_names(
    create: Callable[..., RemoteTable],
) -> None:
    table = create()
    with table.writer(owner_id="me", columns=["orders"]) as writer:
        table.add_column("peak", pa.int64(), "sum")
        table.rename_column("orders", "sales")
        table.rename_column("peak", "orders")
        writer.access.refresh()
        writer.write(0, Rows(data=[{"day": "mo", "id": 1, "orders": 5}]))
    [row] = table.lookup({"day": ["mo"], "id": [1]}, ["sales", "orders"]).to_pylist()
    assert (row["sales"], row["orders"]) == (5, None)


def test_uncommitted_work_is_shown_to_latest_and_masked_from_committed(
    create: Callable[..., RemoteTable], cluster: Cluster
) -> None:
    table = create()
    holder = Holder(cluster, table, "me")
    holder.put({1: 1, 2: 2})
    holder.commit()
    holder.put({1: 10, 3: 3}, batch=1)
    assert rows_of(table) == {1: 11, 2: 2, 3: 3}
    assert rows_of(table, isolation="committed") == {1: 1, 2: 2}
    committed = sum(b.num_rows for key in table.bucket_ids() for b in table.changelog(key))
    latest = sum(
        b.num_rows for key in table.bucket_ids() for b in table.changelog(key, isolation="latest")
    )
    assert (committed, latest) == (2, 5)
    holder.commit(batch=1)
    assert rows_of(table, isolation="committed") == rows_of(table) == {1: 11, 2: 2, 3: 3}
    with pytest.raises(SealedBatch):
        holder.put({1: 1}, batch=0)


def test_a_batch_is_sealed_by_its_put_and_elsewhere_by_a_call(
    create: Callable[..., RemoteTable], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server does not know of that, it does not say so, and is asked, too."""
    asked: list[set[BucketId]] = []
    seal = RemoteAccess.seal

    def seen(self: RemoteAccess, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        asked.append(set(terms))
        return seal(self, writer, terms, batch)

    monkeypatch.setattr(RemoteAccess, "seal", seen)
    table = create()
    one, many = rows({1: 1}), rows(dict.fromkeys(range(100), 1))
    with table.writer(owner_id="me", columns=["orders"]) as writer:
        writer.write(0, Rows(data=many))
        assert asked == []
        assert writer.offsets == table.end_offsets()
        writer.write(1, Rows(data=one))
        assert [len(terms) for terms in asked] == [3]
        assert writer.offsets == table.end_offsets()
        late = replace(writer._grant(0), owner="late")
        with pytest.raises(SealedBatch):
            writer.access.put(GrantedRows(late, Rows(data=many, columns=["orders"])))
        read = PutAnswer.from_fields
        monkeypatch.setattr(
            PutAnswer, "from_fields", lambda said: replace(read(said), sealed=False)
        )
        writer.write(2, Rows(data=many))
        assert asked[1:] == [set(table.bucket_ids())]
    assert rows_of(table, isolation="committed") == {**dict.fromkeys(range(30), 2), 1: 3}


def test_calls_for_another_term_are_the_callers_to_cure(
    create: Callable[..., RemoteTable], cluster: Cluster
) -> None:
    holder = Holder(cluster, create(), "me")
    holder.terms = {key: term + 1 for key, term in holder.terms.items()}
    with pytest.raises(NotLeader, match="is led at term"):
        holder.put({1: 1})
    with pytest.raises(NotLeader):
        holder.commit()
    with pytest.raises(StaleLeaders):
        holder.lock.commit(0, {}, ["gone"])


# What people ask


def test_status_names_servers_buckets_and_counts(
    local: LocalCluster, cluster: Cluster, table: RemoteTable
) -> None:
    put(table, {1: 1, 2: 2, 3: 3})
    table.end_offsets()  # By then, the bucket that has no row is led, too.
    status = cluster.status()
    assert {server["address"] for server in status} == {s.address for s in local.servers}
    mine = [b for server in status for b in server["buckets"] if b["table"] == table.name]
    assert len(mine) == 4
    assert sum(bucket["end_offset"] for bucket in mine) == 4 + 3
    name = f'tallybook_rows_total{{table="{table.name}"}}'
    assert sum(server["metrics"].get(name, 0) for server in status) == 3


def test_nobody_at_the_address_is_said_in_one_line() -> None:
    with pytest.raises(Exception, match=r"no ZooKeeper at 127\.0\.0\.1:1 within 1 s"):
        connect("127.0.0.1:1", deadline_s=1)
