"""One contract for the coordinator on both stores: tables, servers, and every rule of the locks."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from locks import (
    BucketKey,
    ColumnLock,
    CoordinationStore,
    Coordinator,
    DebtKind,
    EmbeddedZooKeeper,
    Fenced,
    FreshRecords,
    HandoverNeeded,
    InvalidColumns,
    InvalidOwner,
    InvalidRequest,
    InvalidTtl,
    LockHeld,
    LockState,
    MemoryCoordination,
    MemoryStore,
    Offsets,
    Prepared,
    RecordTooLarge,
    RewoundBatch,
    SessionLost,
    StaleLeaders,
    Table,
    TableAltered,
    TableDefinition,
    TableExists,
    Token,
    Unavailable,
    UnknownColumn,
    UnknownOutcome,
    UnknownTable,
    ZooKeeperStore,
)
from locks.coordinator import DEFAULT_TTL_MS, LONGEST_TTL_MS, SHORTEST_TTL_MS
from locks.paths import owner_path
from locks.record_codec import decode_node, encode_record
from locks.store import Node, Operation, Write
from tests.zookeeper_server import chroot, wait_until, zookeeper_server

COLUMNS = {"orders": 11, "revenue": 12, "status": 13, "tags": 14}
DEFINITION = TableDefinition(
    schema="{}", columns=COLUMNS, key_columns=("customer_id",), buckets=4, options={"a": "b"}
)
ENDS = Offsets({BucketKey(0, 0): 5, BucketKey(0, 1): 7})
LATER = Offsets({BucketKey(0, 0): 9, BucketKey(0, 1): 8})


@dataclass
class Cluster:
    """A coordination store, and coordinators with a session each."""

    connect: Callable[[], CoordinationStore]
    memory: MemoryCoordination | None = None
    coordinators: list[Coordinator] = field(default_factory=list)

    def coordinator(self) -> Coordinator:
        """Return a new coordinator, in a session of its own."""
        self.coordinators.append(Coordinator(self.connect()))
        return self.coordinators[-1]

    def expire(self, table: Table, owner: str) -> None:
        """Let an owner's TTL pass, by the store's own clock.

        In memory the clock is moved, and with it goes every lock of no longer a TTL; in ZooKeeper
        the record is given a TTL of a millisecond, which then passes.
        """
        store = self.coordinators[0].store
        path = owner_path(table.table_id, owner)
        node = store.read(path)
        assert node is not None
        record = decode_node(path, node)
        if self.memory is not None:
            self.memory.advance(record.ttl_ms)
            return
        store.transact([Write(path, encode_record(replace(record, ttl_ms=1)), node.version)])
        written = store.now_ms()
        wait_until(lambda: store.now_ms() > written + 1, "ZooKeeper's clock to move")


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("coordinator")) as server:
        yield server


@pytest.fixture(params=["memory", "zookeeper"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "memory":
        memory = MemoryCoordination()
        yield Cluster(memory.connect, memory)
        return
    address = chroot(request.getfixturevalue("zookeeper"))
    with ExitStack() as stack:

        def connect() -> CoordinationStore:
            store = ZooKeeperStore(address, session_timeout_s=5)
            stack.callback(store.close)
            return store

        yield Cluster(connect)


@pytest.fixture
def coordinator(cluster: Cluster) -> Coordinator:
    return cluster.coordinator()


@pytest.fixture
def table(coordinator: Coordinator) -> Table:
    return coordinator.create_table("customers", DEFINITION)


def ready(
    coordinator: Coordinator, table: Table, owner: str, *columns: str, **kw: Any
) -> ColumnLock:
    """Return a lock that has got ready, with ENDS as its baseline."""
    lock = coordinator.acquire(table, owner, columns, **kw)
    lock.ready(ENDS, [])
    return lock


def just_before_the_next_transaction(
    coordinator: Coordinator, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let somebody else act between what the next call reads and what it writes."""
    real = coordinator.store.transact

    def transact(operations: Sequence[Operation]) -> None:
        monkeypatch.undo()
        act()
        real(operations)

    monkeypatch.setattr(coordinator.store, "transact", transact)


# Tables and servers


def test_a_table_is_found_by_name_and_by_id(coordinator: Coordinator, cluster: Cluster) -> None:
    assert coordinator.list_tables() == []
    table = coordinator.create_table("customers", DEFINITION)
    coordinator.create_table("a.b-c_9", DEFINITION)
    other = cluster.coordinator()
    assert other.table("customers") == table
    assert other.table_by_id(table.table_id) == table
    assert other.list_tables() == ["a.b-c_9", "customers"]
    assert table.definition == DEFINITION


def test_a_table_of_a_name_that_is_taken_is_refused(coordinator: Coordinator, table: Table) -> None:
    with pytest.raises(TableExists, match="there is a table customers already"):
        coordinator.create_table("customers", DEFINITION)


