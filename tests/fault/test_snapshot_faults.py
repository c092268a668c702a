"""Servers killed and paused while they take, list and delete snapshots, under load.

Whatever is cut off where: what was acknowledged is there, the next snapshots work, all that are
listed restore, and no object stays that none of them needs.
"""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

import recovery.leader.snapshot_keeper
import server.tablet.janitor
from foundation.failpoints import ENVIRONMENT_VARIABLE
from foundation.ids import BucketId, LeadKey
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from merge_engine.bucket.view_meta import read_checkpoint
from recovery.reader.table_scan import ScanSource
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.client.snapshot_lease import SnapshotLease
from server.launch.local_cluster import LocalCluster, LocalServer
from server.protocol.definitions import SNAPSHOTS
from tests.fault.cluster_load import (
    BUCKETS,
    DEADLINE_S,
    LONGER,
    SCHEMA,
    Ledger,
    Load,
    check_exact,
    leaders,
    local_cluster,
    looked_up,
    noted,
    wait_until_led,
)
from tests.support.zookeeper_server import wait_until

# In an upload, behind the listing, and while files are deleted; in a long run, at many more.
TAKING = ["snapshot.before_file:4"]
FREEING = ["snapshot.before_delete:3"]
SLEEPING = ["snapshot.manifest_created:1"]
if LONGER:
    TAKING += [
        "snapshot.listed:3",
        "snapshot.checkpointed:2",
        "snapshot.files_uploaded:5",
        "snapshot.before_file:30",
    ]
    TAKING += ["snapshot.manifest_created:2"]
    FREEING += ["snapshot.deleted", "snapshot.before_delete:1", "snapshot.deleted:12"]
    FREEING += ["snapshot.swept:4"]
    SLEEPING += ["snapshot.before_file:3", "snapshot.before_delete:1"]
# Those of the keeper, at which `test_snapshot_keeper` crashes too, and of the janitor.
ALL = {
    *("snapshot.checkpointed", "snapshot.listed", "snapshot.swept"),
    "dropped.deleted",
}
_numbers = count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Run servers that take snapshots all the time, and keep no more of the log than they need."""
    options = ["--snapshot-interval", "0.5", "--log-ttl", "0"]
    with local_cluster(tmp_path_factory.mktemp("cluster"), options=options) as running:
        yield running


@pytest.fixture
def table(client: Cluster, cluster: LocalCluster) -> Iterator[RemoteTable]:
    """Create a table that nobody else writes to, led by both servers."""
    name = f"sums_{next(_numbers)}"
    made = client.create_table(name, SCHEMA, buckets=BUCKETS, column_locks=False)
    wait_until_led(client, made, cluster.servers)
    yield made
    if name in client.coordinator.tables.names():
        client.drop_table(name)


@dataclass(frozen=True)
class Scene:
    """All that a test needs; `directory` is its own."""

    cluster: LocalCluster
    client: Cluster
    table: RemoteTable
    directory: Path


@pytest.fixture
def scene(cluster: LocalCluster, client: Cluster, table: RemoteTable, tmp_path: Path) -> Scene:
    return Scene(cluster, client, table, tmp_path)


def newest(table: RemoteTable) -> dict[BucketId, int]:
    return {key: found[-1].snapshot_id if found else 0 for key, found in table.snapshots().items()}


def wait_for_snapshots(table: RemoteTable, what: str, rounds: int = 1) -> None:
    """Wait until every bucket has so many more."""
    before = newest(table)
    wait_until(
        lambda: all(last >= before[key] + rounds for key, last in newest(table).items()),
        f"{what}: {rounds} snapshots more of each bucket",
        DEADLINE_S,
    )


def orphans(client: Cluster, table: RemoteTable) -> set[str]:
    """Return the objects that no snapshot needs, and what is missing of those there are."""
    wrong: set[str] = set()
    for key in table.bucket_ids():
        objects = client.storage().child(table.definition.path(key)).child(SNAPSHOTS)
        needed: set[str] = set()
        for one in client.coordinator.snapshots.read(LeadKey(table.table_id, key)).kept:
            manifest = SnapshotStorage(objects).manifest(one.snapshot_id, one.term)
            needed |= {manifest.object_name, *(file.object_name for file in manifest.files)}
        wrong |= needed.symmetric_difference(objects.names())
    return wrong


def leased_sums(table: RemoteTable, lease: SnapshotLease) -> dict[tuple[int, str], int]:
    found = table.scan(source=ScanSource.SNAPSHOT, lease=lease).to_arrow().to_pylist()
    return {(row["k"], name): row[name] for row in found for name in ("total", "rows")}


def check_all(client: Cluster, table: RemoteTable, ledger: Ledger, directory: Path) -> None:
    """Nothing lost, nothing left, and every snapshot is whole; nobody writes any more."""
    check_exact(table, ledger, replay=False)
    table.snapshot()
    with table.lease_latest("checker", renew=False) as lease:
        assert leased_sums(table, lease) == dict(looked_up(table))
    table.snapshot()
    wait_until(lambda: not orphans(client, table), "nothing is left over", DEADLINE_S)
    for key, found in table.snapshots().items():
        storage = client.storage().child(table.definition.path(key)).child(SNAPSHOTS)
        assert 1 <= len(found) <= 2
        for one in found:
            into = directory / f"{key.number}-{one.snapshot_id}"
            chosen = [(one.snapshot_id, one.term)]
            assert restore_latest(SnapshotStorage(storage), chosen, into) is not None
            assert read_checkpoint(into).applied == one.applied


def start_to_fail(server: LocalServer, failpoint: str, patch: pytest.MonkeyPatch) -> None:
    server.kill()
    with patch.context() as patched:
        patched.setenv(ENVIRONMENT_VARIABLE, failpoint)
        server.start()


def test_every_failpoint_of_the_keeper_and_the_janitor_is_known() -> None:
    texts = [
        Path(module.__file__ or "").read_text()
        for module in (recovery.leader.snapshot_keeper, server.tablet.janitor)
    ]
    assert {name for text in texts for name in re.findall(r'\bhit\("([^"]+)"\)', text)} == ALL


@pytest.mark.parametrize("failpoint", [*TAKING, *FREEING])
def test_nothing_is_lost_or_left_when_a_server_is_killed_at(
    failpoint: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, table = scene.cluster, scene.client, scene.table
    killed = cluster.servers[0]
    with noted(3), Load(client, table.name, 3) as load:
        wait_for_snapshots(table, "before anything happens")
        start_to_fail(killed, failpoint, monkeypatch)
        wait_until(lambda: not killed.alive, f"it was killed at {failpoint}", DEADLINE_S)
        if failpoint in FREEING:  # Then it comes back without its disk, and restores.
            shutil.rmtree(killed.log_path.parent / f"views-{killed.number}")
        killed.start()
        load.go_on(20, f"after the kill at {failpoint}")
        wait_until_led(client, table, cluster.servers)
        wait_for_snapshots(table, "after all")
    check_all(client, table, load.ledger, scene.directory)


def test_a_server_that_is_killed_before_it_forgets_a_dropped_table(
    cluster: LocalCluster, client: Cluster, table: RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is the first of them deletes the files: so both would be killed."""
    with noted(5), Load(client, table.name, 5) as load:
        load.go_on()
    table.snapshot()
    for each in cluster.servers:
        start_to_fail(each, "dropped.deleted", monkeypatch)
    wait_until_led(client, table, cluster.servers)
    client.drop_table(table.name)
    wait_until(lambda: any(not each.alive for each in cluster.servers), "one is killed", DEADLINE_S)
    for each in cluster.servers:
        each.kill()
        each.start()
    wait_until(
        lambda: (
            table.table_id not in [one.table.table_id for one in client.coordinator.dropped.all()]
        ),
        "the table is forgotten",
        DEADLINE_S,
    )
    keys = [BucketId(0, number) for number in range(BUCKETS)]
    at = [client.storage().child(table.definition.path(key)) for key in keys]
    assert not any(each.names() or each.child(SNAPSHOTS).names() for each in at)


