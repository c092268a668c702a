"""The tables of a cluster, in ZooKeeper.

The node of a table's name, format 1 in the frame of `framing`: the table's id, and the stamp of its
creation, a text.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from foundation.errors import CorruptRecord, TableAltered, TableExists, UnknownOutcome, UnknownTable
from foundation.formats import Formats
from foundation.suggestions import did_you_mean
from locks.catalog.definitions import (
    RENAMED,
    CatalogTable,
    TableDefinition,
    decode_table,
    dropped,
    dropped_id,
    encode_table,
)
from locks.catalog.partitions import Partitions, encode_partitions
from locks.encoding.framing import (
    Reader,
    RecordFormats,
    encode_text,
    frame,
    frame_counter,
    read_counter,
    read_framed,
)
from locks.encoding.integers import encode_one
from locks.store.base import (
    Conflict,
    CoordinationStore,
    Create,
    Delete,
    Operation,
    Write,
    numbered_children,
)
from locks.store.paths import (
    IDS,
    NEXT_TABLE_ID,
    TABLES,
    epoch_path,
    owners_path,
    partitions_path,
    table_name_path,
    table_path,
)
from locks.store.retrying import retried


class TableCatalog:
    """Creates, finds and alters tables; each change is one transaction."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def create(self, name: str, definition: TableDefinition) -> CatalogTable:
        """Create a table; TableExists if there is one of this name."""
        name_path = table_name_path(name)
        stamp = uuid.uuid4().hex

        def attempt() -> CatalogTable:
            pointer = self._store.read(name_path)
            if pointer is not None:
                _, stamped = decode_name(name, pointer.data)
                table = self._find(name)
                if table is not None and stamped == stamp:
                    return table
                raise TableExists(f"there is a table {name} already")
            table_id, operations = creating(self._store, name, definition)
            self._store.transact([*operations, Create(name_path, encode_name(table_id, stamp))])
            return CatalogTable(name=name, table_id=table_id, version=0, definition=definition)

        return retried(self._store, self._deadline_s, attempt)

    def get(self, name: str) -> CatalogTable:
        """Return the table of this name, as it is now; UnknownTable if there is none."""
        path = table_name_path(name)
        self._store.sync()
        table = self._find(name)
        if table is None:
            names = self._store.children(TABLES)
            raise UnknownTable(
                f"there is no table {path.removeprefix(TABLES + '/')}; the tables are: "
                f"{', '.join(names) or 'none'}{did_you_mean(name, names)}"
            )
        return table

    def get_by_id(self, table_id: int) -> CatalogTable:
        """Return the table of this id, as it is now; UnknownTable if it was dropped."""
        self._store.sync()
        node = self._store.read(table_path(table_id))
        if node is None:
            raise dropped_id(table_id)
        return decode_table(table_id, node.data, node.version)

    def check(self, table: CatalogTable) -> None:
        """Raise UnknownTable if the table was dropped, or truncated, by now."""
        self._store.sync()
        if self._store.read(table_path(table.table_id)) is None:
            raise dropped(table)

    def stamp_of(self, table: CatalogTable) -> str | None:
        """Return the stamp of the table's creation; None if its name is not its own any more."""
        pointer = self._store.read(table_name_path(table.name))
        if pointer is None:
            return None
        table_id, stamp = decode_name(table.name, pointer.data)
        return stamp if table_id == table.table_id else None

    def names(self) -> list[str]:
        """Return the names of all tables."""
        self._store.sync()
        return self._store.children(TABLES)

    def all(self) -> list[CatalogTable]:
        """Return all tables by id, as they are now; one dropped meanwhile is left out."""
        self._store.sync()
        ids = numbered_children(self._store, IDS)
        nodes = self._store.read_many([table_path(table_id) for table_id in ids])
        return [
            decode_table(table_id, node.data, node.version)
            for table_id, node in zip(ids, nodes, strict=True)
            if node is not None
        ]

    def alter(
        self,
        table: CatalogTable,
        definition: TableDefinition,
        conditions: Callable[[], Sequence[Operation]] = tuple,
    ) -> CatalogTable:
        """Replace the definition, on condition that the table is still as `table` says.

        `conditions`: what else has to hold in the same transaction; asked for at every attempt, and
        may raise. Returns the table as it is then: perhaps altered again, by somebody else.
        """
        path = table_path(table.table_id)
        in_doubt = False

        def attempt() -> CatalogTable:
            nonlocal in_doubt
            node = self._store.read(path)
            if node is None:
                raise dropped(table)
            now = decode_table(table.table_id, node.data, node.version)
            if in_doubt and _took_effect(table, definition, now):
                return now
            if now.version != table.version:
                raise TableAltered(
                    f"table {table.name} was altered meanwhile (version {now.version}, not "
                    f"{table.version}); look at it again"
                )
            write = Write(path, encode_table(table.file_name, definition), table.version)
            try:
                self._store.transact([write, *conditions()])
            except UnknownOutcome:
                in_doubt = True
                raise
            return replace(table, version=table.version + 1, definition=definition)

        return retried(self._store, self._deadline_s, attempt)

    def rename(self, table: CatalogTable, new: str) -> CatalogTable:
        """Give the table another name, in one transaction; its id, its files and its locks stay.

        TableExists if another table has that name; TableAltered if this one was renamed meanwhile.
        """
        new_path = table_name_path(new)
        path = table_path(table.table_id)

        def attempt() -> CatalogTable:
            node = self._store.read(path)
            if node is None:
                raise dropped(table)
            now = decode_table(table.table_id, node.data, node.version)
            if now.name == new:  # An earlier attempt took effect, or there is nothing to do.
                return now
            if now.name != table.name:
                raise TableAltered(f"table {table.name} was renamed meanwhile: it is {now.name}")
            if self._store.read(new_path) is not None:
                raise TableExists(f"there is a table {new} already")
            old_path = table_name_path(now.name)
            pointer = self._store.read(old_path)
            if pointer is None:
                raise Conflict(old_path)
            options = {**now.definition.options, RENAMED: new}
            if new == now.file_name:
                del options[RENAMED]
            definition = replace(now.definition, options=options)
            written = encode_table(now.file_name, definition)
            self._store.transact(
                [
                    Write(path, written, node.version),
                    Delete(old_path, pointer.version),
                    Create(new_path, pointer.data),  # With its stamp, by which a creator knows it.
                ]
            )
            return decode_table(table.table_id, written, node.version + 1)

        return retried(self._store, self._deadline_s, attempt)

    def prepare(self) -> None:
        """Create the nodes that everything else is below, unless they are there."""
        for path, data in ((TABLES, b""), (IDS, b""), (NEXT_TABLE_ID, frame_counter(1))):
            create_if_missing(self._store, self._deadline_s, path, data)

    def _find(self, name: str) -> CatalogTable | None:
        """Return the table that has the name; two reads, so one may be dropped in between."""
        missing: int | None = None
        while (pointer := self._store.read(table_name_path(name))) is not None:
            table_id, _ = decode_name(name, pointer.data)
            node = self._store.read(table_path(table_id))
            if node is not None:
                table = decode_table(table_id, node.data, node.version)
                if table.name == name:
                    return table
                continue  # Renamed in between: then the name is not its own any more, either.
            if table_id == missing:  # Name and table go together: it is not there, and never was.
                raise CorruptRecord(f"{table_name_path(name)} names table {table_id}, which is not")
            missing = table_id
        return None


