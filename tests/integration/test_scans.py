"""Scans of tables on a server: isolation, limits, columns, states, sources, sessions, bad calls."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from foundation.errors import (
    BadRequest,
    Closed,
    InvalidInput,
    NotLeader,
    PartitionGone,
    ServerFailed,
    ServerUnavailable,
    TallybookError,
    TooManyScanners,
    UnknownColumn,
    UnknownOrExpiredScannerError,
)
from foundation.ids import BucketId
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.segment import AggMode
from merge_engine.embedded.derived_calls import FOUND
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from merge_engine.schema.state_columns import state_column
from recovery.reader.table_changes import TableChanges
from recovery.reader.table_scan import ScanSource, TableScan
from recovery.writer.access import Answers, Grant, GrantedRows
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.lookups import look_up
from server.client.remote_table import RemoteTable
from server.client.scan_sources import row_schema, snapshot_rows
from server.protocol import wire
from server.protocol.reads import ChangelogBatch, CloseScanners, Scan, ScanBatch, ScanBegun
from server.tablet import reading as server_reading
from server.tablet.limits import ScannerLimits
from server.tablet.tablet_server import TabletServer
from tests.conftest import schema_of
from tests.support.raw_flight import Stranger, client_of, running
from tests.support.works import PutBy
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

SUMS = schema_of(a=(pa.int64(), "sum"), note=(pa.string(), "last_value"))
LIMITS = ScannerLimits(ttl_s=60, max_per_bucket=3, max_per_server=5)
Values = dict[int, tuple[Any, ...]]
Create = Callable[..., RemoteTable]


def partitioned() -> Schema:
    builder = SchemaBuilder().column("day", pa.string()).column("k", pa.int64())
    builder.agg_column("note", pa.string(), "last_value").primary_key("day", "k")
    return builder.partitioned_by("day").build()


@dataclass(frozen=True)
class Scene:
    """A server in this process, and a client."""

    server: TabletServer
    cluster: Cluster
    address: str

    def metric(self, name: str) -> float:
        [status] = self.cluster.status()
        return float(status["metrics"].get(f"tallybook_{name}", 0))

    @property
    def sessions(self) -> int:
        return int(self.metric("scanners"))

    def rows_scanned(self, table: RemoteTable) -> int:
        return int(self.metric(f'rows_scanned_total{{table="{table.name}"}}'))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("scans")
    with ExitStack() as stack:
        address = chroot(stack.enter_context(zookeeper_server(directory)))
        server = stack.enter_context(running(address, directory / "server", scanners=LIMITS))
        cluster = stack.enter_context(client_of(address))
        yield Scene(server, cluster, address)


@pytest.fixture(autouse=True)
def _no_session_is_left(scene: Scene) -> Iterator[None]:
    yield
    assert scene.sessions == 0


@pytest.fixture
def create(scene: Scene, request: pytest.FixtureRequest) -> Iterator[Create]:
    created: list[str] = []

    def create(schema: Schema = SUMS, *, buckets: int = 2, locked: bool = False) -> RemoteTable:
        name = f"t{abs(hash(request.node.name))}-{len(created)}"
        created.append(name)
        return scene.cluster.create_table(name, schema, buckets=buckets, column_locks=locked)

    yield create
    for name in created:
        scene.cluster.drop_table(name, force=True)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.tablet.scanning._MOST_BATCH_ROWS", 7)


def fill(table: RemoteTable, count: int = 100, **more: Any) -> None:
    table.put({"k": list(range(count)), "a": list(range(count)), **more})


def values_of(data: pa.Table | pa.RecordBatch) -> Values:
    """Return key -> values, and check that each key comes once."""
    rows = [tuple(row.values()) for row in data.to_pylist()]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[1:] for row in rows}


def iterated(scan: TableScan) -> Values:
    return values_of(pa.Table.from_batches(list(scan), scan.schema))


def scanned(table: RemoteTable, **arguments: Any) -> Values:
    """Return the rows, and check that both ways to read them show the same."""
    whole = values_of(table.scan(**arguments).to_arrow())
    assert iterated(table.scan(**arguments)) == whole
    return whole


def looked_up(table: RemoteTable, count: int = 100) -> Values:
    found = values_of(table.lookup({"k": list(range(count))}))
    return {key: row for key, row in found.items() if row != (None,) * len(row)}


# Rows


def test_an_empty_table_has_no_rows_but_offsets_and_columns(create: Create) -> None:
    table = create()
    scan = table.scan(isolation="latest")
    assert list(scan) == []
    assert scan.offsets == table.end_offsets() == {BucketId(0, 0): 1, BucketId(0, 1): 1}
    whole = table.scan()
    assert whole.to_arrow().schema == whole.schema == scan.schema
    assert scan.schema.names == ["k", "a", "note"]
    assert whole.cut is not None
    assert whole.cut.ends == scan.offsets
    assert (scan.cut, whole.offsets) == (None, {})


def test_an_empty_bucket_among_others_is_passed_over(create: Create) -> None:
    table = create(buckets=8)
    fill(table, 2)
    assert scanned(table) == {0: (0, None), 1: (1, None)}


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("isolation", ["committed", "latest"])
def test_many_batches_have_every_row_once_and_in_key_order_per_bucket(
    create: Create, isolation: str
) -> None:
    table = create()
    fill(table, 500)
    batches = list(table.scan(isolation=isolation))
    assert len(batches) > 70
    assert all(0 < batch.num_rows <= 7 for batch in batches)
    assert scanned(table, isolation=isolation) == {key: (key, None) for key in range(500)}
    for bucket in table.bucket_ids():
        of_bucket = [
            key
            for batch in table.scan(["a"], buckets=[bucket])
            for key in batch.column("k").to_pylist()
        ]
        assert of_bucket == sorted(of_bucket)


def test_large_rows_come_in_messages_of_a_few_megabytes(create: Create) -> None:
    table = create(buckets=1)
    for key in range(60):
        table.put({"k": [key], "a": [key], "note": [chr(65 + key % 26) * MEBIBYTE]})
    sizes = []
    for batch in table.scan():
        sizes.append(batch.nbytes)
        for key, note in zip(batch["k"].to_pylist(), batch["note"].to_pylist(), strict=True):
            assert note == chr(65 + key % 26) * MEBIBYTE
    assert sum(sizes) > 60 * MEBIBYTE
    assert max(sizes) < 16 * MEBIBYTE, sizes


@pytest.mark.usefixtures("small_batches")
def test_keys_longer_than_any_text_of_a_request(create: Create, scene: Scene) -> None:
    schema = SchemaBuilder().column("k", pa.string()).primary_key("k")
    table = create(schema.agg_column("a", pa.int64(), "sum").build(), buckets=1)
    keys = [f"{number:03d}" + "é" * 2_000 for number in range(30)]
    table.put({"k": keys, "a": list(range(30))})
    found = table.scan().to_arrow()
    assert (found["k"].to_pylist(), found["a"].to_pylist()) == (keys, list(range(30)))
    # And to go on behind such a key.
    stranger = _Scanning(scene.server.address, table)
    scanner, first = stranger.scan()
    _, rest = stranger.scan(scanner=scanner, after=first[0][1])
    seen = [key for batch, _ in (first[0], *rest) for key in batch.column("k").to_pylist()]
    assert seen == keys
    stranger.close_scanners(scanner)


# Isolation


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("isolation", ["committed", "latest"])
def test_what_is_written_while_a_scan_runs_is_not_seen_by_it(
    create: Create, isolation: str
) -> None:
    table = create(buckets=1)
    fill(table)
    expected = looked_up(table)
    scan = table.scan(isolation=isolation)
    batches = iter(scan)
    found = [next(batches)]
    table.put({"k": list(range(-50, 150)), "a": [1000] * 200})
    table.delete({"k": list(range(20, 80))})
    table.put({"k": list(range(20, 40)), "a": [5] * 20})
    found += batches
    assert values_of(pa.Table.from_batches(found)) == expected
    now = scanned(table, isolation=isolation)
    assert {key: row for key, row in now.items() if 0 <= key < 100} == looked_up(table)
    assert now[20] == (5, None)
    assert 40 not in now
    assert now[-1] == (1000, None)


@pytest.mark.usefixtures("small_batches")
def test_committed_rows_leave_out_work_that_is_undone_and_latest_ones_show_it(
    create: Create,
) -> None:
    table = create(locked=True)
    seen: dict[str, Values] = {}
    halves: list[pa.RecordBatch] = []
    with table.writer(owner_id="me", columns=["a"]) as writer:
        writer.write(0, Rows(data={"k": list(range(60)), "a": [1] * 60}))
        before = scanned(table)

        def put_then_fail(grant: Grant) -> Answers[Any]:
            more = {"k": list(range(30, 90)), "a": [10] * 60}
            writer.access.put(GrantedRows(grant, Rows(data=more)))
            for isolation in ("committed", "latest"):
                seen[isolation] = scanned(table, isolation=isolation)
            scan = iter(table.scan())
            halves.append(next(scan))
            rest.append(scan)
            raise InvalidInput("this batch is not to be")

        rest: list[Iterator[pa.RecordBatch]] = []
        with pytest.raises(InvalidInput, match="not to be"):
            writer.run(1, PutBy(put_then_fail))
        # The scan that began while the batch was there goes on after it was undone.
        halves += rest[0]
        assert values_of(pa.Table.from_batches(halves)) == before
        assert seen["committed"] == before == dict.fromkeys(range(60), (1, None))
        assert seen["latest"][89] == (10, None)
        assert seen["latest"][45] == (11, None)
        assert scanned(table) == scanned(table, isolation="latest") == before
        writer.write(1, Rows(data={"k": [1], "a": [1]}))
    assert scanned(table)[1] == (2, None)


@pytest.mark.usefixtures("small_batches")
def test_a_scan_and_the_changes_since_its_cut_are_the_table(create: Create) -> None:
    table = create(locked=True, buckets=3)
    stopping = threading.Event()
    started = threading.Event()

    def write() -> None:
        with table.writer(owner_id="me", columns=["a", "note"]) as writer:
            for number in range(10_000):
                keys = [(number * 7 + at) % 100 for at in range(20)]
                rows = Rows(data={"k": keys, "a": [1] * 20, "note": [str(number)] * 20})
                if number % 3 == 1:

                    def fail(grant: Grant, rows: Rows = rows) -> Answers[Any]:
                        writer.access.put(GrantedRows(grant, rows))
                        raise InvalidInput("undo this")

                    with pytest.raises(InvalidInput, match="undo this"):
                        writer.run(number, PutBy(fail))
                else:
                    writer.write(number, rows)
                started.set()
                if stopping.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        assert started.wait(180)
        scans = [table.scan() for _ in range(8)]
        try:
            states = [
                iterated(scan) if at % 2 else values_of(scan.to_arrow())
                for at, scan in enumerate(scans)
            ]
        finally:
            stopping.set()
        writing.result(180)
    final = looked_up(table)
    for scan, state in zip(scans, states, strict=True):
        assert scan.cut is not None
        assert _replayed(table.changes(scan.cut), state) == final
    for scan, following, state, later in zip(scans, scans[1:], states, states[1:], strict=False):
        assert _replayed(table.changes(scan.cut, following.cut), state) == later


def _replayed(changes: TableChanges, state: Values) -> Values:
    found = {key: list(row) for key, row in state.items()}
    for batch in changes:
        for record in batch.to_pylist():
            kind, names = record["_change_type"], record["_changed_columns"]
            row = found.setdefault(record["k"], [None, None])
            for name in names:
                at = ("a", "note").index(name)
                if kind in ("update_preimage", "delete"):
                    assert row[at] == record[name], record
                else:
                    assert kind != "insert" or row[at] is None, record
                row[at] = None if kind == "delete" else record[name]
    return {key: tuple(row) for key, row in found.items() if row != [None, None]}


# Limits and columns


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, 0), (1, 1), (7, 7), (60, 60), (100, 100), (999, 100)]
)
def test_a_limit_is_kept_across_buckets_and_the_server_sends_no_row_more(
    create: Create, scene: Scene, limit: int, expected: int
) -> None:
    table = create(buckets=4)
    fill(table)
    scan = table.scan(limit=limit)
    assert scan.to_arrow().num_rows == expected
    assert scene.rows_scanned(table) == expected
    assert len(iterated(table.scan(limit=limit))) == expected
    assert scene.rows_scanned(table) == 2 * expected
    if limit == 0:
        assert scan.offsets == {}


@pytest.mark.parametrize("limit", [-1, 1.5, "3"])
def test_a_limit_that_is_no_number_of_rows_is_refused(create: Create, limit: Any) -> None:
    with pytest.raises(InvalidInput, match="a limit is a number of rows"):
        create().scan(limit=limit)


def test_columns_are_those_asked_for_in_that_order(create: Create) -> None:
    table = create()
    fill(table, 3, note=["x", "y", "z"])
    assert table.scan(["note", "a"]).to_arrow().schema.names == ["k", "note", "a"]
    assert scanned(table, columns=["note"]) == {0: ("x",), 1: ("y",), 2: ("z",)}
    assert scanned(table, columns=[]) == {0: (), 1: (), 2: ()}
    with pytest.raises(UnknownColumn, match="did you mean 'note'"):
        table.scan(["notes"])


@pytest.mark.usefixtures("small_batches")
def test_a_scan_goes_on_when_columns_are_added_renamed_and_dropped_meanwhile(
    create: Create, scene: Scene
) -> None:
    table = create(buckets=1)
    fill(table, note=["n"] * 100)
    stale = scene.cluster.table(table.name)
    scan = iter(stale.scan())
    found = [next(scan)]
    table.rename_column("a", "amount")
    table.add_column("peak", pa.int64(), "max")
    table.drop_column("note")
    table.put({"k": [50], "amount": [1], "peak": [9]})  # The server has heard of it.
    found += scan
    assert values_of(pa.Table.from_batches(found)) == {key: (key, "n") for key in range(100)}
    assert scanned(stale, columns=["a"])[50] == (51,)
    with pytest.raises(UnknownColumn, match=r"'note' .*was dropped meanwhile"):
        stale.scan(["note"]).to_arrow()
    whole = stale.scan().to_arrow()
    assert whole.schema.names == ["k", "amount", "peak"], "all that there are, not those known here"
    assert values_of(whole)[50] == (51, 9)
    assert values_of(whole)[49] == (49, None)


# States

STATES = schema_of(
    mean=(pa.float64(), "avg"), seen=(pa.int64(), "hll_sketch"), words=(pa.string(), "string_agg")
)
STATE_NAMES = ["mean_state", "seen_state", "words_state"]


def state_rows(start: int, stop: int) -> dict[str, list[Any]]:
    numbers = list(range(start, stop))
    words = [f"w{number}" for number in numbers]
    return {"k": [n % 10 for n in numbers], "mean": numbers, "seen": numbers, "words": words}


def with_states(table: RemoteTable, *, committed: bool, count: int = 11) -> pa.Table:
    """Return values and states of these keys, the last of which is absent."""
    cut = table.cut() if committed else None
    keys, names = {"k": list(range(count))}, ["mean", "seen", "words"]
    found = look_up(table.caller, keys, None, cut, states=names, found=True)
    assert found.column_names == ["k", *names, *STATE_NAMES, FOUND]
    assert found[FOUND].to_pylist() == [True] * (count - 1) + [False]
    assert set(found.to_pylist()[-1].values()) == {count - 1, None, False}
    return found.slice(0, count - 1)


def merged(create: Create, rows: pa.Table) -> pa.Table:
    """Return what these states read as in another table."""
    other = create(STATES)
    renamed = rows.select(["k", *STATE_NAMES]).rename_columns(["k", "mean", "seen", "words"])
    other.put(renamed, mode=AggMode.MERGE_STATE)
    return other.lookup(rows.select(["k"]))


def test_a_look_up_has_states_that_merge_in_another_table(create: Create) -> None:
    table = create(STATES, locked=True)
    seen: dict[bool, pa.Table] = {}
    with table.writer(owner_id="me", columns=["mean", "seen", "words"]) as writer:
        writer.write(0, Rows(data=state_rows(0, 30)))
        before = with_states(table, committed=True)

        def put_then_fail(grant: Grant) -> Answers[Any]:
            writer.access.put(GrantedRows(grant, Rows(data=state_rows(30, 50))))
            for committed in (False, True):
                seen[committed] = with_states(table, committed=committed)
            raise InvalidInput("this batch is not to be")

        with pytest.raises(InvalidInput, match="not to be"):
            writer.run(1, PutBy(put_then_fail))
    assert before["mean_state"][3].as_py() == {"sum": 39.0, "count": 3}
    assert before["words_state"][3].as_py() == ["w3", "w13", "w23"]
    assert seen[True] == before == with_states(table, committed=False)
    assert seen[False]["mean_state"][3].as_py() == {"sum": 115.0, "count": 5}
    for rows in seen.values():
        assert merged(create, rows) == rows.select(["k", "mean", "seen", "words"])


def test_a_look_up_has_the_states_that_are_asked_for(create: Create) -> None:
    table = create(STATES.add_column("words_state", pa.int64(), "sum"))
    table.put({"k": [1], "mean": [1.0], "words": ["x"], "words_state": [7]})
    keys = {"k": [1, 2]}
    found = look_up(table.caller, keys, [], None, states=["words", "k"])
    assert found.to_pydict() == {"k": [1, 2], "words_state": [["x"], None]}
    found = look_up(table.caller, keys, ["words_state"], None, states=["mean"], found=True)
    assert values_of(found)[1] == (7, {"sum": 1.0, "count": 1}, True)
    with pytest.raises(InvalidInput, match="two columns called 'words_state'"):
        look_up(table.caller, keys, None, None, states=["words"])
    with pytest.raises(UnknownColumn, match="did you mean 'mean'"):
        look_up(table.caller, keys, None, None, states=["men"])


def test_a_leased_snapshot_is_scanned_with_states(create: Create, scene: Scene) -> None:
    table = create(STATES)
    table.put(state_rows(0, 30))
    columns = [state_column(column) for column in STATES.value_columns]
    with table.lease_latest("tiering", renew=False) as lease:
        at_lease = with_states(table, committed=False)
        table.put(state_rows(30, 50))
        for cut, expected in (
            (None, at_lease),
            (lease.cut, at_lease),
            (table.cut(), with_states(table, committed=False)),
        ):
            opening = snapshot_rows(
                scene.cluster.storage(),
                table.definition,
                [*STATES.value_columns, *columns],
                lease,
                cut=cut,
                knowing=table.caller.knowing,
            )
            batches = [batch for key in table.bucket_ids() for batch in opening(key, None)]
            shown = row_schema(table.definition, [*STATES.value_columns, *columns])
            found = pa.Table.from_batches(batches, shown).sort_by("k")
            assert found.to_pylist() == expected.drop_columns([FOUND]).to_pylist()


# Partitions and buckets


@pytest.mark.usefixtures("small_batches")
def test_partitions_are_scanned_and_one_that_is_dropped_ends_its_scan(create: Create) -> None:
    # Far more than goes over the wire before anybody reads it.
    table = create(partitioned(), buckets=1)
    for day in ("mo", "tu"):
        table.put({"day": [day] * 90, "k": list(range(90)), "note": ["x" * 300_000] * 90})
    assert table.scan().to_arrow().num_rows == 180
    monday = [min(table.bucket_ids())]
    assert set(table.scan(buckets=monday).to_arrow()["day"].to_pylist()) == {"mo"}
    scan, later = iter(table.scan()), table.scan()
    next(scan)
    table.drop_partition(day="mo")
    with pytest.raises(PartitionGone, match="were dropped meanwhile"):
        # Until the server hears of it, rows come: they are pinned.
        wait_until(lambda: next(scan, None) is None, "the end of the scan")
    with pytest.raises(PartitionGone, match="were dropped meanwhile"):
        later.to_arrow()
    assert set(table.scan().to_arrow()["day"].to_pylist()) == {"tu"}


def test_buckets_are_those_asked_for_each_once(create: Create) -> None:
    table = create()
    fill(table)
    one = BucketId(0, 1)
    rows = scanned(table, buckets=[one])
    assert 0 < len(rows) < 100
    assert scanned(table, buckets=[one, one]) == rows
    assert scanned(table, buckets=[]) == {}
    with pytest.raises(InvalidInput, match="the table has no buckets"):
        table.scan(buckets=[BucketId(0, 2)])


def test_live_rows_are_the_source_unless_told_otherwise(create: Create) -> None:
    table = create(buckets=2)
    fill(table, 10)
    live = table.scan(source=ScanSource.LIVE_KV).to_arrow()
    assert live.num_rows == 10
    assert live.equals(table.scan().to_arrow())


# The log


def test_the_log_is_a_source_with_limits_and_says_where_to_go_on(create: Create) -> None:
    table = create(buckets=1)
    [bucket] = table.bucket_ids()
    fill(table, 10)
    table.put({"k": [3], "a": [100]})
    scan = table.scan(source=ScanSource.LOG)
    records = scan.to_arrow()
    assert records.schema == scan.schema
    kinds = records["_change_type"].to_pylist()
    assert kinds == ["insert"] * 10 + ["update_preimage", "update_postimage"]
    assert scan.offsets == table.end_offsets()
    for limit in range(13):
        first = table.scan(source=ScanSource.LOG, limit=limit)
        seen = first.to_arrow()
        assert seen.num_rows == limit
        rest = table.scan(source=ScanSource.LOG, from_offsets=first.offsets).to_arrow()
        # An update that the limit cut in two comes again as a whole.
        assert seen.num_rows + rest.num_rows == 12 + (limit == 11)
        assert rest.slice(rest.num_rows - (12 - limit)).equals(records.slice(limit))
    later = table.scan(source=ScanSource.LOG, from_offsets={bucket: 11})
    assert later.to_arrow()["a"].to_pylist() == [3, 103]
    with pytest.raises(InvalidInput, match="leave `columns`"):
        table.scan(["a"], source=ScanSource.LOG)
    with pytest.raises(InvalidInput, match="a lease goes with"):
        table.scan(source=ScanSource.SNAPSHOT)


def test_records_of_the_log_have_the_columns_that_there_are_not_those_known_here(
    create: Create, scene: Scene
) -> None:
    table = create(buckets=1)
    stale = scene.cluster.table(table.name)
    table.add_column("c", pa.int64(), "sum")
    table.put({"k": [1], "c": [5]})
    assert stale.scan(source=ScanSource.LOG).to_arrow()["c"].to_pylist() == [5]


def test_a_table_that_is_altered_while_its_log_is_read_says_so_and_where_to_go_on(
    create: Create,
) -> None:
    table = create()
    fill(table)
    scan = table.scan(source=ScanSource.LOG)
    reading = iter(scan)
    seen = next(reading).num_rows
    table.add_column("c", pa.int64(), "sum")
    fill(table, c=list(range(100)))
    with pytest.raises(InvalidInput, match=r"begin again from the offset .* `table.refresh\(\)`"):
        list(reading)
    rest = table.scan(source=ScanSource.LOG, from_offsets=scan.offsets).to_arrow()
    assert rest["c"].drop_null().to_pylist() != []
    kinds = rest["_change_type"].to_pylist()
    assert kinds.count("insert") + seen == 100


def test_a_log_that_is_read_has_no_values_of_a_column_in_the_place_of_another(
    create: Create,
) -> None:
    table = create()
    fill(table, note=["old"] * 100)
    reading = iter(table.scan(source=ScanSource.LOG))
    next(reading)
    table.drop_column("note")
    table.add_column("note", pa.string(), "first_value")
    fill(table, note=["new"] * 100)
    with pytest.raises(InvalidInput, match="altered while its log was read"):
        list(reading)


def test_a_server_that_does_not_say_which_columns_it_shows_is_not_guessed_at(
    create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an earlier release."""

    def earlier(*, next_offset: int, schema_version: int) -> ChangelogBatch:
        assert schema_version
        return ChangelogBatch(next_offset=next_offset)

    monkeypatch.setattr(server_reading, "ChangelogBatch", earlier)
    table = create()
    fill(table)
    assert table.changes().to_arrow().num_rows == 100
    table.drop_column("a")
    table.add_column("a", pa.int64(), "sum")
    fill(table)
    with pytest.raises(ServerFailed, match="upgrade servers before their clients"):
        table.changes().to_arrow()


