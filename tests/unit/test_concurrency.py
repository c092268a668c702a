"""Calls beside each other, on a bucket and on a table of several."""

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from merge_engine.bucket.options import BucketOptions
from merge_engine.embedded.open_buckets import OpenBuckets
from merge_engine.encoding.stored_rows import SchemaHistory
from recovery.embedded.table import Table
from tests.conftest import SUMS, BucketFactory, batch, rows_of
from tests.support.buckets import add

ROOT = Path(__file__).parents[2]


def test_lookups_beside_puts_see_each_row_whole(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=BucketOptions(behind_max_offsets=7))
    keys = list(range(5))
    bucket.put(batch(k=keys, a=[0] * 5, b=[0] * 5))
    torn: list[Any] = []
    done = threading.Event()

    def look() -> None:
        last = 0
        while not done.is_set():
            for row in bucket.lookup(batch(k=keys)).to_pylist():
                if row["a"] is None or row["a"] != row["b"]:
                    torn.append(row)
            now = bucket.lookup(batch(k=[4])).column("a")[0].as_py()
            if now < last:
                torn.append((last, now))
            last = now

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(60):
                bucket.put(batch(k=keys, a=[1] * 5, b=[1] * 5))
        finally:
            done.set()
        for future in futures:
            future.result()
    assert torn == []
    assert rows_of(bucket) == dict.fromkeys(keys, (60, 60))


def test_puts_from_several_threads_all_count(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(add, bucket, [1, n % 3 + 2], [1, 1]) for n in range(60)]:
            future.result()
    assert rows_of(bucket) == {1: (60, None), 2: (20, None), 3: (20, None), 4: (20, None)}
    assert bucket.end_offset == 1 + 2 * 60


# A table of several buckets


def run_alone(script: str, directory: Path) -> None:
    """Run a script that may wait for ever in a process of its own, which can be ended."""
    command = [sys.executable, "-c", textwrap.dedent(script), str(directory)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr


def test_a_put_is_not_held_up_by_calls_that_wait_for_its_buckets(tmp_path: Path) -> None:
    run_alone(
        """
        import os, sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from contextlib import contextmanager
        from merge_engine.bucket.bucket import Bucket
        from recovery.embedded.table import Table
        from tests.conftest import SUMS, rows_of

        keys, taken, flushes = list(range(64)), [], []
        waiting = threading.Semaphore(0)
        exclusive, flush = Bucket.exclusive, Bucket.flush

        @contextmanager
        def flush_when_all_are_taken(bucket):
            with exclusive(bucket):
                taken.append(bucket)
                if len(taken) == 8:
                    flushes.append(pool.submit(table.flush))
                    for _ in range(min(8, os.cpu_count())):
                        waiting.acquire()
                yield

        def signal_and_flush(bucket):
            waiting.release()
            flush(bucket)

        Bucket.exclusive, Bucket.flush = flush_when_all_are_taken, signal_and_flush
        with Table.create(sys.argv[1], SUMS, buckets=8) as table, ThreadPoolExecutor(1) as pool:
            table.put({"k": keys, "a": [1] * 64})
            [flushed] = flushes
            flushed.result()
            assert rows_of(table) == dict.fromkeys(keys, (1, None))
        """,
        tmp_path / "table",
    )


def test_closing_a_table_beside_lookups_ends_them_with_a_clear_error(tmp_path: Path) -> None:
    run_alone(
        """
        import sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from foundation.errors import InvalidInput
        from recovery.embedded.table import Table
        from tests.conftest import SUMS

        keys = list(range(32))
        table = Table.create(sys.argv[1], SUMS, buckets=4)
        table.put({"k": keys, "a": keys})
        started = threading.Barrier(3)

        def look():
            started.wait()
            try:
                while True:
                    table.lookup({"k": keys})
            except InvalidInput as exc:
                return str(exc)

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(look) for _ in range(2)]
            started.wait()
            table.close()
            for future in futures:
                assert "closed; open it again" in future.result(), future.result()
        """,
        tmp_path / "table",
    )


def test_a_column_can_be_used_as_soon_as_the_schema_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Table.create(tmp_path / "table", SUMS, buckets=2) as table:
        table.put({"k": [1, 2, 3], "a": [1, 1, 1]})
        evolve, used = OpenBuckets.evolve, []

        def use_and_evolve(buckets: OpenBuckets, history: SchemaHistory) -> None:
            table.put({"k": [1, 2, 3], "c": [5, 6, 7]})
            used.append(table.lookup({"k": [1, 2, 3]}, ["c"]).column("c").to_pylist())
            used.append(sorted(table.to_arrow(["c"]).column("c").to_pylist()))
            evolve(buckets, history)

        monkeypatch.setattr(OpenBuckets, "evolve", use_and_evolve)
        table.add_column("c", pa.int64(), "max")
        assert used == [[5, 6, 7], [5, 6, 7]]
