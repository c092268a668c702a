"""The way to declare a table: columns, functions and key, checked together at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from foundation.arguments import text_of
from foundation.errors import InvalidInput, SchemaError
from foundation.suggestions import did_you_mean
from merge_engine.aggregates.base import AggregateFunction
from merge_engine.aggregates.registry import AggFunction, find_function
from merge_engine.schema import ddl
from merge_engine.schema.connector_options import ColumnOptions, read_column_options
from merge_engine.schema.invariants import check_key_type, check_names
from merge_engine.schema.schema import Column, Schema, create_column_function, parse_column_type


@dataclass(frozen=True, kw_only=True)
class _Definition:
    """A column as the caller gave it, not checked yet."""

    name: str
    type: pa.DataType | str
    nullable: bool | None = None
    function: AggFunction | str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


class SchemaBuilder:
    """Declares a table column by column; `build` checks everything and names what is wrong.

        SchemaBuilder()
        .column("customer_id", pa.int64())
        .agg_column("orders", pa.int64(), AggFunction.COUNT)
        .agg_column("tags", "STRING", "string_agg", delimiter="|")
        .primary_key("customer_id")
        .build()

    Every method but `build` only takes notes. Types are Arrow's or Spark DDL names, functions are
    `AggFunction`s or their names.
    """

    def __init__(self) -> None:
        self._definitions: list[_Definition] = []
        self._primary_key: tuple[str, ...] = ()
        self._partitioned_by: tuple[str, ...] = ()
        self._options: dict[str, str] = {}

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{one.name} {one.function or ''}".rstrip() for one in self._definitions
        )
        return f"SchemaBuilder({columns}; key {', '.join(self._primary_key) or 'not given yet'})"

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> "SchemaBuilder":
        """Start with the columns of an Arrow schema; `options` then gives the functions."""
        builder = cls()
        for arrow_field in schema:
            builder.column(arrow_field.name, arrow_field.type, nullable=arrow_field.nullable)
        return builder

    @classmethod
    def from_ddl(cls, columns: str) -> "SchemaBuilder":
        """Start with a DDL list: "id BIGINT NOT NULL, orders BIGINT"; then give `options`."""
        builder = cls()
        for column in ddl.read_columns(columns):
            builder.column(column.name, column.type, nullable=column.nullable)
        return builder

    def column(
        self, name: str, data_type: pa.DataType | str, nullable: bool | None = None
    ) -> "SchemaBuilder":
        """Declare a column of the key, or a value column whose function comes from `options`.

        Keys are never null; `nullable=True` on one is an error rather than a surprise later.
        """
        self._definitions.append(_Definition(name=name, type=data_type, nullable=nullable))
        return self

    def agg_column(
        self,
        name: str,
        data_type: pa.DataType | str,
        function: AggFunction | str,
        **parameters: Any,
    ) -> "SchemaBuilder":
        """Declare a value column with the function that merges it."""
        self._definitions.append(
            _Definition(name=name, type=data_type, function=function, parameters=parameters)
        )
        return self

    def primary_key(self, *names: str) -> "SchemaBuilder":
        """Name the key columns, in key order. A second call replaces the first."""
        self._primary_key = names
        return self

    def partitioned_by(self, *names: str) -> "SchemaBuilder":
        """Name the key columns that partition the table. A second call replaces the first."""
        self._partitioned_by = names
        return self

    def options(self, options: Mapping[str, str]) -> "SchemaBuilder":
        """Take connector options, `fields.<column>.agg` and so on; later ones replace earlier."""
        if not isinstance(options, Mapping):
            raise InvalidInput(f"options are texts by their names, not {options!r}")
        for name, value in options.items():
            text_of(name, "the name of an option")
            text_of(value, f"option {name}")
        self._options.update(options)
        return self

    def build(self) -> Schema:
        """Return version 1 of the schema, with ids from 1 in order of declaration."""
        names = [definition.name for definition in self._definitions]
        check_names(names)
        self._check_key(names)
        options = read_column_options(self._options, names)
        types = {
            definition.name: parse_column_type(definition.type, column=definition.name)
            for definition in self._definitions
        }
        values = []
        for definition in self._definitions:
            name = definition.name
            if name in self._primary_key:
                _check_key_column(definition, types[name], has_options=name in options)
            else:
                values.append(_with_options(definition, options.get(name, ColumnOptions())))
        functions = _create_functions(values, types)
        ids = {name: number for number, name in enumerate(names, start=1)}
        return Schema(
            columns=tuple(
                Column(id=ids[name], name=name, type=types[name], function=functions.get(name))
                for name in names
            ),
            primary_key=tuple(ids[name] for name in self._primary_key),
            partition_by=tuple(ids[name] for name in self._partitioned_by),
            next_column_id=len(names) + 1,
        ).with_checked_orders()

    def _check_key(self, names: Sequence[str]) -> None:
        if not self._primary_key:
            raise SchemaError("there is no primary key; name its columns with primary_key(...)")
        for what, given in (
            ("primary_key", self._primary_key),
            ("partitioned_by", self._partitioned_by),
        ):
            for name in given:
                if name not in names:
                    hint = did_you_mean(name, names)
                    raise SchemaError(f"{what} has '{name}', which is not declared{hint}")
                if given.count(name) > 1:
                    raise SchemaError(f"{what} has '{name}' twice; name it once")
        for name in self._partitioned_by:
            if name not in self._primary_key:
                raise SchemaError(
                    f"partition column '{name}' is not in the primary key; add it to the key, or"
                    " partition by a column of it"
                )


def _check_key_column(
    definition: _Definition, data_type: pa.DataType, *, has_options: bool
) -> None:
    name = definition.name
    if definition.function is not None or has_options:
        raise SchemaError(
            f"column '{name}' is in the primary key and cannot have a function; declare it with"
            " column(...) and without options"
        )
    if definition.nullable:
        raise SchemaError(
            f"column '{name}' is in the primary key but declared nullable; declare it NOT NULL"
            " (nullable=False)"
        )
    check_key_type(data_type, column=name)


def _with_options(definition: _Definition, options: ColumnOptions) -> _Definition:
    """Add what the options say, which must not contradict what the code said."""
    name = definition.name
    function = None
    if definition.function is not None:
        function = find_function(definition.function, column=name)
    if options.function is not None:
        from_options = find_function(options.function, column=name)
        if function is not None and function is not from_options:
            raise SchemaError(
                f"column '{name}' is declared with {function.value}, but the options say"
                f" {from_options.value}; keep one of them"
            )
        function = from_options
    parameters = dict(definition.parameters)
    for option in options.parameters:
        if function is None:
            raise SchemaError(
                f"option '{option.key}' is for column '{name}', which has no function; add"
                f" fields.{name}.agg"
            )
        meant = find_function(option.function, column=name)
        if meant is not function:
            raise SchemaError(
                f"option '{option.key}' is for {meant.value}, but column '{name}' has"
                f" {function.value}; drop the option"
            )
        if option.name in parameters:
            raise SchemaError(
                f"option '{option.key}' gives column '{name}' a second {option.name}; keep one"
            )
        parameters[option.name] = option.value
    return replace(definition, function=function, parameters=parameters)


def _create_functions(
    definitions: Sequence[_Definition], types: Mapping[str, pa.DataType]
) -> dict[str, AggregateFunction]:
    """Return the functions of the value columns.

    Those that order by another column come last: they may need to know its input type. What orders
    by a column takes and gives values of one type, so their own input type is the declared one.
    """
    functions: dict[str, AggregateFunction] = {}
    order_types: dict[str, pa.DataType | None] = dict(types)
    for definition in sorted(definitions, key=lambda each: "order_by" in each.parameters):
        name = definition.name
        if definition.function is None:
            raise SchemaError(
                f"column '{name}' has no aggregate function and is not in the primary key; declare"
                f" it with agg_column(...), or add the option fields.{name}.agg"
            )
        functions[name] = create_column_function(
            definition.function,
            types[name],
            definition.parameters,
            column=name,
            order_types=order_types,
        )
        order_types[name] = functions[name].input_type
    return functions
