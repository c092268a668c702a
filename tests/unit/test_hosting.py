"""A server's buckets: views restored or kept, and schemas that it has not heard of."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import LogGap, UnknownSchema
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable, TableDefinition
from locks.cluster.servers import Server as Registered
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.follower import Follower
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.view_meta import read_checkpoint
from merge_engine.encoding.stored_rows import SchemaHistory
from server.protocol.definitions import ClusterTable, define, evolved
from server.tablet.hosting import Hosting
from tests.conftest import SUMS, batch, rows_of
from tests.support.buckets import ADDED, add
from tests.support.leading import crowd_of
from tests.support.snapshot_world import MemoryStorage

KEY = LeadKey(1, BucketId(0, 0))


class Machine:
    """A server's hosting on its own disk; the logs are everybody's."""

    def __init__(self, logs: MemoryStorage, views: Path, definition: TableDefinition) -> None:
        table = ClusterTable(
            CatalogTable(name="sums", table_id=1, version=0, definition=definition)
        )
        self.view = views / table.path(KEY.bucket)
        self.log = logs.child(table.path(KEY.bucket))
        self.hosting = Hosting(logs, views, BucketOptions())
        self.table = table
        self.hosting.set_table(table)
        self.listed: list[ListedSnapshot] = []

    def open(self, read_table: Callable[[], ClusterTable] | None = None) -> None:
        self.hosting.open(KEY, lambda: self.listed, read_table)

    @property
    def altered(self) -> ClusterTable:
        """The table with a column more."""
        table = self.table.table
        definition = evolved(table.definition, ADDED[-1])
        return ClusterTable(
            CatalogTable(name=table.name, table_id=table.table_id, version=1, definition=definition)
        )

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
        manifest = uploaded.manifest
        listed = ListedSnapshot(
            snapshot_id=manifest.snapshot_id,
            term=bucket.term,
            applied=manifest.applied,
            stable=manifest.stable,
            created_ms=0,
            bytes=sum(file.size for file in manifest.files),
        )
        self.listed.insert(0, listed)


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


@pytest.mark.parametrize("puts", [1, 200])
def test_a_view_that_is_far_behind_is_restored_where_that_is_less_than_to_replay(
    puts: int, machines: list[Machine], tmp_path: Path
) -> None:
    machine, other = machines
    other.open()
    other.put(0)
    other.hosting.close(KEY)
    machine.open()
    for _ in range(puts):
        machine.put(1)
    machine.snapshot(tmp_path / "checkpoint")
    machine.put(2)
    machine.hosting.close(KEY)
    other.listed = machine.listed
    read: list[str] = []
    real = MemoryStorage.read

    def reading(storage: MemoryStorage, name: str) -> bytes:
        read.append(name)
        return real(storage, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemoryStorage, "read", reading)
        other.open()
    replayed = {name for name in read if name.endswith(".seg")}
    assert len(replayed) <= 6, "what came since the snapshot, or all if that is as little"
    restored = any(not name.endswith(".seg") for name in read)
    assert restored == (puts > 1)
    assert rows_of(other.hosting.get(KEY).bucket)[1] == (puts, None)


# Schemas that a server has not heard of


def test_a_bucket_that_was_written_under_a_later_schema_is_opened_under_it(
    machines: list[Machine],
) -> None:
    machine, other = machines
    machine.hosting.set_table(machine.altered)
    machine.open()
    machine.hosting.get(KEY).bucket.put(batch(k=[1], c=[10]))
    machine.hosting.close(KEY)
    with pytest.raises(UnknownSchema):
        other.open(lambda: other.table)
    other.open(lambda: other.altered)
    assert rows_of(other.hosting.get(KEY).bucket) == {1: (None, None, 10)}


def test_a_server_that_looked_before_an_alteration_reads_the_definition_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crowd_of(MemoryStorage(), tmp_path) as crowd:
        server = crowd.join(1)
        tables = server.coordinator.tables
        table = tables.create("sums", define(SUMS, 1, column_locks=False, options={}))
        server.look()
        late = crowd.join(2)
        real = late.coordinator.servers.all
        meanwhile: Iterator[Callable[[], object]] = iter(
            [
                lambda: server.coordinator.alter_table(table, evolved(table.definition, ADDED[-1])),
                server.look,
                lambda: server.hosting.get(KEY).bucket.put(batch(k=[1], c=[10])),
                server.leadership.stop,
                server.coordinator.store.close,
            ]
        )

        def list_servers() -> list[Registered]:
            """Between the definitions and the buckets: a slow answer, a process that was paused."""
            for happens in meanwhile:
                happens()
            return real()

        monkeypatch.setattr(late.coordinator.servers, "all", list_servers)
        late.look()
        assert rows_of(late.hosting.get(KEY).bucket) == {1: (None, None, 10)}


def test_a_schema_is_known_to_the_buckets_before_anybody_can_ask_for_its_columns(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = machines
    machine.open()
    known: list[int] = []
    real = Bucket.evolve

    def evolve(bucket: Bucket, history: SchemaHistory) -> None:
        known.append(machine.hosting.table(1).schema.version)
        real(bucket, history)

    monkeypatch.setattr(Bucket, "evolve", evolve)
    machine.hosting.set_table(machine.altered)
    assert known == [1]
    assert machine.hosting.table(1).schema.version == 2
    assert machine.hosting.get(KEY).bucket.history.current.version == 2


def test_a_schema_that_arrives_while_a_bucket_is_opened_reaches_it_before_it_is_served(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = machines
    served: list[Sequence[LeadKey]] = []
    lead, evolve = Bucket.led_from, Bucket.evolve

    def opened(follower: Follower) -> Bucket:
        bucket = lead(follower)
        machine.hosting.set_table(machine.altered)
        return bucket

    def evolving(bucket: Bucket, history: SchemaHistory) -> None:
        served.append(list(machine.hosting.led()))
        evolve(bucket, history)

    monkeypatch.setattr(Bucket, "led_from", opened)
    monkeypatch.setattr(Bucket, "evolve", evolving)
    machine.open()
    assert served == [[]]
    found = machine.hosting.get(KEY).bucket.lookup(batch(k=[1]), ["c"])
    assert found.schema.field("c").type == pa.int64()


def test_who_warms_up_leaves_the_store_to_others_and_who_opens_does_not(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines[0]
    gently: list[bool] = []

    class Noted(Follower):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            gently.append(settings["gently"])
            super().__init__(*arguments, **settings)

    monkeypatch.setattr("server.tablet.hosting.Follower", Noted)
    machine.hosting.warm(KEY)
    machine.hosting.cool(KEY)
    machine.open()
    assert gently == [True, False]
