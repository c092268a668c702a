"""Short ways to write to a bucket of sums, and versions of its schema."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from foundation.ids import Token
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import BucketResult
from merge_engine.bucket.segment import AggMode
from merge_engine.bucket.view import View
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Schema
from tests.conftest import SUMS, batch

# Every put goes to RocksDB at once.
EAGER = BucketOptions(behind_max_offsets=1)


def open_view(path: Path, identity: str, options: BucketOptions = EAGER) -> View:
    """Open a view by itself, of a bucket of sums."""
    return View(
        path,
        SchemaHistory([SUMS]),
        identity=identity,
        options=options,
        cache=options.to_cache(),
        memory=options.to_memory(),
    )


def add(bucket: Bucket, keys: list[int], values: list[int], **arguments: Any) -> int:
    """Add to the column `a`; return how many keys changed."""
    return bucket.put(batch(k=keys, a=values), **arguments).changed


def put(
    bucket: Bucket,
    *,
    owner: str = "",
    token: Token | None = None,
    mode: AggMode = AggMode.ACCUMULATE,
    **columns: Any,
) -> BucketResult:
    """Put; with a token, as the holder of a lock does."""
    locked = token is not None
    return bucket.put(batch(**columns), owner=owner, token=token, mode=mode, locked=locked)


def delete(
    bucket: Bucket, *keys: int, columns: list[str] | None = None, owner: str = ""
) -> BucketResult:
    data = batch(k=list(keys), op=["delete"] * len(keys))
    return bucket.put(data, columns=columns, operation_column="op", owner=owner)


def evolved(*changes: Callable[[Schema], Schema], start: Schema = SUMS) -> list[Schema]:
    """Return all versions that these changes make, the first included."""
    schemas = [start]
    for change in changes:
        schemas.append(change(schemas[-1]))
    return schemas


ADDED = evolved(lambda schema: schema.add_column("c", pa.int64(), "max"))
DROPPED = evolved(lambda schema: schema.drop_column("a"))
RENAMED = evolved(lambda schema: schema.rename_column("a", "total"))
