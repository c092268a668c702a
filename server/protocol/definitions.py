"""A cluster's table: the coordinator's definition of it, read as the merge engine's schema.

The `options` of a definition:

    uid                         names the table's logs and views: never used again, even when
                                ZooKeeper is set up anew and counts its tables from 1
    table.column-lock.enabled   "true" unless the table was created without column locks
    table.name                  the name of a table that was renamed
    retention                   how long partitions are kept, such as "30 days"
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

from foundation.durations import read_duration, show_duration
from foundation.errors import InvalidInput
from foundation.ids import BucketId
from locks.catalog.definitions import RENAMED, CatalogTable, TableDefinition
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.dated_partitions import dated_column
from merge_engine.schema.schema import Schema
from recovery.description import TableDescription
from recovery.reader.cut import Cut

LOCKED = "table.column-lock.enabled"
UID = "uid"
# Where a bucket's KV snapshots are, below its log.
SNAPSHOTS = "snapshots"
MOST_BUCKETS = 1 << 20
RETENTION = "retention"
_OURS = (UID, LOCKED, RENAMED)


def define(
    schema: Schema, buckets: int, *, column_locks: bool, options: Mapping[str, str]
) -> TableDefinition:
    """Return the definition of a new table."""
    if not isinstance(schema, Schema):
        raise InvalidInput(f"a table is created with a Schema, not {schema!r}")
    if type(buckets) is not int:
        raise InvalidInput(f"the number of buckets is a whole number, not {buckets!r}")
    if not isinstance(options, Mapping):
        raise InvalidInput(f"options are texts by their names, not {options!r}")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"options are texts by their names, not {name!r}: {value!r}")
        if name in _OURS:
            raise InvalidInput(f"option {name} is not for callers to set")
    if not 1 <= buckets <= MOST_BUCKETS:
        raise InvalidInput(f"a table has 1 to {MOST_BUCKETS:,} buckets, not {buckets}")
    if RETENTION in options:
        options = {**options, RETENTION: _checked_retention(schema, options[RETENTION])}
    return TableDefinition(
        schema=schema.to_json(),
        columns=_value_columns(schema),
        key_columns=tuple(column.name for column in schema.key_columns),
        buckets=buckets,
        options={**options, UID: uuid.uuid4().hex, LOCKED: str(column_locks).lower()},
    )


def evolved(definition: TableDefinition, schema: Schema) -> TableDefinition:
    """Return the definition under a newer schema; former ones stay, for rows of their time."""
    return replace(
        definition,
        schema=schema.to_json(),
        former=(*definition.former, definition.schema),
        columns=_value_columns(schema),
        key_columns=tuple(column.name for column in schema.key_columns),
    )


def retaining(definition: TableDefinition, retention: timedelta | str | None) -> TableDefinition:
    """Return the definition of the table with another retention; None: all partitions stay."""
    options = {name: value for name, value in definition.options.items() if name != RETENTION}
    if retention is not None:
        schema = Schema.from_json(definition.schema)
        options[RETENTION] = _checked_retention(schema, retention)
    return replace(definition, options=options)


def _checked_retention(schema: Schema, retention: timedelta | str) -> str:
    dated_column(schema)
    return show_duration(read_duration(retention))


def emptied(definition: TableDefinition) -> TableDefinition:
    """Return the definition of the table that comes in the place of this one, with no rows."""
    options = {**definition.options, UID: uuid.uuid4().hex}
    options.pop(RENAMED, None)
    return replace(definition, options=options)


def _value_columns(schema: Schema) -> dict[str, int]:
    return {column.name: column.id for column in schema.value_columns}


@dataclass(frozen=True)
class ClusterTable:
    """A table as servers and clients work with it."""

    table: CatalogTable

    @property
    def table_id(self) -> int:
        """The coordinator's id."""
        return self.table.table_id

    @property
    def name(self) -> str:
        """The name, for people."""
        return self.table.name

    @property
    def buckets(self) -> int:
        """How many buckets each partition has."""
        return self.table.definition.buckets

    @property
    def locked(self) -> bool:
        """Whether writers need a column lock."""
        return self.table.definition.options.get(LOCKED, "true") != "false"

    @cached_property
    def history(self) -> SchemaHistory:
        """All schemas, the current one last."""
        definition = self.table.definition
        return SchemaHistory(map(Schema.from_json, (*definition.former, definition.schema)))

    @property
    def schema(self) -> Schema:
        """The current schema."""
        return self.history.current

    @property
    def uid(self) -> str:
        """What no other table is or was called, not even one of another cluster."""
        return self.table.definition.options[UID]

    @property
    def directory(self) -> str:
        """Where all its buckets are, below the cluster's storage and the views of a server."""
        return f"{self.table.file_name}-{self.uid}"

    def path(self, key: BucketId) -> str:
        """Return where a bucket's log is below the cluster's storage, and its view on a server."""
        return f"{self.directory}/{key}"

    @property
    def retention(self) -> timedelta | None:
        """How long partitions are kept; None: until they are dropped."""
        written = self.table.definition.options.get(RETENTION)
        return None if written is None else read_duration(written)

    def describe(self, partitions: int | None = None) -> TableDescription:
        """Return what this table is; `partitions`: how many it has."""
        options = self.table.definition.options
        return TableDescription(
            name=self.name,
            table_id=self.table_id,
            schema=self.schema,
            buckets=self.buckets,
            partitions=partitions,
            column_locks=self.locked,
            options={name: value for name, value in options.items() if name not in _OURS},
        )

    def check_cut(self, cut: Cut) -> Cut:
        """Return a cut of this table; InvalidInput if it is of another one."""
        return cut.checked(self.uid, self.name)
