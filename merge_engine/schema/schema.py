"""What a table is: its columns, which of them are the key, and how the others merge.

A schema never changes. Evolution returns a new one with the next version; a column keeps its id for
ever and an id is never given twice, so rows and log segments of any version can be read under any
other: what has no id in common is absent, whatever the names.

Stored as JSON, format 1:

    {"format": 1, "version": 1, "next_column_id": 3, "primary_key": [1], "partition_by": [],
     "columns": [{"id": 1, "name": "customer_id", "type": "BIGINT"},
                 {"id": 2, "name": "orders", "type": "BIGINT", "function": "count",
                  "parameters": {}}]}

Types are Spark DDL names. `parameters` has those that differ from the function's defaults.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any

import pyarrow as pa

from foundation.arguments import names_of
from foundation.errors import SchemaError, UnknownColumn, UnknownFormat
from foundation.formats import Formats
from foundation.suggestions import did_you_mean
from merge_engine.aggregates.base import AggregateFunction
from merge_engine.aggregates.registry import AggFunction, create_function, find_function
from merge_engine.schema.invariants import check_schema
from merge_engine.schema.types import go_together, parse_type, type_name


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table; the function is None for a column of the primary key."""

    id: int
    name: str
    type: pa.DataType
    function: AggregateFunction | None = None

    @property
    def input_type(self) -> pa.DataType | None:
        """The type that a batch has for this column; None if any will do."""
        return self.type if self.function is None else self.function.input_type


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a table at one version. Made by SchemaBuilder, by evolution or from JSON.

    Every instance keeps the invariants of `invariants.py`, so nobody else has to check them.
    """

    columns: tuple[Column, ...]
    primary_key: tuple[int, ...]
    partition_by: tuple[int, ...] = ()
    version: int = 1
    next_column_id: int

    def __post_init__(self) -> None:
        check_schema(self)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of declaration."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def key_columns(self) -> tuple[Column, ...]:
        """The columns of the primary key, in key order."""
        return self._by_ids(self.primary_key)

    @cached_property
    def key_schema(self) -> pa.Schema:
        """The names and types of the key columns."""
        return pa.schema([(column.name, column.type) for column in self.key_columns])

    @cached_property
    def value_columns(self) -> tuple[Column, ...]:
        """The columns that merge, in the order of declaration."""
        return tuple(column for column in self.columns if column.function is not None)

    @cached_property
    def input_types(self) -> Mapping[str, pa.DataType | None]:
        """The type that a batch has for each column, by name; None where any will do."""
        return {column.name: column.input_type for column in self.columns}

    @cached_property
    def partition_columns(self) -> tuple[Column, ...]:
        """The columns whose values name a partition; none if the table is not partitioned."""
        return self._by_ids(self.partition_by)

    def column(self, name: str) -> Column:
        """Return the column of this name. Upper and lower case differ. UnknownColumn if none."""
        for column in self.columns:
            if column.name == name:
                return column
        hint = did_you_mean(name, self.names) or f"; it has {', '.join(self.names)}"
        raise UnknownColumn(f"the table has no column '{name}'{hint}")

    def values(self, names: Sequence[str] | None) -> tuple[Column, ...]:
        """Return the value columns of these names (None: all); key columns are passed over."""
        if names is None:
            return self.value_columns
        columns = (self.column(name) for name in names_of(names))
        return tuple(column for column in columns if column.function is not None)

    def column_by_id(self, column_id: int) -> Column | None:
        """Return the column of this id, or None if it was dropped or is from a later version."""
        return next((column for column in self.columns if column.id == column_id), None)

    def add_column(
        self,
        name: str,
        data_type: pa.DataType | str,
        function: AggFunction | str,
        **parameters: Any,
    ) -> "Schema":
        """Return the next version with a value column more; rows that exist have it untouched."""
        column_type = parse_column_type(data_type, column=name)
        column = Column(
            id=self.next_column_id,
            name=name,
            type=column_type,
            function=create_column_function(
                function, column_type, parameters, column=name, order_types=self.input_types
            ),
        )
        return replace(
            self,
            columns=(*self.columns, column),
            version=self.version + 1,
            next_column_id=self.next_column_id + 1,
        ).with_checked_orders()

    def drop_column(self, name: str) -> "Schema":
        """Return the next version without this value column; its id is never used again."""
        dropped = self.column(name)
        if dropped.function is None:
            raise SchemaError(f"column '{name}' is in the primary key and cannot be dropped")
        if len(self.value_columns) == 1:
            raise SchemaError(
                f"column '{name}' is the last value column and cannot be dropped;"
                " add another one first, or drop the table"
            )
        columns = tuple(column for column in self.columns if column.id != dropped.id)
        return replace(self, columns=columns, version=self.version + 1)

    def rename_column(self, old: str, new: str) -> "Schema":
        """Return the next version with another name for a column, of the key or not.

        Where others are ordered by this column, they are from now on by its new name: that is what
        batches call it. An `order_by` that names no column of the table stays as it is.
        """
        renamed = self.column(old)
        columns = tuple(
            replace(
                column,
                name=new if column.id == renamed.id else column.name,
                function=_ordered_by(column, old, new),
            )
            for column in self.columns
        )
        schema = replace(self, columns=columns, version=self.version + 1)
        return schema.with_checked_orders()

    def with_checked_orders(self) -> "Schema":
        """Return this schema; SchemaError if a batch cannot have a column and be ordered by it.

        A batch has one column of a name: what is stored under it and what orders by it has to go
        with one type. Schemas that are read are not checked: they were made before this was asked.
        """
        types = self.input_types
        for column in self.value_columns:
            assert column.function is not None
            name, order_type = column.function.order_by, column.function.order_type
            if name is None or order_type is None or types.get(name) is None:
                continue
            ordering = self.column(name)
            rounds = ordering.function is not None and ordering.function.rounds_input
            if not go_together(types[name], order_type, rounding=rounds):
                raise SchemaError(
                    f"column '{column.name}' is ordered by '{name}' as {type_name(order_type)}, "
                    f"but column '{name}' takes {type_name(types[name])}, and a batch has one "
                    "column of this name; use another name"
                )
        return self

    def arrow_schema(self) -> pa.Schema:
        """Return what a reader sees: all columns in the order of declaration, keys not null."""
        return pa.schema(
            [
                pa.field(column.name, column.type, nullable=column.function is not None)
                for column in self.columns
            ]
        )

    def to_json(self) -> str:
        """Return the stored form; `Schema.from_json` gives back an equal schema."""
        return json.dumps(
            {
                "format": FORMATS.current,
                "version": self.version,
                "next_column_id": self.next_column_id,
                "primary_key": self.primary_key,
                "partition_by": self.partition_by,
                "columns": [_column_to_json(column) for column in self.columns],
            }
        )

    @staticmethod
    def from_json(text: str) -> "Schema":
        """Read the stored form.

        UnknownFormat if a newer Tallybook wrote it; SchemaError, which says what is missing or
        wrong, if it is not a schema.
        """
        try:
            document = json.loads(text)
        except (ValueError, TypeError) as error:
            raise SchemaError(f"the stored schema is not JSON: {error}") from error
        stored = _Stored(document, "the stored schema")
        return FORMATS.reader(stored.get("format", int), "the stored schema")(stored)

    def __str__(self) -> str:
        """Return one line per column: name, type, and its role or its function."""
        rows = self.rows()
        name_width = max(len(name) for name, _, _ in rows)
        type_width = max(len(shown_type) for _, shown_type, _ in rows)
        lines = [
            f"  {name:{name_width}}  {shown_type:{type_width}}  {role}"
            for name, shown_type, role in rows
        ]
        return "\n".join([f"version {self.version}", *lines])

    def rows(self) -> list[tuple[str, str, str]]:
        """Return of each column its name, its type, and its role or its function, as text."""
        return [
            (column.name, type_name(column.type), self._role(column)) for column in self.columns
        ]

    def __repr__(self) -> str:
        return f"<Schema {self!s}>"

    def _repr_html_(self) -> str:
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows()]
        head = "<tr><th>column</th><th>type</th><th>role or function</th></tr>"
        return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def _role(self, column: Column) -> str:
        if column.function is None:
            return "key, partition" if column.id in self.partition_by else "key"
        parameters = column.function.parameters
        inside = ", ".join(f"{name}={value!r}" for name, value in parameters.items())
        return f"{column.function.name}({inside})" if inside else column.function.name

    def _by_ids(self, ids: tuple[int, ...]) -> tuple[Column, ...]:
        by_id = {column.id: column for column in self.columns}
        return tuple(by_id[column_id] for column_id in ids)


def parse_column_type(data_type: pa.DataType | str, *, column: str) -> pa.DataType:
    """Return the table type, as `parse_type` does, with errors that name the column."""
    try:
        return parse_type(data_type)
    except SchemaError as error:
        raise SchemaError(f"column '{column}': {error}") from error


def create_column_function(
    function: AggFunction | str,
    column_type: pa.DataType,
    parameters: Mapping[str, Any],
    *,
    column: str,
    order_types: Mapping[str, pa.DataType | None],
) -> AggregateFunction:
    """Return the function of a value column.

    `order_types` has the input types of the table's columns: an `order_by` that names one of them
    needs no `order_type`.
    """
    order_by = parameters.get("order_by")
    if isinstance(order_by, str) and "order_type" not in parameters:
        order_type = column_type if order_by == column else order_types.get(order_by)
        if order_type is not None:
            parameters = {**parameters, "order_type": type_name(order_type)}
    return create_function(
        find_function(function, column=column), column_type, parameters, column=column
    )


def _ordered_by(column: Column, old: str, new: str) -> AggregateFunction | None:
    """Return the column's function, ordered by the new name if it was by the old one."""
    function = column.function
    if function is None or function.order_by != old:
        return function
    parameters = {**function.parameters, "order_by": new}
    known = find_function(function.name, column=column.name)
    return create_function(known, column.type, parameters, column=column.name)


