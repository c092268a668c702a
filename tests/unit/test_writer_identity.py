"""What a writer means by its names, numbers and promises, whatever becomes of the table."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    FormerQuery,
    HandoverNeeded,
    InvalidInput,
    LockHeld,
    RewoundBatch,
    StorageUnavailable,
    UnknownColumn,
    UnknownTable,
)
from foundation.failpoints import arm
from locks.catalog.definitions import TableDefinition
from locks.cluster.leaders import Leaders
from locks.store.memory import MemoryCoordination
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import LocalStorage
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter, WriterState
from server.protocol.definitions import define
from tests.support.embedded import Embedded
from tests.support.faulty_storage import interrupt

MakeTable = Callable[..., Embedded]


def sums(*names: str, partitioned: bool = False) -> TableDefinition:
    """Return a table of sums, in one bucket."""
    builder = SchemaBuilder()
    keys = ["day", "k"] if partitioned else ["k"]
    for key in keys:
        builder.column(key, pa.int64())
    builder.primary_key(*keys)
    if partitioned:
        builder.partitioned_by("day")
    for name in names:
        builder.agg_column(name, pa.int64(), "sum")
    return define(builder.build(), 1, column_locks=True, options={})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeTable]:
    """Return what makes tables of one cluster, with one redo log."""
    shared = MemoryCoordination()
    with ExitStack() as stack:

        def table(definition: TableDefinition, name: str = "t") -> Embedded:
            made = Embedded(tmp_path, definition, name=name, shared=shared)
            stack.callback(made.leader.close)
            return made

        yield table


def dies(writer: TableWriter, batch: int, rows: Rows, *, at: str) -> None:
    """Let a writer's process die in the middle of a batch."""
    with arm(at, interrupt), pytest.raises(KeyboardInterrupt):
        writer.write(batch, rows)
    writer._stop_renewal()


def amount(name: str, value: int, **more: Any) -> Rows:
    return Rows(data=[{"k": 1, name: value, **more}])


# Names


@pytest.mark.parametrize("lose", [False, True])
def test_a_writer_goes_on_with_its_columns_whatever_has_their_names(
    make: MakeTable, lose: bool
) -> None:
    table = make(sums("clicks", "views"))
    writer = table.writer(["clicks"]).start()
    writer.write(0, amount("clicks", 1))
    table.evolve(table.schema().rename_column("clicks", "old"))
    table.evolve(table.schema().rename_column("views", "clicks"))
    locked = table.records()["a"].columns
    if lose:
        writer.access.coordinator.store.close()
    writer.write(1, amount("clicks", 100))
    assert writer.columns == ("clicks",)
    assert table.records()["a"].columns == locked
    assert table.rows() == [{"k": 1, "old": 101}]


def test_names_are_those_of_the_table_when_the_writer_starts(make: MakeTable) -> None:
    table = make(sums("x", "y"))
    writer = table.writer(["new"])
    table.evolve(table.schema().rename_column("x", "new"))
    with writer:
        writer.write(0, amount("new", 5))
    assert table.rows() == [{"k": 1, "new": 5}]


def test_a_column_that_is_dropped_ends_its_writer_not_another_of_its_name(make: MakeTable) -> None:
    table = make(sums("x", "y"))
    writer = table.writer().start()
    writer.write(0, amount("x", 1))
    with pytest.raises(LockHeld):
        table.evolve(table.schema().drop_column("x"))
    table.evolve(table.schema().drop_column("x"), force=True)
    table.evolve(table.schema().add_column("x", pa.int64(), "max"))
    for _ in range(2):
        with pytest.raises(UnknownColumn, match="column 'x' was dropped meanwhile"):
            writer.write(1, amount("x", 100))
        assert writer.state is WriterState.CLEAN
        writer.access.coordinator.store.close()
    assert table.rows() == []


def test_nothing_is_promised_for_a_column_that_was_dropped_meanwhile(make: MakeTable) -> None:
    table = make(sums("x", "y"))
    writer = table.writer(redo=True).start()
    writer.write(0, amount("x", 1))

    def meanwhile() -> None:
        """Between the trial and the promise."""
        with suppress(Exception):
            table.evolve(table.schema().drop_column("x"), force=True)
            table.evolve(table.schema().add_column("x", pa.int64(), "max"))
        writer.access.coordinator.store.close()

    with arm("writer.redo_written", meanwhile), pytest.raises(UnknownColumn, match="was dropped"):
        writer.write(1, amount("x", 100))
    writer.close()
    assert table.rows() == []
    with table.writer("y", redo=True) as heir:
        assert heir.batch == 0