@pytest.mark.parametrize("isolation", ["latest", "committed"])
def test_a_changelog_beside_an_alteration_and_a_put_has_both_or_neither(
    create: Create, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    table = create(buckets=1)
    fill(table, 2)
    [bucket] = table.bucket_ids()
    meanwhile: Iterator[Callable[[], object]] = iter(
        [
            lambda: table.add_column("c", pa.int64(), "sum"),
            lambda: table.put({"k": [1], "c": [5]}),
        ]
    )

    def read_first(real: Any) -> Any:
        def end(self: Bucket) -> int:
            for happens in meanwhile:
                happens()
            return real(self)  # type: ignore[no-any-return]

        return end

    # Where the server fixes the end of what it tells.
    for name in ("settled_end", "confirm"):
        monkeypatch.setattr(Bucket, name, read_first(getattr(Bucket, name)))
    found = [batch["c"].to_pylist() for batch in table.changelog(bucket, 0, isolation=isolation)]
    # What is committed was pinned before the put.
    assert found == ([[None, None], [5]] if isolation == "latest" else [[None, None]])


# Sessions


@pytest.mark.usefixtures("small_batches")
def test_a_scan_that_is_left_early_frees_its_session_at_once(create: Create, scene: Scene) -> None:
    table = create()
    fill(table)

    def leave_generator() -> None:
        batches = iter(table.scan())
        next(batches)
        assert scene.sessions == 2, "that of the next bucket, too"
        batches.close()  # type: ignore[attr-defined]

    def leave_loop() -> None:
        for _ in table.scan():
            break

    def leave_block() -> None:
        with table.scan() as scan:
            batches = iter(scan)
            next(batches)
            assert scene.sessions == 2
        assert scene.sessions == 0
        with pytest.raises(Closed, match="was closed; begin another"):
            next(batches)

    def fail() -> None:
        with suppress(ZeroDivisionError), table.scan() as scan:
            for _ in scan:
                raise ZeroDivisionError

    for leave in (leave_generator, leave_loop, leave_block, fail):
        leave()
        assert scene.sessions == 0, leave


def test_closing_twice_or_before_it_began_is_fine(create: Create) -> None:
    table = create()
    scan = table.scan()
    for _ in range(2):
        scan.close()
    with closing(table.scan()) as again:
        assert list(again) == []
        again.close()


@pytest.mark.usefixtures("small_batches")
def test_a_bucket_at_its_limit_is_waited_for_until_a_scanner_is_closed(
    create: Create, scene: Scene
) -> None:
    table = create(buckets=1)
    fill(table)
    held = [iter(table.scan()) for _ in range(LIMITS.max_per_bucket)]
    for batches in held:
        next(batches)
    refusals = f'errors_total{{call="scan",error="{TooManyScanners.__name__}"}}'
    with (
        client_of(scene.address, deadline_s=0.3) as impatient,
        pytest.raises(ServerUnavailable, match="scanners-per-bucket"),
    ):
        impatient.table(table.name).scan().to_arrow()
    before = scene.metric(refusals)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scanned, table)
        wait_until(lambda: scene.metric(refusals) >= before + 3, "it was refused three times")
        assert not waiting.done()
        held.pop().close()  # type: ignore[attr-defined]
        assert len(waiting.result(180)) == 100
    assert scene.metric(refusals) - before < 40, "each attempt waits longer than the one before"
    for batches in held:
        assert sum(batch.num_rows for batch in batches) == 93


