"""The child of the kill tests of embedded writers: batch after batch, each acknowledged on stdout.

The rows of a batch are a function of its number, so the parent knows what must be there: all that
was acknowledged, and perhaps the one that was in flight.

    python -m tests.fault.embedded_writer <directory> <undo or redo>
"""

import sys
from itertools import count
from pathlib import Path

import recovery.embedded.table
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from recovery.embedded.table import Table
from recovery.writer.parts import PartSizes
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter

KEYS = 12
BUCKETS = 2
OWNER = "etl"


def table_schema() -> Schema:
    """Return a sum and a count, in partitions."""
    builder = SchemaBuilder().column("day", "STRING").column("k", "BIGINT")
    builder.agg_column("total", "BIGINT", "sum").agg_column("others", "BIGINT", "sum")
    return builder.primary_key("day", "k").partitioned_by("day").build()


def rows_of(batch: int) -> list[dict[str, int | str]]:
    """Return the rows of a batch; every third one is large enough to go in parts."""
    keys = KEYS if batch % 3 else 4 * KEYS
    return [
        {"day": f"day {(batch // 4 + at) % 3}", "k": at % KEYS, "total": 1 + batch * at}
        for at in range(keys)
    ]


def writer_of(table: Table, directory: Path, way: str) -> TableWriter:
    """Return a writer that undoes, or one that promises first."""
    redo = RedoLog.open(str(directory / "redo")) if way == "redo" else None
    return table.writer(owner_id=OWNER, columns=["total"], redo=redo)


def with_small_parts() -> None:
    """Let a few rows of a bucket be a part."""
    recovery.embedded.table._SIZES = PartSizes(rows=3)


def main(directory: Path, way: str) -> None:
    """Go on after what is committed, until killed."""
    with_small_parts()
    table = Table.open(directory / "table")
    with writer_of(table, directory, way) as writer:
        for batch in count(writer.next_batch()):
            writer.write(batch, Rows(data=rows_of(batch)))
            print(batch, flush=True)
            if batch % 5 == 4:
                table.put([{"day": "day 0", "k": 0, "others": 1}])
                table.flush()
                table.clean()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
