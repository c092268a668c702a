"""A writer that only moves amounts between keys, to be killed: the sum of its column never changes.

The first batch gives every key an amount; each later one takes from some keys what it gives to
others, in all buckets. So whoever sees another sum has seen half of a batch, or one that was not
committed.

    python -m tests.fault.moving_writer <address> <table> <column> <seed> [<redo log>]
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from merge_engine.schema.schema import Schema
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import connect
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.conftest import schema_of
from tests.fault.cluster_load import child_process

KEYS = 400
EACH = 1_000
TOTAL = KEYS * EACH
_MOVED = 120
# As many batches as a busy job has: whoever follows them must keep up.
_PAUSE_S = 0.05


def table_schema() -> Schema:
    """Return a column for each of two writers."""
    return schema_of(a=(pa.int64(), "sum"), b=(pa.int64(), "sum"))


def rows_of(column: str, seed: int, batch: int) -> dict[str, list[int]]:
    """Return the rows of a batch: those of the first one add up to the total, others to nothing."""
    if batch == 0:
        return {"k": list(range(KEYS)), column: [EACH] * KEYS}
    chance = random.Random(f"{seed} {column} {batch}")
    keys = chance.sample(range(KEYS), _MOVED)
    amounts = [chance.randrange(1, 500) for _ in range(_MOVED // 2)]
    return {"k": keys, column: [*amounts, *(-amount for amount in amounts)]}


def writer_of(table: RemoteTable, column: str, redo: RedoLog | None = None) -> TableWriter:
    """Return the writer of a column."""
    return table.writer(owner_id=f"moves-{column}", columns=[column], redo=redo, deadline_s=60.0)


@contextmanager
def moving(address: str, table: str, column: str, seed: int, *redo: str) -> Iterator[Any]:
    """Run the process; it has been killed on exit. It prints each batch that it has committed."""
    arguments = [address, table, column, str(seed), *redo]
    with child_process("tests.fault.moving_writer", *arguments) as child:
        yield child


class Movers:
    """The two writers, each a process that is started again when it was killed."""

    def __init__(self, cluster: LocalCluster, table: RemoteTable, seed: int, redo: Path) -> None:
        self._stack = ExitStack()
        self._start = {
            "a": lambda: moving(cluster.address, table.name, "a", seed),
            "b": lambda: moving(cluster.address, table.name, "b", seed, str(redo)),
        }
        self.running: dict[str, Any] = {}

    def start(self, column: str) -> None:
        """Start a writer, and wait until it has committed something."""
        child = self.running[column] = self._stack.enter_context(self._start[column]())
        assert child.stdout.readline(), f"the writer of {column} has ended"
        threading.Thread(target=child.stdout.read, daemon=True).start()

    def kill(self, column: str) -> None:
        """Kill a writer, anywhere in a batch, and start it again."""
        self.running[column].kill()
        self.running[column].wait()
        self.start(column)

    def __enter__(self) -> "Movers":
        for column in "ab":
            self.start(column)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def main(address: str, name: str, column: str, seed: int, *redo: str) -> None:
    """Go on after what is committed, until killed."""
    log = RedoLog.open(redo[0]) if redo else None
    pause = threading.Event()
    with connect(address) as client, writer_of(client.table(name), column, log) as writer:
        for batch in count(writer.next_batch()):
            writer.write(batch, Rows(data=rows_of(column, seed, batch)))
            print(batch, flush=True)
            pause.wait(_PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
