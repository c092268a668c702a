"""Batches over every limit of a put: by a plain writer on real servers, killed between their parts.

The servers take 500 rows or 60 KB in a put, and a batch has several thousand rows.
"""

import os
import random
import signal
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from foundation.errors import BatchTooLarge, Overflow, Retryable
from foundation.failpoints import ENVIRONMENT_VARIABLE
from merge_engine.encoding.keys import KeyCodec
from recovery.writer.access import Grant, GrantedRows
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.client.uploads import LargePut
from server.launch.local_cluster import LocalCluster
from tests.conftest import schema_of
from tests.fault.cluster_load import (
    DEADLINE_S,
    LONGER,
    client_of,
    leaders,
    local_cluster,
)
from tests.support.small_disk import small_file_system
from tests.support.works import PutBy
from tests.support.zookeeper_server import wait_until

SCHEMA = schema_of(total=(pa.int64(), "sum"), last=(pa.string(), "last_value"))
COLUMNS = ["total", "last"]
LIMITS = ("--put-max-rows", "500", "--put-max-bytes", "60000")
ROWS = 6_000
_numbers = count()
FAILPOINTS = [
    *("put.planned", "put.logged", "put.applied", "put.part_written"),
    *("log.encoded", "log.created", "storage.written", "storage.linked"),
]


def _kills() -> list[tuple[str, str, int]]:
    """Return where servers are killed: by recovery, failpoint and visit; all in a long run."""
    every = [
        (recovery, failpoint, visit)
        for recovery in ("undo", "redo")
        for failpoint in FAILPOINTS
        for visit in (3, 9)
    ]
    every.append(("undo", "undo.planned", 1))
    between = [(recovery, "put.part_written", 5) for recovery in ("undo", "redo")]
    return every if LONGER else [*between, *random.Random(11).sample(every, 1)]


KILLS = _kills()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), options=LIMITS) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    for server in cluster.servers:
        if not server.alive:
            server.start()
    cluster.wait_until_joined()
    with client_of(cluster, attempt_s=10.0) as connected:
        yield connected


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    return client.create_table(f"large_{next(_numbers)}", SCHEMA, buckets=4)


def pieces(batch: int) -> Iterator[pa.Table]:
    """Yield a batch: every key twice, the second time with another text."""
    for turn in ("first", "second"):
        for begin in range(0, ROWS, 1_700):
            keys = list(range(begin, min(begin + 1_700, ROWS)))
            texts = [f"{turn} of batch {batch}" for _ in keys]
            yield pa.table({"k": keys, "total": [1] * len(keys), "last": texts})


def rows(batch: int) -> Rows:
    return Rows(data=lambda: pieces(batch), columns=COLUMNS)


def check(table: RemoteTable, batches: int) -> None:
    """So many batches are there, whole: by a committed scan, and by the changelog."""
    found = table.scan().to_arrow().to_pydict()
    assert sorted(found["k"]) == list(range(ROWS))
    assert set(found["total"]) == {2 * batches}
    assert set(found["last"]) == {f"second of batch {batches - 1}"}
    replayed: dict[int, Any] = {}
    for bucket in table.bucket_ids():
        for part in table.changelog(bucket):
            for row in part.to_pylist():
                if row["_change_type"] in ("insert", "update_postimage"):
                    replayed[row["k"]] = row["total"]
    assert set(replayed.values()) == {2 * batches}


def writer_of(table: RemoteTable, **settings: Any) -> TableWriter:
    return table.writer(owner_id="loader", columns=COLUMNS, **settings)


def test_a_batch_over_every_limit_is_written_once(table: RemoteTable) -> None:
    with writer_of(table) as writer:
        assert writer.write(0, rows(0))
        assert not writer.write(0, rows(0))
        assert writer.write(1, rows(1))
        assert writer.progress.keys_changed == 4 * ROWS
    check(table, 2)