def test_the_servers_limit_counts_all_tables(create: Create, scene: Scene) -> None:
    tables = [create(buckets=1) for _ in range(3)]
    held = []
    for table in tables:
        fill(table, 1)
        held += [iter(table.scan()) for _ in range(2)]
    for batches in held[:5]:
        next(batches)
    with (
        client_of(scene.address, deadline_s=0.3) as impatient,
        pytest.raises(ServerUnavailable, match="scanners-per-server"),
    ):
        impatient.table(tables[2].name).scan().to_arrow()
    for batches in held:
        batches.close()  # type: ignore[attr-defined]


# Requests that no client of ours sends


class _Scanning(Stranger):
    """Begins and takes up scans as it is told."""

    def scan(self, **changes: Any) -> tuple[str, list[tuple[pa.RecordBatch, str]]]:
        """Return the scanner and the batches, each with its last key."""
        reader = self.get_stream(self.scan_ticket(**changes))
        about = ScanBegun.from_body(reader.read_chunk().app_metadata)
        batches: list[tuple[pa.RecordBatch, str]] = []
        while True:
            chunk = reader.read_chunk()
            told = Scan.read_message(wire.decode(chunk.app_metadata))
            if not isinstance(told, ScanBatch):
                return about.scanner, batches
            batches.append((chunk.data, told.last_key.hex()))

    def get_stream(self, ticket: bytes) -> Any:
        return self.client.do_get(flight.Ticket(ticket), self._options)

    def close_scanners(self, *scanners: str) -> None:
        self.action(CloseScanners.name, CloseScanners(scanners=scanners).to_body())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such scanner": ({"scanner": "00"}, UnknownOrExpiredScannerError, "there is no scanner 00"),
    "a scanner that is no text": ({"scanner": 7}, BadRequest, "a text as `scanner`"),
    "a negative limit": ({"limit": -1}, BadRequest, "a scan of -1 rows"),
    "a limit that is no number": ({"limit": "1"}, BadRequest, "whole number as `limit`"),
    "a limit without end": ({"limit": 10**30}, BadRequest, "64 bits"),
    "negative batches": ({"batch_rows": -1}, BadRequest, "in batches of -1"),
    "batches of nothing": ({"batch_rows": 0}, BadRequest, "in batches of 0"),
    "a key that is not hexadecimal": ({"after": "xyz"}, BadRequest, "`after` is not hexadecimal"),
    "a key that is a number": ({"after": 12}, BadRequest, "`after` is not hexadecimal"),
    "an unknown stream": ({"call": "scans"}, BadRequest, "there is no stream 'scans'"),
    "no stream": ({"call": None}, BadRequest, "a text as `call`"),
    "no bucket": ({"buckets": []}, BadRequest, "a scan of 0 buckets"),
    "two buckets": ({"buckets": [[0, 0], [0, 1]]}, BadRequest, "a scan of 2 buckets"),
    "a bucket too high": ({"buckets": [[0, 9]]}, BadRequest, "is none of a table"),
    "another partition": ({"buckets": [[5, 0]]}, NotLeader, "does not lead"),
    "an unknown isolation": ({"isolation": "dirty"}, BadRequest, "no isolation is called"),
    "no isolation": ({"isolation": None}, BadRequest, "a text as `isolation`"),
    "an unknown column": ({"columns": [99]}, UnknownColumn, "no column with id 99"),
    "columns by name": ({"columns": ["a"]}, BadRequest, "`columns`"),
    "a column of the key": ({"columns": [SUMS.key_columns[0].id]}, UnknownColumn, "'k'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_scan_is_refused_and_leaves_no_session(
    create: Create, scene: Scene, name: str
) -> None:
    changes, kind, words = BAD[name]
    table = create()
    fill(table)
    stranger = _Scanning(scene.server.address, table)
    with closing(stranger), pytest.raises(kind, match=words):
        stranger.get(stranger.scan_ticket(**changes))
    assert scene.sessions == 0


