"""The tables of a cluster, in ZooKeeper."""

import uuid
from dataclasses import replace

from locks.errors import TableAltered, TableExists, UnknownTable
from locks.partitions import Partitions, encode_partitions
from locks.paths import (
    IDS,
    NEXT_TABLE_ID,
    TABLES,
    epoch_path,
    owners_path,
    partitions_path,
    table_name_path,
    table_path,
)
from locks.retrying import retried
from locks.store import CoordinationStore, Create, Write
from locks.tables import Table, TableDefinition, decode_table, dropped, dropped_id, encode_table


class TableCatalog:
    """Creates, finds and alters tables; each change is one transaction."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def create(self, name: str, definition: TableDefinition) -> Table:
        """Create a table; TableExists if there is one of this name."""
        name_path = table_name_path(name)
        stamp = uuid.uuid4().hex

        def attempt() -> Table:
            pointer = self._store.read(name_path)
            if pointer is not None:
                table = self._find(name)
                if table is not None and pointer.data.endswith(stamp.encode()):
                    return table
                raise TableExists(f"there is a table {name} already")
            counter = self._store.read(NEXT_TABLE_ID)
            assert counter is not None
            table_id = int(counter.data)
            self._store.transact(
                [
                    Write(NEXT_TABLE_ID, str(table_id + 1).encode(), counter.version),
                    Create(name_path, f"{table_id} {stamp}".encode()),
                    Create(table_path(table_id), encode_table(name, definition)),
                    Create(epoch_path(table_id), b"0"),
                    Create(owners_path(table_id), b""),
                    Create(partitions_path(table_id), encode_partitions(Partitions())),
                ]
            )
            return Table(name=name, table_id=table_id, version=0, definition=definition)

        return retried(self._store, self._deadline_s, attempt)

    def get(self, name: str) -> Table:
        """Return the table of this name, as it is now; UnknownTable if there is none."""
        path = table_name_path(name)
        self._store.sync()
        table = self._find(name)
        if table is None:
            names = ", ".join(self._store.children(TABLES)) or "none"
            raise UnknownTable(
                f"there is no table {path.removeprefix(TABLES + '/')}; the tables are: {names}"
            )
        return table

    def get_by_id(self, table_id: int) -> Table:
        """Return the table of this id, as it is now; UnknownTable if it was dropped."""
        self._store.sync()
        node = self._store.read(table_path(table_id))
        if node is None:
            raise dropped_id(table_id)
        return decode_table(table_id, node.data, node.version)

    def names(self) -> list[str]:
        """Return the names of all tables."""
        self._store.sync()
        return self._store.children(TABLES)

    def all(self) -> list[Table]:
        """Return all tables by id, as they are now; one dropped meanwhile is left out."""
        self._store.sync()
        ids = sorted(map(int, self._store.children(IDS)))
        nodes = self._store.read_many([table_path(table_id) for table_id in ids])
        return [
            decode_table(table_id, node.data, node.version)
            for table_id, node in zip(ids, nodes, strict=True)
            if node is not None
        ]

    def alter(self, table: Table, definition: TableDefinition) -> Table:
        """Replace the definition, on condition that the table is still as `table` says."""
        path = table_path(table.table_id)
        data = encode_table(table.name, definition)
        altered = replace(table, version=table.version + 1, definition=definition)

        def attempt() -> Table:
            node = self._store.read(path)
            if node is None:
                raise dropped(table)
            if (node.data, node.version) == (data, altered.version):
                return altered
            if node.version != table.version:
                raise TableAltered(
                    f"table {table.name} was altered meanwhile (version {node.version}, not "
                    f"{table.version}); look at it again"
                )
            self._store.transact([Write(path, data, table.version)])
            return altered

        return retried(self._store, self._deadline_s, attempt)

    def prepare(self) -> None:
        """Create the nodes that everything else is below, unless they are there."""
        for path, data in ((TABLES, b""), (IDS, b""), (NEXT_TABLE_ID, b"1")):
            create_if_missing(self._store, self._deadline_s, path, data)

    def _find(self, name: str) -> Table | None:
        pointer = self._store.read(table_name_path(name))
        if pointer is None:
            return None
        table_id = int(pointer.data.split()[0])
        node = self._store.read(table_path(table_id))
        return None if node is None else decode_table(table_id, node.data, node.version)


def create_if_missing(store: CoordinationStore, deadline_s: float, path: str, data: bytes) -> None:
    """Create a node unless there is one."""

    def attempt() -> None:
        if store.read(path) is None:
            store.transact([Create(path, data)])

    retried(store, deadline_s, attempt)