def test_an_unknown_name_is_refused_by_its_name(make: MakeTable) -> None:
    with pytest.raises(UnknownColumn, match="table t has no column 'typo'; it has x"):
        make(sums("x")).writer(["typo"]).start()


def test_a_session_that_is_lost_does_not_lead_to_another_table_of_the_same_name(
    make: MakeTable,
) -> None:
    table = make(sums("x"))
    writer = table.writer().start()
    table.drop()
    other = make(sums("x"))
    writer.access.coordinator.store.close()
    with pytest.raises(Exception, match="dropped"):
        writer.write(0, amount("x", 5))
    assert other.rows() == []


def test_to_connect_again_is_to_the_same_table_whatever_has_its_name(make: MakeTable) -> None:
    table = make(sums("x"))
    access = table.access()
    assert access.reconnect().table == access.table
    table.drop()
    make(sums("x"))
    with pytest.raises(UnknownTable, match="dropped"):
        access.reconnect()


def test_a_leader_that_looked_before_an_alteration_reads_the_definition_again(
    make: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(sums("x"))
    with table.writer() as writer:
        writer.write(0, amount("x", 1))

    def write_more() -> None:
        table.evolve(table.schema().add_column("c", pa.int64(), "sum"))
        with table.writer("c", owner="b") as other:
            other.write(0, amount("c", 10))
        table.leader.close()

    meanwhile, real = iter([write_more]), Leaders.take

    def take(leaders: Leaders, *arguments: Any) -> Any:
        for happens in meanwhile:
            happens()
        return real(leaders, *arguments)

    monkeypatch.setattr(Leaders, "take", take)
    heir = table.new_leader("other views")
    assert table.rows(heir) == [{"k": 1, "x": 1, "c": 10}]
    heir.close()


# Promises


def test_two_tables_may_share_a_redo_log(make: MakeTable) -> None:
    tables = [make(sums("x"), name) for name in ("t1", "t2")]
    for table, value in zip(tables, (5, 700), strict=True):
        dies(table.writer(redo=True).start(), 0, amount("x", value), at="writer.prepared")
    for table, value in zip(tables, (5, 700), strict=True):
        with table.writer(redo=True) as heir:
            assert heir.batch == 0
        assert table.rows() == [{"k": 1, "x": value}]


def test_a_promise_of_a_dropped_table_is_not_taken_for_one_of_its_successor(
    make: MakeTable,
) -> None:
    first = make(sums("x"))
    dies(first.writer(redo=True).start(), 0, amount("x", 5), at="writer.prepared")
    first.drop()
    second = make(sums("x"))
    dies(second.writer(redo=True).start(), 0, amount("x", 700), at="writer.prepared")
    with second.writer(redo=True):
        assert second.rows() == [{"k": 1, "x": 700}]


def test_whoever_comes_next_finds_a_promise_without_a_redo_log_of_its_own(make: MakeTable) -> None:
    table = make(sums("x"))
    dies(table.writer(redo=True).start(), 0, amount("x", 5), at="writer.prepared")
    table.shared.advance(10**9)
    with table.writer(owner="b") as heir:
        assert heir.batch == -1
        assert table.rows() == [{"k": 1, "x": 5}]
    assert list((table.directory / "redo").rglob("*.redo")) == []


def test_who_cannot_reach_a_promise_is_told_where_it_is_and_what_it_takes(
    make: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(sums("x"))
    dies(table.writer(redo=True).start(), 0, amount("x", 5), at="writer.prepared")

    def read(storage: LocalStorage, name: str) -> bytes:
        raise StorageUnavailable(f"{name}: no credentials")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read", read)
        with pytest.raises(StorageUnavailable, match=r"promised in .*/redo, which cannot be"):
            table.writer().start()
    with table.writer() as heir:
        assert heir.batch == 0
    assert table.rows() == [{"k": 1, "x": 5}]


def test_a_promise_is_kept_though_the_column_that_it_is_ordered_by_is_renamed_or_dropped(
    make: MakeTable,
) -> None:
    schema = (
        SchemaBuilder()
        .column("k", pa.int64())
        .primary_key("k")
        .agg_column("ts", pa.int64(), "max")
        .agg_column("s", pa.int64(), "last_value", order_by="ts")
        .agg_column("x", pa.int64(), "sum")
        .build()
    )
    definition = define(schema, 1, column_locks=True, options={})
    changes: dict[str, Callable[[Schema], Schema]] = {
        "renamed": lambda schema: schema.rename_column("ts", "at"),
        "dropped": lambda schema: schema.drop_column("ts"),
        "both": lambda schema: schema.drop_column("ts").drop_column("s"),
    }
    for name, change in changes.items():
        table = make(definition, name)
        promise = Rows(data=[{"k": 1, "ts": 7, "s": 3, "x": 5}])
        dies(table.writer(["ts", "s", "x"], redo=True).start(), 0, promise, at="writer.prepared")
        table.evolve(change(table.schema()), force=True)
        with table.writer(redo=True) as heir:
            assert heir.batch == 0
        [row] = table.rows()
        left = {"k": 1, "at": 7, "s": 3, "x": 5}
        assert row == {column: left[column] for column in table.schema().names}


def test_a_promise_that_is_newer_than_the_schema_of_its_payer_is_kept_whole(
    make: MakeTable,
) -> None:
    table = make(sums("x"))
    active = table.writer(owner="active", redo=True).start()
    standby = table.writer(owner="standby", redo=True)
    with pytest.raises(LockHeld):
        standby.start()
    table.evolve(table.schema().add_column("c", pa.int64(), "sum"))
    active.close()
    active = table.writer(["x", "c"], owner="active", redo=True).start()
    dies(active, 0, amount("x", 10, c=500), at="writer.prepared")
    table.shared.advance(10**9)
    standby.start().close()
    assert table.rows() == [{"k": 1, "x": 10, "c": 500}]


def test_a_promise_that_is_made_between_a_look_at_the_table_and_the_lock_is_kept_whole(
    make: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(sums("x"))

    def promise_more() -> None:
        table.evolve(table.schema().add_column("c", pa.int64(), "sum"))
        active = table.writer(["x", "c"], owner="active", redo=True).start()
        dies(active, 0, amount("x", 10, c=500), at="writer.prepared")
        table.shared.advance(10**9)

    standby = table.writer(owner="standby", redo=True)
    meanwhile, look = iter([promise_more]), standby.access.refresh

    def refresh() -> None:
        look()
        for happens in meanwhile:
            happens()

    monkeypatch.setattr(standby.access, "refresh", refresh)
    standby.start().close()
    assert table.rows() == [{"k": 1, "x": 10, "c": 500}]


def test_of_a_promise_whose_column_is_dropped_by_force_the_rest_is_kept_and_counts(
    make: MakeTable,
) -> None:
    table = make(sums("x", "y"))
    writer = table.writer(["x", "y"], redo=True).start()

    def drop() -> None:
        if "x" in table.schema().names:
            table.evolve(table.schema().drop_column("x"), force=True)

    rows = Rows(data=[{"k": 1, "x": 1, "y": 2}])
    with arm("writer.prepared", drop), pytest.raises(UnknownColumn, match="'x' was dropped"):
        writer.write(0, rows)
    assert (writer.state, writer.batch) == (WriterState.CLEAN, 0)
    assert table.rows() == [{"k": 1, "y": 2}]
    assert not writer.write(0, rows), "what was promised is committed"
    writer.write(1, Rows(data=[{"k": 1, "y": 1}], columns=["y"]))
    writer.close()
    assert table.rows() == [{"k": 1, "y": 3}]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("at", ["writer.prepared", "writer.put"])
def test_a_partition_that_was_dropped_is_not_brought_back_by_a_promise(
    make: MakeTable, at: str, anew: bool
) -> None:
    table = make(sums("x", partitioned=True))
    writer = table.writer(redo=True).start()
    writer.write(0, Rows(data=[{"day": 1, "k": 1, "x": 1}, {"day": 2, "k": 1, "x": 1}]))
    both = Rows(data=[{"day": 1, "k": 1, "x": 10}, {"day": 2, "k": 1, "x": 10}])
    dies(writer, 1, both, at=at)
    [first, _] = sorted(table.coordinator.partitions.ids(table.table))
    table.coordinator.partitions.drop(table.table, first)
    if anew:
        table.coordinator.partitions.create(table.table, first)
    with table.writer(redo=True) as heir:
        assert heir.batch == 1
    assert len(table.coordinator.partitions.ids(table.table)) == 1 + anew
    assert table.rows() == [{"day": 2, "k": 1, "x": 11}]


# Numbers


def test_a_writer_without_a_count_goes_on_behind_the_last_batch(make: MakeTable) -> None:
    table = make(sums("x"))
    with table.writer() as writer:
        assert writer.next_batch() == 0
        writer.write(writer.next_batch(), amount("x", 1))
        writer.write(writer.next_batch(), amount("x", 1))
    with table.writer() as writer:
        assert writer.next_batch() == 2
        assert not writer.write(1, amount("x", 100))
    assert table.rows() == [{"k": 1, "x": 2}]


@pytest.mark.parametrize("redo", [False, True])
def test_every_query_counts_its_own_batches(make: MakeTable, redo: bool) -> None:
    table = make(sums("x"))
    for night in range(3):
        job = table.writer(query_id=f"night-{night}", redo=redo)
        with job:
            assert job.batch == -1
            assert job.write(0, amount("x", 10**night))
            assert job.batch == 0
            assert job.progress.batch == 0
        with table.writer(query_id=f"night-{night}", redo=redo, handover=False) as again:
            assert again.batch == 0
            assert not again.write(0, amount("x", 10**night))
            with pytest.raises(Exception, match="batch -1 of `a` comes after batch 0"):
                again.write(-1, amount("x", 1))
    assert table.rows() == [{"k": 1, "x": 111}]
    with pytest.raises(HandoverNeeded, match="handover=True"):
        table.writer(query_id="another", handover=False).start()


def test_a_query_whose_first_batch_is_not_0_is_counted_on_too(make: MakeTable) -> None:
    table = make(sums("x"))
    with table.writer(query_id="first") as job:
        job.write(3, amount("x", 1))
    with table.writer(query_id="second") as job:
        assert job.batch == -1
        job.write(3, amount("x", 1))
        assert job.batch == 3
    assert table.records()["a"].batch == 7
    assert table.rows() == [{"k": 1, "x": 2}]


def test_a_batch_that_a_query_left_uncommitted_is_counted_once(make: MakeTable) -> None:
    table = make(sums("x"))
    with table.writer(query_id="first") as job:
        job.write(0, amount("x", 1))
    for at in ("writer.put", "writer.sealed", "writer.committed"):
        dies(table.writer(query_id="second").start(), 0, amount("x", 10), at=at)
    with table.writer(query_id="second") as job:
        job.write(0, amount("x", 10))
        assert job.batch == 0
    assert table.rows() == [{"k": 1, "x": 11}]


def test_a_writer_that_is_no_query_does_not_count_on_where_one_did(make: MakeTable) -> None:
    table = make(sums("x"))
    with table.writer(query_id="q") as job:
        job.write(0, amount("x", 1))
    operator = table.writer(handover=False).start()
    with pytest.raises(HandoverNeeded, match="are counted by query q"):
        operator.write(1, amount("x", 10))
    operator.close()
    with table.writer(query_id="q", handover=False) as job:
        assert job.batch == 0
    with table.writer() as plain:
        plain.write(plain.next_batch(), amount("x", 10))
    with pytest.raises(FormerQuery, match="a writer that is no query"):
        table.writer(query_id="q", handover=False).start()
    with pytest.raises(HandoverNeeded, match="a writer that is no query"):
        table.writer(query_id="r", handover=False).start()
    assert table.rows() == [{"k": 1, "x": 11}]


@pytest.mark.parametrize("redo", [False, True])
def test_a_query_whose_owner_was_handed_over_never_counts_again(
    make: MakeTable, redo: bool
) -> None:
    """The nightly job that is killed after its commit, and run again after the next night."""
    table = make(sums("x"))
    for night in range(2):
        with table.writer(query_id=f"night-{night}", redo=redo) as job:
            assert job.write(0, amount("x", 10**night))
    with pytest.raises(FormerQuery, match=r"query night-0 has written .* as `a`.* night-1 since"):
        table.writer(query_id="night-0", redo=redo).start()
    with table.writer(query_id="night-1", redo=redo) as job:
        assert not job.write(0, amount("x", 10))
    assert table.rows() == [{"k": 1, "x": 11}]


# What a batch is, beside its number


@pytest.mark.parametrize("redo", [False, True])
def test_another_batch_of_the_last_number_is_neither_skipped_nor_written(
    make: MakeTable, redo: bool
) -> None:
    table = make(sums("x"))
    with table.writer(query_id="q", redo=redo) as job:
        assert job.write(0, amount("x", 1), fingerprint="at 1")
        assert job.write(1, amount("x", 10), fingerprint="at 2")
    for restart in range(2):
        with table.writer(query_id="q", redo=redo) as job:
            assert job.is_replay(1, fingerprint="at 2")
            assert not job.write(1, amount("x", 10), fingerprint="at 2")
            with pytest.raises(RewoundBatch, match=r"batch 1 of `a` .* at 3, and .* one at 2\."):
                job.is_replay(1, fingerprint="at 3")
            with pytest.raises(RewoundBatch, match="another batch of its number"):
                job.write(1, amount("x", 100), fingerprint="at 3")
            assert job.state is WriterState.CLEAN
            # Who does not know when it was planned says what it always said.
            assert job.is_replay(1)
            assert table.rows() == [{"k": 1, "x": 11}], f"restart {restart}"
    with table.writer(query_id="q", redo=redo) as job:
        assert job.write(2, amount("x", 100), fingerprint="at 4")
    assert table.rows() == [{"k": 1, "x": 111}]


@pytest.mark.parametrize("at", ["writer.put", "writer.sealed", "writer.committed"])
@pytest.mark.parametrize("redo", [False, True])
def test_what_is_planned_anew_counts_if_nothing_of_its_number_was_committed(
    make: MakeTable, at: str, redo: bool
) -> None:
    table = make(sums("x"))
    job = table.writer(query_id="q", redo=redo).start()
    with arm(at, interrupt), pytest.raises(KeyboardInterrupt):
        job.write(0, amount("x", 1), fingerprint="at 1")
    job._stop_renewal()
    with table.writer(query_id="q", redo=redo) as job:
        if redo or at == "writer.committed":  # Promised is committed.
            with pytest.raises(RewoundBatch, match="fingerprint at 2, and the committed one at 1"):
                job.write(0, amount("x", 10), fingerprint="at 2")
        else:
            assert job.write(0, amount("x", 10), fingerprint="at 2")
    assert table.rows() == [{"k": 1, "x": 1 if redo or at == "writer.committed" else 10}]


def test_a_batch_is_no_replay_for_columns_that_it_did_not_have(make: MakeTable) -> None:
    table = make(sums("x", "y"))
    with table.writer(["x"]) as job:
        job.write(0, amount("x", 1))
    with table.writer(["y"]) as job:
        another = r"batch 0 of `a` .* columns x, .* again with y,"
        with pytest.raises(RewoundBatch, match=another):
            job.is_replay(0)
        with pytest.raises(RewoundBatch, match=another):
            job.write(0, amount("y", 1))
        job.write(1, amount("y", 10))
    with table.writer(["x", "y"]) as job:
        with pytest.raises(RewoundBatch, match=r"columns y, .* again with x,"):
            job.write(1, amount("x", 1, y=1))
        job.write(2, amount("x", 100, y=100))
    with table.writer(["x"]) as job:
        assert not job.write(2, amount("x", 100)), "with fewer columns nothing is lost"
    assert table.rows() == [{"k": 1, "x": 101, "y": 110}]


def test_a_fingerprint_that_no_record_can_keep_is_refused(make: MakeTable) -> None:
    table = make(sums("x"))
    with table.writer() as job:
        for wrong in ("a" * 201, b"bytes", 7):
            with pytest.raises(InvalidInput, match="fingerprint"):
                job.write(0, amount("x", 1), fingerprint=wrong)  # type: ignore[arg-type]
        assert job.write(0, amount("x", 1), fingerprint="ü" * 100)
    assert table.records()["a"].fingerprint == "ü" * 100


# What must run before a batch is promised


@pytest.mark.parametrize("redo", [False, True])
def test_what_fails_before_a_batch_leaves_nothing_of_it_not_even_a_promise(
    make: MakeTable, redo: bool
) -> None:
    table = make(sums("x"))
    writer = table.writer(redo=redo).start()
    rows = amount("x", 5)
    calls = []

    def before(grant: Any) -> None:
        calls.append(grant.token)
        raise InvalidInput("not now")

    with pytest.raises(InvalidInput, match="not now"):
        writer.write(0, rows, before)
    assert len(calls) == 1
    assert (writer.batch, table.rows()) == (-1, [])
    writer.write(0, rows)
    writer.close()
    assert table.rows() == [{"k": 1, "x": 5}]
