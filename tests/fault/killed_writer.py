"""The child of the kill tests: seeded operations on one table, each acknowledged on stdout.

`operations` is a pure function of the seed, so the parent knows what the child was doing when it
was killed: what was acknowledged, and the one operation that may have been in flight. Everything
that is not a function of the seed, the offsets of a commit, stands in the acknowledgement.

    python -m tests.fault.killed_writer <directory> <seed> <first operation> <committed offsets>
"""

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

import merge_engine
from foundation.ids import Token
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import PutResult
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from recovery.embedded.table import Table

BUCKETS = 2
KEYS = 12
OWNERS: dict[str, tuple[str, ...]] = {
    "orders": ("revenue", "orders", "tags"),
    "visits": ("status", "note", "pages"),
}
# Small enough that RocksDB is written to, and writes to disk, every few operations.
OPTIONS = BucketOptions(
    working_set_bytes=60_000,
    behind_max_bytes=4000,
    behind_max_offsets=20,
    behind_few_rows=5,
    undo_max_bytes=3000,
    write_buffer_bytes=1 << 16,
    roll_up_segments=3,
)

Offsets = dict[str, dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of the child. `batch` counts the owner's puts and deletes."""

    kind: str
    owner: str
    batch: int = 0
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def token(self) -> Token:
        """The token of a put: never the same twice."""
        return Token(1, self.batch)


def failpoint_names() -> list[str]:
    """Return every name that the engine's source passes to `hit`, sorted."""
    source = Path(merge_engine.__file__ or "").parent
    texts = [path.read_text() for path in source.rglob("*.py")]
    return sorted({name for text in texts for name in re.findall(r'\bhit\("([^"]+)"\)', text)})


def table_schema() -> Schema:
    """Return a schema in which doing anything twice, or not at all, or out of order, shows."""
    return (
        SchemaBuilder()
        .column("id", pa.int64())
        .agg_column("revenue", pa.int64(), AggFunction.SUM)
        .agg_column("orders", pa.int64(), AggFunction.COUNT)
        .agg_column("tags", pa.string(), AggFunction.STRING_AGG, limit=12)
        .agg_column("status", pa.string(), AggFunction.LAST_VALUE_IGNORE_NULLS, order_by="at")
        .agg_column("note", pa.string(), AggFunction.LAST_VALUE)
        .agg_column("pages", pa.list_(pa.int64()), AggFunction.ARRAY_AGG, limit=12)
        .primary_key("id")
        .build()
    )


def operations(seed: int) -> Iterator[Step]:
    """Yield operations without end."""
    chance = random.Random(seed)
    kinds = (
        ["put"] * 9
        + ["delete"] * 2
        + ["commit"] * 3
        + ["undo"] * 3
        + ["clean", "clean", "roll up", "roll up", "reopen"]
    )
    for number in count():
        owner = chance.choice(sorted(OWNERS))
        kind = chance.choice(kinds)
        if kind in ("put", "delete"):
            rows = tuple(_row(chance, owner, kind) for _ in range(chance.randint(1, 8)))
            yield Step(kind=kind, owner=owner, batch=number, rows=rows)
        else:
            yield Step(kind=kind, owner=owner)


def _row(chance: random.Random, owner: str, kind: str) -> dict[str, Any]:
    row: dict[str, Any] = {"id": chance.randrange(KEYS)}
    if kind == "delete":
        return row
    # One row in eight deletes, among the others of its batch.
    row["operation"] = "delete" if chance.random() < 1 / 8 else "upsert"
    if owner == "orders":
        tag = chance.choice([None, f"t{chance.randrange(1000)}"])
        return row | {"revenue": chance.randint(-9, 99), "orders": tag, "tags": tag}
    status = chance.choice([None, "new", "paid", "sent"])
    note = "n" * chance.randrange(900) + str(chance.randrange(1000))
    at = chance.randrange(6)
    return row | {"status": status, "at": at, "note": note, "pages": chance.randrange(1000)}


def to_batch(step: Step) -> pa.Table:
    """Return the rows of a put or delete as the table takes them."""
    types = {
        "id": pa.int64(),
        "revenue": pa.int64(),
        "at": pa.timestamp("us", tz="UTC"),
        "pages": pa.int64(),
    }
    names = list(step.rows[0])
    return pa.table(
        {
            name: pa.array([row[name] for row in step.rows], types.get(name, pa.string()))
            for name in names
        }
    )


def send(table: Table, step: Step) -> PutResult:
    """Do a put or a delete."""
    columns, batch = OWNERS[step.owner], to_batch(step)
    if step.kind == "delete":
        return table.delete(batch, columns=columns, owner=step.owner, token=step.token)
    return table.put(
        batch, columns=columns, operation_column="operation", owner=step.owner, token=step.token
    )


def undo(table: Table, owner: str, committed: Mapping[str, int]) -> None:
    """Bring the owner's columns back to what it committed last."""
    ids = table.bucket_ids()
    offsets = {bucket_id: committed.get(str(bucket_id.number), 0) for bucket_id in ids}
    table.undo(owner, OWNERS[owner], offsets)


def clean(table: Table, committed: Offsets) -> None:
    """Drop the log that no undo can need."""
    keep_from = {}
    for bucket_id in table.bucket_ids():
        number = str(bucket_id.number)
        keep_from[bucket_id] = min(committed.get(owner, {}).get(number, 0) for owner in OWNERS)
    table.clean(keep_from=keep_from)


def roll_up(table: Table) -> None:
    """Roll up all of the log, also what may yet be undone: it reads the same."""
    for bucket_id in table.bucket_ids():
        bucket = table.bucket(bucket_id)
        while bucket.roll_up(bucket.end_offset):
            pass


def end_offsets(table: Table) -> dict[str, int]:
    """Return the log ends as JSON has them."""
    return {str(bucket_id.number): end for bucket_id, end in table.end_offsets().items()}


def main(directory: str, seed: int, first: int, committed: Offsets) -> None:
    """Go on from the given operation until killed."""
    table = Table.open(directory, options=OPTIONS)
    for number, step in enumerate(operations(seed)):
        if number < first:
            continue
        acknowledgement: dict[str, Any] = {"done": number}
        if step.kind in ("put", "delete"):
            send(table, step)
        elif step.kind == "commit":
            committed[step.owner] = end_offsets(table)
            acknowledgement["committed"] = committed[step.owner]
        elif step.kind == "undo":
            undo(table, step.owner, committed.get(step.owner, {}))
        elif step.kind == "clean":
            clean(table, committed)
        elif step.kind == "roll up":
            roll_up(table)
        else:
            table.close()
            table = Table.open(directory, options=OPTIONS)
        print(json.dumps(acknowledgement), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
