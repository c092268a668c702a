"""A stream of changes as Spark would run it, by hand: a checkpoint, micro-batches, replays.

It calls a `ChangeStream` in Spark's order, and with what Spark gives it: offsets that were JSON,
tasks that were pickled, a new object for each task. It can be killed between any two steps.
"""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema

from merge_engine.bucket.changelog import ABOUT_CHANGES
from recovery.reader.cut import Cut
from recovery.reader.table_changes import BUCKET
from server.client.remote_table import RemoteTable
from sink.source.data_source import TallybookSource
from sink.source.options import ReaderOptions
from sink.source.schemas import change_fields
from sink.worker_connections import connected, disconnect

Record = dict[str, Any]
Cells = dict[tuple[Any, str], Any]
STEPS = ("begun", "logged", "planned", "sunk", "committed")
ABOUT = frozenset({*ABOUT_CHANGES, BUCKET})


class Died(Exception):
    """The process of the query ended between two steps."""


class DrivenStream:
    """A query and its checkpoint. `batches`: what its sink has, by the number of the micro-batch.

    The sink is idempotent, as `foreachBatch` asks for; what a replayed micro-batch has must be what
    it had before.
    """

    def __init__(self, address: str, table: str, **options: Any) -> None:
        given = {"zookeeper": address, "table": table, "deadline": "20 s", **options}
        self.options = {name: str(value) for name, value in given.items()}
        self.offsets: list[str] = []
        self.committed = 0
        self.batches: dict[int, list[Record]] = {}
        self.tasks: list[int] = []
        self._reader: Any = None
        self._task = b""

    # --- As Spark does ----------------------------------------------------------------------------

    def start(self, *, available_now: bool = True) -> None:
        """Start the query anew: whatever its process knew is gone."""
        self.stop()
        self._reader, self._task = self._make()
        if available_now:
            self._reader.prepareForTriggerAvailableNow()
        self.limit = self._reader.getDefaultReadLimit()

    def stop(self) -> None:
        """End its process; Spark does not say so, but threads end with it."""
        if self._reader is not None:
            self._reader.stop()
        self._reader = None

    def step(self, hit: Callable[[str], None] = lambda _: None) -> list[Record] | None:
        """Run a micro-batch, or repeat the one that was under way; None if there is nothing new.

        `hit` is called between its steps, and may raise.
        """
        reader = self._reader
        number = self.committed
        start = json.loads(self.offsets[number - 1]) if number else self._initial()
        if len(self.offsets) == number:
            end = _json(reader.latestOffset(start, self.limit))
            hit("begun")
            if end == start:
                return None
            self.offsets.append(json.dumps(end))
        hit("logged")
        end = json.loads(self.offsets[number])
        partitions = [pickle.loads(pickle.dumps(one)) for one in reader.partitions(start, end)]
        hit("planned")
        found = [row for one in partitions for row in self._read(one)]
        if number in self.batches:
            assert as_sorted(found) == as_sorted(self.batches[number]), "the same when repeated"
        self.batches[number] = found
        self.tasks.append(len(partitions))
        hit("sunk")
        self.committed += 1
        hit("committed")
        reader.commit(end)
        return found

    def run(self, *, most: int = 200) -> list[list[Record]]:
        """Start, and go on until there is nothing new; return what each micro-batch has had."""
        self.start()
        found: list[list[Record]] = []
        while (batch := self.step()) is not None:
            found.append(batch)
            assert len(found) <= most, "it does not come to an end"
        return found

    def _initial(self) -> Any:
        first, again = self._reader.initialOffset(), self._reader.initialOffset()
        assert first == again == {}
        return _json(first)

    def _read(self, partition: Any) -> Iterator[Record]:
        for batch in pickle.loads(self._task).read(partition):
            yield from batch.to_pylist()

    def _make(self) -> tuple[DataSourceStreamReader, bytes]:
        """Return what plans, and a copy of what reads: the schema is that of when it begins."""
        given = ReaderOptions.of(self.options)
        table = connected(given.recipe).table(given.table)
        fields = change_fields(table.schema, given.columns, given.mode)
        # Spark has one type of timestamps with a time zone.
        schema = from_arrow_schema(fields, prefer_timestamp_ntz=True)
        source = TallybookSource(self.options)
        return source.streamReader(schema), pickle.dumps(source.streamReader(schema))

    # --- What tests ask ---------------------------------------------------------------------------

    @property
    def records(self) -> list[Record]:
        """All that its sink has, in the order of micro-batches."""
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    def cut(self, number: int = -1) -> Cut:
        """Return where a micro-batch ends."""
        return Cut.of(json.loads(self.offsets[number])["cut"])

    @property
    def since(self) -> Cut:
        """Where batch 0 of a stream without rows starts."""
        return Cut.of(json.loads(self.offsets[0])["since"])

    def disconnect(self) -> None:
        """End it, and close this process's connection."""
        self.stop()
        disconnect(ReaderOptions.of(self.options).recipe)


def dying(at: str) -> Callable[[str], None]:
    """Return what kills a query at this step."""

    def hit(step: str) -> None:
        if step == at:
            raise Died(step)

    return hit


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def as_sorted(records: list[Record]) -> list[str]:
    """Return records in an order that does not depend on that of tasks."""
    return sorted(repr(sorted(record.items(), key=lambda one: one[0])) for record in records)


# --- What records make of a table -----------------------------------------------------------------


def in_log_order(records: list[Record]) -> list[Record]:
    """Return records bucket by bucket, each in the order of its log; rows of `full` come first."""
    return sorted(
        records,
        key=lambda one: (
            one["_bucket"] or "",
            -1 if one["_bucket"] is None else one["_log_offset"],
        ),
    )


def apply_changes(cells: Cells, records: list[Record], key: str = "k") -> None:
    """Apply change records: each begins where the one before it has ended."""
    for record in in_log_order(records):
        for name in record["_changed_columns"]:
            cell = record[key], name
            if record["_change_type"] in ("update_preimage", "delete"):
                assert cells.get(cell) == record[name], record
                cells.pop(cell, None)
            elif record["_change_type"] == "insert":
                assert cell not in cells, record
            if (
                record["_change_type"] in ("insert", "update_postimage")
                and record[name] is not None
            ):
                cells[cell] = record[name]


def apply_upserts(cells: Cells, records: list[Record], key: str = "k") -> None:
    """Write or delete rows: a key has one at most."""
    keys = [record[key] for record in records]
    assert len(keys) == len(set(keys))
    for record in records:
        for cell in [cell for cell in cells if cell[0] == record[key]]:
            del cells[cell]
        if record["_change_type"] == "upsert":
            cells.update(cells_of([{k: v for k, v in record.items() if k not in ABOUT}], key))
        else:
            assert record["_change_type"] == "delete"


def cells_of(rows: list[Mapping[str, Any]] | list[Record], key: str = "k") -> Cells:
    """Return what rows have, cell by cell."""
    return {
        (row[key], name): value
        for row in rows
        for name, value in row.items()
        if name != key and value is not None
    }


def table_at(table: RemoteTable, cut: Cut | None = None, key: str = "k") -> Cells:
    """Return what a table has, now or at a cut."""
    return cells_of(table.scan(at=cut).to_arrow().to_pylist(), key)


@contextmanager
def driven(address: str, table: RemoteTable, **options: Any) -> Iterator[DrivenStream]:
    """Return a stream that is ended with the block."""
    stream = DrivenStream(address, table.name, **options)
    try:
        yield stream
    finally:
        stream.stop()
