"""What takes many calls: undos of batches, snapshots; on real servers, each call of one step."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from foundation.errors import OldEpoch
from foundation.failpoints import arm
from foundation.ids import BucketId
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.undo import UndoRange
from recovery.leader.led_bucket import LedBucket
from recovery.writer.access import Answers, Grant, GrantedRows
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster, connect
from server.client.remote_table import RemoteTable
from server.client.table_caller import TableCaller
from server.client.undoing import undo_some
from server.protocol.calls import TakeSnapshots
from server.protocol.messages import NOT_THERE
from server.protocol.writers import Undo
from server.tablet.config import ServerConfig
from server.tablet.tablet_server import TabletServer
from tests.conftest import schema_of
from tests.support.works import PutBy
from tests.support.zookeeper_server import chroot, zookeeper_server

SCHEMA = schema_of(total=(pa.int64(), "sum"), other=(pa.int64(), "sum"))
BUCKETS = 4
ROWS = 400
PART_ROWS = 20
DEADLINE_S = 30
OPTIONS = BucketOptions(put_max_rows=PART_ROWS, undo_max_bytes=1)
_numbers = count()


class Died(BaseException):
    """As a kill would: nothing cleans up behind it."""


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("undos")) as running:
        yield running


@pytest.fixture
def servers(zookeeper: EmbeddedZooKeeper, tmp_path: Path) -> Iterator[list[TabletServer]]:
    """Return two servers that undo one step with every call."""
    address = chroot(zookeeper)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                TabletServer(
                    ServerConfig(
                        zookeeper=address,
                        logs=str(tmp_path / "logs"),
                        views=tmp_path / f"views-{number}",
                        options=OPTIONS,
                        call_s=0.0,
                    )
                )
            )
            for number in range(2)
        ]


@pytest.fixture
def client(servers: list[TabletServer]) -> Iterator[Cluster]:
    with connect(servers[0]._config.zookeeper, deadline_s=60.0) as connected:
        yield connected


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    return client.create_table(f"t{next(_numbers)}", SCHEMA, buckets=BUCKETS)


def test_snapshots_are_taken_a_few_with_every_call(
    client: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server takes one: so a lease of however many buckets outlasts no call's deadline."""
    table = client.create_table("many", SCHEMA, buckets=8, column_locks=False)
    taken: list[int] = []
    real = TableCaller.call

    def counted(caller: TableCaller, call: Any, **how: Any) -> Any:
        answers = real(caller, call, **how)
        if isinstance(call, TakeSnapshots):
            taken.append(sum(one != NOT_THERE for one in answers.results.values()))
        return answers

    monkeypatch.setattr(TableCaller, "call", counted)
    with table.lease_latest("all") as lease:
        assert sorted(lease.snapshots) == table.bucket_ids()
    assert sum(taken) == 8
    assert max(taken) <= 2
    assert table.snapshot() == dict.fromkeys(table.bucket_ids(), 1)


