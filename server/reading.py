"""The calls of a tablet server that read: look-ups, changelogs, log ends."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from merge_engine import BatchTooLarge
from merge_engine.batch import read_keys
from merge_engine.changelog import change_records, changelog_schema
from merge_engine.parallel import Item, Result, map_all
from recovery.isolation import committed_changes
from recovery.isolation_lookup import Asked, committed_lookup
from server import wire
from server.errors import BadRequest
from server.limits import Admission
from server.metrics import Metrics
from server.requests import Requests, column_of, is_committed, schema_of


class Reading:
    """Answers readers of the buckets that are hosted here. Safe for threads."""

    def __init__(
        self, requests: Requests, admission: Admission, metrics: Metrics, *, lookup_max_keys: int
    ) -> None:
        self._requests = requests
        self._hosting = requests.hosting
        self._session = requests.session
        self._admission = admission
        self._metrics = metrics
        self._lookup_max_keys = lookup_max_keys
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tallybook-read")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def lookup(self, body: pa.Buffer) -> pa.Buffer:
        with self._admission.holding(body.size):
            return self._look_up(body)

    def _look_up(self, body: pa.Buffer) -> pa.Buffer:
        fields, batches = wire.unframe(body)
        table = self._requests.table(fields)
        keys, _ = self._requests.keys(fields, 2)
        if len(batches) != len(keys):
            raise BadRequest(f"a look-up in {len(keys)} buckets with keys for {len(batches)}")
        asked = sum(batch.num_rows for batch in batches)
        if asked > self._lookup_max_keys:
            raise BatchTooLarge(
                f"a look-up of {asked:,} keys; the limit is {self._lookup_max_keys:,} "
                "(lookup_max_keys): split it"
            )
        schema = schema_of(fields, table)
        columns = [column_of(schema, table, number) for number in fields.integers("columns")]
        self._session.check()
        wanted = [
            Asked(self._hosting.get(key).bucket, key.key, read_keys(batch, schema))
            for key, batch in zip(keys, batches, strict=True)
        ]
        if is_committed(fields):
            found = committed_lookup(wanted, self._requests.records_of(table), columns, self._map)
        else:
            found = self._map(lambda one: one.bucket.lookup_keys(one.key_columns, columns), wanted)
            self._session.check()  # Again: this process may have been paused in between.
        self._metrics.count("keys_looked_up", asked, table=table.name)
        names = [column.name for column in columns]
        return wire.answer([batch.select(names) for batch in found])

    def _map(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        return map_all(self._pool, call, items)

    def changelog(self, fields: wire.Fields) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of change records, each with where to go on as metadata."""
        table = self._requests.table(fields)
        keys, _ = self._requests.keys(fields, 2)
        if len(keys) != 1:
            raise BadRequest(f"a changelog of {len(keys)} buckets; it is read one by one")
        [key] = keys
        led = self._hosting.get(key)
        start, stop = fields.get("from_offset", int), fields.optional("to_offset", int)
        self._session.check()
        if is_committed(fields):
            committed = committed_changes(
                led.bucket, led.key, self._requests.records_of(table), start, stop
            )
            segments, end = iter(committed), committed.end
        else:
            end = led.bucket.settled_end()
            end = end if stop is None else min(end, stop)
            segments = led.bucket.read_log(start, end)
        # Now that the end is fixed: this schema knows all that was written before it.
        history = led.bucket.history
        schema = changelog_schema(history.current)

        def changes() -> Iterator[Any]:
            for segment in segments:
                if segment.changes:
                    first = max(segment.header.base_offset, start)
                    following = wire.encode({"next_offset": min(segment.header.end_offset, end)})
                    yield change_records(segment, history, first), following
            nothing = pa.RecordBatch.from_pylist([], schema=schema)
            yield nothing, wire.encode({"next_offset": max(start, end)})

        return schema, changes()

    def ends(self, body: pa.Buffer) -> dict[str, Any]:
        _, led, _ = self._requests.led(body, 2)
        return {
            "session": self._session.name,
            "starts": [bucket.bucket.start_offset for bucket in led],
            "ends": [bucket.bucket.settled_end() for bucket in led],
        }