def test_a_table_in_memory_is_cut_as_well(table: RemoteTable) -> None:
    with writer_of(table) as writer:
        writer.write(0, Rows(data=pa.concat_tables(pieces(0)), columns=COLUMNS))
    check(table, 1)


def test_a_put_without_a_lock_keeps_its_limits(client: Cluster) -> None:
    name = f"unlocked_{next(_numbers)}"
    table = client.create_table(name, SCHEMA, buckets=4, column_locks=False)
    with pytest.raises(BatchTooLarge, match="put_max"):
        table.put(pa.concat_tables(pieces(0)))
    assert table.scan().to_arrow().num_rows == 0


def test_one_bad_row_near_the_end_leaves_nothing_of_the_batch(table: RemoteTable) -> None:
    def with_a_bad_row() -> Iterator[pa.Table]:
        yield from pieces(1)
        yield pa.table({"k": [ROWS - 1], "total": [2**63 - 1], "last": ["too much"]})

    with writer_of(table) as writer:
        writer.write(0, rows(0))
        with pytest.raises(Overflow, match=f"key k={ROWS - 1}"):
            writer.write(1, Rows(data=with_a_bad_row, columns=COLUMNS))
        check(table, 1)
        writer.write(1, rows(1))
    check(table, 2)


@pytest.mark.parametrize("recovery", ["undo", "redo"])
@pytest.mark.parametrize("rows_of_batch", [400, ROWS])
def test_all_keys_that_servers_refuse_are_told_at_once(
    table: RemoteTable, tmp_path: Path, *, rows_of_batch: int, recovery: str
) -> None:
    """Of few rows and of many, by both servers, in whichever part they are."""
    keys = range(rows_of_batch)
    bad = {key for key in keys if key % 13 == 0}
    full = pa.table({"k": sorted(bad), "total": [2**63 - 1] * len(bad), "last": ["x"] * len(bad)})
    more = pa.table({"k": keys, "total": [1] * len(keys), "last": ["y"] * len(keys)})
    redo = RedoLog.open(str(tmp_path)) if recovery == "redo" else None
    with writer_of(table, redo=redo) as writer:
        writer.write(0, Rows(data=full, columns=COLUMNS))
        with pytest.raises(Overflow, match="column 'total', key k=") as refused:
            writer.write(1, Rows(data=more, columns=COLUMNS))
        assert len(refused.value.refused) == len(bad)
        good = more.filter(pa.array([key not in bad for key in keys]))
        writer.write(1, Rows(data=good, columns=COLUMNS))
    found = table.scan(["total"]).to_arrow().to_pydict()
    totals = dict(zip(found["k"], found["total"], strict=True))
    assert totals == {key: 2**63 - 1 if key in bad else 1 for key in keys}


@pytest.mark.parametrize("recovery", ["undo", "redo"])
@pytest.mark.parametrize("rows_of_batch", [400, ROWS])
def test_all_keys_whose_rows_do_not_go_together_are_told_within_a_few_tries(
    table: RemoteTable, tmp_path: Path, *, rows_of_batch: int, recovery: str
) -> None:
    """Those of a key that is in two parts are found when the others of these are left out."""
    keys = [key for key in range(rows_of_batch) for _ in range(2)]
    totals = [2**63 - 1 if key % 13 == 0 else 1 for key in keys]
    data = pa.table({"k": keys, "total": totals, "last": ["x"] * len(keys)})
    codec, wanted = KeyCodec([pa.int64()]), {key for key in keys if key % 13}
    redo = RedoLog.open(str(tmp_path)) if recovery == "redo" else None
    with writer_of(table, redo=redo) as writer:
        for _ in range(4):
            try:
                writer.write(0, Rows(data=data, columns=COLUMNS))
                break
            except Overflow as refused:
                [told] = codec.decode(pa.array(refused.refused, pa.binary()))
                data = data.filter(pc.invert(pc.is_in(data["k"], value_set=told)))
    found = table.scan(["total"]).to_arrow().to_pydict()
    assert dict(zip(found["k"], found["total"], strict=True)) == dict.fromkeys(wanted, 2)


