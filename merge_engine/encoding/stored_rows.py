"""Stored rows under the table's current schema, whatever version they were written with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import CorruptView, SchemaError, UnknownColumn, UnknownSchema
from merge_engine.encoding import ragged
from merge_engine.encoding.codec import FEW
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.ragged import Flags, Integers
from merge_engine.encoding.row_codec import RowCodec, versions
from merge_engine.schema.schema import Column, Schema

# Before the encoded key of a row, in a view.
ROW_PREFIX = b"r"
# Of how many choices of columns the schema is kept.
_MOST_SHOWN = 1_000


@dataclass(frozen=True)
class StoredRows:
    """Whole rows: per value column of the schema the touched bits and the states."""

    touched: Flags
    states: Sequence[pa.Array]

    @property
    def there(self) -> Flags:
        """Whether there is such a row at all; for rows of all columns."""
        return np.asarray(self.touched.any(axis=1))

    def take(self, positions: Flags) -> "StoredRows":
        """Return the rows where the flag is set."""
        mask = pa.array(positions)
        return StoredRows(self.touched[positions], [state.filter(mask) for state in self.states])

    def reordered(self, index: Integers) -> "StoredRows":
        """Return the rows at these positions."""
        taken = pa.array(index)
        return StoredRows(
            self.touched.take(index, axis=0), [state.take(taken) for state in self.states]
        )

    def only(self, positions: Sequence[int]) -> "StoredRows":
        """Return some of the columns."""
        return StoredRows(self.touched[:, positions], [self.states[at] for at in positions])

    def with_rows(self, where: Flags, rows: "StoredRows") -> "StoredRows":
        """Return the rows with others, in order, where the flag is set."""
        index = np.arange(len(where))
        index[where] = len(where) + np.arange(len(rows.touched))
        return concatenated([self, rows]).reordered(index)

    def replaced(self, positions: Sequence[int], columns: "StoredRows") -> "StoredRows":
        """Return the rows with other columns at these positions."""
        touched, states = self.touched.copy(), list(self.states)
        for j, position in enumerate(positions):
            touched[:, position], states[position] = columns.touched[:, j], columns.states[j]
        return StoredRows(touched, states)


def concatenated(parts: Sequence[StoredRows]) -> StoredRows:
    """Return rows of the same columns one after the other; there is one part at least."""
    touched = np.concatenate([part.touched for part in parts])
    columns = zip(*(part.states for part in parts), strict=True)
    return StoredRows(touched, [pa.concat_arrays(column) for column in columns])


class SchemaHistory:
    """All versions of a table's schema, and how rows are encoded under each of them.

    Reads any version, writes the newest. Immutable: evolution makes a new one.
    """

    def __init__(self, schemas: Iterable[Schema]) -> None:
        self._schemas = {schema.version: schema for schema in schemas}
        if not self._schemas:
            raise SchemaError("a table needs a schema")
        self.current = self._schemas[max(self._schemas)]
        self.key_codec = KeyCodec([column.type for column in self.current.key_columns])
        self._codecs = {
            version: RowCodec(version, [state_type(column) for column in schema.value_columns])
            for version, schema in self._schemas.items()
        }
        self.position = {
            column.id: position for position, column in enumerate(self.current.value_columns)
        }
        # By the ids and names of the columns: the state of a column has its id.
        self._shown: dict[tuple[tuple[int, str], ...], pa.Schema] = {}

    @property
    def schemas(self) -> Mapping[int, Schema]:
        """The schemas by version."""
        return self._schemas

    def schema(self, version: int) -> Schema:
        """Return the schema of this version; UnknownSchema if it is not known here."""
        self.check_knows(version)
        return self._schemas[version]

    def check_knows(self, version: int) -> None:
        """Raise UnknownSchema for what was written under a schema that is not known here.

        0 is that of segments without columns.
        """
        if version and version not in self._schemas:
            raise UnknownSchema(
                f"written under schema version {version}; the versions known here are "
                f"{sorted(self._schemas)}: read the table's definition again",
                version,
            )

    def positions(self, columns: Sequence[Column] | None) -> Sequence[int]:
        """Return where value columns (None: all) stand in the newest schema."""
        if columns is None:
            return range(len(self.position))
        for column in columns:
            if column.id not in self.position:
                raise UnknownColumn(f"column '{column.name}' was dropped meanwhile; read again")
        return [self.position[column.id] for column in columns]

    def shown(self, columns: Sequence[Column]) -> pa.Schema:
        """Return the schema of rows as a reader sees them: the key, and these columns."""
        names = tuple((column.id, column.name) for column in columns)
        schema = self._shown.get(names)
        if schema is None:
            if len(self._shown) >= _MOST_SHOWN:
                self._shown.clear()
            fields = [(one.name, one.type) for one in (*self.current.key_columns, *columns)]
            schema = self._shown[names] = pa.schema(fields)
        return schema

    def row_keys(self, encoded_keys: pa.BinaryArray) -> list[bytes]:
        """Return encoded keys as the view stores them."""
        if len(encoded_keys) <= FEW:
            return [ROW_PREFIX + key for key in encoded_keys.to_pylist()]
        prefix = pa.scalar(ROW_PREFIX, pa.binary())
        return ragged.to_pybytes_list(pc.binary_join_element_wise(prefix, encoded_keys, b""))

    def encode(self, rows: StoredRows) -> list[bytes]:
        """Return the rows' bytes; empty where no column is touched, for then there is no row."""
        values = ragged.to_pybytes_list(
            self._codecs[self.current.version].encode(rows.touched, rows.states)
        )
        for position in np.flatnonzero(~rows.touched.any(axis=1)).tolist():
            values[position] = b""
        return values

    def decode(self, values: Sequence[bytes | None]) -> StoredRows:
        """Return the rows under the current schema; all untouched where there is none."""
        try:
            if 0 < len(values) <= FEW and None not in values:
                few = self._codecs[self.current.version].decode_few(cast(Sequence[bytes], values))
                if few is not None:
                    return StoredRows(*few)
            return self._decode(ragged.from_pybytes_list(values))
        except ValueError as exc:
            raise CorruptView(f"a stored row cannot be read ({exc}); rebuild the view") from exc

    def _decode(self, array: pa.BinaryArray) -> StoredRows:
        if array.null_count == 0:
            return self._decode_present(array)
        present = ~array.is_null().to_numpy(zero_copy_only=False)
        found = self._decode_present(array.filter(pa.array(present)))
        touched = np.zeros((len(array), found.touched.shape[1]), bool)
        touched[present] = found.touched
        index = pa.array(np.cumsum(present) - 1, mask=~present)
        return StoredRows(touched, [state.take(index) for state in found.states])

    def _decode_present(self, values: pa.BinaryArray) -> StoredRows:
        if len(values) == 0:
            columns = self.current.value_columns
            nothing = [pa.nulls(0, state_type(column)) for column in columns]
            return StoredRows(np.zeros((0, len(columns)), bool), nothing)
        of_row = versions(values)
        if (of_row == self.current.version).all():
            return StoredRows(*self._codecs[self.current.version].decode_checked(values))
        found = np.unique(of_row).tolist()
        parts = [
            self._upgrade(values.filter(pa.array(of_row == version)), version) for version in found
        ]
        back = np.argsort(np.argsort(of_row, kind="stable"))
        return concatenated(parts).reordered(back)

    def _upgrade(self, values: pa.BinaryArray, version: int) -> StoredRows:
        """Decode rows of one version; columns that it did not have are untouched."""
        old = {column.id: at for at, column in enumerate(self.schema(version).value_columns)}
        old_touched, old_states = self._codecs[version].decode(values)
        columns = self.current.value_columns
        touched = np.zeros((len(values), len(columns)), bool)
        states = []
        for position, column in enumerate(columns):
            if column.id in old:
                touched[:, position] = old_touched[:, old[column.id]]
                states.append(old_states[old[column.id]])
            else:
                states.append(pa.nulls(len(values), state_type(column)))
        return StoredRows(touched, states)