def test_a_leased_snapshot_is_read_to_its_end_when_all_servers_are_killed(
    cluster: LocalCluster, client: Cluster, table: RemoteTable, tmp_path: Path
) -> None:
    with noted(6), Load(client, table.name, 6) as load:
        load.go_on(40)
    table.snapshot()
    expected = dict(looked_up(table))
    with table.lease_latest("reader", 5) as lease:
        batches = iter(table.scan(source=ScanSource.SNAPSHOT, lease=lease))
        found = next(batches).to_pylist()
        for each in cluster.servers:
            os.kill(each.pid, signal.SIGKILL)
        for batch in batches:
            found += batch.to_pylist()
        assert {(row["k"], n): row[n] for row in found for n in ("total", "rows")} == expected
        for each in cluster.servers:
            wait_until(lambda each=each: not each.alive, "it is dead")  # type: ignore[misc]
            each.start()
    wait_until_led(client, table, cluster.servers)
    check_all(client, table, load.ledger, tmp_path)


@pytest.mark.parametrize("failpoint", SLEEPING)
def test_a_leader_that_sleeps_while_another_takes_over_neither_lists_nor_deletes(
    failpoint: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, table = scene.client, scene.table
    zombie, other = scene.cluster.servers
    with noted(4), Load(client, table.name, 4) as load:
        load.go_on()
        start_to_fail(zombie, f"{failpoint}:pause", monkeypatch)
        wait_until(lambda: _sleeps(zombie.pid), f"it sleeps at {failpoint}", DEADLINE_S)
        try:
            wait_until(
                lambda: [*leaders(client, table).values()] == [other.address] * BUCKETS,
                "the other leads all buckets",
                DEADLINE_S,
            )
            wait_for_snapshots(table, "of the other", 2)  # As many as are kept.
            witness = table.lease_latest("witness")
        finally:
            os.kill(zombie.pid, signal.SIGCONT)
        load.go_on(20, "when it is awake")
        with witness:
            terms = {key: one.term for key, one in witness.snapshots.items()}
            for key, found in table.snapshots().items():
                assert all(one.term >= terms[key] for one in found), "it has listed its own"
            wait_until_led(client, table, scene.cluster.servers)
            assert leased_sums(table, witness), "nothing of what is leased was deleted"
        wait_for_snapshots(table, "when it has joined again")
    check_all(client, table, load.ledger, scene.directory)


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
