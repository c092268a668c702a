"""A cluster on which streams of changes run by hand, and what their tests do to its tables."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from foundation.failpoints import arm
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.support.faulty_storage import interrupt
from tests.support.streams import (
    Cells,
    DrivenStream,
    Record,
    apply_changes,
    apply_upserts,
    driven,
)

KEYS = range(12)
EAGER = ("--log-ttl", "0", "--snapshot-interval", "1000", "--snapshots-retained", "1")
"""Logs go as soon as there is a snapshot after them, which tests have taken."""
APPLY: dict[str, Callable[[Cells, list[Record]], None]] = {
    "changes": apply_changes,
    "upserts": apply_upserts,
}


class Scene:
    """A cluster whose logs go as soon as no snapshot needs them, and the streams of a test."""

    def __init__(self, local: LocalCluster, client: Cluster) -> None:
        self.local, self.client = local, client
        self.address = local.address
        self._number = 0
        self._stack = ExitStack()

    def table(self, schema: Any = SUMS, *, buckets: int = 3, **settings: Any) -> RemoteTable:
        """Create a table of its own for a test."""
        self._number += 1
        return self.client.create_table(
            f"stream_{self._number}", schema, buckets=buckets, **settings
        )

    def stream(self, table: RemoteTable, start: object = "full", **options: Any) -> DrivenStream:
        """Return a stream that ends with the test."""
        return self._stack.enter_context(driven(self.address, table, start=str(start), **options))

    def writer(self, table: RemoteTable, owner: str, columns: str, **settings: Any) -> TableWriter:
        """Return a writer that has started, and is closed with the test."""
        writer = table.writer(owner_id=owner, columns=list(columns), **settings)
        return self._stack.enter_context(writer)

    def close(self) -> None:
        """End the streams and writers of a test."""
        self._stack.close()
        self._stack = ExitStack()


@contextmanager
def stream_scene(directory: Path) -> Iterator[Scene]:
    """Run a cluster of two servers."""
    with (
        LocalCluster(directory, servers=2, session_timeout_s=2.0, options=EAGER) as local,
        local.connect() as client,
    ):
        yield Scene(local, client)
        DrivenStream(local.address, "any", start="full").disconnect()


def write(writer: TableWriter, data: Any = None, **values: int) -> None:
    """Write a batch: these rows or, in each of these columns, a value for all keys."""
    rows = data or {"k": list(KEYS), **{name: [one] * len(KEYS) for name, one in values.items()}}
    operation = "op" if "op" in rows else None
    writer.write(writer.next_batch(), Rows(data=rows, operation_column=operation))


def leave_uncommitted(writer: TableWriter, **values: int) -> None:
    """Write a batch, and die before it is committed."""
    with arm("writer.sealed", interrupt), pytest.raises(KeyboardInterrupt):
        write(writer, **values)


def to_the_end(stream: DrivenStream) -> list[Record]:
    """Go on until there is nothing new; return all that has come."""
    found: list[Record] = []
    while (batch := stream.step()) is not None:
        found += batch
    return found
