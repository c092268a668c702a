"""Look-ups: each server is asked for the keys of its buckets, and the rows come in order.

Few keys of the latest rows, and one of the committed ones, go together with those of other threads
if they can (`lookup_lanes`); whatever else is asked for is a call of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial

import pyarrow as pa

from foundation.arguments import names_of
from foundation.deadlines import within
from foundation.errors import ColumnTooLarge, InvalidInput, PartitionGone, ServerUnavailable
from merge_engine.embedded.derived_calls import FOUND, Data, as_arrow
from merge_engine.merging.batch import read_keys
from merge_engine.merging.routing import gather, route
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.state_columns import state_column
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.standing import at_own_cut
from server.client.asked_keys import AskedKeys, Keys
from server.client.lookup_lanes import LaneShape, LookupLane
from server.client.outgoing import rows_of
from server.client.table_caller import TableCaller
from server.protocol.definitions import ClusterTable
from server.protocol.reads import Lookup


def look_up(
    caller: TableCaller,
    keys: Data,
    columns: Sequence[str] | None,
    cut: Cut | None,
    *,
    isolation: Isolation = Isolation.LATEST,
    states: Sequence[str] = (),
    found: bool = False,
) -> pa.Table:
    """Return the keys and their values, in the order asked; nulls where absent.

    All at the cut or, without one, as `isolation` says. `states`: after the values, the states of
    these columns, each called as `state_column` does. `found`: with a last column, `FOUND`, that
    says whether there is such a row.
    """
    table = caller.table
    isolation = isolation if cut is None else Isolation.COMMITTED
    asked = _Asked(caller, table, columns, isolation, cut, states=states, found=found)
    return asked.rows_of(read_keys(as_arrow(keys, table.schema), table.schema))


def look_up_now(
    caller: TableCaller, keys: Data, columns: Sequence[str] | None, isolation: Isolation
) -> pa.Table:
    """Return the keys and their values as they are now, together with what others look up."""
    lane, by_itself = _now(caller, columns, isolation)
    asked = lane.keys.read(keys)
    deadline = caller.calls.deadline()
    if lane.takes(asked, deadline):
        try:
            found = lane.calls.ask(asked, deadline)
        except TimeoutError as exc:
            raise ServerUnavailable(
                f"look-ups before this one were not answered in {caller.calls.deadline_s:g} s"
            ) from exc
        if found is not None:
            return found
    return by_itself(asked)


async def look_up_async(
    caller: TableCaller, keys: Data, columns: Sequence[str] | None, isolation: Isolation
) -> pa.Table:
    """Do the same for an event loop: nothing here waits, and no thread waits for this alone."""
    lane, by_itself = _now(caller, columns, isolation)
    asked = lane.keys.read(keys)
    loop = asyncio.get_running_loop()
    if lane.takes(asked, caller.calls.deadline()):
        found = await _gathered(loop, lane, asked)
        if found is not None:
            return found
    return await loop.run_in_executor(caller.calls.lanes.pool, by_itself, asked)


def _now(
    caller: TableCaller, columns: Sequence[str] | None, isolation: Isolation
) -> tuple[LookupLane, Callable[[AskedKeys], pa.Table]]:
    """Return the lane of a look-up, and what does it if it cannot take that."""
    table = caller.table
    columns = None if columns is None else names_of(columns)

    def shape() -> LaneShape:
        return LaneShape(
            table_id=table.table_id,
            buckets=table.buckets,
            schema=table.schema,
            columns=table.schema.values(columns),
            isolation=isolation,
            find=caller.find,
        )

    lane = caller.calls.lanes.lane(
        (table.table_id, table.schema.version, columns, isolation), shape
    )

    def by_itself(asked: AskedKeys) -> pa.Table:
        with within(caller.calls.deadline_s):
            return _Asked(caller, table, columns, isolation).rows_of(lane.keys.arrays([asked]))

    return lane, by_itself


async def _gathered(
    loop: asyncio.AbstractEventLoop, lane: LookupLane, asked: AskedKeys
) -> pa.Table | None:
    answer: asyncio.Future[pa.Table | None] = loop.create_future()

    def settle(found: pa.Table | None, error: Exception | None) -> None:
        if answer.done():  # Whoever asked does not want it any more.
            return
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)

    def tell(found: pa.Table | None, error: Exception | None, /) -> None:
        with suppress(RuntimeError):  # The loop was closed meanwhile.
            loop.call_soon_threadsafe(settle, found, error)

    lane.calls.submit(asked, tell)
    return await answer


class _Asked:
    """What a look-up by itself asks for, of whichever keys.

    Without a cut, committed rows stand at one that is taken now: by their leader if their keys are
    all of one bucket, or else here, so that it is one for all.
    """

    def __init__(
        self,
        caller: TableCaller,
        table: ClusterTable,
        columns: Sequence[str] | None,
        isolation: Isolation,
        cut: Cut | None = None,
        *,
        states: Sequence[str] = (),
        found: bool = False,
    ) -> None:
        schema = table.schema
        chosen, stated = schema.values(columns), schema.values(states)
        self._caller = caller
        self._table = table
        self._shown = _shown(schema, [*chosen, *map(state_column, stated)], found=found)
        self._keys = pa.schema([(column.name, column.type) for column in schema.key_columns])
        self._found = found
        self._call = Lookup(
            table_id=table.table_id,
            schema_version=schema.version,
            buckets=(),
            columns=tuple(column.id for column in chosen),
            isolation=isolation,
            cut=cut,
            found=found,
            states=tuple(column.id for column in stated),
        )

    def rows_of(self, key_columns: Keys) -> pa.Table:
        """Return the rows of these keys."""
        given = self._call.cut is not None
        while True:
            try:
                if given:
                    return self._rows_of(key_columns)
                return at_own_cut(partial(self._rows_of, key_columns))
            except PartitionGone:  # Its keys are none of any partition now.
                continue
            except ColumnTooLarge:
                if len(key_columns[0]) == 1:
                    raise
                return self._halved(key_columns)

    def _halved(self, key_columns: Keys) -> pa.Table:
        """Look one half of the keys up and then the other, at the same cut."""
        half = copy(self)
        if half._call.cut is None and half._call.isolation is Isolation.COMMITTED:
            half._call = replace(half._call, cut=self._caller.cut())
        middle = len(key_columns[0]) // 2
        first = half.rows_of([column[:middle] for column in key_columns])
        return pa.concat_tables([first, half.rows_of([column[middle:] for column in key_columns])])

    def _rows_of(self, key_columns: Keys) -> pa.Table:
        caller, call = self._caller, self._call
        routes = route(self._table.schema, key_columns, self._table.buckets)
        cut = call.cut
        # Who asks one bucket leaves the cut to its leader. For more, it is taken before any of
        # them is looked for: also for one that there is not, or not yet.
        if cut is None and call.isolation is Isolation.COMMITTED and len(routes) > 1:
            cut = caller.cut()
        known = caller.find_all(routes, cut)
        wanted = {
            bucket: pa.record_batch(
                rows_of(key_columns, target, whole=len(routes) == 1), schema=self._keys
            )
            for bucket, target in known
        }
        call = replace(call, buckets=tuple(wanted), keys=wanted, cut=cut)
        shares = caller.ask(call)
        value_schema = pa.schema(self._shown)
        batches = {
            bucket: batch
            for buckets, answer in shares
            for bucket, batch in zip(buckets, answer.batches(value_schema), strict=True)
        }
        values = gather(
            len(key_columns[0]),
            [target for _, target in known],
            [batches[bucket] for bucket, _ in known],
            value_schema,
        )
        if self._found:  # Null where there is not even such a partition.
            values[-1] = values[-1].fill_null(False)
        schema = pa.schema([*self._keys, *value_schema])
        return pa.Table.from_arrays([*key_columns, *values], schema=schema)


def _shown(
    schema: Schema, columns: Sequence[Column], *, found: bool
) -> list[tuple[str, pa.DataType]]:
    """Return the names and types of what comes after the keys; each name is there once."""
    taken = {column.name for column in schema.key_columns}
    for column in columns:
        if column.name in taken:
            raise InvalidInput(
                f"the look-up has two columns called '{column.name}', a column and the state of "
                "another one; leave one of them out, or rename the column"
            )
        taken.add(column.name)
    shown = [(column.name, column.type) for column in columns]
    return [*shown, (FOUND, pa.bool_())] if found else shown
