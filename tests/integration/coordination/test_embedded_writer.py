"""The writer of a table without servers, with its locks in memory and in a real ZooKeeper."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import Fenced, OldEpoch
from foundation.failpoints import arm
from merge_engine.storage.objects import LocalStorage
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from tests.support.catalog_access import CatalogAccess
from tests.support.coordinators import Cluster
from tests.support.faulty_storage import interrupt
from tests.support.memory_log import MemoryLog
from tests.support.one_leader import OneLeader
from tests.support.writer_table import definition


@pytest.fixture
def leader(cluster: Cluster, tmp_path: Path) -> Iterator[OneLeader]:
    cluster.coordinator().tables.create("t", definition(partitioned=True))
    made = OneLeader(cluster.connect, "t", LocalStorage(tmp_path / "logs"), tmp_path / "views")
    yield made
    made.close()


def start(cluster: Cluster, leader: OneLeader, owner: str, **settings: Any) -> TableWriter:
    access = CatalogAccess(cluster.connect, "t", leader)
    return TableWriter(access, owner, ["x"], handover=True, deadline_s=20, **settings).start()


def rows(amount: int) -> Rows:
    return Rows(data=[{"p": p, "k": k, "x": amount} for p in range(2) for k in range(3)])


def values(cluster: Cluster, leader: OneLeader) -> set[int]:
    keys = CatalogAccess(cluster.connect, "t", leader).bucket_ids()
    [leading] = leader.leading(keys)
    found = [
        row["x"]
        for led in leading.buckets.values()
        for batch in led.bucket.scan()
        for row in batch.to_pylist()
    ]
    assert len(found) in (0, 6)
    return set(found)


def test_sessions_of_writer_and_leader_may_be_lost(cluster: Cluster, leader: OneLeader) -> None:
    writer = start(cluster, leader, "a")
    assert writer.write(0, rows(1))
    writer.access.coordinator.store.close()
    assert writer.write(1, rows(1))
    [leading] = leader.leading([])
    leading.coordinator.store.close()
    assert writer.write(2, rows(1))
    writer.close()
    assert values(cluster, leader) == {3}
    assert writer.progress.starts == 3


def test_a_successor_undoes_and_the_zombie_is_fenced(cluster: Cluster, leader: OneLeader) -> None:
    zombie = start(cluster, leader, "a")
    zombie.write(0, rows(1))
    with arm("writer.put", interrupt), pytest.raises(KeyboardInterrupt):
        zombie.write(1, rows(5))
    heir = start(cluster, leader, "a")
    assert values(cluster, leader) == {1}
    with pytest.raises((Fenced, OldEpoch)):
        zombie.write(1, rows(5))
    zombie.close()
    assert heir.write(1, rows(2))
    heir.close()
    assert values(cluster, leader) == {3}


def test_an_expired_owner_is_taken_over_and_its_promise_kept(
    cluster: Cluster, leader: OneLeader
) -> None:
    redo = RedoLog(MemoryLog())
    first = start(cluster, leader, "a", redo=redo)
    with arm("writer.prepared", interrupt), pytest.raises(KeyboardInterrupt):
        first.write(0, rows(1))
    first.close()
    second = start(cluster, leader, "b", redo=redo)
    assert second.write(0, rows(1))
    second.close()
    assert values(cluster, leader) == {2}
