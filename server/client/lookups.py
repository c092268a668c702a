"""Look-ups: each server is asked for the keys of its buckets, and the rows come in order."""

from collections.abc import Sequence

import pyarrow as pa

from foundation.errors import InvalidInput, PartitionGone
from foundation.ids import BucketId
from merge_engine.embedded.derived_calls import Data, as_arrow
from merge_engine.merging.batch import read_keys
from merge_engine.merging.routing import Route, gather, route
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.state_columns import state_column
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from server.client.outgoing import rows_of
from server.client.table_caller import TableCaller
from server.protocol.reads import FOUND, Lookup


def look_up(
    caller: TableCaller,
    keys: Data,
    columns: Sequence[str] | None,
    cut: Cut | None,
    *,
    states: Sequence[str] = (),
    found: bool = False,
) -> pa.Table:
    """Return the keys and their values, in the order asked; nulls where absent.

    All at the cut or, without one, as they are. `states`: after the values, the states of these
    columns, each called as `state_column` does. `found`: with a last column, `FOUND`, that says
    whether there is such a row.
    """
    table = caller.table
    schema = table.schema
    key_columns = read_keys(as_arrow(keys, schema), schema)
    chosen, stated = schema.values(columns), schema.values(states)
    shown = _shown(schema, [*chosen, *map(state_column, stated)], found=found)
    routes = route(schema, key_columns, table.buckets)
    known: list[tuple[BucketId, Route]] = [
        (bucket, target) for target in routes if (bucket := caller.find(target)) is not None
    ]
    key_schema = pa.schema([(column.name, column.type) for column in schema.key_columns])
    wanted = {
        bucket: pa.record_batch(
            rows_of(key_columns, target, whole=len(routes) == 1), schema=key_schema
        )
        for bucket, target in known
    }
    call = Lookup(
        table_id=table.table_id,
        schema_version=schema.version,
        buckets=tuple(wanted),
        columns=tuple(column.id for column in chosen),
        isolation=Isolation.LATEST if cut is None else Isolation.COMMITTED,
        cut=cut,
        found=found,
        states=tuple(column.id for column in stated),
        keys=wanted,
    )
    try:
        shares = caller.ask(call, check_partitions=True)
    except PartitionGone:
        return look_up(caller, keys, columns, cut, states=states, found=found)
    value_schema = pa.schema(shown)
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
    fields = [*((column.name, column.type) for column in schema.key_columns), *shown]
    if found:  # Null where there is not even such a partition.
        values[-1] = values[-1].fill_null(False)
    return pa.Table.from_arrays([*key_columns, *values], schema=pa.schema(fields))


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
