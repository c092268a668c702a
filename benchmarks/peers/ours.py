"""Tallybook as a contestant: the embedded table, and the exactly-once writer on servers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from benchmarks.peers.peer import Opening, Work
from benchmarks.workload import schema_of
from recovery.embedded.table import Table
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster

VALUES = ("total", "highest", "events")
# One per server where there are two.
_WRITER_BUCKETS = 2


class Embedded:
    """A table in this process; each put is durable when it returns."""

    def __init__(self, directory: Path, buckets: int) -> None:
        self._table = Table.create(directory, schema_of(string=False), buckets=buckets)

    @classmethod
    def with_buckets(cls, buckets: int) -> Opening:
        """Return how to open one with so many buckets."""
        return lambda directory, _: cls(directory, buckets)

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Put batch after batch: there is no other way in."""
        for batch in events:
            self._table.put(batch)

    def upsert(self, events: pa.RecordBatch) -> None:
        """Put a batch."""
        self._table.put(events)

    def settle(self) -> None:
        """There is no asking: whoever races waits until nothing runs any more."""

    def read(self, keys: pa.Array) -> pa.Table:
        """Look the keys up."""
        return present(self._table.lookup(pa.table({"key": keys})))

    def close(self) -> None:
        """Release the directory."""
        self._table.close()


class Writer:
    """The exactly-once writer: lock, put, seal and commit, to servers that are processes."""

    def __init__(self, table: RemoteTable, writer: TableWriter, close: Callable[[], None]) -> None:
        self.table = table
        self._writer = writer
        self._close = close

    @classmethod
    def on_servers(cls, servers: int) -> Opening:
        """Return how to open one on a cluster of its own."""

        def opening(directory: Path, _: Work) -> Writer:
            with ExitStack() as stack:
                cluster = stack.enter_context(LocalCluster(directory, servers=servers))
                client = stack.enter_context(cluster.connect(deadline_s=120))
                writer = cls.on(client, "bench")
                stack.callback(writer.close)
                return cls(writer.table, writer._writer, stack.pop_all().close)

        return opening

    @classmethod
    def on(cls, client: Cluster, name: str) -> "Writer":
        """Create a table on a cluster, and open a writer of it."""
        table = client.create_table(name, schema_of(string=False), buckets=_WRITER_BUCKETS)
        writer = table.writer(owner_id="bench", columns=VALUES).start()
        return cls(table, writer, writer.close)

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Write batch after batch: there is no other way in."""
        for batch in events:
            self.upsert(batch)

    def upsert(self, events: pa.RecordBatch) -> None:
        """Write and commit a batch."""
        self._writer.write(self._writer.next_batch(), Rows(data=events, columns=VALUES))

    def settle(self) -> None:
        """There is no asking: whoever races waits until nothing runs any more."""

    def read(self, keys: pa.Array) -> pa.Table:
        """Look the keys up, as they are committed."""
        return present(self.table.lookup(pa.table({"key": keys}), isolation="committed"))

    def close(self) -> None:
        """Release the lock, and end what was started for it."""
        self._close()


def present(rows: pa.Table) -> pa.Table:
    """Return the rows that were there: a look-up has nulls for those that were not."""
    return rows.filter(rows["events"].is_valid())