class Asked:
    """Counts the calls of undo, and lets something happen once, behind one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at = 0
        self.act: Callable[[], object] | None = None
        real = TableCaller.call

        def counted(caller: TableCaller, call: Any, **how: Any) -> Any:
            answers: Any = real(caller, call, **how)
            self.calls += isinstance(call, Undo)
            if self.act is not None and self.calls == self.at:
                act, self.act = self.act, None
                act()
            return answers

        monkeypatch.setattr(TableCaller, "call", counted)

    def then(self, calls: int, act: Callable[[], object]) -> None:
        self.at, self.act = calls, act


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def rows(amount: int, column: str = "total") -> Rows:
    """Return a batch of every key twice."""

    def pieces() -> Iterator[pa.Table]:
        for _ in range(2):
            yield pa.table({"k": list(range(ROWS)), column: [amount] * ROWS})

    return Rows(data=pieces, columns=[column])


def writer_of(table: RemoteTable, owner: str = "loader", column: str = "total") -> TableWriter:
    return table.writer(owner_id=owner, columns=[column])


def leave_a_tail(table: RemoteTable) -> None:
    """Commit a batch, and die when the next one is written and not committed."""
    writer = writer_of(table).start()
    writer.write(0, rows(1))

    def put(grant: Grant) -> Answers[Any]:
        writer.access.put(GrantedRows(grant, writer._named(rows(5))))
        raise Died

    with pytest.raises(Died):
        writer.run(1, PutBy(put))
    writer._stop_renewal()
    assert set(contents(table)["total"]) == {12}


def contents(table: RemoteTable, isolation: str = "latest") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = table.scan(isolation=isolation).to_arrow().to_pydict()
    assert sorted(found["k"]) == list(range(ROWS))
    return found


def segments_undone(servers: list[TabletServer]) -> int:
    led = [led.bucket for server in servers for led in server.hosting.led().values()]
    return sum(one.undo_from is not None for bucket in led for one in bucket.headers(0))


def test_an_undo_of_many_calls_brings_the_table_back(
    table: RemoteTable, servers: list[TabletServer], asked: Asked
) -> None:
    leave_a_tail(table)
    with writer_of(table) as writer:
        assert set(contents(table)["total"]) == {2}
        assert set(contents(table, "committed")["total"]) == {2}
        assert asked.calls >= 2 * ROWS // PART_ROWS // len(servers)
        assert segments_undone(servers) >= 2 * ROWS // PART_ROWS
        assert writer.progress.undone_keys == 2 * ROWS
        assert writer.progress.starts == 1
        writer.write(1, rows(7))
    assert set(contents(table)["total"]) == {16}


def test_a_successor_goes_on_and_the_first_one_is_told_with_its_next_call(
    table: RemoteTable, asked: Asked
) -> None:
    leave_a_tail(table)
    first, second = writer_of(table), writer_of(table)
    asked.then(5, second.start)
    with pytest.raises(OldEpoch):
        first.start()
    assert set(contents(table)["total"]) == {2}
    assert 0 < first.progress.undone_keys < 2 * ROWS
    assert first.progress.undone_keys + second.progress.undone_keys == 2 * ROWS
    second.write(1, rows(7))
    second.close()
    assert set(contents(table)["total"]) == {16}


def test_another_owner_writes_between_two_calls(table: RemoteTable, asked: Asked) -> None:
    leave_a_tail(table)

    def beside() -> None:
        with writer_of(table, "other", "other") as other:
            other.write(0, rows(3, "other"))

    asked.then(5, beside)
    with writer_of(table) as writer:
        assert writer.progress.undone_keys == 2 * ROWS, "others' keys are not counted"
    found = contents(table)
    assert (set(found["total"]), set(found["other"])) == ({2}, {6})


def test_a_leader_that_moves_between_two_calls_is_met_by_starting_over(
    table: RemoteTable, servers: list[TabletServer], asked: Asked
) -> None:
    leave_a_tail(table)
    asked.then(5, servers[0].stop)
    with writer_of(table) as writer:
        assert writer.progress.starts > 1
        # What the other server answers to the call that fails is not counted.
        assert 0 < writer.progress.undone_keys <= 2 * ROWS
        assert set(contents(table)["total"]) == {2}


# --- Without column locks -----------------------------------------------------------------------


@pytest.fixture
def unlocked(client: Cluster) -> RemoteTable:
    """Return a table where x has written every key, and then added to it in small puts."""
    name = f"u{next(_numbers)}"
    table = client.create_table(name, SCHEMA, buckets=BUCKETS, column_locks=False)
    for begin in range(0, ROWS, PART_ROWS):
        keys = list(range(begin, begin + PART_ROWS))
        table.put({"k": keys, "total": [2] * PART_ROWS}, owner="x")
    return table


def add_to_all(table: RemoteTable) -> dict[BucketId, int]:
    """Let x add to all keys; return where the logs ended before."""
    ends = table.end_offsets()
    for begin in range(0, ROWS, PART_ROWS):
        keys = list(range(begin, begin + PART_ROWS))
        table.put({"k": keys, "total": [5] * PART_ROWS}, owner="x")
    return ends


def test_without_locks_what_the_debtor_writes_between_two_calls_stands(
    unlocked: RemoteTable, asked: Asked
) -> None:
    ends = add_to_all(unlocked)
    new = {"k": list(range(1000, 1010)), "total": [9] * 10}
    asked.then(5, lambda: unlocked.put(new, owner="x"))
    results = unlocked.undo("x", ["total"], ends)
    assert asked.calls > 5
    assert sum(result.changed for result in results.values()) == ROWS
    found = unlocked.scan(isolation="latest").to_arrow().sort_by("k").to_pydict()
    assert found["k"] == [*range(ROWS), *new["k"]]
    assert found["total"] == [2] * ROWS + [9] * 10


def test_without_locks_the_next_call_finds_the_new_leader(
    unlocked: RemoteTable, servers: list[TabletServer], asked: Asked
) -> None:
    ends = add_to_all(unlocked)
    asked.then(5, servers[0].stop)
    results = unlocked.undo("x", ["total"], ends)
    assert sum(result.changed for result in results.values()) == ROWS
    assert set(contents(unlocked)["total"]) == {2}


def test_a_server_that_is_late_with_the_first_bucket_leaves_the_others_for_the_next_call(
    unlocked: RemoteTable,
) -> None:
    """However many buckets a server has, its calls are short."""
    ends = add_to_all(unlocked)
    steps = 0

    def count_step() -> None:
        nonlocal steps
        steps += 1

    ids = [unlocked.schema.column("total").id]
    with arm("undo.planned", count_step):
        ranges = {key: UndoRange(end) for key, end in ends.items()}
        answers = undo_some(unlocked.caller, "x", ids, ranges)
    assert steps == len(answers.sessions), "one for each server"
    results = answers.results.values()
    assert sum(result.changed > 0 for result in results) == len(answers.sessions)
    assert all(result.rest is not None for result in results)


def test_a_put_is_not_held_up_by_parts_that_wait_for_its_buckets(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once had the same threads: the put held a bucket, and waited for one of those."""
    held, waiting = threading.Event(), threading.Event()
    check_put, parts_done = LedBucket.check_put, LedBucket.parts_done

    def hold(led: LedBucket, *arguments: Any) -> None:
        held.set()
        assert waiting.wait(DEADLINE_S)
        check_put(led, *arguments)

    def wait_for_it(led: LedBucket, *arguments: Any, **settings: Any) -> Any:
        waiting.set()
        return parts_done(led, *arguments, **settings)

    config = ServerConfig(
        zookeeper=chroot(zookeeper),
        logs=str(tmp_path / "logs"),
        views=tmp_path / "views",
        options=OPTIONS,
    )
    with ExitStack() as stack:
        with mock.patch("os.cpu_count", return_value=1):
            stack.enter_context(TabletServer(config))
        client = stack.enter_context(connect(config.zookeeper, deadline_s=DEADLINE_S))
        table = client.create_table("beside", SCHEMA, buckets=2)
        small = stack.enter_context(table.writer(owner_id="small", columns=["other"]))
        large = stack.enter_context(table.writer(owner_id="large", columns=["total"]))
        monkeypatch.setattr(LedBucket, "check_put", hold)
        monkeypatch.setattr(LedBucket, "parts_done", wait_for_it)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        few = pa.table({"k": list(range(10)), "other": [1] * 10})
        putting = pool.submit(small.write, 0, Rows(data=few, columns=["other"]))
        assert held.wait(DEADLINE_S)
        many = pa.table({"k": list(range(ROWS)), "total": [1] * ROWS})
        loading = pool.submit(large.write, 0, Rows(data=many, columns=["total"]))
        assert putting.result(DEADLINE_S)
        assert loading.result(DEADLINE_S)
        assert small.progress.starts == large.progress.starts == 1
