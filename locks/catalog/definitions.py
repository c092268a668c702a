"""Tables as the coordinator knows them: name, id, definition.

A definition is kept as a document in the frame of `framing`, format 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from foundation.errors import CorruptRecord, InvalidColumns, UnknownColumn, UnknownTable
from foundation.formats import Formats
from locks.encoding.framing import Reader, RecordFormats, frame_document, read_framed

UID = "uid"
RENAMED = "table.name"
"""An option of a table that was renamed: its name now. Its definition keeps the first one, by which
its files are called."""
EMBEDDED = "embedded"
"""An option of a table that is in one process, and in no cluster."""


@dataclass(frozen=True, kw_only=True)
class TableDefinition:
    """What a table is, as values: the schema is the merge engine's JSON, kept as it is.

    `columns` are the value columns by name, with their ids; `key_columns` the primary key's names.
    `former` are the schemas before this one, oldest first: logs have segments of all of them.
    """

    schema: str
    columns: Mapping[str, int]
    key_columns: tuple[str, ...]
    buckets: int
    options: Mapping[str, str] = field(default_factory=dict)
    former: tuple[str, ...] = ()

    def column_ids(self, table: str, columns: Sequence[str | int]) -> tuple[int, ...]:
        """Return the ids of these value columns, given by name or by id.

        An error names the one that is none. An id is taken as it is: a column that was dropped is
        nobody else's, and whoever had it must be able to come back and recover.
        """
        if not columns:
            raise InvalidColumns(f"table {table}: a lock needs at least one column")
        for name in (column for column in columns if isinstance(column, str)):
            if name in self.key_columns:
                raise InvalidColumns(
                    f"table {table}: column '{name}' is part of the primary key, which is "
                    "everybody's; lock value columns only"
                )
            if name not in self.columns:
                known = ", ".join(sorted(self.columns))
                raise UnknownColumn(f"table {table} has no column '{name}'; it has {known}")
        ids = {self.columns[one] if isinstance(one, str) else one for one in columns}
        return tuple(sorted(ids))

    def column_names(self, ids: tuple[int, ...]) -> str:
        """Return ids as people read them; a dropped column has only its number left."""
        names = {number: name for name, number in self.columns.items()}
        return ", ".join(names.get(number, f"#{number}") for number in sorted(ids))


@dataclass(frozen=True, kw_only=True)
class CatalogTable:
    """A table: a re-created one of the same name has another id.

    `version` rises with every alteration. `first_name`: what a renamed table was called when it was
    created; empty if it has that name.
    """

    name: str
    table_id: int
    version: int
    definition: TableDefinition
    first_name: str = ""

    @property
    def file_name(self) -> str:
        """What its files are called by, whatever its name is."""
        return self.first_name or self.name

    @property
    def uid(self) -> str:
        """What no other table ever has, whatever its name and whichever ZooKeeper counts them."""
        return self.definition.options.get(UID, str(self.table_id))


def dropped(table: CatalogTable) -> UnknownTable:
    """Return the error of whoever comes too late."""
    return UnknownTable(
        f"table {table.name} (id {table.table_id}) was dropped, or truncated, which puts another "
        "table in its place: if there is one of this name, open it again"
    )


def dropped_id(table_id: int) -> UnknownTable:
    """Return the same of a table that is known by its id alone."""
    return UnknownTable(f"there is no table with id {table_id}; it was dropped")


def encode_table(name: str, definition: TableDefinition) -> bytes:
    """Return a definition's bytes; `name`: the first that the table had."""
    return frame_document(FORMATS.current, {"name": name, **asdict(definition)})


def decode_table(table_id: int, data: bytes, version: int) -> CatalogTable:
    """Return the table; CorruptRecord if the bytes are none, or of no format that is read."""
    try:
        name, definition = read_framed(FORMATS, data, f"the definition of table {table_id}")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptRecord(f"the definition of table {table_id} is damaged: {exc}") from exc
    now = definition.options.get(RENAMED, name)
    return CatalogTable(
        name=now,
        table_id=table_id,
        version=version,
        definition=definition,
        first_name="" if now == name else name,
    )


def _read_format_2(reader: Reader) -> tuple[str, TableDefinition]:
    """Return the name and the definition; the first ones had no `former`."""
    fields = reader.document()
    name = fields.pop("name")
    fields["key_columns"] = tuple(fields["key_columns"])
    fields["former"] = tuple(fields.get("former", ()))
    return name, TableDefinition(**fields)


FORMATS: RecordFormats[tuple[str, TableDefinition]] = Formats(
    name="table-definition", current=2, readers={2: _read_format_2}, error=CorruptRecord
)
