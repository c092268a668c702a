"""Who is who, on both stores: records read together, owners that come back, queries, names, ids."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from foundation.errors import (
    CorruptRecord,
    Fenced,
    FormerQuery,
    HandoverNeeded,
    LockHeld,
    TableAltered,
    Unavailable,
)
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.column_locks.acquisition import unpaid
from locks.column_locks.column_lock import ColumnLock
from locks.column_locks.locks import DEFAULT_TTL_MS, LockInfo
from locks.column_locks.record_codec import encode_record
from locks.column_locks.records import MOST_FORMER_QUERIES
from locks.coordinator import Coordinator
from locks.snapshots.leases import SHORTEST_LEASE_MS
from locks.snapshots.list_records import ListedSnapshot
from locks.store.base import Create, Node, Write
from locks.store.memory import MemoryCoordination
from locks.store.paths import (
    DROPPED,
    IDS,
    NEXT_TABLE_ID,
    dropped_path,
    epoch_path,
    leader_path,
    lease_path,
    owner_path,
    partitions_path,
    server_path,
    snapshot_list_path,
    table_name_path,
    table_path,
)
from tests.support.coordinators import (
    CALLS,
    COLUMNS,
    DEFINITION,
    ENDS,
    LATER,
    Cluster,
    just_before_the_next_transaction,
    ready,
)
from tests.support.lossy import LOSSES, LossyStore

# Records are read together, or not at all


def in_between(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator, happens: Sequence[object]
) -> list[object]:
    """Let things happen, one per attempt, between the list of owners and their records."""
    store, waiting = coordinator.store, list(happens)
    real = store.read_many

    def read_many(paths: Sequence[str]) -> list[Node | None]:
        if waiting:
            happening = waiting.pop(0)
            assert callable(happening)
            happening()
        return real(paths)

    monkeypatch.setattr(store, "read_many", read_many)
    return waiting


def test_a_debt_that_moves_while_records_are_read_is_seen(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(coordinator, table, "z", "orders").abandon()
    reader = cluster.coordinator()

    def move_to(owner: str) -> object:
        # "0" is new, so it is not among the owners that were listed before.
        return lambda: coordinator.locks.acquire(table, owner, ["orders"], handover=True).abandon()

    left = in_between(monkeypatch, reader, [move_to("a"), move_to("0"), move_to("z")])
    records = reader.locks.records(table)
    assert left == []
    debts = [debt for owner, record in records.items() for debt in unpaid(owner, record)]
    assert [(debt.owner, debt.columns) for debt in debts] == [("z", (11,))]


def test_who_never_gets_to_read_all_records_at_once_is_told_so(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = Coordinator(cluster.coordinator().store, deadline_s=0.0)
    acquire = [lambda: coordinator.locks.acquire(table, "a", ["orders"])] * 1_000
    in_between(monkeypatch, impatient, acquire)
    with pytest.raises(Unavailable, match="acquired again and again for 0 s while they were read"):
        impatient.locks.records(table)


# A record that was forgotten is blank, not gone: its versions go on


@pytest.mark.parametrize("name", CALLS)
def test_what_an_owner_was_before_it_was_forgotten_is_not_taken_for_what_it_is(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, name: str
) -> None:
    def incarnation() -> ColumnLock:
        """Return one that may make the call, after as many writes as any other."""
        lock = cluster.coordinator().locks.acquire(table, "job", ["orders"], handover=True)
        if name != "ready":
            lock.ready(ENDS, [])
        return lock

    old = incarnation()
    ready(coordinator, table, "job", "orders").release()
    coordinator.locks.forget(table, "job")
    new = incarnation()
    with pytest.raises(Fenced, match="was acquired again, with epoch 3"):
        CALLS[name](old)
    assert coordinator.locks.record(table, "job") == new.record
    if name == "ready":
        new.ready(ENDS, [])
    new.commit(0, LATER, [])


def test_epochs_go_on_rising_behind_a_record_that_was_forgotten(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    before = ready(coordinator, table, "job", "orders", query_id="q")
    before.commit(4, LATER, [])
    before.release()
    coordinator.locks.forget(table, "job")
    coordinator.locks.forget(table, "job")
    after = ready(coordinator, table, "job", "orders")
    assert after.epoch > before.epoch
    # All else is as if the owner had never been.
    assert (after.batch, after.record.query_id, after.record.committed) == (-1, "", {})
    after.commit(0, LATER, [])


def test_who_was_forgotten_is_not_among_the_owners(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "job", "orders").release()
    coordinator.locks.forget(table, "job")
    assert coordinator.locks.record(table, "job") is None
    assert coordinator.locks.records(table) == {}
    assert coordinator.locks.all(table) == []
    coordinator.drop_table(table)


# A batch is a replay only if the same query counted it


def test_another_query_under_a_known_owner_is_a_change_of_hands(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "nightly", "orders", query_id="monday").commit(0, LATER, [])
    with pytest.raises(HandoverNeeded, match=r"for query monday \(batch 0\), and now asks for"):
        coordinator.locks.acquire(table, "nightly", ["orders"], query_id="tuesday")
    again = ready(coordinator, table, "nightly", "orders", query_id="monday")
    assert (again.record.query_id, again.record.query_start) == ("monday", 0)
    next_ = ready(coordinator, table, "nightly", "orders", query_id="tuesday", handover=True)
    assert (next_.record.query_id, next_.record.query_start, next_.batch) == ("tuesday", 1, 0)
    next_.commit(1, LATER, [])
    restarted = ready(coordinator, table, "nightly", "orders", query_id="tuesday")
    assert (restarted.record.query_start, restarted.batch) == (1, 1)
    with pytest.raises(FormerQuery, match="was handed over to query tuesday since"):
        coordinator.locks.acquire(table, "nightly", ["orders"], query_id="monday")


def test_a_query_that_has_committed_nothing_has_nothing_to_hand_over(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "nightly", "orders", query_id="monday").release()
    lock = ready(coordinator, table, "nightly", "orders", query_id="tuesday")
    assert (lock.record.query_id, lock.record.query_start) == ("tuesday", 0)


def test_a_promised_batch_counts_for_the_query_that_promised_it(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "nightly", "orders", query_id="monday").prepare(4, "there")
    with pytest.raises(HandoverNeeded, match="batch 4"):
        coordinator.locks.acquire(table, "nightly", ["orders"], query_id="tuesday")
    lock = coordinator.locks.acquire(
        table, "nightly", ["orders"], query_id="tuesday", handover=True
    )
    assert (lock.batch, lock.record.query_start) == (4, 5)


def test_who_is_no_query_leaves_the_count_alone_unless_it_takes_it_over(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "job", "orders", query_id="q").commit(0, LATER, [])
    ready(coordinator, table, "job", "orders").release()
    assert coordinator.locks.records(table)["job"].query_id == "q"
    lock = ready(coordinator, table, "job", "orders", query_id="r", handover=True)
    lock.commit(1, LATER, [])
    taken = ready(coordinator, table, "job", "orders", handover=True)
    assert (taken.record.query_id, taken.record.query_start, taken.batch) == ("", 0, 1)
    with pytest.raises(HandoverNeeded, match="for a writer that is no query"):
        coordinator.locks.acquire(table, "job", ["orders"], query_id="s")
    for former in ("q", "r"):
        with pytest.raises(FormerQuery, match="was handed over to a writer that is no query since"):
            coordinator.locks.acquire(table, "job", ["orders"], query_id=former, handover=True)


def test_a_former_query_of_an_owner_is_refused_whatever_it_says(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    nights = ["monday", "tuesday", "wednesday"]
    for batch, night in enumerate(nights):
        lock = ready(coordinator, table, "nightly", "orders", query_id=night, handover=True)
        lock.commit(batch, LATER, [])
        lock.release()
    before = coordinator.locks.records(table)["nightly"]
    for former in nights[:-1]:
        for handover in (False, True):
            with pytest.raises(
                FormerQuery, match=r"handed over to query wednesday since \(its last batch is 2\)"
            ):
                coordinator.locks.acquire(
                    table, "nightly", ["orders"], query_id=former, handover=handover
                )
    assert coordinator.locks.records(table)["nightly"] == before, "who is refused changes nothing"
    # It is a query of this owner only; and what was forgotten is forgotten.
    ready(coordinator, table, "other", "revenue", query_id="monday").release()
    coordinator.locks.forget(table, "nightly")
    again = ready(coordinator, table, "nightly", "orders", query_id="monday", handover=True)
    assert (again.batch, again.record.former_queries) == (-1, ())


def test_a_query_that_has_committed_nothing_may_come_back(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "nightly", "orders", query_id="monday").commit(0, LATER, [])
    ready(coordinator, table, "nightly", "orders", query_id="in vain", handover=True).release()
    ready(coordinator, table, "nightly", "orders", query_id="tuesday", handover=True).release()
    lock = ready(coordinator, table, "nightly", "orders", query_id="in vain", handover=True)
    assert (lock.record.query_start, len(lock.record.former_queries)) == (1, 1)


def test_a_promised_batch_makes_its_query_a_former_one(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "nightly", "orders", query_id="monday").prepare(0, "there")
    ready(coordinator, table, "nightly", "orders", query_id="tuesday", handover=True).release()
    with pytest.raises(FormerQuery):
        coordinator.locks.acquire(table, "nightly", ["orders"], query_id="monday", handover=True)


def test_hundreds_of_former_queries_are_known_and_no_more(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    nights = [f"night {number}" for number in range(MOST_FORMER_QUERIES + 2)]
    for batch, night in enumerate(nights):
        lock = ready(coordinator, table, "nightly", "orders", query_id=night, handover=True)
        lock.commit(batch, {}, [])
    record = coordinator.locks.records(table)["nightly"]
    assert len(record.former_queries) == MOST_FORMER_QUERIES
    assert len(encode_record(record)) < 5_000
    for former in (nights[1], nights[-2]):
        with pytest.raises(FormerQuery):
            coordinator.locks.acquire(table, "nightly", ["orders"], query_id=former, handover=True)


def test_what_tells_a_promised_batch_from_others_is_kept_when_it_is_decided(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "job", "orders")
    lock.commit(0, LATER, [], fingerprint="first")
    assert coordinator.locks.records(table)["job"].fingerprint == "first"
    lock.prepare(1, "there", fingerprint="second")
    again = coordinator.locks.acquire(table, "job", ["orders"])
    assert (again.record.batch, again.record.fingerprint) == (1, "second")
    [debt] = again.debts
    assert debt.prepared is not None
    assert debt.prepared.fingerprint == "second"


# Columns by their ids


def test_a_column_is_locked_by_id_whatever_its_name_is(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    columns = {**COLUMNS, "orders": 12, "revenue": 11}
    swapped = coordinator.alter_table(table, replace(DEFINITION, columns=columns))
    assert coordinator.locks.acquire(swapped, "a", [11]).columns == (11,)
    assert coordinator.locks.acquire(swapped, "b", ["orders"]).columns == (12,)
    # Whoever had a column that was dropped must be able to come back, and recover.
    assert coordinator.locks.acquire(swapped, "c", [14, 99]).columns == (14, 99)


def test_a_column_that_a_live_lock_pins_is_not_dropped_unless_forced(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    without = replace(DEFINITION, columns={"revenue": 12, "status": 13, "tags": 14})
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    payer = coordinator.locks.acquire(table, "etl-2", ["orders", "tags"])
    others = replace(DEFINITION, columns={name: COLUMNS[name] for name in ("orders", "tags")})
    renamed = replace(DEFINITION, columns={**COLUMNS, "new": 15})
    table = coordinator.alter_table(table, others)
    table = coordinator.alter_table(table, renamed)
    with pytest.raises(LockHeld, match="are held by `etl-2` until"):
        coordinator.alter_table(table, without)
    assert coordinator.tables.get("customers") == table
    payer.abandon()
    table = coordinator.alter_table(table, without)
    table = coordinator.alter_table(table, DEFINITION)
    ready(coordinator, table, "etl-3", "orders", handover=True)
    assert coordinator.alter_table(table, without, force=True).version == table.version + 1


def test_a_column_of_a_debt_is_pinned_as_the_lock_s_own_are(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    payer = coordinator.locks.acquire(table, "etl-1", ["tags"])
    without = replace(DEFINITION, columns={"tags": 14})
    with pytest.raises(LockHeld, match="with a debt of `etl-1` on orders to pay"):
        coordinator.alter_table(table, without)
    payer.ready(ENDS, [])
    coordinator.alter_table(table, without)


def test_a_lock_that_is_renewed_just_before_its_column_is_dropped_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryCoordination()
    coordinator, other = Coordinator(memory.connect()), Coordinator(memory.connect())
    table = coordinator.tables.create("t", DEFINITION)
    lock = ready(other, table, "etl-1", "orders")
    memory.advance(DEFAULT_TTL_MS)
    just_before_the_next_transaction(coordinator, lock.renew, monkeypatch)
    with pytest.raises(LockHeld, match="are held by `etl-1` until"):
        coordinator.alter_table(table, replace(DEFINITION, columns={"tags": 14}))
    assert other.tables.get("t") == table


def test_a_lock_that_is_acquired_just_before_its_column_is_dropped_is_noticed(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cluster.coordinator()
    real = coordinator.store.transact
    acquired: list[ColumnLock] = []

    def transact(operations: Sequence[object]) -> None:
        if not acquired:
            acquired.append(other.locks.acquire(table, "etl-1", ["orders"]))
        real(operations)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator.store, "transact", transact)
    without = replace(DEFINITION, columns={"tags": 14})
    with pytest.raises(LockHeld, match="are held by `etl-1` until"):
        coordinator.alter_table(table, without)
    assert other.tables.get("customers") == table


# An alteration of unknown outcome


@pytest.mark.parametrize("losses", LOSSES, ids=" then ".join)
def test_an_alteration_that_happened_is_no_failure_though_somebody_altered_behind_it(
    losses: list[str],
) -> None:
    memory = MemoryCoordination()
    losing = LossyStore(memory)
    coordinator, other = Coordinator(losing), Coordinator(memory.connect())
    table = coordinator.tables.create("t", DEFINITION)
    ours = replace(DEFINITION, schema='{"ours": 1}', former=(DEFINITION.schema,))
    happened: list[CatalogTable] = []

    def somebody_alters() -> None:
        now = other.tables.get("t")
        if now.version == 1 and not happened:
            former = (*ours.former, ours.schema)
            theirs = replace(ours, schema='{"theirs": 1}', former=former)
            happened.append(other.alter_table(now, theirs))

    losing.after_a_loss = somebody_alters
    losing.lose(*losses)
    altered = coordinator.alter_table(table, ours)
    losing.lose()
    assert altered == other.tables.get("t")
    assert ours.schema in (altered.definition.schema, *altered.definition.former)
    assert bool(happened) == ("answer" in losses)


def test_the_same_alteration_by_somebody_else_is_as_good_as_ours() -> None:
    memory = MemoryCoordination()
    losing = LossyStore(memory)
    coordinator, other = Coordinator(losing), Coordinator(memory.connect())
    table = coordinator.tables.create("t", DEFINITION)
    ours = replace(DEFINITION, schema='{"ours": 1}', former=(DEFINITION.schema,))
    losing.after_a_loss = lambda: other.alter_table(other.tables.get("t"), ours)
    losing.lose("request")
    assert coordinator.alter_table(table, ours) == other.tables.get("t")
    assert other.tables.get("t").version == 1
    # Who knows that nothing of its own was sent is told to look again.
    with pytest.raises(TableAltered, match="was altered meanwhile"):
        coordinator.alter_table(table, ours)


def test_an_alteration_that_never_happened_is_told_from_one_that_did() -> None:
    memory = MemoryCoordination()
    losing = LossyStore(memory)
    coordinator, other = Coordinator(losing), Coordinator(memory.connect())
    table = coordinator.tables.create("t", DEFINITION)
    theirs = replace(DEFINITION, schema='{"theirs": 1}', former=(DEFINITION.schema,))
    losing.after_a_loss = lambda: other.alter_table(other.tables.get("t"), theirs)
    losing.lose("request")
    with pytest.raises(TableAltered, match="was altered meanwhile"):
        coordinator.alter_table(table, replace(DEFINITION, schema='{"ours": 1}'))


# Every byte is checked


def test_a_flipped_bit_is_found_in_whatever_is_kept(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "a", "orders").commit(0, {BucketId(0, 0): 5}, [])
    coordinator.partitions.create(table, b"day")
    gone = coordinator.tables.create("gone", DEFINITION)
    coordinator.drop_table(gone)
    server = coordinator.servers.register("127.0.0.1:7070")
    lead = LeadKey(table.table_id, BucketId(0, 0))
    coordinator.leaders.take(server, [lead])
    listed = coordinator.snapshots.claim(lead, 3)
    one = ListedSnapshot(snapshot_id=1, term=3, applied=9, stable=8, created_ms=7, bytes=6)
    coordinator.snapshots.add(listed, one, 2)
    coordinator.leases.acquire(table.table_id, "reader", {lead.bucket: 1}, SHORTEST_LEASE_MS)
    reading: dict[str, Callable[[], object]] = {
        dropped_path(gone.table_id): coordinator.dropped.all,
        server_path(server.name): coordinator.servers.all,
        leader_path(lead.node_name): coordinator.leaders.all,
        snapshot_list_path(table.table_id, 0, 0): lambda: coordinator.snapshots.read(lead),
        lease_path(table.table_id, "reader"): lambda: coordinator.leases.all(table.table_id),
        table_path(table.table_id): lambda: coordinator.tables.get("customers"),
        table_name_path("customers"): lambda: coordinator.tables.get("customers"),
        partitions_path(table.table_id): lambda: coordinator.partitions.ids(table),
        owner_path(table.table_id, "a"): lambda: coordinator.locks.records(table),
        epoch_path(table.table_id): lambda: coordinator.locks.records(table),
        NEXT_TABLE_ID: lambda: coordinator.tables.create("another", DEFINITION),
    }
    store = coordinator.store
    for path, read in reading.items():
        node = store.read(path)
        assert node is not None
        bits = range(8 * len(node.data))
        for bit in (*bits[:80], *bits[80::7]):
            damaged = bytearray(node.data)
            damaged[bit // 8] ^= 1 << bit % 8
            now = store.read(path)
            assert now is not None
            store.transact([Write(path, bytes(damaged), now.version)])
            with pytest.raises(CorruptRecord):
                read()
        now = store.read(path)
        assert now is not None
        store.transact([Write(path, node.data, now.version)])
        read()


@pytest.mark.parametrize("parent", [IDS, DROPPED])
def test_a_node_that_is_nobody_s_is_an_error_that_says_where(
    coordinator: Coordinator, parent: str
) -> None:
    coordinator.store.transact([Create(f"{parent}/notes", b"")])
    with pytest.raises(CorruptRecord, match=f"{parent}/notes is not a number"):
        _ = coordinator.tables.all(), coordinator.dropped.all()


# For people: since when, how long ago, and what it is called


def test_a_lock_tells_since_when_it_is_held_and_how_old_its_last_batch_is(
    coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known() -> LockInfo:
        [found] = coordinator.locks.all(table)
        return found

    before_ms = coordinator.store.now_ms()
    lock = coordinator.locks.acquire(table, "etl", ["orders"], query_id="q", query_name="nightly")
    lock.ready(ENDS, servers=[])
    acquired_ms = known().held_since_ms
    assert acquired_ms is not None
    assert before_ms - 1000 <= acquired_ms <= coordinator.store.now_ms()
    assert known().committed_ms is None
    lock.commit(0, ENDS, servers=[])
    assert known().record.idle_ms == 0
    real = time.monotonic
    monkeypatch.setattr("locks.column_locks.column_lock.time.monotonic", lambda: real() + 60)
    lock.renew()
    record = known().record
    assert 60_000 <= record.idle_ms <= record.held_ms < 120_000
    assert record.query_name == "nightly"
    again = coordinator.locks.acquire(table, "etl", ["orders"], query_id="q")
    assert (again.record.held_ms, again.record.query_name) == (0, "")
    assert again.record.idle_ms >= 60_000, "the last batch is as old as it was"