@pytest.mark.parametrize("kill", KILLS)
def test_a_server_that_is_killed_anywhere_in_a_large_batch_has_written_it_once(
    table: RemoteTable,
    cluster: LocalCluster,
    client: Cluster,
    *,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kill: tuple[str, str, int],
) -> None:
    """A put that was begun is undone or, if it was promised, gone on with."""
    recovery, failpoint, visit = kill
    redo = RedoLog.open(str(tmp_path)) if recovery == "redo" else None
    server = cluster.servers[0]
    with writer_of(table, redo=redo) as writer:
        writer.write(0, rows(0))
        if failpoint == "undo.planned":  # There has to be something to undo.
            _die_in_a_batch(writer)
        server.kill()
        with monkeypatch.context() as patched:
            patched.setenv(ENVIRONMENT_VARIABLE, f"{failpoint}:{visit}")
            server.start()
        cluster.wait_until_joined()
        # It is killed when it begins to lead, or leads part of what is written next.
        wait_until(
            lambda: not server.alive or server.address in leaders(client, table).values(),
            "it leads again",
            DEADLINE_S,
        )
        restarted = threading.Thread(target=lambda: _start_again(cluster))
        restarted.start()
        writer.write(1, rows(1))
        restarted.join()
        assert writer.progress.starts > 1
        writer.write(2, rows(2))
    check(table, 3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def _die_in_a_batch(writer: TableWriter) -> None:
    def put(grant: Grant) -> Any:
        writer.access.put(GrantedRows(grant, writer._named(rows(1))))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.run(1, PutBy(put))


def _start_again(cluster: LocalCluster) -> None:
    server = cluster.servers[0]
    wait_until(lambda: not server.alive, "it was killed between two parts", DEADLINE_S)
    server.start()


def test_a_writer_that_dies_between_upload_and_end_is_succeeded_by_its_next_self(
    table: RemoteTable, client: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        """As a kill would: nothing cleans up behind it."""

    def die(*_: object, **__: object) -> None:
        raise Died

    first = writer_of(table).start()
    first.write(0, rows(0))
    with monkeypatch.context() as patched:
        patched.setattr(LargePut, "put", die)
        patched.setattr(LargePut, "close", lambda *_: None)
        with pytest.raises(Died):
            first.write(1, rows(1))
    assert _spooled(client) == 2, "both servers have an upload"
    with writer_of(table) as second:
        assert _spooled(client) == 0, "they were fenced, and forgotten"
        second.write(1, rows(1))
    check(table, 2)


def _spooled(client: Cluster) -> int:
    return sum(int(status["metrics"]["tallybook_spooled_puts"]) for status in client.status())


@pytest.mark.parametrize("recovery", ["undo", "redo"])
def test_buckets_that_move_while_a_batch_is_uploaded_have_it_begun_anew(
    tmp_path: Path, recovery: str
) -> None:
    """Another thread of the same client looks up, and so learns who the new leader is."""
    asked = 0
    with local_cluster(tmp_path / "cluster", options=LIMITS) as cluster:
        cluster.servers[1].stop()
        with client_of(cluster, attempt_s=10.0) as client:
            table = client.create_table("moved", SCHEMA, buckets=4)

            def both_lead() -> bool:
                table.lookup({"k": list(range(100))})
                return len(set(leaders(client, table).values())) == 2

            def moving() -> Iterator[pa.Table]:
                nonlocal asked
                asked += 1
                for number, piece in enumerate(pieces(0)):
                    yield piece
                    if (asked, number) == (1, 3):
                        cluster.servers[1].start()
                        cluster.wait_until_joined()
                        wait_until(both_lead, "both lead", DEADLINE_S)
                        table.lookup({"k": list(range(100))})

            redo = RedoLog.open(str(tmp_path / "redo")) if recovery == "redo" else None
            with writer_of(table, redo=redo) as writer:
                assert writer.write(0, Rows(data=moving, columns=COLUMNS))
                assert (asked, writer.progress.starts) == (2, 2)
            check(table, 1)


def test_of_two_tasks_with_one_token_the_second_goes_on_with_the_first(
    table: RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has sent its rows and died; the second has the same token, and other rows."""

    class Died(BaseException):
        """The task is gone."""

    real = LargePut._advance

    def advance_once(self: LargePut, upload: Any, try_only: bool) -> Any:
        self._call(upload, self._to_advance(upload, try_only=try_only))
        raise Died

    with writer_of(table) as writer:

        def twice(grant: Any) -> Any:
            access: Any = writer.access
            with monkeypatch.context() as patched:
                patched.setattr(LargePut, "_advance", advance_once)
                patched.setattr(LargePut, "close", lambda *_: None)
                with pytest.raises(Died):
                    access.put(GrantedRows(grant, writer._named(rows(0))))
            patched.undo()
            assert LargePut._advance is real
            return access.put(GrantedRows(grant, writer._named(rows(7))))

        writer.run(0, PutBy(twice, rows(0)))
    check(table, 1)


def test_reads_and_other_writers_go_on_beside_a_large_batch(
    table: RemoteTable, client: Cluster
) -> None:
    with writer_of(table) as writer:
        writer.write(0, rows(0))
        seen: list[set[Any]] = []
        beside = 0
        other = client.create_table(f"beside_{next(_numbers)}", SCHEMA, buckets=1)

        def look() -> None:
            nonlocal beside
            with other.writer(owner_id="other", columns=["total"]) as small:
                while not done.is_set():
                    seen.append(set(table.scan(["total"]).to_arrow()["total"].to_pylist()))
                    one = Rows(data={"k": [1], "total": [1]}, columns=["total"])
                    small.write(small.next_batch(), one)
                    beside += 1

        done = threading.Event()
        thread = threading.Thread(target=look)
        thread.start()
        try:
            for batch in range(1, 4):
                writer.write(batch, rows(batch))
        finally:
            done.set()
            thread.join(DEADLINE_S)
    assert beside
    assert all(len(values) <= 2 for values in seen), "per bucket, whole batches only"
    check(table, 4)


def test_a_disk_that_fills_while_rows_are_spooled_loses_nothing_and_goes_on_with_room(
    tmp_path: Path,
) -> None:
    with small_file_system(tmp_path / "views", "64m") as views:
        options = (*LIMITS, "--spool-min-free-bytes", str(32 << 20), "--views", str(views))
        with local_cluster(tmp_path / "cluster", servers=1, options=()) as cluster:
            server = cluster.servers[0]
            server.stop()
            # The last --views counts.
            server._command += [*options]
            server.start()
            cluster.wait_until_joined()
            filler = views / "filler"
            filler.write_bytes(bytes(50 << 20))
            with client_of(cluster) as client:
                table = client.create_table("full", SCHEMA, buckets=2)
                with writer_of(table, deadline_s=3.0) as writer:
                    with pytest.raises(Retryable, match="stay free; nothing was written"):
                        writer.write(0, rows(0))
                    filler.unlink()
                    writer.write(0, rows(0))
                check(table, 1)


def test_what_killed_servers_leave_in_the_spool_is_removed_at_the_start(
    cluster: LocalCluster, client: Cluster
) -> None:
    server = cluster.servers[1]
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.alive, "it is dead")
    left = server.log_path.parent / "views-1" / "spool" / "overlay-of-a-killed-one"
    left.mkdir(parents=True)
    (left / "000001.sst").write_bytes(b"rows")
    server.start()
    cluster.wait_until_joined()
    assert not left.exists()
