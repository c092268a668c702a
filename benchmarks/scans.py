"""Scans: all rows of a bucket, in key order and finished, over RocksDB's own pairs of bytes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from rocksdict import AccessType, Rdict

from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from benchmarks.workload import Workload, open_bucket, view_of
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from recovery.reader.bucket_scan import BucketScan, open_scan
from recovery.reader.cut import Bound, BucketCut
from server.launch.local_cluster import LocalCluster


def scan_vs_bare_iteration(setting: Setting) -> Iterator[Figure]:
    """Live scans over bare iteration of the same files: a first pass, a second, and a mask."""
    directory = setting.directory / "scans"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(directory, work.history)
    for batch in work.fill():
        bucket.put(batch)
    bucket.flush()
    options = BucketOptions()
    database = Rdict(
        str(view_of(directory)),
        options.to_options(options.to_cache()),
        access_type=AccessType.read_only(),
    )

    def bare() -> None:
        for _key, _value in database.items():
            pass

    def step(cut: BucketCut, *, again: bool = False) -> tuple[float, float]:
        with closing(open_scan(bucket, None)) as read_before:
            if again:
                _read(read_before)

            def scan() -> int:
                if again:
                    return _read(read_before)
                with closing(open_scan(bucket, cut)) as opened:
                    return _read(opened)

            seconds, rows = timed(scan)
        assert rows == setting.keys
        bare_seconds, _ = timed(bare)
        return seconds / rows, bare_seconds / rows

    what = f"of {setting.keys:,} rows (sum, max, count, last string), in process, against "
    what += "`for key, value in db.items()` of bare rocksdict over the same files"
    everything = BucketCut(bounds={}, others=Bound())
    step(everything)
    yield interleave(setting.runs, 1, lambda: step(everything)).speed(
        "scan_vs_bare_iteration", what=f"live scan {what}", unit="rows", goal=">=0.5"
    )
    yield interleave(setting.runs, 1, lambda: step(everything, again=True)).speed(
        "scan_again_vs_bare_iteration", what=f"second pass over one scan {what}", unit="rows"
    )
    before = _with_more(bucket, work)
    yield interleave(setting.runs, 1, lambda: step(before)).speed(
        "masked_scan_vs_bare_iteration",
        what=f"scan at a cut, under the mask of {setting.batch_rows:,} later rows {what}",
        unit="rows",
    )
    database.close()
    bucket.close()


def scan_through_flight_vs_bare_iteration(setting: Setting) -> Iterator[Figure]:
    """Scans of a table on a server, whole and batch by batch, over bare iteration of its rows."""
    directory = setting.directory / "flight_scans"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(directory, work.history)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "cluster"))
        client = stack.enter_context(cluster.connect())
        table = client.create_table("bench", work.schema, buckets=1, column_locks=False)
        for batch in work.fill():
            table.put(batch)
            bucket.put(batch)
        bucket.flush()
        bucket.close()
        database = stack.enter_context(closing(_read_only(view_of(directory))))

        def step(scan: Callable[[], int]) -> tuple[float, float]:
            seconds, rows = timed(scan)
            assert rows == setting.keys
            bare_seconds, pairs = timed(lambda: _bare(database))
            return seconds / rows, bare_seconds / pairs

        def whole() -> int:
            return table.scan().to_arrow().num_rows  # type: ignore[no-any-return]

        def batch_by_batch() -> int:
            return sum(batch.num_rows for batch in table.scan())

        what = f"of a table of {setting.keys:,} rows (sum, max, count, last string) in one bucket "
        what += "on one server, against `for key, value in db.items()` of bare rocksdict in "
        what += "this process over the same rows"
        step(whole)
        yield interleave(setting.runs, 1, lambda: step(whole)).speed(
            "scan_through_flight_vs_bare_iteration",
            what=f"`table.scan().to_arrow()` {what}",
            unit="rows",
            goal=">=0.5",
        )
        yield interleave(setting.runs, 1, lambda: step(batch_by_batch)).speed(
            "scan_batches_through_flight_vs_bare_iteration",
            what=f"`for batch in table.scan()` {what}",
            unit="rows",
            goal=">=0.5",
        )


def _read_only(directory: Path) -> Rdict:
    options = BucketOptions()
    return Rdict(
        str(directory),
        options.to_options(options.to_cache()),
        access_type=AccessType.read_only(),
    )


def _bare(database: Rdict) -> int:
    count = 0
    for _key, _value in database.items():
        count += 1
    return count


def _with_more(bucket: Bucket, work: Workload) -> BucketCut:
    """Put a batch; return a cut of before it."""
    offset = bucket.put(work.batch(), owner="me").base_offset
    return BucketCut(bounds={"me": Bound(offset)}, others=Bound())


def _read(scan: BucketScan) -> int:
    columns = scan.history.current.value_columns
    return sum(batch.data.num_rows for batch in scan.batches(columns))