def test_a_scanner_is_of_its_bucket_and_is_closed_by_whoever_names_it(
    create: Create, scene: Scene
) -> None:
    table = create()
    fill(table)
    with closing(_Scanning(scene.server.address, table)) as stranger:
        scanner, batches = stranger.scan()
        with pytest.raises(BadRequest, match=r"is of bucket 0/0 of table \d+, not 0/1 of"):
            stranger.get(stranger.scan_ticket(scanner=scanner, buckets=[[0, 1]]))
        assert sum(batch.num_rows for batch, _ in batches) == scene.rows_scanned(table)
        # A key that is none, and keys before and behind all others.
        for after, rows in ((b"", batches[0][0].num_rows), (b"\xff" * 2_000, 0)):
            _, found = stranger.scan(scanner=scanner, after=after.hex())
            assert sum(batch.num_rows for batch, _ in found) == rows
        stranger.close_scanners("nobody")
        stranger.close_scanners()
        stranger.action("close_scanners", wire.encode({}))
        with pytest.raises(BadRequest):
            stranger.action("close_scanners", wire.encode({"scanners": [1]}))
        assert scene.sessions == 1
        stranger.close_scanners(scanner, scanner)
        assert scene.sessions == 0
        with pytest.raises(TallybookError, match="there is no scanner"):
            stranger.get(stranger.scan_ticket(scanner=scanner))
