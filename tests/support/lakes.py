"""Copies of a small table in a lake, made by hand: no cluster, no Spark."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from foundation.ids import BucketId
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import ObjectStorage
from recovery.reader.cut import Cut, OwnerCut
from sink.lake.fields import lake_fields
from sink.lake.files import FileWriter
from sink.lake.log import LakeLog
from sink.lake.state import Change, LakeFile, LakeState, Layout, Mark, file_name
from tests.conftest import SUMS

BUCKET = BucketId(0, 0)
STARTED_MS = 1_790_000_000_000


def a_cut(batch: int) -> Cut:
    """Return a cut at which one owner has committed so many batches, and one more."""
    owners = {"etl": OwnerCut(batch=batch)}
    return Cut(table="t-1", epoch=1, time_ms=STARTED_MS + 1000 * batch, owners=owners)


def a_mark(
    step: int = 0,
    *,
    schema: Schema = SUMS,
    states: bool = False,
    layout: Layout = Layout.VECTORS,
    **given: Any,
) -> Mark:
    """Return the mark of a step."""
    told: dict[str, Any] = {
        "lake": str(uuid.UUID(int=7)),
        "created_ms": STARTED_MS,
        "table": "t-1",
        "name": "orders",
        "columns": lake_fields(schema, states=states).ids,
        "cut": a_cut(step),
        "round": step,
        "version": 0,
    }
    return Mark(schema=schema, states=states, layout=layout, step=step, **told | given)


def a_file(
    rows: int = 10,
    *,
    step: int = 0,
    bucket: BucketId = BUCKET,
    dead: Iterable[int] = (),
    **given: Any,
) -> LakeFile:
    """Return a file that only the log knows of."""
    told: dict[str, Any] = {"name": file_name(bucket, step), "size": 100 * rows}
    return LakeFile(rows=rows, dead=BitMap64(list(dead)), **told | given)


def write_rows(
    storage: ObjectStorage,
    rows: pa.Table | pa.RecordBatch,
    *,
    step: int = 0,
    bucket: BucketId = BUCKET,
    schema: Schema = SUMS,
) -> list[LakeFile]:
    """Write rows to files, as a task does."""
    writer = FileWriter(storage, bucket, step, lake_fields(schema, states=False).arrow)
    writer.add(rows)
    return writer.close()


def sums(keys: Sequence[int], values: Sequence[int | None] | None = None) -> pa.Table:
    """Return rows of the table of sums."""
    return pa.table({"k": keys, "a": keys if values is None else values}, pa.schema(SUMS_FIELDS))


SUMS_FIELDS = [("k", pa.int64()), ("a", pa.int64())]


def with_dead(file: LakeFile, *rows: int) -> LakeFile:
    """Return a file of which these rows are dead, too."""
    return replace(file, dead=file.dead | BitMap64(rows))


def commit(
    log: LakeLog,
    before: LakeState | None,
    *,
    added: Sequence[LakeFile] = (),
    removed: Sequence[LakeFile] = (),
    **given: Any,
) -> LakeState:
    """Commit the next step. `time_ms`, `operation` and `changes_rows` are those of the change."""
    step = 0 if before is None else before.next_step
    about = {
        "time_ms": given.pop("time_ms", STARTED_MS + 1000 * step),
        "operation": given.pop("operation", "ROUND"),
        "changes_rows": given.pop("changes_rows", True),
    }
    layout = given.pop("layout", log.layouts[0])
    mark = a_mark(step, layout=layout, **given)
    change = Change(mark=mark, added=tuple(added), removed=tuple(removed), **about)
    fields = lake_fields(mark.schema, states=mark.states).arrow
    return log.commit(before, change, fields)
