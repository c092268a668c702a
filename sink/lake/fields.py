"""The columns of a copy: those of the table, under their names, and states if they are wanted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from foundation.errors import SchemaError
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.state_columns import has_own_state, state_column

# What Parquet's writers in Spark, and so Delta, have in no name.
_NOT_IN_NAMES = frozenset(" ,;{}()\n\t=")
_STATE = ":state"


@dataclass(frozen=True)
class LakeFields:
    """`values`: the value columns, then those of states. `arrow`: all, with the key before them."""

    key: tuple[Column, ...]
    values: tuple[Column, ...]
    states: tuple[Column, ...]

    @property
    def arrow(self) -> pa.Schema:
        """The columns as files have them; those of the key are never null."""
        fields = [pa.field(one.name, one.type, nullable=False) for one in self.key]
        fields += [pa.field(one.name, one.type) for one in (*self.values, *self.states)]
        return pa.schema(fields)

    @property
    def ids(self) -> dict[str, str]:
        """What each name stands for, whatever columns are called by others: see `Mark.columns`."""
        ids = {one.name: str(one.id) for one in (*self.key, *self.values)}
        return ids | {one.name: f"{one.id}{_STATE}" for one in self.states}


def lake_fields(schema: Schema, *, states: bool) -> LakeFields:
    """Return the columns of a copy of a table with this schema."""
    values = schema.value_columns
    own = [state_column(one) for one in values if states and has_own_state(one)]
    return LakeFields(schema.key_columns, values, tuple(own))


def check_names(fields: LakeFields) -> None:
    """SchemaError for a column that a lake cannot have, by its name."""
    names = fields.arrow.names
    for name in names:
        if names.count(name) > 1:
            raise SchemaError(
                f"the states of '{name.removesuffix('_state')}' would be called '{name}', as "
                "another column is; rename that one, or leave the states"
            )
    _check_case("columns", fields.arrow)
    for field in fields.arrow:
        for beside in ([field], *_within(field.type)):
            _check_case(f"column '{field.name}': fields", beside)
            for one in beside:
                wrong = sorted(_NOT_IN_NAMES.intersection(one.name))
                if wrong:
                    raise SchemaError(
                        f"column '{field.name}': '{one.name}' has {wrong[0]!r} in it, which no "
                        "name in a lake may have: rename it"
                    )


def _check_case(what: str, beside: Iterable[pa.Field]) -> None:
    folded: dict[str, str] = {}
    for field in beside:
        other = folded.setdefault(field.name.casefold(), field.name)
        if other != field.name:
            raise SchemaError(
                f"{what} '{other}' and '{field.name}' differ in upper and lower case only, which "
                "lakes do not tell apart: rename one of them"
            )


def clashes(columns: Mapping[str, str], fields: LakeFields) -> str | None:
    """Return why files with these columns cannot be read under these names, if they cannot."""
    before = {told: name for name, told in columns.items()}
    for name, told in fields.ids.items():
        if columns.get(name, told) != told:
            return f"'{name}' is another column than the one that was called so"
        if before.get(told, name) != name:
            return f"'{before[told]}' was renamed to '{name}'"
    return None


def dropped_columns(before: Schema, now: Schema) -> list[str]:
    """Return the columns that were dropped: with them go the rows that had nothing else."""
    return [one.name for one in before.value_columns if now.column_by_id(one.id) is None]


def _within(kind: pa.DataType) -> Iterator[list[pa.Field]]:
    """Yield the fields of each struct within a type: those that stand beside each other."""
    inner = [kind.field(number) for number in range(kind.num_fields)]
    if pa.types.is_struct(kind):
        yield inner
    for one in inner:
        yield from _within(one.type)
