"""Snapshots: what a second one sends, what puts feel of them, and how fast a view is back."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.figure import Figure, Setting
from benchmarks.measure import Pairs, interleave, timed
from benchmarks.workload import Workload, log_of, open_bucket, view_of
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.snapshot_manifest import Manifest
from merge_engine.bucket.snapshot_storage import SnapshotStorage, UploadedSnapshot
from merge_engine.bucket.view_meta import read_checkpoint
from merge_engine.storage.objects import LocalStorage

_PUT_ROWS = 1_000
# So many puts that the slowest hundredth is more than an accident.
_PUTS = 400
_ROUNDS = 12


def _filled(directory: Path, setting: Setting) -> tuple[Bucket, Workload]:
    """Return a bucket that has every key, and was written to about as much again."""
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(directory, work.history)
    for batch in work.fill():
        bucket.put(batch)
    for _ in range(setting.keys // setting.batch_rows):
        bucket.put(work.batch())
    return bucket, work


def _storage(directory: Path) -> SnapshotStorage:
    return SnapshotStorage(LocalStorage(log_of(directory)).child("snapshots"))


def _snapshot(
    bucket: Bucket, directory: Path, number: int, *, reuse: tuple[Manifest, ...] = ()
) -> UploadedSnapshot:
    """Take a snapshot as a leader does, and keep the checkpoint."""
    checkpoint = _checkpoint_of(directory, number)
    bucket.checkpoint(checkpoint)
    state = read_checkpoint(checkpoint)
    return _storage(directory).upload(
        checkpoint,
        snapshot_id=number,
        term=bucket.term,
        state=state,
        stable=state.applied,
        schema_version=bucket.history.current.version,
        created_ms=0,
        reuse=reuse,
    )


def _checkpoint_of(directory: Path, number: int) -> Path:
    return directory / f"checkpoint-{number}"


def snapshot_incremental(setting: Setting) -> Iterator[Figure]:
    """What snapshots after the first one send, each after one key in a hundred has changed."""
    directory = setting.directory / "snapshot_incremental"
    bucket, _ = _filled(directory, setting)
    changes = Workload(setting.keys, batch_rows=setting.keys // 100, seed=1)
    latest = first = _snapshot(bucket, directory, 0)
    sent = []
    for number in range(1, _ROUNDS + 1):
        bucket.put(changes.batch())
        latest = _snapshot(bucket, directory, number, reuse=(latest.manifest,))
        sent.append(latest.uploaded_bytes)
    bucket.close()
    whole = first.uploaded_bytes
    yield Figure(
        name="snapshot_incremental_share",
        what=f"bytes of the second snapshot of {setting.keys:,} keys, after 1 % of them changed, "
        "against the first",
        ours=_megabytes(sent[0]),
        baseline=_megabytes(whole),
        value=sent[0] / whole,
        goal="<0.15",
    )
    yield Figure(
        name="snapshot_incremental_mean_share",
        what=f"the mean of {_ROUNDS} such snapshots one after the other, compactions included, "
        "against the first",
        ours=_megabytes(fmean(sent)),
        baseline=_megabytes(whole),
        value=fmean(sent) / whole,
        spread=(min(sent) / whole, max(sent) / whole),
    )


def put_while_snapshotting(setting: Setting) -> Iterator[Figure]:
    """Puts while whole snapshots are taken one after the other, and while none is."""
    directory = setting.directory / "put_while_snapshotting"
    bucket, _ = _filled(directory, setting)
    work = Workload(setting.keys, batch_rows=_PUT_ROWS, seed=1)
    numbers = count()

    def slowest_hundredth() -> float:
        batches = [work.batch() for _ in range(_PUTS)]
        seconds = [timed(lambda batch=batch: bucket.put(batch))[0] for batch in batches]  # type: ignore[misc]
        return float(np.quantile(seconds, 0.99))

    ours, baseline = [], []
    slowest_hundredth()
    for _ in range(setting.runs):
        baseline.append(slowest_hundredth())
        with _snapshots_all_the_time(bucket, directory, numbers):
            ours.append(slowest_hundredth())
    bucket.close()
    yield Pairs(ours, baseline).duration(
        "put_p99_while_snapshotting",
        what=f"99th percentile of puts of {_PUT_ROWS:,} rows into {setting.keys:,} keys while "
        f"whole snapshots go to the same disk ({next(numbers)} were taken), against without (the "
        "ratio is one of times: less is better)",
        goal="<=2",
    )


@contextmanager
def _snapshots_all_the_time(
    bucket: Bucket, directory: Path, numbers: Iterator[int]
) -> Iterator[None]:
    """Take snapshots in a thread; at least one has been taken, and none is going on, on exit."""
    stop = threading.Event()
    failed: list[Exception] = []

    def take() -> None:
        try:
            while True:
                number = next(numbers)
                _snapshot(bucket, directory, number)
                shutil.rmtree(_checkpoint_of(directory, number))
                _storage(directory).sweep([])
                if stop.is_set():
                    return
        except Exception as exc:  # Raised below, in the thread that measures.
            failed.append(exc)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def snapshot_restore(setting: Setting) -> Iterator[Figure]:
    """A bucket that is opened after a restore, and after a copy of the same files."""
    directory = setting.directory / "snapshot_restore"
    bucket, work = _filled(directory, setting)
    manifest = _snapshot(bucket, directory, 0).manifest
    bucket.put(work.batch())
    bucket.close()
    storage, view = _storage(directory), view_of(directory)

    def opened() -> None:
        open_bucket(directory, work.history).close()

    def restore() -> None:
        storage.restore(manifest, view)
        opened()

    def copy() -> None:
        _copy_synced(_checkpoint_of(directory, 0), view)
        opened()

    def step() -> tuple[float, float]:
        seconds = []
        for call in (restore, copy):
            shutil.rmtree(view)
            seconds.append(timed(call)[0] / setting.keys)
        return seconds[0], seconds[1]

    yield interleave(setting.runs, setting.steps, step).speed(
        "restore_vs_copy",
        what=f"restore of a snapshot of {setting.keys:,} keys and replay of "
        f"{setting.batch_rows:,} rows, against a plain copy of its files (synced, too) and the "
        "same replay",
        unit="keys",
        goal=">=0.5",
    )


def _copy_synced(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