def test_an_unknown_table_is_an_error_that_lists_the_known_ones(
    coordinator: Coordinator, table: Table
) -> None:
    with pytest.raises(UnknownTable, match="no table orders; the tables are: customers"):
        coordinator.table("orders")
    with pytest.raises(UnknownTable, match="no table with id 999"):
        coordinator.table_by_id(999)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "../x", "a b", "-a", ".a", "ü", "x" * 201]
)
def test_a_table_name_with_tricks_is_refused(coordinator: Coordinator, name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a table name"):
        coordinator.create_table(name, DEFINITION)
    with pytest.raises(InvalidRequest, match="is not a table name"):
        coordinator.table(name)


def test_a_re_created_table_has_a_new_id_and_no_locks(
    coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders").release()
    coordinator.drop_table(table)
    assert coordinator.list_tables() == []
    with pytest.raises(UnknownTable):
        coordinator.table_by_id(table.table_id)
    again = coordinator.create_table("customers", DEFINITION)
    assert again.table_id > table.table_id
    assert coordinator.list_locks(again) == []
    with pytest.raises(UnknownTable, match="was dropped"):
        coordinator.acquire(table, "etl-1", ["orders"])
    with pytest.raises(UnknownTable, match="was dropped"):
        coordinator.drop_table(table)
    assert coordinator.table("customers") == again


def test_a_table_is_altered_by_whoever_saw_it_last(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    wider = replace(DEFINITION, columns={**COLUMNS, "visits": 15})
    altered = coordinator.alter_table(table, wider)
    assert cluster.coordinator().table("customers") == altered
    assert altered.version == table.version + 1
    with pytest.raises(TableAltered, match=r"altered meanwhile \(version 1, not 0\)"):
        coordinator.alter_table(table, replace(DEFINITION, buckets=9))
    coordinator.drop_table(altered)
    with pytest.raises(UnknownTable, match="was dropped"):
        coordinator.alter_table(altered, wider)


def test_a_table_with_a_live_lock_is_dropped_only_by_force_which_fences(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(LockHeld, match="held by `etl-1`"):
        coordinator.drop_table(table)
    coordinator.drop_table(table, force=True)
    with pytest.raises(Fenced, match="is gone: forgotten, or its table was dropped; stop for good"):
        lock.commit(0, LATER, [])


def test_a_lock_that_comes_alive_while_its_table_is_dropped_is_in_the_way(
    cluster: Cluster, coordinator: Coordinator, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ready(cluster.coordinator(), table, "etl-1", "orders", ttl_ms=SHORTEST_TTL_MS)
    cluster.expire(table, "etl-1")
    just_before_the_next_transaction(coordinator, lambda: lock.commit(0, LATER, []), monkeypatch)
    if cluster.memory is not None:
        with pytest.raises(LockHeld, match="held by `etl-1`"):
            coordinator.drop_table(table)
        lock.commit(1, LATER, [])
    else:  # The lock has a TTL of a millisecond there: the second look finds it expired again.
        coordinator.drop_table(table)
        with pytest.raises(Fenced):
            lock.renew()


def test_servers_are_listed_while_their_session_lasts(
    cluster: Cluster, coordinator: Coordinator
) -> None:
    other = cluster.coordinator()
    first = other.register_server("127.0.0.1:1")
    second = coordinator.register_server("127.0.0.1:2")
    assert sorted(s.address for s in coordinator.list_servers()) == ["127.0.0.1:1", "127.0.0.1:2"]
    assert first.name != other.register_server("127.0.0.1:1").name
    other.store.close()
    assert coordinator.list_servers() == [second]
    with pytest.raises(SessionLost):
        other.list_servers()


# What cannot be asked for


@pytest.mark.parametrize("ttl_ms", [-1, 0, SHORTEST_TTL_MS - 1, LONGEST_TTL_MS + 1])
def test_a_ttl_out_of_range_is_refused(coordinator: Coordinator, table: Table, ttl_ms: int) -> None:
    with pytest.raises(InvalidTtl, match=f"a TTL of {ttl_ms} ms; it ranges from 2000 to"):
        coordinator.acquire(table, "etl-1", ["orders"], ttl_ms=ttl_ms)


def test_columns_that_cannot_be_locked_are_refused(coordinator: Coordinator, table: Table) -> None:
    with pytest.raises(
        UnknownColumn, match="no column 'visits'; it has orders, revenue, status, t"
    ):
        coordinator.acquire(table, "etl-1", ["orders", "visits"])
    with pytest.raises(InvalidColumns, match="at least one column"):
        coordinator.acquire(table, "etl-1", [])
    with pytest.raises(InvalidColumns, match="'customer_id' is part of the primary key"):
        coordinator.acquire(table, "etl-1", ["orders", "customer_id"])
    assert coordinator.list_locks(table) == []


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ("", "it is empty"),
        (".", "relative path"),
        ("..", "relative path"),
        ("a/b", "it has a '/'"),
        ("a\0b", "cannot be printed"),
        ("a\nb", "cannot be printed"),
        ("a\x7f", "cannot be printed"),
        (chr(0xD800), "cannot be printed"),
        ("\ue000", "cannot be printed"),
        ("\N{REPLACEMENT CHARACTER}", "cannot be printed"),
        ("\N{GRINNING FACE}", "beyond 16 bits"),
        ("x" * 201, "longer than 200 bytes"),
        ("ü" * 101, "longer than 200 bytes"),
    ],
)
def test_an_owner_id_that_zookeeper_cannot_hold_is_refused(
    coordinator: Coordinator, table: Table, owner: str, reason: str
) -> None:
    with pytest.raises(InvalidOwner, match=reason):
        coordinator.acquire(table, owner, ["orders"])
    with pytest.raises(InvalidOwner, match=reason):
        coordinator.forget(table, owner)


@pytest.mark.parametrize(
    "owner", ["x", "a b", "...", "zookeeper", "ü" * 100, "\uffee", "`$(id)`", "-"]
)
def test_any_other_owner_id_is_taken(coordinator: Coordinator, table: Table, owner: str) -> None:
    coordinator.acquire(table, owner, ["orders"])
    assert [info.owner for info in coordinator.list_locks(table)] == [owner]


# Acquire


def test_a_lock_has_an_epoch_columns_and_nothing_to_pay(
    coordinator: Coordinator, table: Table
) -> None:
    lock = coordinator.acquire(table, "etl-1", ["revenue", "orders", "orders"], query_id="q")
    assert (lock.owner, lock.columns, lock.batch, lock.debts) == ("etl-1", (11, 12), -1, ())
    assert lock.state is LockState.ACQUIRED
    assert lock.record == coordinator.records(table)["etl-1"]
    assert (lock.record.query_id, lock.record.ttl_ms) == ("q", DEFAULT_TTL_MS)
    lock.check()


def test_a_live_lock_is_refused_with_owner_columns_epoch_expiry_and_the_way_out(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders", "revenue", ttl_ms=600_000)
    with pytest.raises(LockHeld) as refused:
        cluster.coordinator().acquire(table, "etl-2", ["revenue", "tags"])
    assert re.fullmatch(
        r"columns orders, revenue of table customers \(epoch 1; times in UTC\) are held by `etl-1` "
        r"until (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d; wait, or `tallybook locks release customers "
        r"etl-1`",
        str(refused.value),
    )
    lock.commit(0, LATER, [])
    assert set(coordinator.records(table)) == {"etl-1"}


def test_the_expiry_in_a_refusal_is_by_the_store_s_clock_and_has_a_day_if_not_today() -> None:
    memory = MemoryCoordination(clock_ms=1_754_049_600_000)  # 2025-08-01 12:00:00 UTC
    coordinator = Coordinator(memory.connect())
    table = coordinator.create_table("customers", DEFINITION)
    coordinator.acquire(table, "etl-1", ["orders"], ttl_ms=190_000)
    coordinator.acquire(table, "my etl", ["tags"], ttl_ms=86_400_000)
    with pytest.raises(
        LockHeld,
        match="held by `etl-1` until 12:03:10; wait, or `tallybook locks release customers etl-1`",
    ):
        coordinator.acquire(table, "etl-2", ["orders"])
    with pytest.raises(
        LockHeld,
        match="until 2025-08-02 12:00:00; wait, or `tallybook locks release customers 'my etl'`",
    ):
        coordinator.acquire(table, "etl-2", ["tags"])


def test_locks_on_disjoint_columns_do_not_block_each_other(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    first = ready(coordinator, table, "etl-1", "orders", "tags")
    second = ready(cluster.coordinator(), table, "etl-2", "revenue")
    for batch in range(3):
        first.commit(batch, LATER, [])
        second.commit(batch, LATER, [])
    assert second.epoch > first.epoch


CALLS: dict[str, Callable[[ColumnLock], None]] = {
    "ready": lambda lock: lock.ready(ENDS, []),
    "renew": lambda lock: lock.renew(),
    "prepare": lambda lock: lock.prepare(0, "there"),
    "commit": lambda lock: lock.commit(0, LATER, []),
    "release": lambda lock: lock.release(),
    "abandon": lambda lock: lock.abandon(),
    "check": lambda lock: lock.check(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("by", ["itself", "another", "forget"])
def test_a_fenced_holder_fails_on_its_next_call_whatever_it_is(
    cluster: Cluster, coordinator: Coordinator, table: Table, call: str, by: str
) -> None:
    lock = coordinator.acquire(table, "etl-1", ["orders"])
    if call != "ready":
        lock.ready(ENDS, [])
    other = cluster.coordinator()
    if by == "itself":
        other.acquire(table, "etl-1", ["tags"])
        now = "was acquired again, with epoch 2"
    else:
        cluster.expire(table, "etl-1")
        other.acquire(table, "etl-2", ["orders"])
        now = "was taken over or released"
        if by == "forget":
            other.forget(table, "etl-1")
            now = "is gone: forgotten, or its table was dropped"
    before = other.records(table)
    for again in (call, *CALLS):
        message = rf"^the lock of `etl-1` \(epoch 1\) {now}; stop for good$"
        with pytest.raises(Fenced, match=message):
            CALLS[again](lock)
        assert lock.state is LockState.FENCED
    assert other.records(table) == before


def test_an_owner_may_acquire_again_at_any_time_and_its_tail_becomes_its_debt(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders").commit(0, LATER, [])
    lock = cluster.coordinator().acquire(table, "etl-1", ["tags"])
    (debt,) = lock.debts
    assert (debt.kind, debt.owner, debt.columns) == (DebtKind.UNDO, "etl-1", (11,))
    assert debt.offsets == LATER
    assert (lock.columns, lock.batch) == ((14,), 0)


def test_an_expired_owner_is_taken_over_with_what_it_had_not_committed(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders", "tags").commit(4, LATER, [])
    cluster.expire(table, "etl-1")
    lock = cluster.coordinator().acquire(table, "etl-2", ["orders", "revenue"], handover=True)
    (debt,) = lock.debts
    assert (debt.kind, debt.owner, debt.columns) == (DebtKind.UNDO, "etl-1", (11, 14))
    assert (debt.offsets, debt.prepared) == (LATER, None)
    assert lock.batch == -1
    theirs = coordinator.records(table)["etl-1"]
    assert (theirs.held, theirs.ready, theirs.batch) == (False, False, 4)


def test_expiry_is_by_the_ttl_and_by_zookeeper_s_clock(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    lock = coordinator.acquire(table, "etl-1", ["orders"], ttl_ms=SHORTEST_TTL_MS)
    if cluster.memory is not None:
        cluster.memory.advance(SHORTEST_TTL_MS - 1)
        lock.renew()
        cluster.memory.advance(SHORTEST_TTL_MS - 1)
        with pytest.raises(LockHeld):
            coordinator.acquire(table, "etl-2", ["orders"])
        cluster.memory.advance(1)
        assert coordinator.acquire(table, "etl-2", ["orders"]).epoch > lock.epoch
        return
    renewed_ms = coordinator.store.now_ms()
    taken: list[int] = []

    def take() -> bool:
        try:
            taken.append(coordinator.acquire(table, "etl-2", ["orders"]).epoch)
        except LockHeld:
            return False
        return True

    wait_until(take, "the shortest TTL to pass")
    assert coordinator.store.now_ms() - renewed_ms >= SHORTEST_TTL_MS - 1_000
    assert taken[0] > lock.epoch


def test_a_prepared_batch_counts_as_committed_when_its_owner_is_succeeded(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    cluster.expire(table, "etl-1")
    with pytest.raises(HandoverNeeded, match="last committed by `etl-1`"):
        coordinator.acquire(table, "etl-2", ["orders"])
    successor = cluster.coordinator().acquire(table, "etl-2", ["orders"], handover=True)
    (debt,) = successor.debts
    assert (debt.kind, debt.owner, debt.columns) == (DebtKind.REDO, "etl-1", (11,))
    assert (debt.prepared, debt.offsets) == (Prepared(Token(lock.epoch, 0), "redo/0"), ENDS)
    assert coordinator.records(table)["etl-1"].batch == 0


def test_a_prepared_batch_counts_as_committed_when_its_owner_succeeds_itself(
    coordinator: Coordinator, table: Table
) -> None:
    first = ready(coordinator, table, "etl-1", "orders")
    first.prepare(0, "redo/0")
    second = coordinator.acquire(table, "etl-1", ["orders"])
    assert second.batch == 0
    assert [debt.kind for debt in second.debts] == [DebtKind.REDO]
    second.ready(LATER, [])
    with pytest.raises(
        RewoundBatch, match="batch 0 of `etl-1` is committed already: a replay; skip"
    ):
        second.commit(0, LATER, [])


def test_the_debts_of_a_holder_that_never_got_ready_move_on(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    second = coordinator.acquire(table, "etl-2", ["orders", "tags"])
    cluster.expire(table, "etl-2")
    third = coordinator.acquire(table, "etl-3", ["tags"])
    assert third.debts == second.debts
    assert [debt.owner for debt in third.debts] == ["etl-1"]
    assert coordinator.records(table)["etl-2"].debts == ()
    again = coordinator.acquire(table, "etl-3", ["tags"])
    assert again.debts == third.debts
    again.ready(LATER, [])
    assert coordinator.records(table)["etl-3"].debts == ()


def test_the_columns_of_a_debt_are_pinned_until_it_is_paid(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders", "tags")
    cluster.expire(table, "etl-1")
    payer = coordinator.acquire(table, "etl-2", ["orders"])
    with pytest.raises(LockHeld, match="with a debt of `etl-1` on orders, tags to pay"):
        coordinator.acquire(table, "etl-3", ["tags"])
    payer.ready(ENDS, [])
    assert coordinator.acquire(table, "etl-3", ["tags"]).debts == ()


def test_an_owner_waits_while_another_has_a_debt_of_its_to_pay(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    payer = coordinator.acquire(table, "etl-2", ["orders"])
    with pytest.raises(LockHeld, match="with a debt of `etl-1` on orders to pay"):
        coordinator.acquire(table, "etl-1", ["revenue"])
    payer.ready(ENDS, [])
    coordinator.acquire(table, "etl-1", ["revenue"])


def test_an_owner_takes_over_an_expired_payer_of_its_own_debt(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    coordinator.acquire(table, "etl-2", ["orders"])
    cluster.expire(table, "etl-2")
    lock = coordinator.acquire(table, "etl-1", ["revenue"])
    assert [(debt.owner, debt.columns) for debt in lock.debts] == [("etl-1", (11,))]
    assert not coordinator.records(table)["etl-2"].held


def test_several_expired_owners_are_taken_over_at_once(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    ready(coordinator, table, "etl-2", "tags").prepare(0, "redo/2")
    ready(coordinator, table, "etl-3", "status")
    cluster.expire(table, "etl-1")
    if cluster.memory is None:
        cluster.expire(table, "etl-2")
    lock = coordinator.acquire(table, "etl-4", ["orders", "tags"], handover=True)
    assert {debt.owner: debt.kind for debt in lock.debts} == {
        "etl-1": DebtKind.UNDO,
        "etl-2": DebtKind.REDO,
    }
    assert coordinator.records(table)["etl-3"].held


def test_what_an_owner_commits_while_it_is_succeeded_is_not_lost(
    cluster: Cluster, coordinator: Coordinator, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ready(cluster.coordinator(), table, "etl-1", "orders")
    just_before_the_next_transaction(coordinator, lambda: lock.commit(0, LATER, []), monkeypatch)
    successor = coordinator.acquire(table, "etl-1", ["orders"])
    assert successor.batch == 0
    assert [debt.offsets for debt in successor.debts] == [LATER]


def test_what_an_expired_owner_commits_while_it_is_taken_over_is_not_lost(
    cluster: Cluster, coordinator: Coordinator, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ready(cluster.coordinator(), table, "etl-1", "orders", ttl_ms=SHORTEST_TTL_MS)
    cluster.expire(table, "etl-1")
    just_before_the_next_transaction(coordinator, lambda: lock.commit(0, LATER, []), monkeypatch)
    if cluster.memory is not None:
        with pytest.raises(LockHeld, match="held by `etl-1`"):
            coordinator.acquire(table, "etl-2", ["orders"], handover=True)
        cluster.memory.advance(SHORTEST_TTL_MS)
    # (In ZooKeeper its TTL is a millisecond here, so it is found expired again.)
    successor = coordinator.acquire(table, "etl-2", ["orders"], handover=True)
    assert [debt.offsets for debt in successor.debts] == [LATER]
    assert coordinator.records(table)["etl-1"].batch == 0


def test_only_the_epoch_that_was_asked_for_is_succeeded(
    coordinator: Coordinator, table: Table
) -> None:
    first = ready(coordinator, table, "etl-1", "orders")
    second = coordinator.acquire(table, "etl-1", ["orders"], only_epoch=first.epoch)
    with pytest.raises(Fenced, match="was at epoch 1 and is at epoch 2; stop for good"):
        coordinator.acquire(table, "etl-1", ["orders"], only_epoch=first.epoch)
    second.ready(ENDS, [])
    second.release()
    with pytest.raises(Fenced, match="was at epoch 2 and is no longer held; stop for good"):
        coordinator.acquire(table, "etl-1", ["orders"], only_epoch=second.epoch)
    with pytest.raises(Fenced, match="was at epoch 7 and is gone; stop for good"):
        coordinator.acquire(table, "etl-9", ["orders"], only_epoch=7)


# Batches


def test_a_batch_is_committed_with_its_offsets_and_the_next_may_follow(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    assert lock.state is LockState.READY
    lock.commit(0, ENDS, [])
    lock.commit(1, LATER, [])
    record = coordinator.records(table)["etl-1"]
    assert (record.batch, record.offsets) == (1, LATER)
    assert record == lock.record


def test_batches_never_go_back(coordinator: Coordinator, table: Table) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.commit(3, ENDS, [])
    calls: list[Callable[[int], None]] = [
        lambda batch: lock.commit(batch, LATER, []),
        lambda batch: lock.prepare(batch, "there"),
    ]
    for call in calls:
        with pytest.raises(RewoundBatch, match="batch 3 of `etl-1` is committed already"):
            call(3)
        with pytest.raises(RewoundBatch, match=r"batch 2 .* after batch 3 was committed"):
            call(2)
    assert coordinator.records(table)["etl-1"].offsets == ENDS
    again = ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(RewoundBatch):
        again.commit(3, ENDS, [])


def test_batches_may_leave_numbers_out_which_is_logged(
    coordinator: Coordinator, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    with caplog.at_level(logging.WARNING, "locks.column_lock"):
        lock.commit(0, ENDS, [])
        assert caplog.messages == []
        lock.commit(5, ENDS, [])
        lock.prepare(9, "there")
        lock.commit(9, ENDS, [])
    assert [message[:30] for message in caplog.messages] == [
        "batch 5 of etl-1 follows batch",
        "batch 9 of etl-1 follows batch",
    ]


def test_a_prepared_batch_is_committed_before_any_other(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    with pytest.raises(InvalidRequest, match="batch 0 of `etl-1` is prepared and has to be commit"):
        lock.commit(1, LATER, [])
    with pytest.raises(InvalidRequest, match="batch 0 of `etl-1` is prepared and has to be commit"):
        lock.prepare(1, "redo/1")
    lock.commit(0, LATER, [])
    assert coordinator.records(table)["etl-1"].prepared is None


def test_ready_and_commit_count_for_nothing_when_a_server_that_answered_is_gone(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    hosting, other = cluster.coordinator(), cluster.coordinator()
    stays = coordinator.register_server("127.0.0.1:1").name
    goes = hosting.register_server("127.0.0.1:2").name
    goes_too = other.register_server("127.0.0.1:3").name
    lock = coordinator.acquire(table, "etl-1", ["orders"])
    other.store.close()
    with pytest.raises(StaleLeaders, match=f"server {goes_too} is gone"):
        lock.ready(ENDS, [stays, goes_too])
    assert not coordinator.records(table)["etl-1"].ready
    assert lock.state is LockState.ACQUIRED
    lock.ready(ENDS, [stays, goes, stays])
    lock.commit(0, ENDS, [stays, goes])
    hosting.store.close()
    with pytest.raises(StaleLeaders, match=f"server {goes} is gone, .* start over"):
        lock.commit(1, LATER, [stays, goes])
    assert coordinator.records(table)["etl-1"].batch == 0
    lock.commit(1, LATER, [stays])


def test_a_holder_that_is_fenced_hears_that_rather_than_of_stale_leaders(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    coordinator.acquire(table, "etl-1", ["orders"])
    with pytest.raises(Fenced):
        lock.commit(0, LATER, ["gone"])


def test_only_a_ready_lock_writes(coordinator: Coordinator, table: Table) -> None:
    lock = coordinator.acquire(table, "etl-1", ["orders"])
    message = r"the lock of `etl-1` \(epoch 1\) is acquired, not ready"
    for call in ("prepare", "commit", "release"):
        with pytest.raises(InvalidRequest, match=message):
            CALLS[call](lock)
    lock.ready(ENDS, [])
    with pytest.raises(InvalidRequest, match="is ready, not acquired"):
        lock.ready(LATER, [])
    assert coordinator.records(table)["etl-1"].offsets == ENDS


# Unknown outcomes


class Unanswering(MemoryStore):
    """Applies transactions, or not, and answers nothing, for as long as it is told to."""

    applies: bool | None = None

    def transact(self, operations: Sequence[Operation]) -> None:
        if self.applies in (None, True):
            super().transact(operations)
        if self.applies is not None:
            raise UnknownOutcome("no answer")

    def sync(self) -> None:
        if self.applies is not None:
            raise Unavailable("no answer")
        super().sync()


@pytest.fixture
def unanswering() -> tuple[Unanswering, Coordinator, Table]:
    memory = MemoryCoordination()
    store = Unanswering(memory, memory.connect().session)
    coordinator = Coordinator(store)
    return store, coordinator, coordinator.create_table("customers", DEFINITION)


def test_a_commit_of_unknown_outcome_is_found_out_by_the_next_call(
    unanswering: tuple[Unanswering, Coordinator, Table],
) -> None:
    store, coordinator, table = unanswering
    lock = ready(coordinator, table, "etl-1", "orders")
    for batch, applied in enumerate([False, True]):
        store.applies = applied
        with pytest.raises(UnknownOutcome, match="no answer, and whether it took effect could not"):
            lock.commit(batch, LATER, [])
        with pytest.raises(Unavailable):
            lock.renew()
        store.applies = None
        if applied:
            with pytest.raises(RewoundBatch, match="is committed already"):
                lock.commit(batch, LATER, [])
        else:
            lock.commit(batch, LATER, [])
        assert lock.batch == batch
    assert coordinator.records(table)["etl-1"] == lock.record


def test_a_lock_that_was_abandoned_without_an_answer_lives_on_with_the_next_call(
    unanswering: tuple[Unanswering, Coordinator, Table],
) -> None:
    store, coordinator, table = unanswering
    lock = ready(coordinator, table, "etl-1", "orders")
    store.applies = True
    with pytest.raises(UnknownOutcome):
        lock.abandon()
    store.applies = None
    assert coordinator.records(table)["etl-1"].abandoned
    lock.commit(0, LATER, [])
    assert not coordinator.records(table)["etl-1"].abandoned


def test_a_lock_that_was_released_without_an_answer_is_found_released(
    unanswering: tuple[Unanswering, Coordinator, Table],
) -> None:
    store, coordinator, table = unanswering
    lock = ready(coordinator, table, "etl-1", "orders")
    store.applies = True
    with pytest.raises(UnknownOutcome):
        lock.release()
    store.applies = None
    with pytest.raises(Fenced, match="taken over or released"):
        lock.renew()


def test_an_acquire_without_an_answer_is_harmless_and_may_be_repeated(
    unanswering: tuple[Unanswering, Coordinator, Table],
) -> None:
    store, coordinator, table = unanswering
    for applied in (False, True):
        store.applies = applied
        with pytest.raises((UnknownOutcome, Unavailable)):
            coordinator.acquire(table, "etl-1", ["orders"])
    store.applies = None
    ready(coordinator, table, "etl-1", "orders").release()


# Release, abandon, forget


def test_release_frees_the_columns_and_keeps_the_batch_number(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.commit(6, LATER, [])
    lock.release()
    assert lock.state is LockState.ENDED
    for call in CALLS.values():
        with pytest.raises(InvalidRequest, match="is ended, not"):
            call(lock)
    assert coordinator.acquire(table, "etl-2", ["orders"], handover=True).debts == ()
    again = coordinator.acquire(table, "etl-1", ["tags"])
    assert (again.batch, again.debts) == (6, ())


def test_a_lock_with_a_prepared_batch_is_not_released(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    with pytest.raises(
        InvalidRequest, match="is prepared and not committed: commit it, or abandon"
    ):
        lock.release()
    lock.commit(0, LATER, [])
    lock.release()


def test_an_abandoned_lock_is_taken_over_at_once(coordinator: Coordinator, table: Table) -> None:
    first = ready(coordinator, table, "etl-1", "orders")
    first.abandon()
    assert first.state is LockState.ENDED
    (info,) = coordinator.list_locks(table)
    assert info.record.held
    assert not info.live
    second = coordinator.acquire(table, "etl-2", ["orders"])
    assert [debt.owner for debt in second.debts] == ["etl-1"]
    second.abandon()
    assert coordinator.acquire(table, "etl-3", ["orders"]).debts == second.debts


def test_an_owner_is_forgotten_only_when_it_holds_nothing(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.commit(0, LATER, [])
    with pytest.raises(LockHeld, match="held by `etl-1` until"):
        coordinator.forget(table, "etl-1")
    cluster.expire(table, "etl-1")
    with pytest.raises(
        LockHeld, match=r"whose lock expired at .*; `tallybook locks release customers etl-1`"
    ):
        coordinator.forget(table, "etl-1")
    coordinator.acquire(table, "etl-1", ["orders"]).abandon()
    with pytest.raises(LockHeld, match="whose lock was abandoned"):
        coordinator.forget(table, "etl-1")
    ready(coordinator, table, "etl-1", "orders").release()
    coordinator.forget(table, "etl-1")
    assert coordinator.records(table) == {}
    coordinator.forget(table, "etl-1")
    assert coordinator.acquire(table, "etl-1", ["orders"]).batch == -1


def test_epochs_rise_over_all_owners_and_outlive_them(
    coordinator: Coordinator, table: Table
) -> None:
    epochs = []
    for owner in ("etl-1", "etl-2", "etl-1", "etl-3"):
        lock = ready(coordinator, table, owner, "orders")
        epochs.append(lock.epoch)
        lock.release()
        coordinator.forget(table, owner)
    assert epochs == [1, 2, 3, 4]


# Handover


def test_columns_last_committed_by_another_are_handed_over_only_when_that_is_said(
    coordinator: Coordinator, table: Table
) -> None:
    first = ready(coordinator, table, "etl-1", "orders", "tags")
    first.commit(8, LATER, [])
    first.release()
    with pytest.raises(HandoverNeeded) as refused:
        coordinator.acquire(table, "etl-2", ["orders"])
    assert str(refused.value) == (
        "column orders of table customers was last committed by `etl-1` (batch 8), not by `etl-2`: "
        "a new checkpoint or a new job would count its whole history again. Go on as `etl-1`, or "
        "pass handover=True if `etl-2` begins where `etl-1` ended"
    )
    assert set(coordinator.records(table)) == {"etl-1"}
    ready(coordinator, table, "etl-2", "revenue").commit(0, LATER, [])

    second = ready(coordinator, table, "etl-2", "orders", handover=True)
    second.release()
    # Until it commits, the columns are still the first owner's.
    again = ready(coordinator, table, "etl-1", "orders")
    again.release()
    second = ready(coordinator, table, "etl-2", "orders", handover=True)
    second.commit(1, LATER, [])
    second.release()
    ready(coordinator, table, "etl-2", "orders").release()
    ready(coordinator, table, "etl-1", "tags").release()
    with pytest.raises(HandoverNeeded, match="last committed by `etl-2`"):
        coordinator.acquire(table, "etl-1", ["orders"])
    back = ready(coordinator, table, "etl-1", "orders", handover=True)
    back.commit(9, LATER, [])
    with pytest.raises(LockHeld):
        coordinator.acquire(table, "etl-2", ["orders"], handover=True)
    back.release()
    with pytest.raises(HandoverNeeded, match="last committed by `etl-1`"):
        coordinator.acquire(table, "etl-2", ["orders"])


# Sizes, listings, watches


def test_more_debts_than_a_transaction_holds_are_refused_with_the_way_out(
    coordinator: Coordinator,
) -> None:
    names = {f"c{number}": number for number in range(40)}
    table = coordinator.create_table("wide", replace(DEFINITION, columns=names))
    offsets = Offsets({BucketKey(0, n): (n * 7919) % 10**9 for n in range(10_000)})
    for name in names:
        lock = coordinator.acquire(table, f"owner-{name}", [name])
        lock.ready(offsets, [])
        lock.abandon()
    with pytest.raises(RecordTooLarge, match=r"40 debts to pay.*acquire fewer columns at a time"):
        coordinator.acquire(table, "all", list(names))
    some = coordinator.acquire(table, "all", list(names)[:10])
    assert len(some.debts) == 10
    assert all(debt.offsets == offsets for debt in some.debts)


def test_locks_are_listed_with_what_they_hold_and_until_when(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    assert coordinator.list_locks(table) == []
    ready(coordinator, table, "etl-2", "tags").release()
    lock = ready(coordinator, table, "etl-1", "orders", ttl_ms=60_000)
    now_ms = coordinator.store.now_ms()
    first, second = cluster.coordinator().list_locks(table)
    assert (first.owner, first.record, first.live) == ("etl-1", lock.record, True)
    assert now_ms + 50_000 < first.expires_ms <= now_ms + 60_000
    assert (second.owner, second.live, second.record.held) == ("etl-2", False, False)


def test_a_fresh_view_follows_owners_commits_takeovers_and_forgetting(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    fresh = FreshRecords(cluster.coordinator(), table)

    def follows() -> None:
        wait_until(lambda: fresh.records() == coordinator.records(table), "the view to be fresh")

    assert fresh.records() == {}
    lock = ready(coordinator, table, "etl-1", "orders")
    follows()
    for batch in range(3):
        lock.commit(batch, {BucketKey(0, 0): batch}, [])
        follows()
    other = ready(coordinator, table, "etl-2", "tags")
    follows()
    other.commit(0, LATER, [])
    lock.abandon()
    follows()
    payer = coordinator.acquire(table, "etl-2", ["orders"], handover=True)
    follows()
    payer.ready(ENDS, [])
    coordinator.forget(table, "etl-1")
    follows()
    assert set(fresh.records()) == {"etl-2"}
    ready(coordinator, table, "etl-1", "revenue")
    follows()
    coordinator.drop_table(coordinator.table("customers"), force=True)
    wait_until(lambda: fresh.records() == {}, "the view of a dropped table to be empty")


def test_a_fresh_view_reads_nothing_while_nothing_changes(
    cluster: Cluster, coordinator: Coordinator, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = cluster.coordinator()
    ready(coordinator, table, "etl-1", "orders")
    other = ready(coordinator, table, "etl-2", "tags")
    fresh = FreshRecords(watching, table)
    expected = coordinator.records(table)
    wait_until(lambda: fresh.records() == expected, "the view to be fresh")
    watching.store.sync()
    fresh.records()
    reads: list[str] = []
    real = watching.store.read

    def read(path: str) -> Node | None:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(watching.store, "read", read)
    for _ in range(10):
        assert fresh.records() == expected
    assert reads == []
    other.renew()
    wait_until(lambda: fresh.records() == coordinator.records(table), "the view to be fresh")
    assert set(reads) == {owner_path(table.table_id, "etl-2")}


def test_a_fresh_view_of_a_lost_session_says_so(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    watching = cluster.coordinator()
    fresh = FreshRecords(watching, table)
    watching.store.close()
    ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(SessionLost):
        fresh.records()
