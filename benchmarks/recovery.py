"""After a failure: replay of the log, and undo, against the writes that they repeat or revert."""

import shutil
from collections.abc import Iterator
from functools import partial
from itertools import count

from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from benchmarks.workload import Workload, open_bucket, view_of
from foundation.ids import Token
from merge_engine.bucket.undo import UndoRange


def replay(setting: Setting) -> Iterator[Figure]:
    """Opening a bucket without a view, which replays the whole log."""
    directory = setting.directory / "replay"

    def step() -> tuple[float, float]:
        work = Workload(setting.keys, batch_rows=setting.batch_rows)
        bucket = open_bucket(directory, work.history)
        # New keys are the fastest to write, and so the hardest to compare with.
        write_seconds = sum(timed(partial(bucket.put, batch))[0] for batch in work.fill())
        changes = bucket.end_offset
        bucket.close()
        shutil.rmtree(view_of(directory))
        replay_seconds, bucket = timed(lambda: open_bucket(directory, work.history))
        bucket.close()
        shutil.rmtree(directory)
        return replay_seconds / changes, write_seconds / changes

    yield interleave(setting.runs, 1, step).speed(
        "replay_vs_write_ratio",
        what=f"replay of {setting.keys:,} changes into an empty view, against the puts that made "
        "them",
        unit="rows",
        goal=">=1.0",
    )


def undo(setting: Setting) -> Iterator[Figure]:
    """Undo of a batch that was not committed."""
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(setting.directory / "undo", work.history)
    columns = [column.id for column in work.schema.value_columns]
    for batch in work.fill():
        bucket.put(batch)
    batches = count()

    def step() -> tuple[float, float]:
        batch, token = work.batch(), Token(1, next(batches))
        write_seconds, put = timed(lambda: bucket.put(batch, owner="writer", token=token))
        undo_seconds, _ = timed(lambda: bucket.undo("writer", columns, UndoRange(put.base_offset)))
        return undo_seconds, write_seconds

    yield interleave(setting.runs, setting.steps, step).duration(
        "undo_vs_write_time_ratio",
        what=f"undo of a batch of {setting.batch_rows:,} rows in {setting.keys:,} keys, against "
        "its put (the ratio is one of times: less is better)",
    )
    bucket.close()