def _took_effect(before: CatalogTable, definition: TableDefinition, now: CatalogTable) -> bool:
    """Whether a definition was written; others may have altered the table since.

    Every schema of a table has a version of its own, and stays among the former ones.
    """
    since = (*now.definition.former, now.definition.schema)
    later = since[len(before.definition.former) + 1 :]
    return definition == now.definition or definition.schema in later


def creating(
    store: CoordinationStore, name: str, definition: TableDefinition
) -> tuple[int, list[Operation]]:
    """Return the id of a new table, and what creates it, but for the node of its name."""
    counter = store.read(NEXT_TABLE_ID)
    assert counter is not None
    table_id = read_counter(NEXT_TABLE_ID, counter.data)
    return table_id, [
        Write(NEXT_TABLE_ID, frame_counter(table_id + 1), counter.version),
        Create(table_path(table_id), encode_table(name, definition)),
        Create(epoch_path(table_id), frame_counter(0)),
        Create(owners_path(table_id), b""),
        Create(partitions_path(table_id), encode_partitions(Partitions())),
    ]


def encode_name(table_id: int, stamp: str) -> bytes:
    """Return what the node of a table's name has."""
    return frame(NAME_FORMATS.current, [encode_one(table_id), encode_text(stamp)])


def decode_name(name: str, data: bytes) -> tuple[int, str]:
    """Return the id of the table of this name, and the stamp of its creation."""
    return read_framed(NAME_FORMATS, data, f"the name {name}")


def _read_name_1(reader: Reader) -> tuple[int, str]:
    return reader.integer(), reader.text()


NAME_FORMATS: RecordFormats[tuple[int, str]] = Formats(
    name="table-name", current=1, readers={1: _read_name_1}, error=CorruptRecord
)


def create_if_missing(store: CoordinationStore, deadline_s: float, path: str, data: bytes) -> None:
    """Create a node unless there is one."""

    def attempt() -> None:
        if store.read(path) is None:
            store.transact([Create(path, data)])

    retried(store, deadline_s, attempt)
