"""What a table is, as a small value: for people, programs that list tables, and notebooks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from merge_engine.schema.schema import Schema


@dataclass(frozen=True, kw_only=True)
class TableDescription:
    """A table as it was when it was asked for.

    `buckets`: of each partition. `partitions`: how many there are; None if it has no partition
    columns. `column_locks`: whether writers need a lock. `options`: others that it was created
    with. Printed, it is a small table of the columns; in a notebook, too.
    """

    name: str
    table_id: int | str
    schema: Schema
    buckets: int
    partitions: int | None = None
    column_locks: bool = True
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([self._head(), *str(self.schema).splitlines()[1:]])

    def _head(self) -> str:
        facts = [f"id {self.table_id}", _several(self.buckets, "bucket")]
        if self.partitions is not None:
            facts[-1] += f" in each of {_several(self.partitions, 'partition')}"
        if not self.column_locks:
            facts.append("without column locks")
        facts += [f"{name}={value}" for name, value in self.options.items()]
        facts.append(f"schema version {self.schema.version}")
        return f"table {self.name}: {', '.join(facts)}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._head())}</p>{self.schema._repr_html_()}"


def differences(table: TableDescription, wanted: TableDescription) -> list[str]:
    """Return what tells a table from another that was wanted, each in a few words.

    Column ids and versions are not looked at: a table that was altered may be what is wanted now.
    """
    found = []
    here, there = _columns(table.schema), _columns(wanted.schema)
    for name in dict.fromkeys([*here, *there]):
        if name not in there:
            found.append(f"it has a column '{name}', which is not wanted")
        elif name not in here:
            found.append(f"it has no column '{name}'")
        elif here[name] != there[name]:
            found.append(f"column '{name}' is {here[name]}, not {there[name]}")
    keys = [[column.name for column in one.schema.key_columns] for one in (table, wanted)]
    if keys[0] != keys[1]:
        found.append(f"its key is ({', '.join(keys[0])}), not ({', '.join(keys[1])})")
    if table.buckets != wanted.buckets:
        found.append(f"it has {_several(table.buckets, 'bucket')}, not {wanted.buckets}")
    if table.column_locks != wanted.column_locks:
        found.append(f"it has {'' if table.column_locks else 'no '}column locks")
    for name in dict.fromkeys([*table.options, *wanted.options]):
        pair = table.options.get(name), wanted.options.get(name)
        if pair[0] != pair[1]:
            found.append(f"option {name} is {pair[0]!r}, not {pair[1]!r}")
    return found


def _columns(schema: Schema) -> dict[str, str]:
    return {name: f"{data_type} {role}" for name, data_type, role in schema.rows()}


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
