"""The calls of a tablet server that look up: by themselves, or one after the other in an exchange.

What many look-ups have in common is found out once: to find it out takes as long as to look up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from foundation.errors import BadRequest, BatchTooLarge
from foundation.ids import BucketId, LeadKey
from foundation.parallel import Mapper, at_once, in_turn
from merge_engine.embedded.derived_calls import FOUND
from merge_engine.merging.batch import read_keys
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.state_columns import state_column
from recovery.leader.led_bucket import LedBucket
from recovery.reader.committed_lookup import Asked, committed_lookup, settled_lookup
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.standing import at_own_cut
from server.protocol import wire
from server.protocol.definitions import ClusterTable
from server.protocol.reads import Lookup, LookupAnswer, LookupStream
from server.tablet.limits import Admission
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests, columns_of, schema_of

_FEW = 1_000


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a look-up asks for, as the table is now: which columns, under which schema."""

    table: ClusterTable
    schema: Schema
    columns: Sequence[Column]
    found: str | None
    rows: pa.Schema

    @classmethod
    def of(cls, call: Lookup | LookupStream, table: ClusterTable) -> "_Plan":
        schema = schema_of(call, table)
        columns = columns_of(schema, table, call.columns)
        flag = None
        if isinstance(call, Lookup):
            columns += map(state_column, columns_of(schema, table, call.states))
            flag = FOUND if call.found else None
        rows = pa.schema([(one.name, one.type) for one in (*schema.key_columns, *columns)])
        return cls(table=table, schema=schema, columns=columns, found=flag, rows=rows)

    def values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows without their keys. By place, for a state may be called like a column."""
        return rows.select(range(len(self.schema.primary_key), rows.num_columns))

    def named(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with the names that the caller knows: a key may have another one by now."""
        if rows.schema.equals(self.rows):
            return rows
        return pa.RecordBatch.from_arrays(rows.columns, schema=self.rows)


class LookingUp:
    """Looks up keys in the buckets that are hosted here. Safe for threads."""

    def __init__(
        self,
        requests: Requests,
        admission: Admission,
        metrics: Metrics,
        mapper: Mapper,
        *,
        lookup_max_keys: int,
    ) -> None:
        """`mapper`: works on several buckets at a time."""
        self._requests = requests
        self._admission = admission
        self._metrics = metrics
        self._map = mapper
        self._lookup_max_keys = lookup_max_keys

    def lookup(self, call: Lookup) -> LookupAnswer:
        """Return the values of the keys."""
        plan = _Plan.of(call, self._requests.table(call))
        found = self.look_up(call, call.keys, plan)
        return LookupAnswer.of([plan.values(batch) for batch in found])

    def begin(self, call: LookupStream) -> "LookupExchange":
        """Begin an exchange of look-ups."""
        return LookupExchange(self, self._requests, self._admission, call)

    def look_up(
        self,
        call: Lookup | LookupStream,
        wanted: Mapping[BucketId, pa.RecordBatch],
        plan: _Plan,
    ) -> list[pa.RecordBatch]:
        """Return the keys and their values, a batch for each bucket."""
        session, hosting = self._requests.session, self._requests.hosting
        keys = self._requests.keys(plan.table, wanted)
        asked = sum(batch.num_rows for batch in wanted.values())
        if asked > self._lookup_max_keys:
            raise BatchTooLarge(
                f"a look-up of {asked:,} keys; the limit is {self._lookup_max_keys:,} "
                "(--lookup-max-keys): split it"
            )
        session.check()
        of_buckets = [
            _Keys(key, led, read_keys(batch, plan.schema))
            for key, led, batch in zip(keys, hosting.get_all(keys), wanted.values(), strict=True)
        ]
        # Few keys are looked up before another thread would have begun to.
        mapper = in_turn if asked <= _FEW else self._map
        if call.isolation is Isolation.LATEST:
            found = mapper(
                lambda one: one.led.bucket.lookup_keys(one.keys, plan.columns, found=plan.found),
                of_buckets,
            )
            session.check()  # Again: this process may have been paused in between.
        else:
            # Each of them asks its log. When the store says nothing, only who waits for it is kept.
            afar = hosting.asks_afar and len(of_buckets) > 1
            found = self._committed(call, plan, of_buckets, at_once if afar else mapper)
        self._metrics.count("keys_looked_up", asked, table=plan.table.name)
        return found

    def _committed(
        self,
        call: Lookup | LookupStream,
        plan: _Plan,
        of_buckets: Sequence["_Keys"],
        mapper: Mapper,
    ) -> list[pa.RecordBatch]:
        """Look up at the cut of the call or, if it has none, at one that has all there is."""

        def at(cut: Cut) -> list[Asked]:
            return [self._asked(one, cut) for one in of_buckets]

        kept = self._requests.cuts.last(plan.table) if call.cut is None else None
        if kept is not None:
            found = settled_lookup(at(kept), plan.columns, mapper, found=plan.found)
            if found is not None:
                return found

        def read() -> list[pa.RecordBatch]:
            cut = self._requests.cut(call, plan.table)
            assert cut is not None  # The call is for what is committed.
            return committed_lookup(at(cut), plan.columns, mapper, found=plan.found)

        return read() if call.cut is not None else at_own_cut(read)

    def _asked(self, one: "_Keys", cut: Cut) -> Asked:
        confirming = self._requests.confirming
        return Asked(
            one.led.bucket,
            cut.at(one.key.bucket),
            one.keys,
            lambda: confirming.confirm(one.key, one.led),
        )


@dataclass(frozen=True)
class _Keys:
    """Keys of a bucket, in the table's types."""

    key: LeadKey
    led: LedBucket
    keys: Sequence[pa.Array]


class LookupExchange:
    """Look-ups that ask for the same, as they come one after the other. For one thread."""

    def __init__(
        self, looking_up: LookingUp, requests: Requests, admission: Admission, call: LookupStream
    ) -> None:
        self._looking_up = looking_up
        self._requests = requests
        self._admission = admission
        self._call = call
        self._plan = _Plan.of(call, requests.table(call))
        self._checked: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """The schema of all answers."""
        return self._plan.rows

    def answer(self, chunk: Any) -> pa.RecordBatch:
        """Return the keys of a message and their values."""
        keys, call = chunk.data, self._call
        if keys is None:
            raise BadRequest("a look-up without keys")
        if self._checked is None:  # All batches of an exchange have one schema.
            wire.check_plain(keys.schema)
            self._checked = keys.schema
        table = self._requests.table(call)
        if self._plan.table is not table:
            self._plan = _Plan.of(call, table)
        with self._admission.holding(keys.get_total_buffer_size()):
            wanted = call.keys_of(keys, bytes(chunk.app_metadata or b""))
            found = self._looking_up.look_up(call, wanted, self._plan)
        return self._plan.named(found[0] if len(found) == 1 else pa.concat_batches(found))