def state_type(column: Column) -> pa.DataType:
    """Return the type of a value column's states."""
    if column.function is None:
        raise SchemaError(f"column '{column.name}' is part of the key and has no state")
    return column.function.state_type


def state_types(schema: Schema) -> dict[int, pa.DataType]:
    """Return the types of the states by column id, in the order of the schema."""
    return {column.id: state_type(column) for column in schema.value_columns}


def finished(
    history: SchemaHistory,
    keys: Sequence[pa.Array],
    rows: StoredRows,
    columns: Sequence[Column],
    *,
    found: tuple[str, Flags] | None = None,
) -> pa.RecordBatch:
    """Return rows of these columns as a reader sees them: the key, and the finished values.

    `found`: a last column that says whether there is such a row: its name, and what it has.
    """
    all_touched = ragged.all_set(rows.touched)
    values = [
        finish(column, None if all_touched else rows.touched[:, j], rows.states[j])
        for j, column in enumerate(columns)
    ]
    schema = history.shown(columns)
    if found is not None:
        name, flags = found
        schema = schema.append(pa.field(name, pa.bool_()))
        values.append(pa.array(flags))
    return pa.RecordBatch.from_arrays([*keys, *values], schema=schema)


def finish(column: Column, touched: Flags | None, states: pa.Array) -> pa.Array:
    """Return a value column's states as a reader sees them: null where never written.

    `touched` None: all were.
    """
    assert column.function is not None
    values = column.function.finish(states)
    return values if touched is None else ragged.only_where(touched, values)
