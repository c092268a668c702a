"""A table without servers: its buckets led by this process, and written by the same writer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.errors import InvalidInput, NotFenced, NotLeader
from foundation.failpoints import arm
from foundation.ids import Token
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import Grant, GrantedRows
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from tests.support.embedded import Embedded
from tests.support.faulty_storage import interrupt
from tests.support.writer_table import definition


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    made = Embedded(tmp_path, definition(partitioned=False))
    yield made
    made.leader.close()


def test_rows_are_given_as_for_a_table(embedded: Embedded) -> None:
    with embedded.writer() as writer:
        writer.write(0, Rows(data={"k": [1, 1], "x": [4, 5]}))
        writer.write(1, Rows(data=[{"k": 2, "x": 3}]))
        writer.write(2, Rows(data=[]))
    assert embedded.rows() == [{"k": 1, "x": 9}, {"k": 2, "x": 3}]


def test_new_partitions_get_buckets(tmp_path: Path) -> None:
    embedded = Embedded(tmp_path, definition(partitioned=True))
    with embedded.writer() as writer:
        writer.write(0, Rows(data=[{"p": 7, "k": 1, "x": 3}]))
        stray = Grant(writer=Writer("a", 1), owner="a", token=Token(1, 1), terms={})
        with pytest.raises(NotFenced, match="its writer was not fenced for"):
            writer.access.put(GrantedRows(stray, Rows(data=[{"p": 8, "k": 1, "x": 3}])))
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
        list(other.leading(embedded.access().bucket_ids()))
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
    with TableWriter(embedded.access(), "b", ["x", "y", "z"]) as writer:
        writer.write(0, Rows(data=[{"k": 1, "x": 3, "y": 4, "z": 5}]))
    delete = Rows(data=[{"k": 1, "op": "delete"}], operation_column="op")
    promised(embedded, delete, "xyz")
    embedded.evolve(embedded.schema().add_column("w", "bigint", "sum"))
    with TableWriter(embedded.access(), "w", ["w"]) as writer:
        writer.write(0, Rows(data=[{"k": 1, "w": 7}]))
    with embedded.writer("xyz", redo=True):
        assert embedded.rows() == [{"k": 1, "w": 7}]


def test_what_is_wrong_with_rows_is_found_before_any_bucket_is_asked(embedded: Embedded) -> None:
    with embedded.writer() as writer:
        with pytest.raises(InvalidInput, match="no column 'w'"):
            writer.write(0, Rows(data=[{"k": 1, "w": 3}]))
        assert writer.write(0, Rows(data=[{"k": 1, "x": 3}]))