def _column_to_json(column: Column) -> dict[str, Any]:
    document = {"id": column.id, "name": column.name, "type": type_name(column.type)}
    if column.function is not None:
        document |= {"function": column.function.name, "parameters": column.function.parameters}
    return document


def _column_from_json(document: object) -> Column:
    stored = _Stored(document, "a column of the stored schema")
    name = stored.get("name", str)
    stored = _Stored(document, f"column '{name}' of the stored schema")
    column_type = parse_column_type(stored.get("type", str), column=name)
    function = None
    if stored.has("function"):
        # What was stored is complete: nothing is taken from columns that happen to have a name now.
        function = create_function(
            find_function(stored.get("function", str), column=name),
            column_type,
            stored.get("parameters", dict),
            column=name,
        )
    return Column(id=stored.get("id", int), name=name, type=column_type, function=function)


class _Stored:
    """A JSON object from outside, whose fields may be missing or of another kind."""

    def __init__(self, document: object, what: str) -> None:
        if not isinstance(document, dict):
            raise SchemaError(f"{what} is not a JSON object")
        self._document = document
        self._what = what

    def has(self, field: str) -> bool:
        return field in self._document

    def get(self, field: str, kind: type[Any]) -> Any:
        if field not in self._document:
            raise SchemaError(f"{self._what} has no '{field}'")
        value = self._document[field]
        if type(value) is not kind:
            raise SchemaError(
                f"'{field}' of {self._what} is {value!r}, not of type {kind.__name__}"
            )
        return value


def _read_format_1(stored: _Stored) -> Schema:
    return Schema(
        columns=tuple(_column_from_json(column) for column in stored.get("columns", list)),
        primary_key=tuple(stored.get("primary_key", list)),
        partition_by=tuple(stored.get("partition_by", list)),
        version=stored.get("version", int),
        next_column_id=stored.get("next_column_id", int),
    )


FORMATS: Formats[Callable[[_Stored], Schema]] = Formats(
    name="schema", current=1, readers={1: _read_format_1}, error=UnknownFormat
)
