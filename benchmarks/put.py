"""Puts: against bare RocksDB on many keys, against pyarrow's own grouping on few."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from benchmarks.bare import BareDatabase, stored_rows
from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from benchmarks.workload import Workload, log_of, open_bucket
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import segment_name
from recovery.embedded.table import Table

_AGGREGATIONS = [("total", "sum"), ("highest", "max"), ("events", "count")]


def put_1m_keys(setting: Setting) -> Iterator[Figure]:
    """Puts on many keys, one column a string, over bare RocksDB; and the size of their log."""
    yield from _put_over_bare(setting, "1m_keys", string=True, goal=">=0.5")


def put_1m_keys_fixed(setting: Setting) -> Iterator[Figure]:
    """Puts on many keys, all columns of fixed width, over bare RocksDB."""
    yield from _put_over_bare(setting, "1m_keys_fixed", string=False, goal=">=0.6")


def _put_over_bare(setting: Setting, label: str, *, string: bool, goal: str) -> Iterator[Figure]:
    directory = setting.directory / label
    work = Workload(setting.keys, batch_rows=setting.batch_rows, string=string)
    bucket = open_bucket(directory, work.history)
    bare = BareDatabase(directory / "bare")

    def step(batch: pa.RecordBatch) -> tuple[float, float]:
        seconds, result = timed(lambda: bucket.put(batch))
        keys, values = stored_rows(bucket, result)
        bare_seconds, _ = timed(lambda: bare.read_and_write(keys, values))
        return seconds / len(keys), bare_seconds / len(keys)

    # Every key once, and about as many again: both databases have compacted by then.
    for batch in work.fill():
        step(batch)
    for _ in range(setting.keys // setting.batch_rows):
        step(work.batch())
    columns = "sum, max, count, last string" if string else "sum, max, count"
    yield interleave(setting.runs, setting.steps, lambda: step(work.batch())).speed(
        f"put_{label}_ratio",
        what=f"put of {setting.batch_rows:,} rows ({columns}) into {setting.keys:,} keys, against "
        "RocksDB alone, which reads and writes the same bytes",
        unit="keys",
        goal=goal,
    )
    yield _log_size(label, bucket, directory, work.batch())
    bucket.close()
    bare.close()


def _log_size(label: str, bucket: Bucket, directory: Path, batch: pa.RecordBatch) -> Figure:
    result = bucket.put(batch)
    keys, values = stored_rows(bucket, result)
    stored = sum(map(len, keys + values)) / result.changed
    segment = log_of(directory) / segment_name(result.base_offset)
    logged = segment.stat().st_size / result.changed
    return Figure(
        name=f"put_{label}_log_bytes_per_row",
        what="size of the log per row that was changed (before and after, compressed), against the "
        "row's key and value in the view",
        ours=f"{logged:.1f} bytes",
        baseline=f"{stored:.1f} bytes",
        value=logged,
    )


def put_10k_keys(setting: Setting) -> Iterator[Figure]:
    """Puts on few keys, where folding is the work, over pyarrow's `group_by`."""
    work = Workload(setting.small_keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(setting.directory / "put_10k_keys", work.history)

    def step(aggregations: list[tuple[str, str]], *, threads: bool) -> tuple[float, float]:
        batch = work.batch()
        table = pa.Table.from_batches([batch])
        seconds, _ = timed(lambda: bucket.put(batch))
        grouped_seconds, _ = timed(
            lambda: table.group_by("key", use_threads=threads).aggregate(aggregations)
        )
        return seconds / len(batch), grouped_seconds / len(batch)

    def ordered() -> tuple[float, float]:
        return step([*_AGGREGATIONS, ("status", "last")], threads=False)

    for batch in work.fill():
        bucket.put(batch)
    for _ in range(setting.steps):
        ordered()
    # These batches are fast: more of them, for steady medians.
    more = replace(setting, runs=2 * setting.runs, steps=2 * setting.steps)
    what = f"put of {setting.batch_rows:,} rows into {setting.small_keys:,} keys, against pyarrow "
    yield interleave(more.runs, more.steps, ordered).speed(
        "put_10k_keys_vs_group_by",
        what=what + "`group_by` of the same batch (one thread, as `last` needs)",
        unit="rows",
        goal=">=0.2",
    )
    yield interleave(more.runs, more.steps, lambda: step(_AGGREGATIONS, threads=True)).speed(
        "put_10k_keys_vs_threaded_group_by",
        what=what + "`group_by` on all cores, without the string that our put has",
        unit="rows",
    )
    bucket.close()


def put_4_buckets(setting: Setting) -> Iterator[Figure]:
    """Puts into a whole table, which routes rows and works on its buckets in parallel."""
    directory = setting.directory / "put_4_buckets"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(directory / "bucket", work.history)

    with Table.create(directory / "table", work.schema, buckets=4) as table:

        def step(batch: pa.RecordBatch) -> tuple[float, float]:
            seconds, result = timed(lambda: table.put(batch))
            bucket_seconds, _ = timed(lambda: bucket.put(batch))
            return seconds / result.changed, bucket_seconds / result.changed

        for batch in work.fill():
            step(batch)
        yield interleave(setting.runs, setting.steps, lambda: step(work.batch())).speed(
            "put_4_buckets_vs_1_ratio",
            what=f"put of {setting.batch_rows:,} rows into {setting.keys:,} keys of a table with 4 "
            "buckets in one process, against one bucket",
            unit="keys",
        )
    bucket.close()
