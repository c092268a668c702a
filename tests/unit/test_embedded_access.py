"""A table without servers: its buckets led by this process, and written by the same writer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from locks import Coordinator, MemoryCoordination, Table
from merge_engine import InvalidInput, LocalStorage, Schema, Token
from merge_engine.failpoints import arm
from recovery.access import Grant, Rows
from recovery.embedded import EmbeddedAccess, history_of
from recovery.errors import NotFenced, NotLeader
from recovery.guard import Writer
from recovery.one_leader import OneLeader
from recovery.redo import RedoLog
from recovery.writer import TableWriter
from tests.faulty_storage import interrupt
from tests.memory_log import MemoryLog
from tests.writer_table import definition


class Embedded:
    """A table in a directory, its leader, and writers."""

    def __init__(self, directory: Path, *, partitioned: bool = False) -> None:
        self.directory = directory
        self.shared = MemoryCoordination()
        self.coordinator = Coordinator(self.shared.connect())
        self.coordinator.create_table("t", definition(partitioned))
        self.leader = self.new_leader("views")
        self.redo = RedoLog(MemoryLog())

    def new_leader(self, views: str) -> OneLeader:
        logs = LocalStorage(self.directory / "logs")
        return OneLeader(self.shared.connect, "t", logs, self.directory / views)

    def access(self, leader: OneLeader | None = None) -> EmbeddedAccess:
        return EmbeddedAccess(self.shared.connect, "t", leader or self.leader)

    def writer(self, columns: str = "x", *, redo: bool = False) -> TableWriter:
        return TableWriter(
            self.access(),
            "a",
            list(columns),
            handover=True,
            deadline_s=0.5,
            redo=self.redo if redo else None,
            pause=lambda _: None,
        )

    def rows(self) -> list[dict[str, int]]:
        keys = self.access().bucket_keys()
        [leading] = self.leader.leading(keys)
        return [
            {name: value for name, value in row.items() if value is not None}
            for key in keys
            for batch in leading.buckets[key].bucket.scan()
            for row in batch.to_pylist()
        ]

    def evolve(self, schema: Schema) -> Table:
        table = self.coordinator.table("t")
        changed = replace(
            table.definition,
            schema=schema.to_json(),
            former=(*table.definition.former, table.definition.schema),
            columns={column.name: column.id for column in schema.value_columns},
        )
        return self.coordinator.alter_table(table, changed)

    def schema(self) -> Schema:
        return history_of(self.coordinator.table("t")).current


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    made = Embedded(tmp_path)
    yield made
    made.leader.close()


def test_rows_are_given_as_for_a_table(embedded: Embedded) -> None:
    with embedded.writer() as writer:
        writer.write(0, Rows(data={"k": [1, 1], "x": [4, 5]}))
        writer.write(1, Rows(data=[{"k": 2, "x": 3}]))
        writer.write(2, Rows(data=[]))
    assert embedded.rows() == [{"k": 1, "x": 9}, {"k": 2, "x": 3}]


def test_new_partitions_get_buckets(tmp_path: Path) -> None:
    embedded = Embedded(tmp_path, partitioned=True)
    with embedded.writer() as writer:
        assert writer.access.create_partitions(Rows(data=[])) == []
        writer.write(0, Rows(data=[{"p": 7, "k": 1, "x": 3}]))
        stray = Grant(writer=Writer("a", 1), owner="a", token=Token(1, 1), terms={})
        with pytest.raises(NotFenced, match="its writer was not fenced for"):
            writer.access.put(stray, Rows(data=[{"p": 8, "k": 1, "x": 3}]))
    assert embedded.rows() == [{"p": 7, "k": 1, "x": 3}]
    embedded.leader.close()


def test_a_leader_that_loses_its_session_leads_anew(embedded: Embedded) -> None:
    writer = embedded.writer().start()
    writer.write(0, Rows(data=[{"k": 1, "x": 3}]))
    [leading] = embedded.leader.leading([])
    leading.coordinator.store.close()
    assert writer.write(1, Rows(data=[{"k": 1, "x": 3}]))
    assert writer.progress.starts == 2
    assert embedded.rows() == [{"k": 1, "x": 6}]


def test_a_leader_that_is_closed_is_opened_by_the_next_call(embedded: Embedded) -> None:
    writer = embedded.writer().start()
    embedded.leader.close()
    embedded.leader.close()
    assert writer.write(0, Rows(data=[{"k": 1, "x": 3}]))
    assert embedded.rows() == [{"k": 1, "x": 3}]


def test_two_processes_do_not_lead_the_same_bucket(embedded: Embedded) -> None:
    embedded.writer().start()
    other = embedded.new_leader("others")
    with pytest.raises(NotLeader, match="another process leads bucket 0/0 of table t"):
        list(other.leading(embedded.access().bucket_keys()))
    other.close()


def test_a_writer_reconnects_in_another_session(embedded: Embedded) -> None:
    writer = embedded.writer().start()
    writer.access.coordinator.store.close()
    assert writer.write(0, Rows(data=[{"k": 1, "x": 3}]))
    writer.close()
    assert embedded.rows() == [{"k": 1, "x": 3}]


def promised(embedded: Embedded, rows: Rows, columns: str = "x") -> None:
    """A writer promises a batch and is gone."""
    writer = embedded.writer(columns, redo=True).start()
    with arm("writer.prepared", interrupt), pytest.raises(KeyboardInterrupt):
        writer.write(0, rows)
    embedded.shared.advance(600_000)


def test_a_promise_is_kept_under_a_later_schema(embedded: Embedded) -> None:
    promised(embedded, Rows(data=[{"k": 1, "x": 3, "y": 4}]), "xy")
    embedded.evolve(embedded.schema().drop_column("x").rename_column("y", "total"))
    with TableWriter(embedded.access(), "b", ["z"], redo=embedded.redo) as writer:
        assert writer.progress.starts == 1
    with TableWriter(embedded.access(), "a", ["total"], redo=embedded.redo) as writer:
        assert writer.batch == 0
    assert embedded.rows() == [{"k": 1, "total": 4}]


def test_a_promise_whose_columns_were_dropped_is_kept(embedded: Embedded) -> None:
    promised(embedded, Rows(data=[{"k": 1, "x": 3}]))
    embedded.evolve(embedded.schema().drop_column("x"))
    with TableWriter(embedded.access(), "a", ["y"], redo=embedded.redo) as writer:
        assert writer.batch == 0
    assert embedded.rows() == []


def test_a_promised_delete_of_all_columns_is_one_of_those_that_there_were(
    embedded: Embedded,
) -> None:
    with embedded.writer("xyz") as writer:
        writer.write(0, Rows(data=[{"k": 1, "x": 3, "y": 4, "z": 5}]))
    delete = Rows(data=[{"k": 1, "op": "delete"}], operation_column="op")
    location = embedded.redo.write("a", Token(2, 1), delete, embedded.schema())
    embedded.evolve(embedded.schema().add_column("w", "int", "sum"))
    assert embedded.redo.read(location, embedded.schema()).columns == ["x", "y", "z"]


def test_what_is_wrong_with_rows_is_found_before_any_bucket_is_asked(embedded: Embedded) -> None:
    with embedded.writer() as writer:
        with pytest.raises(InvalidInput, match="no column 'w'"):
            writer.write(0, Rows(data=[{"k": 1, "w": 3}]))
        assert writer.write(0, Rows(data=[{"k": 1, "x": 3}]))
