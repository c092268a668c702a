"""Dropped tables: what they were, until somebody has deleted their files.

Dropping a table leaves a node with its definition and the ids of its partitions, those dropped
before included, unless they were forgotten. Format 1, in the frame of `framing`: the definition's
length and bytes, then the ids as an array of `integers`.

Whoever deletes the files keeps what is leased, forgets the table last, and so begins again after a
crash. A dropped table gets no new lists and leases: what is found there is all there will be.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from foundation.errors import CorruptRecord
from foundation.formats import Formats
from locks.catalog.definitions import CatalogTable, decode_table
from locks.catalog.partitions import decode_partitions
from locks.column_locks.lock_set import LockSet
from locks.encoding.framing import Reader, RecordFormats, frame, read_framed
from locks.encoding.integers import encode_array, encode_one
from locks.store.base import (
    Conflict,
    CoordinationStore,
    Create,
    Delete,
    Node,
    Operation,
    delete_all,
    numbered_children,
)
from locks.store.paths import (
    DROPPED,
    dropped_path,
    epoch_path,
    leases_path,
    owner_path,
    owners_path,
    partitions_path,
    snapshots_path,
    table_name_path,
    table_path,
)
from locks.store.retrying import retried


@dataclass(frozen=True, kw_only=True)
class DroppedTable:
    """A table as it was when it was dropped, and the ids of the partitions it had."""

    table: CatalogTable
    partitions: tuple[int, ...]


class DroppedTables:
    """Lists and forgets dropped tables. Safe for threads."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def all(self) -> list[DroppedTable]:
        """Return the dropped tables that nobody has forgotten, by id, as they are now."""
        self._store.sync()
        ids = numbered_children(self._store, DROPPED)
        nodes = self._store.read_many(list(map(dropped_path, ids)))
        return [
            decode_dropped(table_id, node.data)
            for table_id, node in zip(ids, nodes, strict=True)
            if node is not None
        ]

    def forget(self, table_id: int) -> None:
        """Delete what is left of a dropped table: lists, leases and at last its own node."""
        path = dropped_path(table_id)

        def attempt() -> None:
            self._store.sync()
            if self._store.read(path) is None:
                return
            for parent in (snapshots_path(table_id), leases_path(table_id)):
                names = self._store.children(parent)
                delete_all(self._store, [f"{parent}/{name}" for name in names])
                if self._store.read(parent) is not None:
                    self._store.transact([Delete(parent)])
            self._store.transact([Delete(path)])

        retried(self._store, self._deadline_s, attempt)


@dataclass(frozen=True, kw_only=True)
class Dropping:
    """What drops a table with its lock records, but for its name, if all is still as it was read.

    `table`: as it was read; `name`: the version of the node of its name.
    """

    table: CatalogTable
    name: int
    operations: list[Operation]


def dropping(store: CoordinationStore, table: CatalogTable, held: LockSet) -> Dropping:
    """Return what drops a table. Conflict if it was dropped since the locks were read."""
    table_id = table.table_id
    definition = _present(store, table_path(table_id))
    now = decode_table(table_id, definition.data, definition.version)
    name = _present(store, table_name_path(now.name))
    listed = _present(store, partitions_path(table_id))
    partitions = decode_partitions(table_id, listed.data, listed.version)
    ids = sorted([*partitions.ids.values(), *partitions.dropped])
    owners = [
        Delete(owner_path(table_id, owner), lock.version) for owner, lock in held.owners.items()
    ]
    operations: list[Operation] = [
        *owners,
        Delete(owners_path(table_id)),
        Delete(epoch_path(table_id), held.epoch_version),
        Delete(partitions_path(table_id), listed.version),
        Delete(table_path(table_id), definition.version),
        Create(dropped_path(table_id), encode_dropped(definition.data, ids)),
    ]
    return Dropping(table=now, name=name.version, operations=operations)


def _present(store: CoordinationStore, path: str) -> Node:
    node = store.read(path)
    if node is None:
        raise Conflict(path)
    return node


def encode_dropped(definition: bytes, partitions: Iterable[int]) -> bytes:
    """Return the node's data, of an encoded definition."""
    ids = encode_array(np.fromiter(partitions, np.int64))
    return frame(FORMATS.current, [encode_one(len(definition)), definition, ids])


def decode_dropped(table_id: int, data: bytes) -> DroppedTable:
    """Return the table; CorruptRecord if the bytes are none, or of no format that is read."""
    try:
        definition, partitions = read_framed(FORMATS, data, "a dropped table")
        table = decode_table(table_id, definition, 0)
    except CorruptRecord as exc:
        raise CorruptRecord(f"{dropped_path(table_id)}: {exc}") from exc
    return DroppedTable(table=table, partitions=partitions)


def _read_format_1(reader: Reader) -> tuple[bytes, tuple[int, ...]]:
    """Return the definition, with its own format, and the ids of partitions."""
    definition, ids = reader.take(reader.integer()), reader.array()
    return definition, tuple(ids.tolist())


FORMATS: RecordFormats[tuple[bytes, tuple[int, ...]]] = Formats(
    name="dropped-table", current=1, readers={1: _read_format_1}, error=CorruptRecord
)
