"""A server's views: restored from a snapshot where they must be, and kept where they are more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from locks import BucketKey, LeadKey, Table, TableDefinition
from merge_engine import BucketOptions, LogGap
from merge_engine.view import read_checkpoint
from server.definitions import ClusterTable, define
from server.hosting import Hosting
from tests.buckets import add
from tests.conftest import SUMS
from tests.snapshot_world import MemoryStorage

KEY = LeadKey(1, BucketKey(0, 0))


class Machine:
    """A server's hosting on its own disk; the logs are everybody's."""

    def __init__(self, logs: MemoryStorage, views: Path, definition: TableDefinition) -> None:
        table = ClusterTable(Table(name="sums", table_id=1, version=0, definition=definition))
        self.view = views / table.path(KEY.key)
        self.log = logs.child(table.path(KEY.key))
        self.hosting = Hosting(logs, views, BucketOptions())
        self.hosting.set_table(table)
        self.listed: list[tuple[int, int]] = []

    def open(self) -> None:
        self.hosting.open(KEY, lambda: self.listed)

    def put(self, key: int) -> None:
        add(self.hosting.get(KEY).bucket, [key], [1])

    def snapshot(self, directory: Path) -> None:
        """Make the bucket as it is now the latest snapshot."""
        bucket = self.hosting.get(KEY).bucket
        bucket.checkpoint(directory)
        state = read_checkpoint(directory)
        uploaded = self.hosting.snapshots(KEY).upload(
            directory,
            snapshot_id=len(self.listed) + 1,
            term=bucket.term,
            state=state,
            stable=state.applied,
            schema_version=1,
            created_ms=0,
        )
        self.listed.insert(0, (uploaded.manifest.snapshot_id, bucket.term))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    logs, definition = MemoryStorage(), define(SUMS, 1, column_locks=False, options={})
    made = [Machine(logs, tmp_path / f"views-{at}", definition) for at in range(2)]
    yield made
    for machine in made:
        machine.hosting.close_all()


def test_a_view_that_is_newer_than_all_snapshots_stays_where_a_segment_is_missing(
    machines: list[Machine], tmp_path: Path
) -> None:
    machine, other = machines
    machine.open()
    machine.put(1)
    machine.snapshot(tmp_path / "checkpoint")
    begin = machine.hosting.get(KEY).bucket.end_offset
    machine.put(2)
    end = machine.hosting.get(KEY).bucket.end_offset
    machine.hosting.close(KEY)
    other.open()
    other.put(3)
    other.put(4)
    other.hosting.close(KEY)
    # What the view has and no snapshot, and what nobody has any more.
    machine.log.delete([f"{begin:020d}.seg", f"{end + 1:020d}.seg"])
    with pytest.raises(LogGap, match=r"is missing"):
        machine.open()
    assert read_checkpoint(machine.view).applied >= end
    assert not machine.view.with_name("0.restored").exists()


def test_what_a_server_left_that_was_killed_in_a_restore_is_in_nobodys_way(
    machines: list[Machine], tmp_path: Path
) -> None:
    machine, other = machines
    machine.open()
    machine.put(1)
    machine.snapshot(tmp_path / "checkpoint")
    machine.hosting.close(KEY)
    left = other.view.with_name(f"{other.view.name}.restored")
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half")
    other.listed = machine.listed
    other.open()
    rows = [row for batch in other.hosting.get(KEY).bucket.scan() for row in batch.to_pylist()]
    assert [row["k"] for row in rows] == [1]
    assert not left.exists()
    assert not (other.view / "half").exists()
