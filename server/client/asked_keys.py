"""The keys of look-ups: checked for each look-up, and made into arrays for many at a time.

To make an Arrow array of a few numbers costs as much as to make it of a thousand, and a thread that
does so lets others run before it goes on. So lists of whole numbers and of texts, which most
look-ups have, stay as they are until they are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from merge_engine.embedded.derived_calls import Data, as_arrow
from merge_engine.merging.batch import read_keys
from merge_engine.schema.schema import Schema

Keys: TypeAlias = Sequence[pa.Array]
"""The key columns of some rows, in the table's types."""


def _is_long(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_text(value: object) -> bool:
    if type(value) is not str:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:  # Half of a character.
        return False


_PLAIN: Mapping[pa.DataType, Callable[[object], bool]] = {
    pa.int64(): _is_long,
    pa.string(): _is_text,
}


class AskedKeys(NamedTuple):
    """The keys of one look-up, by column: `plain` lists, or arrays in the table's types."""

    rows: int
    columns: Sequence[Sequence[Any]]
    plain: bool


class KeyReader:
    """Reads the keys of a table with this schema. Safe for threads."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._types = [column.type for column in schema.key_columns]
        checks = [(column.name, _PLAIN.get(column.type)) for column in schema.key_columns]
        self._checks = [(name, check) for name, check in checks if check is not None]

    def read(self, keys: Data) -> AskedKeys:
        """Return keys that can be looked up, or raise what is wrong with them."""
        plain = self._plain(keys) if type(keys) is dict else None
        if plain is not None:
            return AskedKeys(len(plain[0]), plain, plain=True)
        arrays = read_keys(as_arrow(keys, self._schema), self._schema)
        return AskedKeys(len(arrays[0]), arrays, plain=False)

    def _plain(self, keys: dict[str, Any]) -> Sequence[list[Any]] | None:
        """Return the columns if there is nothing to say of them; None: they have to be read."""
        if len(self._checks) < len(self._types) or len(keys) != len(self._types):
            return None
        columns = []
        if all(check(keys.get(name)) for name, check in self._checks):  # One value of each.
            return [[keys[name]] for name, _ in self._checks]
        for name, check in self._checks:
            values = keys.get(name)
            if type(values) is not list or not values or not all(map(check, values)):
                return None
            columns.append(values)
        return columns if len({*map(len, columns)}) == 1 else None

    def arrays(self, asked: Sequence[AskedKeys]) -> list[pa.Array]:
        """Return the key columns of several look-ups, one after the other."""
        if all(one.plain for one in asked):
            return [
                pa.array([value for one in asked for value in one.columns[at]], data_type)
                for at, data_type in enumerate(self._types)
            ]
        of_each = [self._arrays(one) for one in asked]
        return [pa.concat_arrays(column) for column in zip(*of_each, strict=True)]

    def _arrays(self, asked: AskedKeys) -> Keys:
        if not asked.plain:
            return asked.columns
        return [
            pa.array(values, data_type)
            for values, data_type in zip(asked.columns, self._types, strict=True)
        ]
